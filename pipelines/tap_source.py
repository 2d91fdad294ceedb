"""Rows of one kind of topic of a run: first what is archived, then what its broker has, then on with the run.

Rule 1: the run cannot notice: no group, no commit, no topic is made.
Rule 2: one place (`_take`) lets each row through once: what is before the position is dropped, whoever brings it.
Rule 3: a broker that is away is waited for while the run is live; when the run has ended its archive has the rest.
Rule 4: what the orchestrator deletes (requests of a retired version) was archived before, and is read there.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipelines import children, tap_columns
from pipelines.config_file import read_resolved
from pipelines.tap_positions import Place, Since
from schemas.settings import Settings
from schemas.topics import Topics
from workers.runtime import clock
from workers.taps import archive
from workers.transport.records.bus import Bus, BusUnavailable, Reader, Record

POLL_MS_MAX = 500
DISCOVER_PERIOD_S = 2.0
GATHER_MS = 500
ANSWER_S_MAX = 5.0
"""A broker that does not answer for this long is away."""
AWAY_PAUSE_S = 0.5
ROWS_PER_PIECE_MAX = 4096
OpenBus = Callable[[Settings, str], AbstractContextManager[Bus]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one partition. `after[i]`: the position of `place` once row i is shown, `end` once all are. A piece
    without a place says that there is nothing more for now."""

    rows: pa.Table
    place: Place | None = None
    after: tuple[tuple[int, int], ...] = ()
    end: tuple[int, int] = (0, 0)


def kafka(settings: Settings, address: str) -> AbstractContextManager[Bus]:
    """The run's broker, asked without patience."""
    from workers.transport.records.kafka_bus import KafkaBus

    return closing(KafkaBus(address, settings.kafka, settings.broker.replication, ANSWER_S_MAX))


class Source:
    """`pieces()` is what there is; `positions` where it stands; `unreadable` what it had to leave out."""

    def __init__(
        self,
        run_dir: Path,
        kind: str,
        since: Since,
        *,
        follow: bool = False,
        stopping: threading.Event | None = None,
        open_bus: OpenBus = kafka,
        is_live: Callable[[Path], bool] = children.is_live,
    ) -> None:
        self._run_dir, self._kind, self._since, self._follow = run_dir, kind, since, follow
        self._stopping = stopping or threading.Event()
        self._open_bus, self._is_live = open_bus, is_live
        self._settings = read_resolved(run_dir)
        self._topics = Topics(self._settings.name)
        self.positions = since.positions.copy()
        self.unreadable: list[str] = []
        self.damage: list[str] = []
        """What of the archive could not be read."""
        self._settled = False
        """What the broker had at the start has been seen: topics that come later are read from their beginning."""

    def pieces(self) -> Iterator[Piece]:
        """BusUnavailable (without `follow`)."""
        if self._since.now:
            self._count_archived()
        else:
            yield from self._archived()
        while not self._stopping.is_set():
            if not self._is_live(self._run_dir):
                yield from self._archived()
                return
            try:
                yield from self._live()
            except BusUnavailable:
                if self._is_live(self._run_dir) and not self._follow:
                    raise
            if not self._follow:
                return
            yield self._nothing()
            self._stopping.wait(AWAY_PAUSE_S)

    def count(self) -> int:
        """Rows that there are."""
        total = self._count_archived()
        if self._is_live(self._run_dir):
            total += sum(piece.rows.num_rows for piece in self._live())
        return total

    def _nothing(self) -> Piece:
        return Piece(tap_columns.schema_of(self._kind).empty_table())

    # --- the archive ------------------------------------------------------------------------

    def _archived(self, topic: str = "") -> Iterator[Piece]:
        for name, partition, table in archive.files(self._run_dir, topic or self._kind, damage=self.damage):
            start = 0
            while start < table.num_rows and not self._stopping.is_set():
                end = _whole(table, start)
                yield from self._shown((name, partition), table.slice(start, end - start))
                start = end

    def _count_archived(self) -> int:
        """Step over what is archived; how many rows that is."""
        files = archive.files(self._run_dir, self._kind, ("partition", "offset"), self.damage)
        pieces = [self._take((name, partition), table) for name, partition, table in files]
        return sum(piece.rows.num_rows for piece in pieces if piece is not None)

    # --- the broker -------------------------------------------------------------------------

    def _live(self) -> Iterator[Piece]:
        """Up to the end of now; with `follow` until the run is not live. BusUnavailable."""
        broker = (children.read_lock(self._run_dir) or {}).get("broker")
        if broker is None:
            return  # it has not started yet
        with self._open_bus(self._settings, broker) as bus:
            reader = bus.reader(gather_ms=GATHER_MS if self._follow else 0)
            try:
                yield from self._read(bus, reader)
            finally:
                reader.close()

    def _read(self, bus: Bus, reader: Reader) -> Iterator[Piece]:
        reading: set[Place] = set()
        ends: dict[Place, int] = {}
        looked_at = float("-inf")
        while not self._stopping.is_set():
            if clock.monotonic_s() - looked_at >= DISCOVER_PERIOD_S:
                for name in self._discover(bus, reader, reading):
                    yield from self._archived(name)
                ends = ends or self._ends(bus, reading)
                ends = {place: end for place, end in ends.items() if place in reading}
                looked_at = clock.monotonic_s()
                if self._follow and not self._is_live(self._run_dir):
                    return
            records = reader.poll(POLL_MS_MAX)
            for place, group in groupby(records, lambda record: (record.topic, record.partition)):
                yield from self._of_records((place[0].removeprefix(self._topics.prefix), place[1]), list(group))
            if not self._follow and (self._reached(reader, ends) or (not records and reader.at_end())):
                return
            if not records:
                yield self._nothing()

    def _discover(self, bus: Bus, reader: Reader, reading: set[Place]) -> list[str]:
        """Read what is new, leave what is deleted; the topics of the latter, to be read from the archive."""
        found = bus.topics(self._topics.prefix + self._kind)
        names = {
            topic.removeprefix(self._topics.prefix): count
            for topic, count in found.items()
            if self._topics.kind(topic) == self._kind
        }
        there = {(name, partition) for name, count in names.items() for partition in range(count)}
        gone = reading - there
        for name, partition in gone:
            reader.remove(self._topics.prefix + name, partition)
        reading -= gone
        for place in sorted(there - reading):
            if self._add(bus, reader, place):
                reading.add(place)
            else:
                gone.add(place)
        self._settled = True
        return sorted({name for name, _ in gone})

    def _add(self, bus: Bus, reader: Reader, place: Place) -> bool:
        """False if the topic was deleted since it was listed. BusUnavailable."""
        topic = self._topics.prefix + place[0]
        try:
            if self._since.now and not self._settled:
                self.positions.of[place] = bus.end_offsets(topic).get(place[1], 0), 0
            at = self.positions.of.get(place)
            reader.add(topic, place[1], "earliest" if at is None else at[0])
        except BusUnavailable:
            if topic in bus.topics(topic):
                raise
            return False
        return True

    def _ends(self, bus: Bus, reading: set[Place]) -> dict[Place, int]:
        """How far a tap that does not follow reads: a busy topic never ends."""
        if self._follow:
            return {}
        found: dict[str, dict[int, int]] = {}
        for name in {name for name, _ in reading}:
            try:
                found[name] = bus.end_offsets(self._topics.prefix + name)
            except BusUnavailable:
                if self._topics.prefix + name in bus.topics(self._topics.prefix + name):
                    raise  # else it was deleted meanwhile, and the next look finds that
        return {place: found[place[0]].get(place[1], 0) for place in reading if place[0] in found}

    def _reached(self, reader: Reader, ends: dict[Place, int]) -> bool:
        return all(
            reader.position(self._topics.prefix + name, partition) >= end for (name, partition), end in ends.items()
        )

    def _of_records(self, place: Place, records: Sequence[Record]) -> Iterator[Piece]:
        tables = []
        for record in records:
            try:
                tables.append(tap_columns.of_record(self._kind, record))
            except (ValueError, RecursionError) as error:
                self.unreadable.append(f"{place[0]} {place[1]}:{record.offset}: {error}")
        if tables:
            yield from self._shown(place, pa.concat_tables(tables))

    # --- both -------------------------------------------------------------------------------

    def _shown(self, place: Place, table: pa.Table) -> Iterator[Piece]:
        piece = self._take(place, table)
        if piece is None:
            return
        rows, after = tap_columns.typed(self._kind, piece.rows), piece.after
        if self._since.time_us is not None:
            keep = self._young(rows, self._since.time_us)
            rows, after = (
                rows.filter(keep),
                tuple(at for at, young in zip(after, keep.to_pylist(), strict=True) if young),
            )
        yield Piece(rows, place, after, piece.end)

    def _take(self, place: Place, table: pa.Table) -> Piece | None:
        """Rule 2. Rows of whole records, in order; None if all were shown before."""
        at = self.positions.of.get(place, (0, 0))
        keep, after = [], []
        offsets = table.column("offset").to_pylist()
        row = 0
        for number, offset in enumerate(offsets):
            row = row + 1 if number and offsets[number - 1] == offset else 0
            if (offset, row) < at:
                continue
            last = number + 1 == len(offsets) or offsets[number + 1] != offset
            keep.append(number)
            after.append((offset + 1, 0) if last else (offset, row + 1))
        if not keep:
            return None
        self.positions.of[place] = after[-1]
        kept = table if len(keep) == table.num_rows else table.take(pa.array(keep, pa.int64()))
        return Piece(kept, place, tuple(after), after[-1])

    def _young(self, rows: pa.Table, time_us: int) -> pa.ChunkedArray:
        """Which rows are from that time on: of token rows when they were scored (completions: finished)."""
        name = "timestamp" if not tap_columns.is_tokens(self._kind) else "scored_at"
        name = "finished_at" if self._kind == "completions" else name
        times = rows.column(name)
        return pc.fill_null(pc.greater_equal(times, pa.scalar(time_us, times.type)), False)


def _whole(table: pa.Table, start: int) -> int:
    """Where a slice from `start` ends that parts no record."""
    end: int = min(table.num_rows, start + ROWS_PER_PIECE_MAX)
    offsets = table.column("offset")
    while end < table.num_rows and offsets[end].as_py() == offsets[end - 1].as_py():
        end += 1
    return end
