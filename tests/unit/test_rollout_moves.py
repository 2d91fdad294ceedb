"""What the rollout service says of KV: who gets a handle, what a stay says of it, what the engine counts;
and when a swap moves them."""

from pathlib import Path

import pytest

from schemas import messages as m
from schemas.ids import RequestKey
from tests.unit.rollout_house import House, settings
from tests.unit.test_rollout_service import hosting_0
from workers.rollout.engines.base import Prefill, Tokens
from workers.rollout.engines.paced_engine import PacedEngine
from workers.rollout.partials import Place, Running, begin, computed_again, counted, to_partial

HANDLE = m.KvHandle(location="shm:f/1", tokens=10, fingerprint="fingerprint-0")


class OfferingEngine(PacedEngine):
    """Offers the KV of all that it is asked to, and takes what it is given. `tended`: how often it was."""

    offered: tuple[RequestKey, ...] = ()
    tended = 0

    def stop(self, keys: tuple[RequestKey, ...], *, offer: bool = False) -> dict[RequestKey, m.KvHandle]:
        super().stop(keys)
        self.offered += keys if offer else ()
        return dict.fromkeys(keys, HANDLE) if offer else {}

    def step(self) -> list[Tokens]:
        return [self._carried(part) for part in super().step()]

    def _carried(self, part: Tokens) -> Tokens:
        if part.prefill is None or not part.prefill.reason:
            return part
        return Tokens(
            part.key, part.ids, part.logprobs, part.finish, prefill=Prefill(1, part.prefill.computed - 1, 4096)
        )

    def tend(self) -> None:
        self.tended += 1


@pytest.fixture
def house(tmp_path: Path) -> House:
    return _hosting(House(tmp_path, engine=OfferingEngine(settings(), pace=0)))


def _hosting(made: House) -> House:
    made.service.join()
    made.announce(0)
    made.swap(0)
    made.until(lambda: bool(made.of(m.Hosting)))
    return made


def _carried(partial: m.PartialRecord) -> dict[str, object]:
    names = ("response_ids", "logprobs", "loss_mask", "engine_path", "started_at", "kv")
    return {name: getattr(partial, name) for name in names}


def test_a_request_that_goes_on_elsewhere_has_a_handle_and_one_that_is_dropped_none(house: House) -> None:
    keeps, drops = (house.issue(group, 0, 0, max_new_tokens=60) for group in (1, 2))
    house.until(lambda: min(house.tokens_so_far(keeps), house.tokens_so_far(drops)) >= 2)
    house.stop(keeps, keep=True)
    house.stop(drops, keep=False)
    house.until(lambda: bool(house.of(m.PartialRecord)))
    house.until(lambda: house.engine.load_now().running == 0)
    (partial,) = house.of(m.PartialRecord)
    assert (partial.group, partial.kv) == (1, HANDLE)
    assert house.engine.offered == (keeps,)  # type: ignore[attr-defined]


def test_a_stay_and_a_heartbeat_say_what_came_along(house: House) -> None:
    key = house.issue(1, 0, 0, max_new_tokens=40)
    house.until(lambda: house.tokens_so_far(key) >= 5)
    house.stop(key, keep=True)
    house.until(lambda: bool(house.of(m.PartialRecord)))
    (partial,) = house.of(m.PartialRecord)
    house.issue(1, 0, 0, attempt=1, max_new_tokens=40, **_carried(partial))
    house.until(lambda: bool(house.of(dict)))
    so_far = len(partial.response_ids)
    stays = [(stay["kv_reused"], stay["kv_recomputed"]) for stay in house.of(dict)[0]["engine_path"]]
    assert stays == [(0, 0), (3 + so_far - 1, 1)]
    house.until(lambda: house.of(m.Heartbeat)[-1].moves.taken == 1)
    moves = house.of(m.Heartbeat)[-1].moves
    assert moves == m.Moves(taken=1, carried=1, tokens_carried=2 + so_far, tokens_recomputed=1, size=4096)
    assert house.engine.tended > 0  # type: ignore[attr-defined]


def test_a_move_is_told_at_once_and_before_the_requests_end(house: House) -> None:
    """Else the last ones of a run were never told."""
    carried = {"response_ids": (7,), "logprobs": (-1.0,), "loss_mask": (True,), "kv": HANDLE, "started_at": 6}
    stay = m.Stay(engine="0", version=0, fingerprint="f", tokens=1)
    house.until(lambda: bool(house.of(m.Heartbeat)))
    house.issue(1, 0, 0, attempt=1, max_new_tokens=2, engine_path=(stay,), **carried)
    house.until(lambda: bool(house.of(m.Finished)))
    words = [word for word in house.said if isinstance(word, m.Heartbeat | m.Finished)]
    finished = next(place for place, word in enumerate(words) if isinstance(word, m.Finished))
    before = words[finished - 1]
    assert isinstance(before, m.Heartbeat)
    assert before.moves.taken == 1


def test_in_mode_partial_no_kv_is_offered(tmp_path: Path) -> None:
    """A request goes on under other weights there."""
    house = _hosting(House(tmp_path, engine=OfferingEngine(settings(), pace=0), mode="partial"))
    key = house.issue(1, 0, 0, max_new_tokens=40)
    house.until(lambda: house.tokens_so_far(key) >= 3)
    house.announce(1)
    house.swap(1)
    house.until(lambda: bool(house.of(m.PartialRecord)))
    assert house.of(m.PartialRecord)[0].kv is None
    assert house.engine.offered == ()  # type: ignore[attr-defined]


def test_a_request_that_got_no_token_here_keeps_the_handle_it_came_with(house: House) -> None:
    one = begin(house.request(1, 0, 0, response_ids=(1,), logprobs=(-1.0,), loss_mask=(True,), kv=HANDLE), 9)
    assert to_partial(one, Place(1, 2, "f"), "moved").kv == HANDLE
    one.ids, one.logprobs = [5], [-1.0]
    assert to_partial(one, Place(1, 2, "f"), "moved").kv is None


def test_what_is_prefilled_again_is_counted_by_its_reason_and_new_requests_are_not(house: House) -> None:
    new = begin(house.request(1, 0, 0), 9)
    later = begin(house.request(1, 0, 0, response_ids=(1,), logprobs=(-1.0,), loss_mask=(True,)), 9)
    moves = counted(m.Moves(), new, Prefill(100))
    assert moves == m.Moves()
    for reason in ("gone", "checksum", "gone"):
        moves = counted(moves, later, Prefill(4, reason=reason))
    assert moves == m.Moves(taken=3, tokens_recomputed=12, reprefills={"gone": 2, "checksum": 1})


def test_the_share_of_a_step_that_was_computed_before_leaves_out_new_prompts_and_newest_tokens(house: House) -> None:
    carried = {"response_ids": (1,), "logprobs": (-1.0,), "loss_mask": (True,)}
    new, again, came_along = (
        begin(house.request(group, 0, 0, **so_far), 9) for group, so_far in ((1, {}), (2, carried), (3, carried))
    )
    step = [
        (new, _part(new, Prefill(50))),
        (again, _part(again, Prefill(31, reason="gone"))),
        (came_along, _part(came_along, Prefill(1, carried=30))),
        (new, _part(new)),
        (again, _part(again)),
    ]
    assert computed_again(step) == 30 / (50 + 31 + 1 + 1 + 1)
    assert computed_again(step[2:]) == 0
    assert computed_again([]) == 0


def _part(one: Running, prefill: Prefill | None = None) -> Tokens:
    return Tokens(one.key, (7,), (-1.0,), None, prefill=prefill)


@pytest.mark.parametrize("carries", [False, True])
def test_the_seconds_of_a_prefill_that_was_done_before_are_told_apart(tmp_path: Path, carries: bool) -> None:
    """A request goes on alone: its first step is all that the engine prefilled; it computed 13 tokens, 12 of them
    again, or one."""
    engine = OfferingEngine(settings()) if carries else PacedEngine(settings())
    house = _hosting(House(tmp_path, engine))
    stay = m.Stay(engine="0", version=0, fingerprint="f", tokens=10)
    so_far = {"response_ids": (7,) * 10, "logprobs": (-1.0,) * 10, "loss_mask": (True,) * 10, "started_at": 6}
    house.issue(1, 0, 0, attempt=1, max_new_tokens=12, engine_path=(stay,), **so_far)
    house.until(lambda: bool(house.of(dict)))
    house.until(lambda: house.of(m.Heartbeat)[-1].moves.taken == 1)
    beat = house.of(m.Heartbeat)[-1]
    assert beat.prefill_s > 0
    assert beat.moves.reprefill_s == pytest.approx(0.0 if carries else beat.prefill_s * 12 / 13)
    assert beat.moves.tokens_recomputed == (1 if carries else 13)


class SlowToPrepare(PacedEngine):
    """Version 1 is prepared when the test says so."""

    asked = 0
    prepared = False

    def prepare(self, weights: m.WeightsRecord) -> bool:
        self.asked += 1
        return self.prepared or weights.version == 0


def test_requests_go_on_while_the_next_version_is_prepared(tmp_path: Path) -> None:
    engine = SlowToPrepare(settings(), pace=0)
    house = hosting_0(House(tmp_path, engine))
    key = house.issue(1, 0, 0, max_new_tokens=40)
    house.until(lambda: house.tokens_so_far(key) >= 2)
    house.announce(1)
    house.swap(1)
    house.until(lambda: engine.asked >= 5)
    assert (len(house.of(m.Hosting)), engine.version) == (1, 0)
    before = house.tokens_so_far(key)
    assert before >= 5
    engine.prepared = True
    house.until(lambda: len(house.of(m.Hosting)) == 2)
    (partial,) = house.of(m.PartialRecord)
    assert before <= len(partial.response_ids) < 40


def test_an_engine_without_requests_does_not_wait_for_a_version_to_be_prepared(tmp_path: Path) -> None:
    engine = SlowToPrepare(settings(), pace=0)
    house = hosting_0(House(tmp_path, engine))
    house.announce(1)
    house.swap(1)
    house.until(lambda: len(house.of(m.Hosting)) == 2)
    assert engine.version == 1


def test_of_a_running_request_no_more_than_its_snapshot_tokens_are_lost_with_its_engine(tmp_path: Path) -> None:
    """Three snapshots of 30 tokens; what goes on from the last is what the request would have been."""
    house = hosting_0(House(tmp_path, snapshot_tokens=8))
    whole = house.issue(1, 0, 0, max_new_tokens=30)
    house.issue(1, 1, 0, max_new_tokens=8)
    house.until(lambda: len(house.of(dict)) == 2)
    row = max(house.of(dict), key=lambda one: len(one["response_ids"]))
    snapshots = house.of(m.PartialRecord)
    assert {(one.reason, one.group, one.index, one.attempt, one.kv) for one in snapshots} == {
        ("snapshot", *whole, None)
    }
    assert [len(one.response_ids) for one in snapshots] == [8, 16, 24]
    for one in snapshots:
        assert list(one.response_ids) == row["response_ids"][: len(one.response_ids)]
        assert list(one.logprobs) == pytest.approx(row["logprobs"][: len(one.logprobs)])
        assert [stay.tokens for stay in one.engine_path] == [len(one.response_ids)]
    names = ("response_ids", "logprobs", "loss_mask", "engine_path", "started_at")
    carried = {name: getattr(snapshots[-1], name) for name in names}
    house.issue(1, 0, 0, attempt=1, max_new_tokens=30, **carried)
    house.until(lambda: len(house.of(dict)) == 3)
    assert house.of(dict)[-1]["response_ids"] == row["response_ids"]
    assert len(house.of(m.PartialRecord)) == 3, "six more tokens"
