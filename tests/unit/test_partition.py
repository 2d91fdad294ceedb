"""Shares of engines, with values worked out by hand. Versions are 0, 1, 2, ...; the last one is the newest."""

import pytest

from workers.orchestrator.partition import Demand, engines_needed, packed, proportional


def shares(engines: int, *requests: int) -> list[int]:
    demands = [Demand(version, count, live=count > 0) for version, count in enumerate(requests)]
    return list(proportional(engines, demands).values())


@pytest.mark.parametrize(
    ("engines", "requests", "due"),
    [
        # Quotas 7.14, 0.71, 0.14: two get 1 and leave, 6 are left for the first. Rounding would say 7, 1, 0.
        (8, (100, 10, 2), [6, 1, 1]),
        # 1.33 each: floors leave one over; equal remainders go to the newest.
        (4, (10, 10, 10), [1, 1, 2]),
        # 2.5, 2.5, 3: one over, the newer of the equal remainders gets it.
        (8, (5, 5, 6), [2, 3, 3]),
        # More versions than engines: one each, oldest first, the newest waits.
        (4, (3, 3, 3, 3, 3), [1, 1, 1, 1, 0]),
        (1, (1, 50), [1, 0]),
        # Nothing asks: all stand by for the newest.
        (3, (0, 0), [0, 3]),
        (5, (0, 7, 0), [0, 5, 0]),
        # Leaving lowers the quota of others: 10 x (0.9, 1.02, ...) needs a second look.
        (3, (1, 1, 100), [1, 1, 1]),
    ],
)
def test_engines_in_proportion_to_requests_and_nobody_starves(
    engines: int, requests: tuple[int, ...], due: list[int]
) -> None:
    assert shares(engines, *requests) == due


def test_shares_always_sum_to_the_engines_and_whoever_asks_gets_one() -> None:
    for engines in range(1, 9):
        for first in (0, 1, 5, 100):
            for second in (0, 1, 7):
                for third in (0, 2, 40):
                    given = shares(engines, first, second, third)
                    asking = [n for n in (first, second, third) if n]
                    assert sum(given) == engines
                    got = [g for g, n in zip(given, (first, second, third), strict=True) if n]
                    assert sum(g > 0 for g in got) == min(engines, len(asking)), (engines, first, second, third)


def test_packed_old_versions_keep_what_runs_and_the_newest_gets_the_rest() -> None:
    demands = [Demand(0, 100, keep=4, want=4), Demand(1, 10, keep=1, want=1), Demand(2, 2)]
    assert packed(8, demands) == {0: 4, 1: 1, 2: 3}


def test_packed_an_old_version_gains_an_engine_only_for_requests_that_wait() -> None:
    assert packed(4, [Demand(0, 40, keep=1, want=2), Demand(1, 90)]) == {0: 2, 1: 2}
    assert packed(4, [Demand(0, 20, keep=1, want=1), Demand(1, 90)]) == {0: 1, 1: 3}


def test_packed_an_old_version_gives_back_only_what_the_newest_needs() -> None:
    """Version 0 would fit on 1 of its 6 engines: on 6 its requests end sooner. The older of two keeps first."""
    old = Demand(0, 100, keep=1, want=1, held=6)
    assert packed(8, [old, Demand(1, 0, live=False)]) == {0: 6, 1: 2}
    assert packed(8, [old, Demand(1, 90, want=2)]) == {0: 6, 1: 2}
    assert packed(8, [old, Demand(1, 500, want=5)]) == {0: 3, 1: 5}
    assert packed(8, [old, Demand(1, 900, want=40, live=False)]) == {0: 1, 1: 7}
    assert packed(8, [Demand(0, 50, held=4), Demand(1, 50, held=4), Demand(2, 300, want=3)]) == {0: 4, 1: 1, 2: 3}


def test_packed_running_requests_of_old_versions_are_not_displaced_for_groups_that_could_be_opened() -> None:
    assert packed(2, [Demand(0, 40, keep=2, want=2), Demand(1, 24, live=False)]) == {0: 2, 1: 0}


def test_packed_a_version_that_runs_is_never_left_without_an_engine() -> None:
    assert packed(3, [Demand(0, 90, keep=2, want=3), Demand(1, 32, keep=1, want=1), Demand(2, 8)]) == {0: 1, 1: 1, 2: 1}


def test_packed_keeps_come_before_gains() -> None:
    assert packed(4, [Demand(0, 64, keep=1, want=2), Demand(1, 90, keep=3, want=3), Demand(2, 0)]) == {0: 1, 1: 3, 2: 0}


def test_packed_more_versions_than_engines_go_oldest_first() -> None:
    demands = [Demand(version, 9, keep=1, want=1) for version in range(5)]
    assert packed(4, demands) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 0}
    assert packed(1, [Demand(3, 1), Demand(4, 500)]) == {3: 1, 4: 0}


def test_engines_needed_by_seats_and_by_kv_with_the_room_that_is_left_over() -> None:
    assert engines_needed(0, 0, 0, seats=4, kv_tokens=100) == 0
    assert engines_needed(5, 50, 10, seats=4, kv_tokens=100) == 2
    assert engines_needed(3, 100, 40, seats=4, kv_tokens=100) == 1
    # 60 each into 100: one per engine.
    assert engines_needed(3, 180, 60, seats=4, kv_tokens=100) == 3
    # 30 each into 100: three per engine.
    assert engines_needed(6, 180, 30, seats=8, kv_tokens=100) == 2
    # 51 of 1 and one of 50 into 100: an engine without room for 50 holds 51 tokens, and 101 - 50 are not twice 51.
    assert engines_needed(52, 101, 50, seats=60, kv_tokens=100) == 2
    # Two of 1 may lie on either of two engines of 40 before one of 39 comes.
    assert engines_needed(3, 41, 39, seats=3, kv_tokens=40) == 3
