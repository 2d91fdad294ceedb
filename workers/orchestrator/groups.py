"""The life of a group and of its requests, as two tables of transitions; every change goes through an asserting move.

    train   open -----> complete -----> chosen -----> trained
              \\             |
               +-> voided <-+           (failed, no_signal)

    eval    open -----> evaluated
              \\
               +-> voided               (failed)

A group is opened with its version and keeps it. Each of its requests (one per sample) goes

    waiting ---> at engine ---> finished ---> scored
       ^             |  \\                     ^
       |             |   stopping (Swap sent, partial awaited)
       +-------------+------ partial, refused, failed, engine lost: issued again, attempt + 1

With `group_policy = "partial"` a training group that has two others left goes on without a sample that failed too
often (`dropped`); it is complete when those are scored. A group that is voided drops all that it has.

A score may come before the word that the seat is free, so `scored` is reached from everywhere; what was given up but
not yet issued again may still be heard to have finished. Seats and KV are not
booked here but in `placement.py`, under the request's key: a seat may stay booked after the request was scored.

Rule 1: a word about another attempt than the last one issued is ignored (`Groups.find` says None).
Rule 2: `failures` counts what went wrong; `attempt` counts issues; a move raises only `attempt`.
Rule 3: the figures per version (live groups, live requests, waiting, KV) are kept at each move, never recounted.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum, auto

from schemas.ids import Position, RequestKey
from schemas.messages import Purpose, Scored


class Stage(IntEnum):
    OPEN = auto()
    COMPLETE = auto()
    CHOSEN = auto()
    TRAINED = auto()
    EVALUATED = auto()
    VOIDED = auto()


class Place(IntEnum):
    WAITING = auto()
    ENGINE = auto()
    STOPPING = auto()
    FINISHED = auto()
    SCORED = auto()
    DROPPED = auto()


STAGES_AFTER: dict[Stage, tuple[Stage, ...]] = {
    Stage.OPEN: (Stage.COMPLETE, Stage.EVALUATED, Stage.VOIDED),
    Stage.COMPLETE: (Stage.CHOSEN, Stage.VOIDED),
    Stage.CHOSEN: (Stage.TRAINED,),
    Stage.TRAINED: (),
    Stage.EVALUATED: (),
    Stage.VOIDED: (),
}
PLACES_AFTER: dict[Place, tuple[Place, ...]] = {
    Place.WAITING: (Place.ENGINE, Place.FINISHED, Place.SCORED, Place.DROPPED),
    Place.ENGINE: (Place.WAITING, Place.STOPPING, Place.FINISHED, Place.SCORED, Place.DROPPED),
    Place.STOPPING: (Place.WAITING, Place.FINISHED, Place.SCORED, Place.DROPPED),
    Place.FINISHED: (Place.WAITING, Place.SCORED, Place.DROPPED),
    Place.SCORED: (Place.DROPPED,),
    Place.DROPPED: (),
}
UNSAMPLED = (Place.WAITING, Place.ENGINE, Place.STOPPING)
"""Where a request still needs an engine: what the partition counts."""
LIVE = (Stage.OPEN, Stage.COMPLETE)


@dataclass(slots=True, eq=False)
class Request:
    """One sample. `since` is when it came to its engine (or finished), on the mind's patience clock, microseconds."""

    group: int
    index: int
    version: int
    tokens_max: int
    attempt: int = -1
    failures: int = 0
    place: Place = Place.WAITING
    engine: int = -1
    since: int = 0
    partial: Position | None = None
    score: Scored | None = None

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.group, self.index, self.attempt)


@dataclass(slots=True, eq=False)
class Group:
    """One prompt with its samples. `completed` is its place in the order of completion."""

    number: int
    version: int
    purpose: Purpose
    prompt_row: int
    queued_at: int
    requests: tuple[Request, ...]
    stage: Stage = Stage.OPEN
    unscored: int = 0
    completed: int = -1

    @property
    def members(self) -> tuple[Request, ...]:
        """The samples that were not lost (`group_policy = "partial"`)."""
        return tuple(request for request in self.requests if request.place is not Place.DROPPED)

    @property
    def outcomes_vary(self) -> bool:
        """The signal: the verifier's verdicts differ, whatever their values (rewards are shaped, outcomes are not)."""
        return len({request.score.outcome for request in self.members if request.score is not None}) > 1


@dataclass(slots=True)
class VersionBooks:
    """Figures of one version. `live` = train groups open or complete; `unsampled` = requests that need an engine."""

    live: int = 0
    complete: int = 0
    evaluating: int = 0
    unsampled: int = 0
    waiting: int = 0
    tokens: int = 0
    largest: int = 0
    queue: deque[Request] = field(default_factory=deque)
    """Waiting requests in order; an entry that no longer waits is dropped when it is met."""


class Groups:
    """All groups that have not ended, and the figures per version."""

    def __init__(self) -> None:
        self.opened = 0
        self.completed = 0
        self.live = 0
        self.evaluating = 0
        self.table: dict[int, Group] = {}
        self.complete: dict[int, Group] = {}
        self.versions: dict[int, VersionBooks] = {}
        self.changes = 0
        """Counts openings and changes of stage."""
        self.drained = False
        """The last request of some version that needed an engine has ended. Whoever looks resets it."""

    def open(
        self, version: int, purpose: Purpose, prompt_row: int, *, size: int, tokens_max: int, queued_at: int
    ) -> Group:
        """A new group; all its requests wait."""
        number, self.opened = self.opened, self.opened + 1
        self.changes += 1
        requests = tuple(Request(number, index, version, tokens_max) for index in range(size))
        group = Group(number, version, purpose, prompt_row, queued_at, requests, unscored=size)
        self.put(group)
        books = self.of(version)
        books.largest = max(books.largest, tokens_max)
        books.queue.extend(requests)
        return group

    def put(self, group: Group) -> None:
        """Count a group in, as it is: new, or out of a snapshot."""
        self.table[group.number] = group
        if group.stage is Stage.COMPLETE:
            self.complete[group.number] = group
            self.of(group.version).complete += 1
        if group.stage not in LIVE:
            return
        self._count(group, 1)
        books = self.of(group.version)
        for request in group.requests:
            if request.place in UNSAMPLED:
                books.unsampled += 1
                books.tokens += request.tokens_max
            books.waiting += request.place is Place.WAITING

    def of(self, version: int) -> VersionBooks:
        return self.versions.setdefault(version, VersionBooks())

    def forget(self, version: int) -> None:
        """Nothing of the version will come again."""
        books = self.versions.pop(version, VersionBooks())
        used = books.live + books.evaluating + books.unsampled
        assert used == 0, f"version {version} is in use"

    def find(self, group: int, index: int, attempt: int) -> tuple[Group, Request] | None:
        """The request that a word is about, or None: it is not open any more, or the word is about another attempt."""
        found = self.table.get(group)
        if found is None or found.stage is not Stage.OPEN or not 0 <= index < len(found.requests):
            return None
        request = found.requests[index]
        return (found, request) if request.attempt == attempt else None

    def current(self, key: RequestKey) -> tuple[Group, Request] | None:
        return self.find(key.group, key.index, key.attempt)

    def move(self, request: Request, place: Place) -> None:
        """The only way a request changes its place."""
        before = request.place
        assert place in PLACES_AFTER[before], f"request {request.key}: {before.name} -> {place.name}"
        books = self.versions[request.version]
        request.place = place
        change = (place in UNSAMPLED) - (before in UNSAMPLED)
        if change:
            books.unsampled += change
            books.tokens += change * request.tokens_max
            self.drained |= books.unsampled == 0
        if before is Place.WAITING:
            books.waiting -= 1
        if place is Place.WAITING:
            books.waiting += 1
            books.queue.append(request)

    def scored(self, group: Group, request: Request, score: Scored) -> bool:
        """Take a score; True if it was the group's last."""
        request.score = score
        self.move(request, Place.SCORED)
        group.unscored -= 1
        return group.unscored == 0

    def lost(self, group: Group, request: Request) -> bool:
        """The group goes on without this sample; True if all others are scored."""
        self.move(request, Place.DROPPED)
        group.unscored -= 1
        return group.unscored == 0

    def end(self, group: Group, stage: Stage) -> None:
        """The only way a group changes its stage."""
        self._move(group, stage)
        if stage is Stage.COMPLETE:
            group.completed, self.completed = self.completed, self.completed + 1
            self.complete[group.number] = group
            self.of(group.version).complete += 1
        elif self.complete.pop(group.number, None) is not None:
            self.of(group.version).complete -= 1
        if stage in (Stage.TRAINED, Stage.EVALUATED, Stage.VOIDED):
            del self.table[group.number]

    def _move(self, group: Group, stage: Stage) -> None:
        assert stage in STAGES_AFTER[group.stage], f"group {group.number}: {group.stage.name} -> {stage.name}"
        assert (stage is Stage.EVALUATED) <= (group.purpose == "eval"), f"group {group.number} is {group.purpose}"
        if group.stage in LIVE and stage not in LIVE:
            self._count(group, -1)
        group.stage = stage
        self.changes += 1

    def _count(self, group: Group, change: int) -> None:
        books = self.of(group.version)
        if group.purpose == "train":
            books.live += change
            self.live += change
        else:
            books.evaluating += change
            self.evaluating += change

    def waiting(self, version: int) -> Request | None:
        """The next request of the version that waits; it stays in the queue until `issued`."""
        queue = self.of(version).queue
        while queue and queue[0].place is not Place.WAITING:
            queue.popleft()
        return queue[0] if queue else None

    def live_by_version(self) -> list[tuple[int, int]]:
        """(version, live train groups), oldest first."""
        return [(version, books.live) for version, books in sorted(self.versions.items()) if books.live]

    def complete_by_version(self) -> list[tuple[int, int]]:
        """(version, complete groups), oldest first."""
        return [(version, books.complete) for version, books in sorted(self.versions.items()) if books.complete]
