"""The mind as plain data and back, so that a restart need not hear the whole journal again.

Rule 1: a restored mind says what the one it was taken from would have said to every later word, byte for byte (I9).
Rule 2: stored is what depends on history; what follows from it is counted again (figures per version, room of engines).
Left out is what can have no effect any more: waits and times of requests that ended or were issued again.
Rule 3: a snapshot of another form is none: whoever finds one goes back to an older one, or to the beginning. Raise
`Snapshot.form` when the meaning of a field changes.
"""

import base64
import binascii
import zlib
from collections import deque
from dataclasses import replace
from typing import Literal

from pydantic import ConfigDict, ValidationError

from schemas.ids import Position
from schemas.messages import Effect, EndRun, Message, PromptArrived, Purpose, Scored
from schemas.records import KeyField
from schemas.settings import Settings
from workers.orchestrator import window
from workers.orchestrator.groups import Group, Groups, Place, Request, Stage
from workers.orchestrator.placement import Engine, Fleet
from workers.orchestrator.rows import Rows
from workers.orchestrator.state import Mind

_ENDED = (Place.SCORED, Place.DROPPED)
"""Where a request that is not waiting will never wait again."""


class _Part(Message):
    """A field of a later writer is not ignored here: the snapshot is then of another form."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestPart(_Part):
    attempt: int
    failures: int
    place: str
    engine: int
    since: int
    partial: Position | None
    score: Scored | None


class GroupPart(_Part):
    number: int
    version: int
    purpose: Purpose
    prompt_row: int
    queued_at: int
    tokens_max: int
    stage: str
    completed: int
    requests: tuple[RequestPart, ...]


class VersionPart(_Part):
    """`queue`: (group, index) of requests in the order in which they will be issued."""

    version: int
    largest: int
    queue: tuple[tuple[int, int], ...]


class GroupsPart(_Part):
    opened: int
    completed: int
    changes: int
    drained: bool
    groups: tuple[GroupPart, ...]
    versions: tuple[VersionPart, ...]


class EnginePart(_Part):
    number: int
    incarnation: int
    seats: int
    kv_tokens_max: int
    tokens_per_request_max: int
    heard: int
    version: int | None
    loading: int | None
    loading_since: int
    issued: int
    booked: tuple[tuple[KeyField, int], ...]


class FleetPart(_Part):
    """Engines in the order in which they joined."""

    engines: tuple[EnginePart, ...]
    dead: tuple[tuple[int, int], ...]
    sequences: tuple[tuple[int, int], ...]


class RowsPart(_Part):
    evaluation: tuple[PromptArrived, ...]
    unread: tuple[PromptArrived, ...]
    arrived_rows: int
    wanted: int
    total: int | None
    trained: bool


class Snapshot(_Part):
    """All that a `Mind` knows. `issued` is (since, group, index, attempt), `judged` the steps it was told, changes,
    next step, exhausted."""

    form: Literal[1] = 1
    steps: int | None
    groups: GroupsPart
    fleet: FleetPart
    rows: RowsPart
    last_word: EndRun | None
    published: int
    step_next: int
    chosen: tuple[int, ...]
    evaluated: tuple[int, ...]
    judged: tuple[int | None, int, int, bool] | None
    blocked: bool
    blocked_by_oldest_s: float
    voids_in_row: int
    now: int
    patience: int
    rebalanced_at: int
    issued: tuple[tuple[int, int, int, int], ...]
    strays: tuple[tuple[int, KeyField], ...]
    checkpoints: tuple[int, ...] | None
    unretired: tuple[int, ...]
    undeleted: tuple[int, ...]
    triggered: bool
    changed: bool
    effects: tuple[Effect, ...]


def pack(snapshot: Snapshot) -> str:
    """As the journal has it: JSON, zlib, base64."""
    return base64.b64encode(zlib.compress(snapshot.model_dump_json().encode())).decode()


def unpack(text: str) -> Snapshot | None:
    """None if it cannot be read, or is of another form."""
    try:
        return Snapshot.model_validate_json(zlib.decompress(base64.b64decode(text, validate=True)))
    except (binascii.Error, zlib.error, ValidationError):
        return None


# --- from the mind ----------------------------------------------------------------------------


def take(mind: Mind) -> Snapshot:
    """What `mind` knows, between two events."""
    return Snapshot(
        steps=mind.rules.steps,
        groups=_groups(mind.groups),
        fleet=_fleet(mind.fleet),
        rows=_rows(mind.rows),
        last_word=mind.last_word,
        published=mind.published,
        step_next=mind.step_next,
        chosen=tuple(group.number for group in mind.chosen),
        evaluated=tuple(mind.evaluated),
        judged=None if mind.judged is None else (mind.judged[0].steps, *mind.judged[1:]),
        blocked=mind.blocked,
        blocked_by_oldest_s=mind.blocked_by_oldest_s,
        voids_in_row=mind.voids_in_row,
        now=mind.now,
        patience=mind.patience,
        rebalanced_at=mind.rebalanced_at,
        issued=tuple(
            (since, request.group, request.index, attempt)
            for since, request, attempt in mind.issued
            if mind.groups.find(request.group, request.index, attempt) is not None and request.since == since
        ),
        strays=tuple(mind.strays),
        checkpoints=mind.checkpoints,
        unretired=tuple(mind.unretired),
        undeleted=tuple(mind.undeleted),
        triggered=mind.triggered,
        changed=mind.changed,
        effects=tuple(mind.effects),
    )


def _groups(groups: Groups) -> GroupsPart:
    return GroupsPart(
        opened=groups.opened,
        completed=groups.completed,
        changes=groups.changes,
        drained=groups.drained,
        groups=tuple(_group(group) for group in groups.table.values()),
        versions=tuple(
            VersionPart(
                version=version,
                largest=books.largest,
                queue=tuple((entry.group, entry.index) for entry in books.queue if entry.place not in _ENDED),
            )
            for version, books in groups.versions.items()
        ),
    )


def _group(group: Group) -> GroupPart:
    return GroupPart(
        number=group.number,
        version=group.version,
        purpose=group.purpose,
        prompt_row=group.prompt_row,
        queued_at=group.queued_at,
        tokens_max=group.requests[0].tokens_max,
        stage=group.stage.name,
        completed=group.completed,
        requests=tuple(
            RequestPart(
                attempt=request.attempt,
                failures=request.failures,
                place=request.place.name,
                engine=request.engine,
                since=request.since,
                partial=request.partial,
                score=request.score,
            )
            for request in group.requests
        ),
    )


def _fleet(fleet: Fleet) -> FleetPart:
    return FleetPart(
        engines=tuple(
            EnginePart(
                number=engine.number,
                incarnation=engine.incarnation,
                seats=engine.seats,
                kv_tokens_max=engine.kv_tokens_max,
                tokens_per_request_max=engine.tokens_per_request_max,
                heard=engine.heard,
                version=engine.version,
                loading=engine.loading,
                loading_since=engine.loading_since,
                issued=engine.issued,
                booked=tuple(engine.booked.items()),
            )
            for engine in fleet.engines.values()
        ),
        dead=tuple(fleet.dead.items()),
        sequences=tuple(fleet.sequences.items()),
    )


def _rows(rows: Rows) -> RowsPart:
    return RowsPart(
        evaluation=tuple(rows.evaluation),
        unread=tuple(rows.unread),
        arrived_rows=rows.arrived_rows,
        wanted=rows.wanted,
        total=rows.total,
        trained=rows.trained,
    )


# --- and back ---------------------------------------------------------------------------------


def restore(settings: Settings, snapshot: Snapshot) -> Mind:
    """A mind that goes on as the one `snapshot` was taken from."""
    mind = Mind(settings)
    mind.rules = replace(mind.rules, steps=snapshot.steps)
    _restore_groups(mind.groups, snapshot.groups)
    _restore_fleet(mind.fleet, snapshot.fleet)
    _restore_rows(mind.rows, snapshot.rows)
    mind.last_word = snapshot.last_word
    mind.published = snapshot.published
    mind.step_next = snapshot.step_next
    mind.chosen = [mind.groups.table[number] for number in snapshot.chosen]
    mind.evaluated = list(snapshot.evaluated)
    mind.judged = _judged(mind.rules, snapshot.judged)
    mind.blocked = snapshot.blocked
    mind.blocked_by_oldest_s = snapshot.blocked_by_oldest_s
    mind.voids_in_row = snapshot.voids_in_row
    mind.now = snapshot.now
    mind.patience = snapshot.patience
    mind.rebalanced_at = snapshot.rebalanced_at
    mind.issued = deque(
        (since, _request(mind.groups, group, index), attempt) for since, group, index, attempt in snapshot.issued
    )
    mind.strays = deque(snapshot.strays)
    mind.checkpoints = snapshot.checkpoints
    mind.unretired = list(snapshot.unretired)
    mind.undeleted = list(snapshot.undeleted)
    mind.triggered = snapshot.triggered
    mind.changed = snapshot.changed
    mind.effects = list(snapshot.effects)
    return mind


def _judged(
    rules: window.Rules, said: tuple[int | None, int, int, bool] | None
) -> tuple[window.Rules, int, int, bool] | None:
    return None if said is None else (replace(rules, steps=said[0]), *said[1:])


def _request(groups: Groups, group: int, index: int) -> Request:
    return groups.table[group].requests[index]


def _restore_groups(groups: Groups, part: GroupsPart) -> None:
    for one in part.versions:
        groups.of(one.version).largest = one.largest
    for group in part.groups:
        groups.put(_restored_group(group))
    for one in part.versions:
        groups.of(one.version).queue.extend(_request(groups, *entry) for entry in one.queue)
    groups.opened, groups.completed = part.opened, part.completed
    groups.changes, groups.drained = part.changes, part.drained


def _restored_group(part: GroupPart) -> Group:
    requests = tuple(
        Request(
            group=part.number,
            index=index,
            version=part.version,
            tokens_max=part.tokens_max,
            attempt=request.attempt,
            failures=request.failures,
            place=Place[request.place],
            engine=request.engine,
            since=request.since,
            partial=request.partial,
            score=request.score,
        )
        for index, request in enumerate(part.requests)
    )
    return Group(
        number=part.number,
        version=part.version,
        purpose=part.purpose,
        prompt_row=part.prompt_row,
        queued_at=part.queued_at,
        requests=requests,
        stage=Stage[part.stage],
        unscored=sum(request.place not in _ENDED for request in requests),
        completed=part.completed,
    )


def _restore_fleet(fleet: Fleet, part: FleetPart) -> None:
    for engine in part.engines:
        names = {name: getattr(engine, name) for name in EnginePart.model_fields if name != "booked"}
        fleet.put(Engine(**names, booked=dict(engine.booked), tokens=sum(tokens for _, tokens in engine.booked)))
    fleet.dead, fleet.sequences = dict(part.dead), dict(part.sequences)


def _restore_rows(rows: Rows, part: RowsPart) -> None:
    rows.evaluation, rows.unread = list(part.evaluation), deque(part.unread)
    rows.arrived_rows, rows.wanted = part.arrived_rows, part.wanted
    rows.total, rows.trained = part.total, part.trained
