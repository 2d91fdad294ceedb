"""All arithmetic of lag: which version may still train, what may be opened, which groups make batch n.

Rule 1: the deadline of a group is the last step that may train it: `min(version + K, steps - 1)`.
Rule 2: n is the next batch to be chosen; it may be chosen once version n was announced, so at most one is untrained.
Rule 3: pure functions of plain numbers.

Why no batch can become impossible (I6: for every m >= n the live groups with deadline <= m fit into batches n .. m,
that is, number at most (m - n + 1) x B), by induction over what can happen:

* Nothing is live: it holds.
* A group is opened at version w, and no live group has a later one. Deadlines never fall as versions grow, so the new
  group's deadline D is the greatest of all. Counts at m < D do not change; at m >= D the count is live + 1, and
  `openable` allowed it only with live + 1 <= (D - n + 1) x B <= (m - n + 1) x B.
* Batch n is chosen: `choose` takes it only if I6 holds afterwards, with n + 1 for n. For m = n that leaves 0 groups, so
  all groups with deadline n are in the batch, and nothing older than K can ever be left.
* A group is voided: counts only fall. A version is announced: neither deadlines nor n change.
* A group is opened at an older version (`legacy_fill`): `fillable` looks at I6 itself.
* Mode `oversample` (K = 0) opens more than a batch holds, so I6 holds only between batches: whoever chooses one voids
  all others, and nothing is live.

When the last step n = steps - 1 is chosen every deadline is at most n, so nothing stays live behind it. While the last
step is unknown (`epochs`), the deadline is version + K; when the datasets are exhausted the last batch takes all.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.invariants import deadline, lag_allowed


@dataclass(frozen=True, slots=True)
class Rules:
    """`steps` is None while the last step is unknown. `oversample`: `live_max` groups are opened for each batch."""

    batch: int
    staleness_max: int
    live_max: int
    steps: int | None
    oversample: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete group. `completed` is its place in the order of completion."""

    group: int
    version: int
    completed: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`groups` in order; empty when the batch cannot be chosen yet."""

    groups: tuple[int, ...] = ()
    exhausted: bool = False


def openable(rules: Rules, newest: int, first: int, live: int) -> int:
    """How many groups may be opened now at version `newest`; `first` = the next batch to be chosen."""
    last = deadline(newest, rules.staleness_max, rules.steps)
    size = rules.live_max if rules.oversample else rules.batch
    return max(0, min(rules.live_max, (last - first + 1) * size) - live)


def fillable(rules: Rules, version: int, first: int, live: Sequence[tuple[int, int]]) -> bool:
    """May one more group be opened at the older `version`? Never at the oldest of a full window, it could not drain.

    `live` = (version, live groups), oldest first.
    """
    total = sum(count for _, count in live)
    if version <= oldest_live(rules, first) or total + 1 > rules.live_max:
        return False
    counts = dict(live)
    counts[version] = counts.get(version, 0) + 1
    return fits(rules, sorted(counts.items()), first)


def fits(rules: Rules, live: Iterable[tuple[int, int]], first: int) -> bool:
    """I6 from (version, live groups), oldest first, when batch `first` is the next to be chosen."""
    total = 0
    for version, count in live:
        total += count
        if total > max(0, deadline(version, rules.staleness_max, rules.steps) - first + 1) * rules.batch:
            return False
    return True


def enough(rules: Rules, complete: int, live: int, exhausted: bool) -> bool:
    """Are `complete` of `live` groups a batch? The last one may be smaller, once everything live is complete."""
    return complete >= (max(min(live, rules.batch), 1) if _is_last(rules, live, exhausted) else rules.batch)


def _is_last(rules: Rules, live: int, exhausted: bool) -> bool:
    return exhausted and (rules.oversample or live <= rules.batch)


def leaves_room(rules: Rules, step: int, complete: Iterable[tuple[int, int]], live: Iterable[tuple[int, int]]) -> bool:
    """Does I6 hold once batch `step` has B of the complete groups, those with the earliest deadline?

    `complete`, `live` = (version, groups), oldest first. Who of the same deadline is taken makes no difference.
    """
    left, room = dict(live), rules.batch
    for version, count in complete:
        taken = min(room, count)
        left[version] -= taken
        room -= taken
    return rules.oversample or fits(rules, left.items(), step + 1)


def choose(
    rules: Rules, step: int, complete: Sequence[Candidate], live: Sequence[tuple[int, int]], exhausted: bool
) -> Choice:
    """Batch `step`: B complete groups in order of (deadline, completion), provided I6 holds afterwards.

    `live` = (version, live groups), oldest first, the complete ones among them. `exhausted`: no prompt is left to open;
    then a last batch smaller than B is chosen, once everything live is complete. With `oversample` everything else is
    to be voided, so nothing can be left too old, and the first batch after the last prompt is the last. I1 is asserted.
    """
    total = sum(count for _, count in live)
    if not enough(rules, len(complete), total, exhausted):
        return Choice()
    if not leaves_room(rules, step, sorted(Counter(c.version for c in complete).items()), live):
        return Choice()
    order = sorted(complete, key=lambda c: (deadline(c.version, rules.staleness_max, rules.steps), c.completed))
    taken = order[: rules.batch]
    for candidate in taken:
        assert lag_allowed(step, candidate.version, rules.staleness_max), f"{candidate} in step {step}"
    return Choice(tuple(candidate.group for candidate in taken), exhausted=_is_last(rules, total, exhausted))


def oldest_live(rules: Rules, first: int) -> int:
    """The oldest version of the window."""
    return first - rules.staleness_max


def needed(
    rules: Rules, first: int, newest: int, keep: int, checkpoints: Sequence[int] | None
) -> tuple[int, list[int]]:
    """Whose weights must stay (I5), apart from versions in use: all from the first number on, and those in the list.

    `checkpoints` = versions that checkpoints need, None before the first one: a trainer then starts at version 0.
    """
    lowest = min(oldest_live(rules, first), newest - keep + 1)
    return lowest, [0] if checkpoints is None else list(checkpoints)
