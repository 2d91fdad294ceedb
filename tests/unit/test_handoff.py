"""Whether KV may be used, and how long it is kept: a mismatch has its reason, no budget is broken, nothing stays."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.transport.kv.handoff import (
    CLAIM_US_MAX,
    FORMAT,
    LEASE_US,
    OFFER_US_MAX,
    RENEW_US,
    Expire,
    Header,
    Keep,
    Kind,
    Offer,
    Offers,
    Refuse,
    Renew,
    Seen,
    State,
    Tick,
    prefix_hash,
    refusal,
)

IDS = (5, 6, 7, 8, 9)
KIND = Kind(model="m", fingerprint="f", layout="l", dtype="torch.float32", block_tokens=32)
GOOD = Header(kind=KIND, tokens=4, prefix=prefix_hash(IDS[:4]), size=10)
BUDGET = 100


def test_kv_of_these_ids_under_these_weights_in_this_form_is_good() -> None:
    assert refusal(GOOD, KIND, IDS) is None
    assert refusal(GOOD, KIND, (*IDS, 1, 2)) is None, "more ids than KV: the rest is computed"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model", "other", "model"),
        ("fingerprint", "other", "version"),
        ("layout", "other", "layout"),
        ("dtype", "torch.bfloat16", "dtype"),
        ("block_tokens", 16, "block_size"),
    ],
)
def test_kv_of_another_kind_is_refused_with_what_differs(field: str, value: object, reason: str) -> None:
    other = GOOD.model_copy(update={"kind": KIND.model_copy(update={field: value})})
    assert refusal(other, KIND, IDS) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": 5}, "tokens"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 3}, "tokens"),
        ({"prefix": prefix_hash((5, 6, 7, 9))}, "tokens"),
        ({"format": FORMAT + 1}, "unreadable"),
    ],
)
def test_kv_of_other_ids_or_of_all_of_them_is_refused(change: dict[str, object], reason: str) -> None:
    """All of them: one token must be left to compute."""
    assert refusal(GOOD.model_copy(update=change), KIND, IDS) == reason


@given(st.lists(st.integers(0, 2**31), min_size=2, max_size=40), st.data())
def test_one_other_id_anywhere_is_another_prefix(ids: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(ids) - 2))
    header = Header(kind=KIND, tokens=len(ids) - 1, prefix=prefix_hash(ids[:-1]), size=1)
    assert refusal(header, KIND, ids) is None
    ids[place] += 1
    assert refusal(header, KIND, ids) == "tokens"


def _offers(*sizes: int) -> Offers:
    """Offered `0`, `1`, .. at times 0, 1, ..; a token is a byte."""
    offers = Offers(BUDGET)
    for place, size in enumerate(sizes):
        assert offers.on(Offer(str(place), size, size, place)) == [Keep(str(place))]
    return offers


def test_the_cheapest_to_compute_again_makes_room_and_of_equals_the_oldest() -> None:
    offers = _offers(40, 20, 20, 20)
    assert offers.on(Offer("new", 30, 30, 9)) == [Expire("1", True), Expire("2", True), Keep("new")]
    assert offers.names == ("0", "3", "new")


def test_an_offer_that_is_none_of_the_dearest_or_larger_than_all_is_not_made() -> None:
    offers = _offers(60, 40)
    assert offers.on(Offer("small", 10, 10, 9)) == [Refuse("small", "budget")]
    assert offers.on(Offer("equal", 40, 40, 9)) == [Refuse("equal", "budget")]
    assert offers.on(Offer("huge", 101, 101, 9)) == [Refuse("huge", "budget")]
    assert offers.names == ("0", "1")


def test_what_is_claimed_makes_no_room() -> None:
    offers = _offers(20, 70)
    offers.on(Seen("0", State.CLAIMED, 1))
    assert offers.on(Offer("new", 90, 90, 9)) == [Refuse("new", "budget")]
    offers.on(Seen("0", State.RELEASED, 2))
    assert offers.on(Offer("new", 90, 90, 9)) == [Expire("1", True), Keep("new")]


def test_a_release_that_was_never_seen_as_a_claim_is_a_release() -> None:
    offers = _offers(20)
    offers.on(Seen("0", State.RELEASED, 1))
    assert offers.state("0") is None
    assert offers.held == 0


def test_an_offer_is_renewed_until_it_is_too_old() -> None:
    offers = _offers(20)
    assert offers.on(Tick(RENEW_US - 1)) == []
    assert offers.on(Tick(RENEW_US)) == [Renew("0")]
    assert offers.on(Tick(RENEW_US + 1)) == []
    assert offers.on(Tick(OFFER_US_MAX)) == [Renew("0")]
    assert offers.on(Tick(OFFER_US_MAX + 1)) == [Expire("0", False)]
    assert offers.names == ()


def test_a_claim_whose_claimant_is_gone_is_over_after_its_own_time() -> None:
    offers = _offers(20)
    offers.on(Seen("0", State.CLAIMED, OFFER_US_MAX))
    assert offers.on(Tick(OFFER_US_MAX + CLAIM_US_MAX)) == [Renew("0")]
    assert offers.on(Tick(OFFER_US_MAX + CLAIM_US_MAX + 1)) == [Expire("0", False)]


def test_a_lease_outlives_several_renewals() -> None:
    assert LEASE_US > 3 * RENEW_US


def test_a_word_on_what_is_over_changes_nothing_and_no_state_goes_back() -> None:
    offers = _offers(20)
    assert offers.on(Seen("gone", State.CLAIMED, 1)) == []
    offers.on(Seen("0", State.CLAIMED, 1))
    with pytest.raises(AssertionError, match="claimed cannot become offered"):
        offers.on(Seen("0", State.OFFERED, 2))


@dataclass
class _File:
    tokens: int
    state: State


class _Life(RuleBasedStateMachine):
    """An owner and others that claim, release and die; `files` is what lies there."""

    def __init__(self) -> None:
        super().__init__()
        self.offers = Offers(BUDGET)
        self.files: dict[str, _File] = {}
        self.now = self.made = 0

    @rule(tokens=st.integers(1, 120))
    def offer(self, tokens: int) -> None:
        name = str(self.made)
        self.made += 1
        before = dict(self.files)
        for effect in self.offers.on(Offer(name, tokens, tokens, self.now)):
            match effect:
                case Keep():
                    self.files[name] = _File(tokens, State.OFFERED)
                case Expire():
                    gone = self.files.pop(effect.name)
                    assert gone.state is State.OFFERED
                    assert gone.tokens < tokens
                case Refuse():
                    assert self.files == before
                case Renew():
                    raise AssertionError("an offer renews nothing")

    @precondition(lambda self: self.files)
    @rule(data=st.data(), state=st.sampled_from([State.CLAIMED, State.RELEASED]))
    def others(self, data: st.DataObject, state: State) -> None:
        name = data.draw(st.sampled_from(sorted(self.files)))
        if state is State.RELEASED:
            del self.files[name]
        else:
            self.files[name].state = state
        self.offers.on(Seen(name, state, self.now))

    @rule(gap=st.integers(1, OFFER_US_MAX))
    def tick(self, gap: int) -> None:
        self.now += gap
        for effect in self.offers.on(Tick(self.now)):
            assert isinstance(effect, Expire | Renew)
            if isinstance(effect, Expire):
                assert not effect.evicted
                del self.files[effect.name]

    @invariant()
    def what_lies_there_is_what_is_held_and_within_the_budget(self) -> None:
        assert set(self.offers.names) == set(self.files)
        assert self.offers.held == sum(file.tokens for file in self.files.values()) <= BUDGET

    def teardown(self) -> None:
        self.tick(max(OFFER_US_MAX, CLAIM_US_MAX) + 1)
        assert not self.files


TestLife = _Life.TestCase
