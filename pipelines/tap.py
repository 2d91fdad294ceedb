"""`dora tap`: read a stream of a run without touching it: no group, no commit, nothing the run could notice.

    from pipelines.tap import tap

    for batch in tap("quickstart-000", "trajectories", follow=True, where="reward > 0.5"):
        ...  # pyarrow.RecordBatch with the archive's columns

A live run is read from its archive and its broker, one that has ended from its archive; the rows are the same.
"""

import difflib
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from pipelines import children, tap_columns, tap_positions, tap_source
from pipelines.archived import complain
from pipelines.config_file import read_resolved
from pipelines.runs import find_run
from pipelines.tap_positions import BEGINNING, Place, Positions
from pipelines.tap_source import OpenBus, Source
from pipelines.tokens import PromptTokenizer
from schemas.topics import KINDS
from workers.runtime.errors import BadInput
from workers.transport.records.bus import BusUnavailable

ROWS_PER_BATCH_MAX = 4096
_TEXTS = {"prompt_ids": "prompt_text", "response_ids": "response_text"}


@dataclass(frozen=True, slots=True)
class Ask:
    """What of a topic is asked for. `since`: a text that people write, or positions."""

    topic: str = "trajectories"
    follow: bool = False
    since: str | Positions = BEGINNING
    where: str = ""
    decode: bool = False
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """Rows that were asked for; `after[i]` is the position of `place` once row i was used, `end` after all of it. A
    part without a place says that there is nothing more for now."""

    batch: pa.RecordBatch
    place: Place | None
    after: tuple[tuple[int, int], ...]
    end: tuple[int, int]


def tap(
    run: str | Path,
    topic: str = "trajectories",
    *,
    follow: bool = False,
    since: str = BEGINNING,
    where: str = "",
    decode: bool = False,
    limit: int | None = None,
    runs_dir: str | Path = "runs",
) -> Iterator[pa.RecordBatch]:
    """Batches of a topic of a run (a folder, or a name under `runs_dir`). BadInput (of a damaged archive after all that
    can be read), BusUnavailable.

    `follow` goes on until the run ends; `since` is a duration (10m), a time, a position, `beginning` or `now`; `where`
    an SQL condition on the columns; `decode` adds `prompt_text` and `response_text`."""
    stream = Stream(find_run(str(run), Path(runs_dir)), Ask(topic, follow, since, where, decode, limit))
    for part in stream.parts():
        if part.batch.num_rows:
            yield part.batch
    complain(stream.source.damage)


class Stream:
    """Rows of one topic as asked for. `schema` is that of every batch; `source.positions` is what was read so far."""

    def __init__(
        self, run_dir: Path, ask: Ask, stopping: threading.Event | None = None, open_bus: OpenBus = tap_source.kafka
    ) -> None:
        self.kind = known_topic(ask.topic)
        since = ask.since
        start = tap_positions.since(self.kind, since) if isinstance(since, str) else tap_positions.Since(since)
        self.source = Source(run_dir, self.kind, start, follow=ask.follow, stopping=stopping, open_bus=open_bus)
        self._limit = ask.limit
        self._texts = _Texts(run_dir, self.kind) if ask.decode else None
        self.schema = self._decoded(tap_columns.schema_of(self.kind).empty_table()).schema
        self._where = None
        if ask.where:
            from pipelines.tap_sql import Where

            self._where = Where(self.kind, ask.where, self.schema)

    def parts(self) -> Iterator[Shown]:
        """BusUnavailable (without `follow`); BadInput where `where` cannot be asked of a row."""
        left = self._limit
        if left == 0:
            return
        for piece in self.source.pieces():
            rows, after, end = self._decoded(piece.rows), piece.after, piece.end
            if self._where is not None and rows.num_rows:
                places = self._where.places(rows)
                rows, after = rows.take(pa.array(places, pa.int64())), tuple(after[place] for place in places)
            if left is not None and rows.num_rows >= left:
                rows, after = rows.slice(0, left), after[:left]
                end = after[-1]
            if left is not None:
                left -= rows.num_rows
            yield from _batches(rows, piece.place, after, end)
            if left == 0:
                return

    def _decoded(self, rows: pa.Table) -> pa.Table:
        return rows if self._texts is None else self._texts.added(rows)


def _batches(
    rows: pa.Table, place: Place | None, after: tuple[tuple[int, int], ...], end: tuple[int, int]
) -> Iterator[Shown]:
    batches = rows.combine_chunks().to_batches(ROWS_PER_BATCH_MAX)
    if not batches:
        yield Shown(_empty(rows.schema), place, (), end)
    start = 0
    for number, batch in enumerate(batches):
        part = after[start : start + batch.num_rows]
        start += batch.num_rows
        yield Shown(batch, place, part, end if number + 1 == len(batches) else part[-1])


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


class _Texts:
    """Adds what token ids say, by the run's own tokenizer. BadInput if the topic has no ids."""

    def __init__(self, run_dir: Path, kind: str) -> None:
        names = tap_columns.schema_of(kind).names
        self._columns = {ids: text for ids, text in _TEXTS.items() if ids in names}
        if not self._columns:
            raise BadInput(f"--decode: rows of {kind} hold no token ids; trajectories and completions do")
        self._tokenizer = PromptTokenizer(Path(read_resolved(run_dir).model))

    def added(self, rows: pa.Table) -> pa.Table:
        for ids, text in self._columns.items():
            said = [None if value is None else self._tokenizer.text(value) for value in rows.column(ids).to_pylist()]
            rows = rows.append_column(text, pa.array(said, pa.string()))
        return rows


def known_topic(topic: str) -> str:
    """The kind of topic. BadInput names the nearest."""
    if topic in KINDS:
        return topic
    near = difflib.get_close_matches(topic, KINDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise BadInput(f"topic {topic!r} is not known: {hint}There are {', '.join(KINDS)}")


def table_of(run_dir: Path, topic: str, ask: Ask, damage: list[str]) -> pa.Table:
    """All rows of now; `damage` hears of what could not be read."""
    stream = Stream(run_dir, Ask(topic, False, ask.since, ask.where, ask.decode, ask.limit))
    table = pa.Table.from_batches([part.batch for part in stream.parts()], schema=stream.schema)
    damage += stream.source.damage
    return table


def topics_of(run_dir: Path, damage: list[str], open_bus: OpenBus = tap_source.kafka) -> list[Mapping[str, object]]:
    """Every kind of topic with the rows that it has now and what it is; `damage` hears of what could not be read. One
    connection for all. BusUnavailable."""
    broker = (children.read_lock(run_dir) or {}).get("broker") if children.is_live(run_dir) else None
    if broker is None:
        return [_topic(run_dir, kind, open_bus, damage) for kind in KINDS]
    with open_bus(read_resolved(run_dir), broker) as bus:
        return [_topic(run_dir, kind, lambda *_: nullcontext(bus), damage) for kind in KINDS]


def _topic(run_dir: Path, kind: str, open_bus: OpenBus, damage: list[str]) -> Mapping[str, object]:
    source = Source(run_dir, kind, tap_positions.since(kind, BEGINNING), open_bus=open_bus)
    try:
        rows = source.count()
    except BusUnavailable:
        if children.is_live(run_dir):
            raise
        source = Source(run_dir, kind, tap_positions.since(kind, BEGINNING))
        rows = source.count()  # it ended meanwhile
    damage += source.damage
    return {"topic": kind, "rows": rows, "what": tap_columns.WHAT[kind]}
