"""`dora eval RUN`: the tables of the tap `evaluate`, of now or for as long as the run goes on.

Rule 1: the run cannot notice: rows are read as by `dora tap`. What is said goes to a topic that no process of it reads.
Rule 2: live, tables are kept in the run's folder with the positions they stand at (`workers/taps/tables.py`); `eval`
without `--follow` counts anew.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipelines import children, tap_source
from pipelines.alone import alone
from pipelines.config_file import read_resolved
from pipelines.tap_positions import Positions, Since
from pipelines.tap_source import OpenBus, Piece, Source
from schemas.settings import Settings
from schemas.tables import Table
from schemas.topics import Topics
from workers.runtime import clock
from workers.taps import tables as running
from workers.taps.tables import Tables
from workers.transport.records.bus import BusUnavailable, publish

LOCK = "evaluator.lock"
"""In the run's folder: of two evaluators of one run the second is refused."""
SAY_S = 10.0
"""Tables are said at most so often, and so seldom that counting takes a twentieth of the time."""
TURN_S = 1.0
"""A busy feed gives way to the others after this long."""


def tables_of(run_dir: Path, damage: list[str], open_bus: OpenBus = tap_source.kafka) -> list[Table]:
    """As they are now; `damage` hears of what could not be read. BusUnavailable."""
    settings = read_resolved(run_dir)
    tables = Tables(settings.name, settings.group_size)
    for feed in running.FEEDS:
        source = Source(run_dir, feed, Since(Positions(feed)), open_bus=open_bus)
        for piece in source.pieces():
            _take(tables, feed, piece)
        damage += source.damage
    damage += tables.unreadable
    return tables.now()


def _take(tables: Tables, feed: str, piece: Piece) -> None:
    if piece.place is not None:
        tables.take(feed, piece.rows, piece.place, piece.end)


@dataclass
class Follow:
    """Keeps the tables of a run until it ends: `run_dir/tables.sqlite`, the topic `tables`, `on_tables`."""

    run_dir: Path
    on_tables: Callable[[Sequence[Table]], None] = lambda _: None
    stopping: threading.Event = field(default_factory=threading.Event)
    open_bus: OpenBus = tap_source.kafka
    is_live: Callable[[Path], bool] = children.is_live
    damage: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._settings = read_resolved(self.run_dir)
        self.tables = Tables(self._settings.name, self._settings.group_size, self.run_dir / running.FILE)
        self._sources = {feed: self._source(feed) for feed in running.FEEDS}
        self._streams = {feed: source.pieces() for feed, source in self._sources.items()}
        self._due_at = clock.monotonic_s() + SAY_S

    def _source(self, feed: str) -> Source:
        since = Since(Positions(feed, self.tables.positions(feed)))
        return Source(
            self.run_dir, feed, since, follow=True, stopping=self.stopping, open_bus=self.open_bus, is_live=self.is_live
        )

    def run(self) -> None:
        """Until the run has ended, or it is told to stop."""
        while self.turn():
            pass
        self.close()

    def turn(self) -> bool:
        """A turn of every feed; False when there is nothing left to come."""
        for feed, stream in list(self._streams.items()):
            if not self._drain(feed, stream):
                del self._streams[feed]
        if self._streams and clock.monotonic_s() >= self._due_at:
            self._say()
        return bool(self._streams)

    def _drain(self, feed: str, stream: Iterator[Piece]) -> bool:
        """False at its end."""
        limit = clock.monotonic_s() + TURN_S
        for piece in stream:
            _take(self.tables, feed, piece)
            if piece.place is None or clock.monotonic_s() >= limit:
                return True
        return False

    def close(self) -> None:
        """A last word."""
        for source in self._sources.values():
            self.damage += source.damage
        self.damage += self.tables.unreadable
        self._say()
        self.tables.close()

    def _say(self) -> None:
        began = clock.monotonic_s()
        cells = self.tables.unsaid()
        self.on_tables(self.tables.now())
        self._due_at = clock.monotonic_s() + max(SAY_S, 20 * (clock.monotonic_s() - began))
        broker = (children.read_lock(self.run_dir) or {}).get("broker")
        if cells and broker is not None and self.is_live(self.run_dir):
            with suppress(BusUnavailable):  # later; and a run that has ended has its archive
                _publish(self._settings, broker, cells, self.open_bus)
                self.tables.note_said(cells)


def watch(
    run_dir: Path,
    every: int | None,
    on_tables: Callable[[Sequence[Table]], None],
    stopping: threading.Event,
    open_bus: OpenBus = tap_source.kafka,
) -> list[str]:
    """Tables, and held-out rows on every `every`-th version (0: none; None: 1 if the run has held-out rows), until the
    run has ended or `stopping`. What could not be had, in sentences. BadInput, BusUnavailable."""
    if every is None:
        every = int(any(dataset.purpose == "eval" for dataset in read_resolved(run_dir).dataset))
    refusal = f"another `dora eval --follow` works on {run_dir}: end it first"
    with alone(run_dir / LOCK, refusal), ThreadPoolExecutor(1) as threads:
        heldout = None
        if every:
            from pipelines.heldout import HeldOut

            heldout = HeldOut(run_dir, every, stopping, open_bus)
        tables = threads.submit(_tables, run_dir, on_tables, stopping, open_bus)
        if heldout is None:
            return tables.result()
        tables.add_done_callback(lambda done: stopping.set() if done.exception() else None)
        try:
            heldout.run()
        except BaseException:
            stopping.set()
            raise
        return [*tables.result(), *heldout.missing()]


def _tables(
    run_dir: Path, on_tables: Callable[[Sequence[Table]], None], stopping: threading.Event, open_bus: OpenBus
) -> list[str]:
    """In a thread of their own: an engine has the main one."""
    following = Follow(run_dir, on_tables, stopping, open_bus)
    following.run()
    return following.damage


def _publish(settings: Settings, broker: str, cells: Sequence[Table], open_bus: OpenBus) -> None:
    topics = Topics(settings.name)
    with open_bus(settings, broker) as bus:
        producer = bus.producer()
        try:
            for cell in cells:
                publish(producer, topics.tables, cell, key=running.key(cell).encode())
            producer.flush(tap_source.ANSWER_S_MAX)
        finally:
            producer.close()
