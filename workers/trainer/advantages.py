"""Advantages: how much better a sample is than others. Plain numbers, no tensor.

Rule 1: samples belong together by their group's id, wherever they stand in the batch.
Rule 2: sums are exact (`math.fsum`) and the variance is two-pass, so equal rewards give exactly 0.
Rule 3: the divisor has a floor: rounding noise of float32 rewards never becomes an advantage of thousands.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

STD_FLOOR = 1e-6


def grpo(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / max(std, floor) with the population's std, of one group.

    Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    divisor = max(math.sqrt(variance), STD_FLOOR)
    return [(reward - mean) / divisor for reward in rewards]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r - mean, of one group: no division by the spread. Liu et al., Dr. GRPO, arXiv 2503.20783, section 3.2."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r - mean of the group's other members; 0 for a group of one. Ahmadian et al., arXiv 2402.14740, equation 5."""
    if len(rewards) == 1:
        return [0.0]
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def reinforce_pp(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / max(std, floor), of all samples of a step, whatever their groups.

    Hu et al., REINFORCE++, arXiv 2501.03262: the advantage that is normalised over the global batch; a KL is part of
    our loss, not of the reward.
    """
    return grpo(rewards)


WITHIN_GROUP: dict[str, Callable[[Sequence[float]], list[float]]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
OVER_STEP: dict[str, Callable[[Sequence[float]], list[float]]] = {"reinforce_pp": reinforce_pp}


def advantages_of(kind: str, groups: Sequence[int], rewards: Sequence[float]) -> list[float]:
    """Advantage [N] of every sample, from group ids [N] and rewards [N], in the order they came.

    `kind` is `grpo`, `dr_grpo`, `rloo` or `reinforce_pp` (settings.training.advantage).
    """
    assert len(groups) == len(rewards), (len(groups), len(rewards))
    if kind in OVER_STEP:
        return OVER_STEP[kind](rewards)
    places: dict[int, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        places[group].append(place)
    advantages = [0.0] * len(rewards)
    for members in places.values():
        for place, value in zip(members, WITHIN_GROUP[kind]([rewards[p] for p in members]), strict=True):
            advantages[place] = value
    return advantages
