"""Advantages by group (cases F01 to F04)."""

import math
import random
import struct

import pytest

from workers.trainer.advantages import ADVANTAGES, by_group


def as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_samples_belong_together_by_group_and_not_by_position(kind: str) -> None:
    assert by_group(kind, [1, 2, 1, 2], [1.0, 0.0, 1.0, 0.0]) == [0.0] * 4


def test_leave_one_out_where_the_peers_do_not_vary_divides_by_nothing() -> None:
    """F02: rewards (1, 0, 0, 0)."""
    assert by_group("rloo", [7] * 4, [1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_leave_one_out_of_a_group_of_one_is_zero() -> None:
    assert by_group("rloo", [7], [1.0]) == [0.0]


@pytest.mark.parametrize("other", [0.35 + 1e-8, 0.35 + 1e-6, 0.3500001, 0.36, 1.0])
def test_seven_equal_rewards_and_one_different_in_float32_make_no_advantage_of_thousands(other: float) -> None:
    """F03."""
    rewards = [as_float32(0.35)] * 7 + [as_float32(other)]
    for kind in ADVANTAGES:
        assert max(abs(value) for value in by_group(kind, [0] * 8, rewards)) < 3.0


def test_equal_rewards_that_are_no_float32_numbers_give_exactly_zero() -> None:
    assert by_group("grpo", [0] * 8, [as_float32(0.4)] * 8) == [0.0] * 8


def test_one_failure_among_seven_good_ones_keeps_the_whole_group() -> None:
    values = by_group("rloo", [0] * 8, [0.0, *[0.95] * 7])
    assert len(values) == 8
    assert values[0] == pytest.approx(-0.95)
    assert all(value > 0 for value in values[1:])


def test_grpo_divides_by_the_spread_and_dr_grpo_does_not() -> None:
    assert by_group("grpo", [0] * 4, [1.0, 1.0, 0.0, 0.0]) == pytest.approx([1.0, 1.0, -1.0, -1.0])
    assert by_group("dr_grpo", [0] * 4, [1.0, 1.0, 0.0, 0.0]) == pytest.approx([0.5, 0.5, -0.5, -0.5])


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_advantages_of_a_group_add_up_to_nothing_whatever_the_order(kind: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    groups = [group for group in range(5) for _ in range(6)]
    rewards = [chance.random() for _ in groups]
    order = list(range(len(groups)))
    chance.shuffle(order)
    straight = by_group(kind, groups, rewards)
    shuffled = by_group(kind, [groups[i] for i in order], [rewards[i] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order])
    for group in range(5):
        assert math.fsum(v for v, g in zip(straight, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-9)
