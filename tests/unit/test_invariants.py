"""The predicates of I1 to I10, with values worked out by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import invariants as i


def test_names_are_i1_to_i10_in_order_and_each_is_a_sentence() -> None:
    assert [invariant.name for invariant in i.INVARIANTS] == [f"I{number}" for number in range(1, 11)]
    assert all(invariant.sentence.endswith(".") for invariant in i.INVARIANTS)


def test_group_of_version_3_that_waited_until_step_12_may_not_train_with_k_8() -> None:
    """B04: queue time counts."""
    assert i.lag(step=12, version=3) == 9
    assert not i.lag_allowed(step=12, version=3, staleness_max=8)
    assert i.lag_allowed(step=11, version=3, staleness_max=8)


def test_synchronous_means_lag_zero_and_step_zero_may_start() -> None:
    """B02, A06."""
    assert i.lag_allowed(0, 0, 0)
    assert not i.lag_allowed(1, 0, 0)


def test_a_group_of_the_future_never_trains() -> None:
    assert not i.lag_allowed(step=3, version=4, staleness_max=8)


@pytest.mark.parametrize(
    ("indices", "policy", "may"),
    [
        ((0, 1, 2), "all", True),
        ((2, 0, 1), "partial", True),
        ((0, 2), "partial", True),
        ((0, 2), "all", False),
        ((1,), "partial", False),
        ((0, 0, 1), "partial", False),
        ((0, 1, 3), "partial", False),
        ((), "partial", False),
    ],
)
def test_a_group_of_three_trains_whole_or_with_two_where_it_may_lose_one(
    indices: tuple[int, ...], policy: str, may: bool
) -> None:
    assert i.trains_whole(indices, 3, policy) is may


def test_deadline_is_version_plus_k_but_no_later_than_the_last_step() -> None:
    assert i.deadline(3, 2, None) == 5
    assert i.deadline(3, 2, 10) == 5
    assert i.deadline(3, 2, 5) == 4


@pytest.mark.parametrize(
    ("live", "first", "fits"),
    [
        ([], 5, True),
        ([3, 3, 3], 5, False),  # deadline 5: three groups, one batch of two
        ([3, 3, 4, 4], 5, True),  # two by step 5, four by step 6
        ([3, 3, 4, 4, 4], 5, False),  # five by step 6
        ([2], 5, False),  # its last step is over
        ([5] * 6, 5, True),  # six by step 7
        ([5] * 7, 5, False),
    ],
)
def test_live_groups_fit_the_batches_that_are_left(live: list[int], first: int, fits: bool) -> None:
    """I6 with B = 2, K = 2."""
    assert i.feasible(live, first, 2, 2, None) is fits


def test_near_the_end_all_deadlines_are_the_last_step() -> None:
    assert i.feasible([8, 9], 9, 2, 2, 10)
    assert not i.feasible([8, 9, 9], 9, 2, 2, 10)


@given(
    st.lists(st.integers(0, 12), max_size=14),
    st.integers(0, 12),
    st.integers(1, 4),
    st.integers(0, 4),
    st.none() | st.integers(13, 16),
)
def test_feasible_says_the_same_as_the_sentence_word_by_word(
    live: list[int], first: int, batch: int, staleness_max: int, steps: int | None
) -> None:
    deadlines = [i.deadline(version, staleness_max, steps) for version in live]
    said = all(
        sum(d <= m for d in deadlines) <= (m - first + 1) * batch
        for m in range(first - 1, max([first, *deadlines]) + 1)
    ) and all(d >= first for d in deadlines)
    assert i.feasible(live, first, batch, staleness_max, steps) is said


def test_the_order_in_which_live_groups_are_named_means_nothing() -> None:
    for order in itertools.permutations([3, 4, 4, 5]):
        assert i.feasible(order, 5, 2, 2, None)


def test_versions_grow_by_one_from_zero() -> None:
    assert i.consecutive([])
    assert i.consecutive([0, 1, 2])
    assert not i.consecutive([0, 2])
    assert not i.consecutive([1, 2])
    assert not i.consecutive([0, 1, 1])


def test_an_engine_is_full_at_its_seats_and_at_its_kv() -> None:
    assert i.within_capacity(32, 32, 1000, 1000)
    assert not i.within_capacity(33, 32, 0, 1000)
    assert not i.within_capacity(1, 32, 1001, 1000)
    assert not i.within_capacity(-1, 32, 0, 1000)
