"""Advantages (cases F01 to F05)."""

import math
import random
import statistics
import struct

import pytest

from workers.trainer.advantages import OVER_STEP, WITHIN_GROUP, advantages_of


def as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@pytest.mark.parametrize("kind", sorted(WITHIN_GROUP))
def test_samples_belong_together_by_group_and_not_by_position(kind: str) -> None:
    assert advantages_of(kind, [1, 2, 1, 2], [1.0, 0.0, 1.0, 0.0]) == [0.0] * 4


def test_leave_one_out_where_the_peers_do_not_vary_divides_by_nothing() -> None:
    """F02: rewards (1, 0, 0, 0)."""
    assert advantages_of("rloo", [7] * 4, [1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_leave_one_out_of_a_group_of_one_is_zero() -> None:
    assert advantages_of("rloo", [7], [1.0]) == [0.0]


@pytest.mark.parametrize("other", [0.35 + 1e-8, 0.35 + 1e-6, 0.3500001, 0.36, 1.0])
def test_seven_equal_rewards_and_one_different_in_float32_make_no_advantage_of_thousands(other: float) -> None:
    """F03."""
    rewards = [as_float32(0.35)] * 7 + [as_float32(other)]
    for kind in (*WITHIN_GROUP, *OVER_STEP):
        assert max(abs(value) for value in advantages_of(kind, [0] * 8, rewards)) < 3.0


@pytest.mark.parametrize("kind", sorted((*WITHIN_GROUP, *OVER_STEP)))
def test_equal_rewards_that_are_neither_zero_nor_one_give_nothing(kind: str) -> None:
    """F05: exactly 0, but for the rounding of float64 (3 x 0.4 / 3)."""
    values = advantages_of(kind, [0] * 8, [as_float32(0.4)] * 8)
    assert values == ([0.0] * 8 if kind != "rloo" else pytest.approx([0.0] * 8, abs=1e-15))


def test_one_failure_among_seven_good_ones_keeps_the_whole_group() -> None:
    """F04."""
    values = advantages_of("rloo", [0] * 8, [0.0, *[0.95] * 7])
    assert len(values) == 8
    assert values[0] == pytest.approx(-0.95)
    assert all(value > 0 for value in values[1:])


def test_grpo_divides_by_the_spread_and_dr_grpo_does_not() -> None:
    assert advantages_of("grpo", [0] * 4, [1.0, 1.0, 0.0, 0.0]) == pytest.approx([1.0, 1.0, -1.0, -1.0])
    assert advantages_of("dr_grpo", [0] * 4, [1.0, 1.0, 0.0, 0.0]) == pytest.approx([0.5, 0.5, -0.5, -0.5])


def test_reinforce_pp_compares_with_all_samples_of_the_step_whatever_their_group() -> None:
    rewards = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert advantages_of("reinforce_pp", [1, 1, 2, 2, 3, 3], rewards) == pytest.approx([1, 1, -1, -1, 1, -1])
    assert advantages_of("reinforce_pp", [1, 2, 3, 4, 5, 6], rewards) == pytest.approx([1, 1, -1, -1, 1, -1])
    assert advantages_of("reinforce_pp", [7], [1.0]) == [0.0]


@pytest.mark.parametrize("kind", sorted((*WITHIN_GROUP, *OVER_STEP)))
def test_advantages_are_those_of_the_formulas(kind: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    groups = [chance.randrange(4) for _ in range(24)]
    rewards = [chance.random() for _ in groups]
    expected = []
    for group, reward in zip(groups, rewards, strict=True):
        peers = [r for g, r in zip(groups, rewards, strict=True) if g == group or kind in OVER_STEP]
        if kind == "rloo":
            others = sum(peers) - reward
            expected.append(reward - others / (len(peers) - 1) if len(peers) > 1 else 0.0)
        else:
            spread = statistics.pstdev(peers) if kind != "dr_grpo" else 1.0
            expected.append((reward - statistics.fmean(peers)) / spread if spread else 0.0)
    assert advantages_of(kind, groups, rewards) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", sorted(WITHIN_GROUP))
def test_advantages_of_a_group_add_up_to_nothing_whatever_the_order(kind: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    groups = [group for group in range(5) for _ in range(6)]
    rewards = [chance.random() for _ in groups]
    order = list(range(len(groups)))
    chance.shuffle(order)
    straight = advantages_of(kind, groups, rewards)
    shuffled = advantages_of(kind, [groups[i] for i in order], [rewards[i] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order])
    for group in range(5):
        assert math.fsum(v for v, g in zip(straight, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-9)
