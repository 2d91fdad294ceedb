"""Graders that need no answer: they look at ids only. Rewards vary within a group and can be learnt."""

from collections.abc import Callable

from workers.reward.verdict import GradeInput, Verdict, ids_only


def _share(item: GradeInput, counts: Callable[[int], bool]) -> float:
    return sum(1 for token in item.response_ids if counts(token)) / max(1, len(item.response_ids))


@ids_only
def even_share(item: GradeInput) -> float:
    """Share of even ids, 0 .. 1."""
    return _share(item, lambda token: token % 2 == 0)


@ids_only
def low_share(item: GradeInput) -> float:
    """Share of ids below 128, 0 .. 1."""
    return _share(item, lambda token: token < 128)


@ids_only
def distinct_share(item: GradeInput) -> float:
    """Share of the ids that are distinct, 0 .. 1: text that repeats itself scores low."""
    return len(set(item.response_ids)) / max(1, len(item.response_ids))


@ids_only
def low_majority(item: GradeInput) -> Verdict:
    """Shaped: the outcome says whether more than a quarter of the ids lie below 128, the reward is their share."""
    share = _share(item, lambda token: token < 128)
    return Verdict(reward=share, outcome=float(share > 0.25), parts={"share": share})
