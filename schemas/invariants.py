"""I1 to I10: name, sentence, and the predicates that code asserts and checkers use. Pure functions of plain numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invariant:
    name: str
    sentence: str


INVARIANTS = (
    Invariant("I1", "No token trains with lag > K."),
    Invariant(
        "I2", "Every opened group ends exactly once: trained, voided with a reason, or live or chosen at the stop."
    ),
    Invariant("I3", "A trajectory enters at most one gradient in the lineage of any weights."),
    Invariant("I4", "A trajectory and its group have one version; its engine hosted that version, by fingerprint."),
    Invariant("I5", "Versions grow by one and never change; none is deleted while something needs it."),
    Invariant("I6", "For every m >= n the live groups with deadline <= m fit the batches up to m."),
    Invariant("I7", "An engine never runs more requests than its seats, nor holds more KV than its capacity."),
    Invariant("I8", "Once faults stop, the next step comes within a stated bound."),
    Invariant("I9", "Replaying the journal gives the same decisions, byte for byte."),
    Invariant("I10", "A moved request continues with the tokens and KV it had; what cannot be proven is recomputed."),
)


def lag(step: int, version: int) -> int:
    """Age in versions of a group of `version` that step `step` trains."""
    return step - version


def lag_allowed(step: int, version: int, staleness_max: int) -> bool:
    """I1. Looked at when a batch is chosen and again before the gradient."""
    return 0 <= lag(step, version) <= staleness_max


def deadline(version: int, staleness_max: int, steps: int | None) -> int:
    """The last step that may train a group of `version`; `steps` is None while the last step is unknown."""
    latest = version + staleness_max
    return latest if steps is None else min(latest, steps - 1)


def feasible(live_versions: Iterable[int], first: int, batch: int, staleness_max: int, steps: int | None) -> bool:
    """I6 with `first` the first step that is still to be chosen: for every m >= first - 1, live groups with
    deadline <= m number at most (m - first + 1) x batch."""
    deadlines = sorted(deadline(version, staleness_max, steps) for version in live_versions)
    return all(place + 1 <= (m - first + 1) * batch for place, m in enumerate(deadlines))


def step_bound_s(
    *, requests: int, at_once: int, versions: int, tries: int, try_s: float, swap_s: float, lost_s: float, step_s: float
) -> float:
    """I8: once faults stop, seconds until the next version at most, time with voids not counted.

    `requests` that may be live; `at_once`: how many of them one engine holds for certain; `versions` that may be live;
    `tries` of a sample; `try_s`: limit of one, sampling and scoring; `swap_s`: until an engine that is to host another
    version does; `lost_s`: until an engine that is gone is known to be; `step_s`: of the trainer. Derived in
    docs/INVARIANTS.md.
    """
    rounds = -(-requests // at_once) + versions
    return lost_s + rounds * tries * try_s + versions * swap_s + step_s


def consecutive(versions: Sequence[int]) -> bool:
    """I5: 0, 1, 2, ..."""
    return list(versions) == list(range(len(versions)))


MEMBERS_MIN = 2
"""An advantage compares: a group that lost samples trains with so many at least."""


def trains_whole(indices: Sequence[int], group_size: int, policy: str) -> bool:
    """I3: each sample of a group once; all of them, unless `scheduling.group_policy` lets it lose some."""
    there = set(indices)
    some = policy == "partial" and len(there) >= MEMBERS_MIN and there < set(range(group_size))
    return len(there) == len(indices) and (some or there == set(range(group_size)))


def within_capacity(running: int, seats: int, kv_tokens: int, kv_tokens_max: int) -> bool:
    """I7."""
    return 0 <= running <= seats and 0 <= kv_tokens <= kv_tokens_max
