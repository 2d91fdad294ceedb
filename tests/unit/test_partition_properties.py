"""What must be so of every share of engines, whatever is asked. Versions are 0, 1, 2, ...; the last is the newest."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import RequestKey
from schemas.messages import Joined
from workers.orchestrator.partition import Demand, engines_needed, packed, proportional
from workers.orchestrator.placement import Fleet

Share = Callable[[int, list[Demand]], dict[int, int]]
POLICIES = pytest.mark.parametrize("share", [packed, proportional], ids=["packed", "proportional"])
ENGINES = st.integers(1, 64)


@st.composite
def asked(draw: st.DrawFn) -> list[Demand]:
    """Old versions have requests that run or wait; the newest may have none of its own and still count what it could
    open."""
    olds = draw(st.lists(st.integers(1, 300), max_size=9))
    demands = []
    for version, requests in enumerate(olds):
        keep = draw(st.integers(0, 12))
        want, held = draw(st.integers(max(1, keep), 13)), draw(st.integers(keep, 20))
        demands.append(Demand(version, requests, keep=keep, want=want, held=held))
    live = draw(st.booleans())
    requests = draw(st.integers(1 if live else 0, 300))
    want = draw(st.integers(1, 40)) if requests else 0
    return [*demands, Demand(len(olds), requests, live=live, want=want)]


@POLICIES
@given(engines=ENGINES, demands=asked())
def test_all_engines_are_shared_out_and_every_version_is_named(
    share: Share, engines: int, demands: list[Demand]
) -> None:
    given_ = share(engines, demands)
    assert list(given_) == [demand.version for demand in demands]
    assert sum(given_.values()) == engines
    assert min(given_.values()) >= 0


@POLICIES
@given(engines=ENGINES, demands=asked())
def test_whoever_has_requests_has_an_engine_while_there_are_enough(
    share: Share, engines: int, demands: list[Demand]
) -> None:
    """The floor. With more versions than engines: one each in order of deadline, the newest waits."""
    given_ = share(engines, demands)
    lives = [demand.version for demand in demands if demand.requests and demand.live]
    if len(lives) <= engines:
        assert all(given_[version] >= 1 for version in lives)
    else:
        assert given_ == {demand.version: int(demand.version in lives[:engines]) for demand in demands}


@POLICIES
@given(engines=ENGINES, demands=asked())
def test_a_version_without_requests_gets_nothing_unless_it_is_the_newest(
    share: Share, engines: int, demands: list[Demand]
) -> None:
    empty = [replace(demands[0], version=-1, requests=0), *demands]
    given_ = share(engines, empty)
    assert given_[-1] == 0
    assert {version: count for version, count in given_.items() if version >= 0} == share(engines, demands)


@given(engines=ENGINES, demands=asked(), data=st.data())
def test_more_requests_of_a_version_never_cost_it_an_engine(
    engines: int, demands: list[Demand], data: st.DataObject
) -> None:
    """Monotone in its own R, the others' staying as they are."""
    place = data.draw(st.sampled_from([n for n, demand in enumerate(demands) if demand.requests] or [0]))
    before = proportional(engines, demands)
    demands[place] = replace(demands[place], requests=demands[place].requests + data.draw(st.integers(1, 200)))
    assert proportional(engines, demands)[place] >= before[place]


@given(engines=ENGINES, requests=st.integers(1, 100), versions=st.integers(1, 12))
def test_equal_requests_get_equal_shares_and_what_is_over_goes_to_the_newest(
    engines: int, requests: int, versions: int
) -> None:
    given_ = list(proportional(engines, [Demand(version, requests) for version in range(versions)]).values())
    if versions <= engines:
        assert given_ == sorted(given_)
        assert given_[-1] - given_[0] <= 1


@given(engines=ENGINES, demands=asked())
def test_proportional_shares_are_within_one_of_the_quota_but_for_the_floor(engines: int, demands: list[Demand]) -> None:
    given_ = proportional(engines, demands)
    total = sum(demand.requests for demand in demands)
    lives = [demand for demand in demands if demand.requests]
    if total and len(lives) <= engines:
        for demand in lives:
            assert given_[demand.version] <= max(1, -(-engines * demand.requests // total))


@given(engines=ENGINES, demands=asked())
def test_packed_keeps_the_engines_of_running_requests_and_gives_no_more_than_is_wanted_or_held(
    engines: int, demands: list[Demand]
) -> None:
    given_ = packed(engines, demands)
    *olds, newest = demands
    asking = len(olds) + (newest.live and newest.requests > 0)
    needed = sum(max(1, demand.keep) for demand in olds) + (newest.live and newest.requests > 0)
    for demand in olds:
        if asking <= engines:
            assert given_[demand.version] <= max(1, demand.want, demand.held)
            if given_[demand.version] > max(1, demand.want):
                assert given_[newest.version] >= newest.want, "what the newest needs nobody keeps"
        if needed <= engines:
            assert given_[demand.version] >= demand.keep


@given(engines=ENGINES, demands=asked())
def test_packed_serves_the_oldest_first(engines: int, demands: list[Demand]) -> None:
    """Whoever lacks an engine that its running requests need has only newer ones behind it that lack theirs too."""
    given_ = packed(engines, demands)
    lack = [given_[demand.version] < demand.keep for demand in demands[:-1]]
    more = [given_[demand.version] > max(1, demand.keep) for demand in demands[:-1]]
    if True in lack:
        assert not any(more), "nobody gains while somebody lacks"
        first = lack.index(True)
        assert all(given_[demand.version] <= 1 for demand in demands[first + 1 : -1])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 12), st.integers(40, 120))
def test_the_engines_that_are_said_to_be_needed_hold_all_requests_in_any_order(
    tokens: list[int], seats: int, kv_tokens: int
) -> None:
    """By seats and by KV, in the order in which they come, each on the engine with most free KV."""
    count = engines_needed(len(tokens), sum(tokens), max(tokens), seats, kv_tokens)
    fleet = Fleet()
    limits = {"seats": seats, "kv_tokens_max": kv_tokens, "tokens_per_request_max": kv_tokens}
    for number in range(count):
        fleet.join(Joined(engine=number, incarnation=0, host="h", **limits), 0)
        fleet.swap(fleet.engines[number], 0, 0)
        fleet.hosted(fleet.engines[number])
    for number, one in enumerate(tokens):
        engine = fleet.pick(0, one, ())
        assert engine is not None, f"request {number} of {one} tokens finds no room on {count} engines"
        fleet.book(engine, RequestKey(number, 0, 0), one)
