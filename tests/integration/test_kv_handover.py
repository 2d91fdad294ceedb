"""A request that moves between two engines, each in a process of its own, goes on as the one that stayed: the same ids
and, in float32, the same log-probs; one token is computed. Tiny models.
"""

from collections.abc import Iterator

import pytest

from tests.integration.kv_two import (
    BLOCK,
    BLOCK_BYTES,
    PROMPT,
    WAYS,
    Sample,
    Two,
    claimed,
    decode,
    emptied,
    ends_as_if_it_had_stayed,
    go_on,
    left,
    open_two,
    stayed,
    stop,
    wanted,
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", params=WAYS)
def two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Two]:
    with open_two(tmp_path_factory.mktemp("kv"), request.param) as opened:
        yield opened


@pytest.fixture(autouse=True)
def empty(two: Two) -> Iterator[None]:
    with emptied(two):
        yield


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("tokens", [1, 8, 9, 10, 37], ids="after {} tokens".format)
def test_a_moved_request_goes_on_as_if_it_had_stayed_and_one_token_is_computed(
    two: Two, tokens: int, temperature: float
) -> None:
    """Greedy and seeded; 120 + 9 - 1 tokens of KV are exactly four blocks."""
    sample = wanted(temperature=temperature)
    first = sample.request
    found = ends_as_if_it_had_stayed(two, left(two, sample, tokens), first)
    blocks = -(-(len(PROMPT) + tokens - 1) // BLOCK)
    assert (found.computed, found.carried, found.reason) == (1, len(PROMPT) + tokens - 1, "")
    assert found.size == blocks * BLOCK_BYTES


def test_blocks_that_the_prefix_cache_has_are_not_loaded(two: Two) -> None:
    """A sibling ran on engine 1 before: the three whole blocks of the prompt are there."""
    sibling, sample = wanted(1), wanted(0)
    first = sample.request
    stayed(two.engines[1], [sibling.request])
    found = ends_as_if_it_had_stayed(two, left(two, sample, 20), first)
    assert (found.computed, found.carried) == (1, 139)
    whole = ends_as_if_it_had_stayed(two, left(two, wanted(5), 20), wanted(5).request)
    assert whole.size == found.size == 2 * BLOCK_BYTES, "two of five blocks, siblings again"


def test_eight_move_at_once(two: Two) -> None:
    samples = [wanted(index, temperature=0.0 if index == 3 else 1.0) for index in range(8)]
    firsts = [one.request.model_copy(update={"attempt": 99}) for one in samples]
    for one in samples:
        two.engines[0].add(one.request)
    decode(two.engines[0], samples, 17)
    stop(two.engines[0], samples)
    go_on(two.engines[1], samples)
    decode(two.engines[1], samples)
    for one, (ids, logprobs) in zip(samples, stayed(two.engines[0], firsts), strict=True):
        assert one.ids == ids
        assert one.logprobs == pytest.approx(logprobs, abs=1e-5), "batches of other shapes"
        assert one.prefills[-1].computed == 1


def test_a_request_that_moves_twenty_times_is_the_one_that_stayed(two: Two) -> None:
    sample = wanted(new=100)
    first = sample.request
    two.engines[0].add(sample.request)
    for move in range(1, 21):
        decode(two.engines[(move + 1) % 2], [sample], 4)
        stop(two.engines[(move + 1) % 2], [sample])
        go_on(two.engines[move % 2], [sample])
    decode(two.engines[0], [sample])
    (ids, logprobs) = stayed(two.engines[1], [first])[0]
    assert (sample.ids, sample.logprobs) == (ids, logprobs)
    assert [one.computed for one in sample.prefills[1:]] == [1] * 20


def test_one_that_moves_among_others_disturbs_nobody(two: Two) -> None:
    """Two stay on either engine while a third moves; its blocks are taken by others before it is loaded."""
    here, there, moves = wanted(1), wanted(2), wanted(0)
    firsts = [one.request.model_copy(update={"attempt": 99}) for one in (here, there, moves)]
    two.engines[0].add(here.request)
    two.engines[0].add(moves.request)
    two.engines[1].add(there.request)
    decode(two.engines[0], [here, moves], 11)
    decode(two.engines[1], [there], 5)
    stop(two.engines[0], [moves])
    others = [wanted(10 + n, prompt=(*range(n, n + 300),)).request for n in range(7)]
    taken = [Sample(one) for one in others]
    for one in taken:
        two.engines[0].add(one.request)
    decode(two.engines[0], [here, *taken])
    go_on(two.engines[1], [moves])
    decode(two.engines[1], [there, moves])
    for one, (ids, _) in zip((here, there, moves), stayed(two.engines[0], firsts), strict=True):
        assert one.ids == ids
    assert moves.prefills[-1].computed == 1


def test_an_engine_gets_back_what_it_gave_away(two: Two) -> None:
    sample = left(two, wanted())
    go_on(two.engines[0], [sample])
    decode(two.engines[0], [sample])
    assert sample.ids == stayed(two.engines[1], [wanted().request])[0][0]
    assert (sample.prefills[-1].computed, sample.prefills[-1].reason) == (1, "")


def test_the_first_token_does_not_wait_until_the_memory_of_its_kv_is_given_back(two: Two) -> None:
    sample = left(two, wanted())
    go_on(two.engines[1], [sample])
    decode(two.engines[1], [sample], 1)
    assert claimed(two, sample).exists()
    two.engines[1].tend()
    assert (two.files(), sample.prefills[-1].computed) == ([], 1)
    decode(two.engines[1], [sample])
