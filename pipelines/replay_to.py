"""`dora replay RUN --to BROKER`: topics of a run said again under a fresh name, to debug a consumer on them.

    archive and broker of RUN -> what is in the range -> in order of time -> dora.<name>.* at BROKER, runs/<name>

Rule 1: a record is said again as it was: partition, key, headers, value, the order within its partition. Changed are
   only the run's name, and the places of rows (`batches`, `scored` in `status`): rows lie elsewhere now.
Rule 2: what names rows brings them along, in range or not, and comes after them.
Rule 3: nobody else writes to a fresh name, so record n of a partition lies at offset n: places are known before
   anything is sent, and are looked at once it is acknowledged.
Rule 4: `journal` stays behind: it is of that run's orchestrator alone, and `--decisions` replays it.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from pipelines import tap_columns, tap_source
from pipelines.config_file import read_resolved, write_resolved
from pipelines.replay_range import Range, number_in, range_of
from pipelines.tap import known_topic
from pipelines.tap_positions import BEGINNING, since
from schemas import arrow
from schemas.codec import arrow_headers, headers_of_topic
from schemas.messages import STATUS, BatchRecord, Scored
from schemas.settings import Settings
from schemas.topics import EVALUATOR_PARTITION, KINDS, Topics, TopicSpec, version_key
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.taps.archive import UNREADABLE
from workers.transport.records.bus import Bus, BusUnavailable, Delivery, Producer

NAMES_MAX = 1000
FLIGHT_BYTES_MAX = 8 << 20
Row = tuple[str, int, int]
"""Kind, partition and offset of a record of token rows."""


@dataclass(frozen=True, slots=True)
class Said:
    """A record of the run. `topic` without prefix; `at`: microseconds since 1970; `rows`: records of rows it names."""

    kind: str
    topic: str
    partition: int
    offset: int
    at: int
    key: bytes | None
    value: bytes
    headers: Mapping[str, str]
    rows: tuple[Row, ...] = ()


@dataclass
class Again:
    """What was said again: as run `name` at `broker`, on whose folder `run_dir` a worker can be started. `moved`:
    records that name rows which lie elsewhere now; `unreadable`: what could not be taken along."""

    run: str
    name: str
    broker: str
    run_dir: Path
    topics: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    unreadable: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for. No `topics` = all that the range can choose from. `speed`: 1 = as in the run, 10 = ten times
    as fast, None = as fast as possible."""

    broker: str
    name: str = ""
    topics: tuple[str, ...] = ()
    step: str | None = None
    since: str = ""
    until: str = ""
    speed: float | None = None


def say_again(run_dir: Path, wanted: Wanted, open_bus: tap_source.OpenBus = tap_source.kafka) -> Again:
    """Do it. BadInput, BusUnavailable."""
    if wanted.speed is not None and not 0 < wanted.speed < float("inf"):
        raise BadInput(f"--speed {wanted.speed}: 1 = as it was, 10 = ten times as fast; without it as fast as possible")
    settings = read_resolved(run_dir)
    chosen = range_of(wanted.step, wanted.since, wanted.until, [known_topic(kind) for kind in wanted.topics])
    with open_bus(settings, wanted.broker) as bus:
        name = _fresh_name(bus, run_dir, settings.name, wanted)
        again = Again(settings.name, name, wanted.broker, run_dir.parent / name)
        records = rewritten(in_order(_read(run_dir, chosen, again, open_bus)), settings.name, name)
        again.topics = Counter(one.kind for one in records)
        again.moved = sum(bool(one.rows) for one in records)
        again.run_dir.mkdir()
        write_resolved(settings.model_copy(update={"name": name}), again.run_dir)
        bus.make_topics(_specs(Topics(name), settings, records))
        producer = bus.producer()
        try:
            _send(producer, Topics(name), records, wanted.speed, settings.broker.timeout_s)
        finally:
            producer.close()
    return again


def _fresh_name(bus: Bus, run_dir: Path, run: str, wanted: Wanted) -> str:
    """BadInput if the one that was asked for is taken: by a folder beside the run's, or on the broker."""

    def taken(name: str) -> str:
        if (run_dir.parent / name).exists():
            return f"{run_dir.parent / name} exists"
        try:
            there = bus.topics(Topics(name).prefix)
        except ValueError as error:
            raise BadInput(f"--as {name}: {error}") from error
        return f"the broker at {wanted.broker} has {len(there)} topics {Topics(name).prefix}*" if there else ""

    if wanted.name:
        if why := taken(wanted.name):
            raise BadInput(f"--as {wanted.name}: {why}: choose another name")
        return wanted.name
    for number in range(NAMES_MAX):
        if not taken(name := f"{run[:70]}-again-{number:03d}"):
            return name
    raise BadInput(f"{NAMES_MAX} names {run}-again-* are taken: choose one by --as")


# --- what is said ---------------------------------------------------------------------------


def _read(run_dir: Path, chosen: Range, again: Again, open_bus: tap_source.OpenBus) -> list[Said]:
    """What is in the range, and the rows that it names (rule 2). BadInput."""

    def records(kind: str, named: Set[Row]) -> Iterator[Said]:
        def wanted(place: tuple[str, int], offset: int, at: int, value: bytes = b"") -> bool:
            return (kind, place[1], offset) in named or chosen.holds(kind, place, offset, at, value)

        source = tap_source.Source(run_dir, kind, since(kind, BEGINNING), open_bus=open_bus)
        read = _rows if tap_columns.is_tokens(kind) else _words
        for piece in source.pieces():
            if piece.place is not None:
                yield from read(kind, piece.place, piece.rows, wanted)
        again.unreadable += source.unreadable
        again.unreadable += [str(file) for file in sorted((run_dir / "archive" / UNREADABLE).glob(f"{kind}.*.arrow"))]

    kinds = sorted(chosen.topics, key=lambda kind: (tap_columns.is_tokens(kind), KINDS.index(kind)))
    found: list[Said] = []
    for kind in kinds:  # words first: they say which rows come along
        found += records(kind, {row for one in found for row in one.rows if row[0] == kind})
    steps = {number_in(one.value, "step") for one in found if one.kind == "batches"}
    for step in range(chosen.steps[0], chosen.steps[1] + 1) if chosen.steps else ():
        if step not in steps:
            raise BadInput(f"--step: no batch of run {again.run} is of step {step}: `dora tap {again.run} batches`")
    if not found:
        raise BadInput(f"run {again.run} said nothing in that range: `dora tap {again.run}` lists what there is")
    return found


def _rows(kind: str, place: tuple[str, int], table: pa.Table, wanted: Callable[..., bool]) -> Iterator[Said]:
    """Rows of one partition of token rows -> its records that are wanted (an evaluator's lay on no topic)."""
    if place[1] == EVALUATOR_PARTITION:
        return
    schema = _schema_of(kind)
    held: dict[int, list[dict[str, Any]]] = {}
    for offset, row in zip(table.column("offset").to_pylist(), arrow.to_rows(table.select(schema.names)), strict=True):
        held.setdefault(offset, []).append(row)
    for offset, rows in held.items():
        at = max(row["finished_at" if kind == "completions" else "scored_at"] for row in rows)
        if wanted(place, offset, at):
            first = rows[0]
            headers = arrow_headers(first["group"], first["index"], first["attempt"])
            key, value = version_key(first["version"]), arrow.to_bytes(rows, schema)
            yield Said(kind, *place, offset, at, key, value, headers)


def _words(kind: str, place: tuple[str, int], table: pa.Table, wanted: Callable[..., bool]) -> Iterator[Said]:
    """The same of any other topic."""
    columns = [table.column(name).to_pylist() for name in ("offset", "key", "id", "value")]
    times = table.column("timestamp").cast(pa.int64()).to_pylist()
    for offset, key, identity, text, at in zip(*columns, times, strict=True):
        value = text.encode()
        if wanted(place, offset, at, value):
            key_bytes = None if key is None else key.encode()
            headers = headers_of_topic(kind, identity)
            yield Said(kind, *place, offset, at, key_bytes, value, headers, _named(kind, value))


def _schema_of(kind: str) -> pa.Schema:
    return arrow.COMPLETION if kind == "completions" else arrow.TRAJECTORY


def _named(kind: str, value: bytes) -> tuple[Row, ...]:
    """The rows that a word names, in its order. Nothing of what its reader will bury."""
    try:
        match kind:
            case "batches":
                members = BatchRecord.model_validate_json(value).members
                return tuple(("trajectories", one.partition, one.offset) for one in members)
            case "status" if isinstance(said := STATUS.validate_json(value), Scored):
                rows = "evaluations" if said.purpose == "eval" else "trajectories"
                return ((rows, said.partition, said.offset),)
    except ValidationError:
        pass
    return ()


def in_order(records: Iterable[Said]) -> list[Said]:
    """By time; each partition in its own order, and a word that names rows after them. BadInput if rows are missing."""
    by_place: dict[tuple[bool, str, int], list[Said]] = {}
    for one in records:  # rows first: the words that name them are looked at afterwards
        by_place.setdefault((not tap_columns.is_tokens(one.kind), one.topic, one.partition), []).append(one)
    rows_at: dict[Row, int] = {}
    timed: list[tuple[int, Said]] = []
    for place in sorted(by_place):
        at = 0
        for one in sorted(by_place[place], key=lambda one: one.offset):
            missing = [row for row in one.rows if row not in rows_at]
            if missing:
                kind, partition, offset = missing[0]
                raise BadInput(
                    f"record {one.offset} of {one.topic} names record {partition}/{offset} of {kind}, which is not "
                    "there: restore that file of the archive from a copy, or leave it out with --since or --step"
                )
            at = max([at, one.at, *(rows_at[row] for row in one.rows)])
            rows_at |= {(one.kind, one.partition, one.offset): at} if tap_columns.is_tokens(one.kind) else {}
            timed.append((at, one))
    timed.sort(key=lambda pair: pair[0])  # stable: of one moment, rows before words
    return [replace(one, at=at) for at, one in timed]


def rewritten(records: Sequence[Said], run: str, name: str) -> list[Said]:
    """As they are said again, at the offsets that they will have. BadInput where a prompt would get another number."""
    offsets: Counter[tuple[str, int]] = Counter()
    moved: dict[Row, int] = {}
    said = []
    for one in records:
        offset = offsets[one.topic, one.partition]
        offsets[one.topic, one.partition] += 1
        if one.kind == "prompts" and offset != one.offset:
            raise BadInput(
                f"prompts: row {one.offset} would be row {offset}, and requests would name another prompt: a row "
                "before it is not in the archive, or not readable; name the other topics by --topic"
            )
        if tap_columns.is_tokens(one.kind):
            moved[one.kind, one.partition, one.offset] = offset
            value = _renamed_rows(one, run, name)
        else:
            value = _renamed(one, run, name, moved)
        said.append(replace(one, offset=offset, value=value))
    return said


def _renamed_rows(one: Said, run: str, name: str) -> bytes:
    if run == name:
        return one.value
    rows = arrow.to_rows(arrow.to_table(one.value))
    changed = [row | {"run": name} if row["run"] == run else row for row in rows]
    return arrow.to_bytes(changed, _schema_of(one.kind))


def _renamed(one: Said, run: str, name: str, moved: Mapping[Row, int]) -> bytes:
    said = before = json.loads(one.value)
    if isinstance(before, dict) and before.get("run") == run:
        said = before | {"run": name}
    if one.kind == "batches" and one.rows:
        members = zip(before["members"], one.rows, strict=True)
        said = said | {"members": [member | {"offset": moved[row]} for member, row in members]}
    elif one.rows:
        said = said | {"offset": moved[one.rows[0]]}
    return one.value if said == before else json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()


# --- saying it ------------------------------------------------------------------------------


def _specs(topics: Topics, settings: Settings, records: Sequence[Said]) -> list[TopicSpec]:
    """All topics of a run, and those of requests that are said again."""
    specs, engines = topics.specs(), Counter[str]()
    for one in records:
        if one.kind == "requests":
            engines[one.topic] = max(engines[one.topic], one.partition + 1, settings.engines.count)
    return specs + [topics.requests_spec(int(topic.rpartition(".v")[2]), count) for topic, count in engines.items()]


def _send(producer: Producer, topics: Topics, records: Sequence[Said], speed: float | None, timeout_s: float) -> None:
    """BusUnavailable if they do not lie where they should (rule 3)."""
    began, pause = clock.monotonic_s(), threading.Event()
    flight: list[tuple[Said, Delivery]] = []
    size = 0
    for one in records:
        if speed is not None:
            wait_s = began + (one.at - records[0].at) / 1e6 / speed - clock.monotonic_s()
            if wait_s > 0:
                pause.wait(wait_s)
        topic = topics.prefix + one.topic
        delivery = producer.send(topic, one.value, one.headers, partition=one.partition, key=one.key)
        flight.append((one, delivery))
        size += len(one.value)
        if size >= FLIGHT_BYTES_MAX:
            _land(producer, topics, flight, timeout_s)
            flight, size = [], 0
    _land(producer, topics, flight, timeout_s)


def _land(producer: Producer, topics: Topics, flight: Sequence[tuple[Said, Delivery]], timeout_s: float) -> None:
    producer.flush(timeout_s)
    for one, delivery in flight:
        at = delivery.offset(timeout_s)
        if at != one.offset:
            raise BusUnavailable(
                f"{topics.prefix}{one.topic}: a record lies at {one.partition}/{at}, not at {one.offset}: somebody "
                "else writes there; say it again under another name"
            )


# --- what people and programs hear ----------------------------------------------------------


def as_dict(again: Again) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "run": again.run,
        "as": again.name,
        "broker": again.broker,
        "run_dir": str(again.run_dir),
        "records": dict(again.topics),
        "moved": again.moved,
        "unreadable": again.unreadable,
    }


def as_text(again: Again) -> str:
    """For people."""
    texts = [f"run {again.run} is said again as {again.name} at {again.broker}:"]
    texts += [f"  {kind:<13} {count:>9}" for kind, count in sorted(again.topics.items())]
    texts += [f"left out, not readable: {what}" for what in again.unreadable[:10]]
    texts.append(f"on it: dora worker KIND --run-dir {again.run_dir} --broker {again.broker}")
    return "\n".join(texts)
