"""The archive: every record of the run as Arrow files, so that whoever audits a run needs only pyarrow.

    archive/<topic without prefix>/<partition>.<first offset, 20 digits>.arrow      what it says
    archive/unreadable/<topic without prefix>.<partition>.<offset>.arrow            raw, with the reason

Token rows: the columns of `schemas/arrow.py` plus `partition`, `offset` (the rows of one record in their order).
All else: `partition, offset, timestamp, key, id, value`, where `value` is the JSON text.

Rule 1: a file is written whole, synced, and renamed into place; offsets are committed after that. After a crash the
same records are read again and the file of the same name is replaced.
Rule 2: nothing is lost: what cannot be parsed is kept raw. Nothing stops the archive but a full disk or the broker.
Rule 3: a topic that the orchestrator deletes was read to its end before: it is simply not read any more.
Rule 4: a file says by which schema it was written (`trajectory/1` in its metadata); that of a later one is refused.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas import arrow
from schemas.codec import schema_of_topic
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.runtime.files import sync
from workers.runtime.process import Process
from workers.transport.records.bus import Bus, BusUnavailable, Record

DISCOVER_PERIOD_S = 0.5
POLL_MS_MAX = 250
UNREADABLE = "unreadable"
ROWS_PER_BATCH_MAX = 1024
"""Of a file. What is damaged in it costs no more than the batch that it is in."""
END_LIMIT_S = 60.0
TOKEN_KINDS = ("completions", "trajectories", "evaluations")
_WHERE = [pa.field("partition", pa.int32(), nullable=False), pa.field("offset", pa.int64(), nullable=False)]
_TOKEN_SCHEMAS = {
    kind: pa.schema([*(arrow.COMPLETION if kind == "completions" else arrow.TRAJECTORY), *_WHERE])
    for kind in TOKEN_KINDS
}
_RECORD = [
    *_WHERE,
    pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
    pa.field("key", pa.string()),
    pa.field("id", pa.string()),
]
TEXT_SCHEMA = pa.schema([*_RECORD, pa.field("value", pa.string(), nullable=False)])
RAW_SCHEMA = pa.schema([*_RECORD, pa.field("value", pa.binary(), nullable=False), pa.field("reason", pa.string())])
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


def serve(process: Process, bus: Bus) -> int:
    """Archive until `process.stopping`, then read every topic to its end. BusUnavailable, OSError (disk full)."""
    archive = Archive(process, bus)
    try:
        while not process.stopping.is_set():
            archive.turn()
        archive.finish()
    finally:
        archive.close()
    return 0


@dataclass(frozen=True, slots=True)
class Roll:
    """When files are written. The orchestrator deletes a version's requests topic only after that."""

    period_s: float = 10.0
    bytes_max: int = 64 << 20
    records_max: int = 50_000


@dataclass
class _Waiting:
    """Records of all partitions that are not in a file yet."""

    records: dict[tuple[str, int], list[Record]] = field(default_factory=dict)
    count: int = 0
    size: int = 0

    def add(self, record: Record) -> None:
        self.records.setdefault((record.topic, record.partition), []).append(record)
        self.count += 1
        self.size += len(record.value)


class Archive:
    """The archive of one run."""

    def __init__(self, process: Process, bus: Bus, roll: Roll = Roll()) -> None:
        self._process = process
        self._limits = roll
        self._bus = bus
        self._folder = process.run_dir / "archive"
        self._reader = bus.reader(process.topics.group("archive"), POLL_MS_MAX)
        self._reading: set[tuple[str, int]] = set()
        self._waiting = _Waiting()
        self._discovered_at = float("-inf")
        self._rolled_at = clock.monotonic_s()

    def turn(self) -> None:
        """Find topics, read, write files when it is time."""
        now = clock.monotonic_s()
        if now - self._discovered_at >= DISCOVER_PERIOD_S:
            self._discover()
            self._discovered_at = now
        for record in self._reader.poll(POLL_MS_MAX):
            self._waiting.add(record)
        full = self._waiting.size >= self._limits.bytes_max or self._waiting.count >= self._limits.records_max
        if full or clock.monotonic_s() - self._rolled_at >= self._limits.period_s:
            self._roll()

    def finish(self) -> None:
        """Read every topic to its end (the others of the run have stopped) and write what there is."""
        self._discover()
        end = clock.monotonic_s() + END_LIMIT_S
        while clock.monotonic_s() < end:
            records = self._reader.poll(POLL_MS_MAX)
            for record in records:
                self._waiting.add(record)
            if not records and self._reader.at_end():
                break
        else:
            self._process.log.warning("not_at_end", after_s=END_LIMIT_S)
        self._roll()

    def close(self) -> None:
        self._reader.close()

    def _discover(self) -> None:
        there = {
            (topic, partition)
            for topic, partitions in self._bus.topics(self._process.topics.prefix).items()
            for partition in range(partitions)
        }
        for topic, partition in sorted(self._reading - there):
            self._reader.remove(topic, partition)
        for topic, partition in sorted(there - self._reading):
            try:
                self._reader.add(topic, partition, "committed")
            except BusUnavailable:
                if topic in self._bus.topics(topic):
                    raise
                there.remove((topic, partition))  # deleted since it was listed: it was archived to its end before
        self._reading = there

    def _roll(self) -> None:
        """All waiting records into files, then the commit that they stand for."""
        self._rolled_at = clock.monotonic_s()
        if not self._waiting.count:
            return
        for (topic, partition), records in sorted(self._waiting.records.items()):
            self._write(topic, partition, records)
        self._waiting = _Waiting()
        self._reader.commit()

    def _write(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        name = topic.removeprefix(self._process.topics.prefix)
        kind = self._process.topics.kind(topic)
        tables, first = [], None
        for record in records:
            try:
                tables.append(_token_table(kind, record) if kind in TOKEN_KINDS else _text(record))
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError, JSONDecodeError, ArrowInvalid; nesting
                self._process.log.warning("unreadable", topic=name, partition=partition, offset=record.offset)
                raw = {**_header(record), "value": record.value, "reason": f"{type(error).__name__}: {error}"}
                file = self._folder / UNREADABLE / f"{name}.{partition}.{record.offset:020d}.arrow"
                write_file(file, pa.Table.from_pylist([raw], schema=RAW_SCHEMA))
                continue
            first = record.offset if first is None else first
        if first is not None:
            table = pa.concat_tables(tables) if kind in TOKEN_KINDS else pa.Table.from_pylist(tables, TEXT_SCHEMA)
            said = {"schema": "/".join(map(str, schema_of_topic(kind)))}
            file = self._folder / name / f"{partition}.{first:020d}.arrow"
            write_file(file, table.combine_chunks().replace_schema_metadata(said))


def _token_table(kind: str, record: Record) -> pa.Table:
    """A record of token rows as rows of its archive file. ValueError."""
    rows, schema = arrow.to_table(record.value), _TOKEN_SCHEMAS[kind]
    columns = rows.columns
    for one, value in zip(_WHERE, (record.partition, record.offset), strict=True):
        columns.append(pa.chunked_array([pa.array([value] * rows.num_rows, one.type)]))
    for one, column in zip(schema, columns, strict=True):
        if column.null_count and not one.nullable:
            raise ValueError(f"{one.name} is null")
    return pa.Table.from_arrays(columns, schema=schema)


def _text(record: Record) -> dict[str, Any]:
    """Any other record as a row of its archive file. ValueError; RecursionError if it is nested too deeply."""
    text = record.value.decode()
    json.loads(text)
    return {**_header(record), "value": text}


def _header(record: Record) -> dict[str, Any]:
    return {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_us,
        "key": None if record.key is None else record.key.decode(errors="replace"),
        "id": record.headers.get("id"),
    }


_DAMAGE = (pa.lib.ArrowException, OSError, UnicodeDecodeError)
"""What Arrow raises for a file that was written whole and has changed since: names and texts no longer UTF-8, too."""


def schema_of(kind: str) -> pa.Schema:
    """Columns of the archive's files of a kind."""
    return _TOKEN_SCHEMAS.get(kind, TEXT_SCHEMA)


def rows_of(kind: str, record: Record) -> pa.Table:
    """A record as rows of its archive file. ValueError; RecursionError if its JSON is nested too deeply."""
    if kind in TOKEN_KINDS:
        return _token_table(kind, record)
    return pa.Table.from_pylist([_text(record)], TEXT_SCHEMA)


def write_file(file: Path, table: pa.Table) -> None:
    """Write, sync, rename into place, sync the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.tmp")
    with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=_OPTIONS) as writer:
        writer.write_table(table, ROWS_PER_BATCH_MAX)
    sync(unfinished)
    unfinished.replace(file)
    sync(file.parent)


def read(run_dir: Path, kind: str, damage: list[str] | None = None) -> pa.Table:
    """All archived records of a kind (`trajectories`, `journal`, `requests` of all versions, ...), in the order of
    topic, partition, offset; what was archived twice comes once. Empty if there is nothing. BadInput, as `files`."""
    found = (table for _, _, table in files(run_dir, kind, damage=damage))
    return pa.concat_tables([schema_of(kind).empty_table(), *found])


def files(
    run_dir: Path, kind: str, columns: Sequence[str] = (), damage: list[str] | None = None
) -> Iterator[tuple[str, int, pa.Table]]:
    """(topic without prefix, partition, rows) of each archived file of a kind, as `read` orders them; with `columns`
    only these (`offset` among them). BadInput if a file is damaged, or of a later schema; with `damage` what is damaged
    is said there, a sentence each, and the rest is read."""
    for folder in _folders(run_dir / "archive", kind):
        for partition, table, keep in _without_doubles(folder, columns, damage):
            yield folder.name, partition, table.filter(pa.array(keep, pa.bool_()))


def check(run_dir: Path, kind: str) -> None:
    """BadInput names a file of this kind that is damaged in a way that can be told from the file alone."""
    for folder in _folders(run_dir / "archive", kind):
        for file in sorted(folder.glob("*.arrow")):
            table = _read_file(file, (), None)
            try:
                table.validate(full=True)
            except _DAMAGE as error:
                raise _damaged(file, error) from error


def _folders(archive: Path, kind: str) -> list[Path]:
    """Of a kind, or of one topic (`requests.v000012`)."""
    return sorted(folder for folder in archive.glob(f"{kind}*") if kind in (folder.name, _kind(folder)))


def _kind(folder: Path) -> str:
    return folder.name.split(".", maxsplit=1)[0]


def _without_doubles(
    folder: Path, columns: Sequence[str], damage: list[str] | None
) -> Iterator[tuple[int, pa.Table, list[bool]]]:
    """Partition and rows of each file, with a mask of the rows whose offset no earlier file had."""
    ends: dict[int, int] = {}
    for file in sorted(folder.glob("*.arrow"), key=_place):
        table = _read_file(file, columns, damage)
        partition, _ = _place(file)
        offsets = table.column("offset").to_pylist()
        end = ends.get(partition, 0)
        yield partition, table, [offset >= end for offset in offsets]
        ends[partition] = max([end, *(offset + 1 for offset in offsets)])


def _place(file: Path) -> tuple[int, int]:
    """Partition and first offset, by its name. BadInput."""
    try:
        partition, offset, _ = file.name.split(".")
        return int(partition), int(offset)
    except ValueError:
        raise BadInput(f"{file} is no file of an archive (PARTITION.OFFSET.arrow): take it out of there") from None


def _read_file(file: Path, columns: Sequence[str], damage: list[str] | None) -> pa.Table:
    """Its columns, or only these, in their order. BadInput, as `files`."""
    names = list(columns or schema_of(_kind(file.parent)).names)
    try:
        with pa.memory_map(str(file)) as source:
            with pa.ipc.open_file(source) as reader:
                places = _places(file, reader.schema, names)
            with pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=places)) as reader:
                table = reader.read_all().select(names)
        if damage is not None:
            table.validate(full=True)
        return table.replace_schema_metadata()
    except _DAMAGE as error:
        if damage is None:
            raise _damaged(file, error) from error
        return _rest_of(file, names, error, damage)


def _places(file: Path, schema: pa.Schema, names: Sequence[str]) -> list[int]:
    """Where the columns lie. BadInput if they are not there as we know them."""
    kind = _kind(file.parent)
    name, number = schema_of_topic(kind)
    said = (schema.metadata or {}).get(b"schema", f"{name}/{number}".encode()).decode(errors="replace")
    if said not in (f"{name}/{number}", f"{name}/{number - 1}"):
        raise BadInput(
            f"{file}: it is of schema {said}, this dora reads {name}/{number} and {name}/{number - 1}: "
            "read it with the dora that wrote it, or a later one"
        )
    ours = schema_of(kind)
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise _damaged(file, f"no column {', '.join(missing)}")
    other = [name for name in names if schema.field(name).type != ours.field(name).type]
    if other:
        raise _damaged(file, f"the type of column {', '.join(other)} is not the archive's")
    return [schema.get_field_index(name) for name in names]


def _rest_of(file: Path, names: Sequence[str], why: object, damage: list[str]) -> pa.Table:
    """The batches of a damaged file that can be read; `damage` hears from which record on some cannot."""
    kind = _kind(file.parent)
    ours = pa.schema([schema_of(kind).field(name) for name in names])
    good: list[pa.Table] = []
    partition, after = _place(file)
    lost_from: int | None = None
    for batch in _batches_of(file):
        try:
            if batch is None:
                raise pa.ArrowInvalid("cut")
            _places(file, batch.schema, names)
            batch.validate(full=True)
            table = pa.Table.from_batches([batch]).select(names).cast(ours)
            after = table.column("offset")[-1].as_py() + 1
            good.append(table)
        except _DAMAGE:
            lost_from = after if lost_from is None else lost_from
    at = f"{partition}:{after if lost_from is None else lost_from}"
    damage.append(
        f"{file} is damaged from record {at} on ({why}): {sum(map(len, good))} of its rows were read; "
        "restore this file of the archive from a copy"
    )
    return pa.concat_tables([ours.empty_table(), *good])


def _batches_of(file: Path) -> Iterator[pa.RecordBatch | None]:
    """Each batch, None for one that cannot be read; of a file without its end those that come before."""
    raw = pa.py_buffer(file.read_bytes()) if file.is_file() else pa.py_buffer(b"")
    try:
        reader = pa.ipc.open_file(raw)
    except _DAMAGE:
        yield from _batches_in_order(raw)
        return
    for number in range(reader.num_record_batches):
        try:
            yield reader.get_batch(number)
        except _DAMAGE:
            yield None


def _batches_in_order(raw: pa.Buffer) -> Iterator[pa.RecordBatch | None]:
    """A file is a stream behind eight bytes."""
    try:
        with pa.ipc.open_stream(raw.slice(min(8, raw.size))) as reader:
            for batch in reader:
                if batch.num_rows:
                    yield batch
    except _DAMAGE:
        pass
    yield None


def _damaged(file: Path, why: object) -> BadInput:
    return BadInput(f"{file} is damaged ({why}): restore this file of the archive from a copy")
