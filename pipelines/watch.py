"""The supervisor's ear and mouth on the log: one thread that follows a run and keeps a `Snapshot`.

Rule 1: all calls to the log are here, in this thread; the supervisor never waits for the log.
Rule 2: a log that does not answer is tried again until the run ends or `broker.timeout_s` is over (then `failed`).
"""

import json
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipelines.snapshot import Snapshot
from pipelines.tally import Tally
from schemas.codec import BadRecord, decode_of_topic
from schemas.messages import EngineGone, Message, MetricPoint
from schemas.settings import Settings
from schemas.topics import Topics
from workers.runtime import clock
from workers.runtime.log import Log
from workers.transport.records.bus import Bus, BusUnavailable, Producer, Reader, Record, publish

POLL_MS = 300
SAY_TIMEOUT_S = 5.0
SHOW_PERIOD_S = 0.5
_FOLLOWED = ("control", "journal", "metrics", "dead-letters")


@dataclass(frozen=True, slots=True)
class Ended:
    """The orchestrator's last word."""

    outcome: str
    reason: str


class Watcher(threading.Thread):
    """Follows `control`, `journal`, `metrics`, `dead-letters`; says `EngineGone` and restarts. Writes metrics.jsonl."""

    def __init__(self, bus: Bus, settings: Settings, run_dir: Path) -> None:
        super().__init__(name="watcher", daemon=True)
        self._bus, self._settings, self._topics = bus, settings, Topics(settings.name)
        self._run_dir = run_dir
        self._log = Log("watcher")
        self._says: queue.Queue[tuple[str, Message, threading.Event]] = queue.Queue()
        self._leave = threading.Event()
        self._tally = Tally()
        self.snapshot = Snapshot(settings.name)
        self.ended: Ended | None = None
        self.lost: dict[int, int] = {}
        self.failed: str | None = None
        self._heard_at = self._shown_at = clock.monotonic_s()
        control = self._topics.control
        self._control_from = bus.end_offsets(control)[0] if control in bus.topics(control) else 0
        """An end that was said before a resume is not the end of what was resumed."""
        self.resumes = self._control_from > 0

    def run(self) -> None:
        """Until `close`; whatever else ends this thread fails the run."""
        try:
            self._follow()
        except BaseException as error:
            self.failed = f"the supervisor cannot follow the log: {type(error).__name__}: {error}"
            raise

    def _follow(self) -> None:
        with (self._run_dir / "metrics.jsonl").open("w") as metrics:
            reader = self._bus.reader(gather_ms=POLL_MS)
            for kind in _FOLLOWED:
                reader.add(self._topics.of(kind), 0, self._control_from if kind == "control" else "earliest")
            producer = self._bus.producer()
            while not self._leave.is_set() or not self._says.empty():
                self._turn(reader, producer, metrics)
            reader.close()
            producer.close()

    def engine_gone(self, engine: int, reason: str, wait_s: float) -> None:
        """Tell the orchestrator; return when it is on the log, at the latest after `wait_s`."""
        self._say(self._topics.status, EngineGone(engine=engine, incarnation=clock.now_us(), reason=reason)).wait(
            wait_s
        )

    def run_was_stopped(self, engines: Iterable[int], wait_s: float) -> None:
        """Before a resume starts anything: the engines of last time ended with the run."""
        now = clock.now_us()
        gone = [EngineGone(engine=n, incarnation=now, reason="stopped with the run", stopped=True) for n in engines]
        said = [self._say(self._topics.status, one) for one in gone]
        if said:
            said[-1].wait(wait_s)

    def restarted(self, name: str) -> None:
        """Count a restart on the log."""
        values = {"restarts": 1.0, f"restarts/{name}": 1.0}
        point = MetricPoint(run=self._settings.name, source="supervisor", at=clock.now_us(), values=values)
        self._say(self._topics.metrics, point)

    def close(self, wait_s: float) -> None:
        self._leave.set()
        self.join(wait_s)

    def _say(self, topic: str, message: Message) -> threading.Event:
        said = threading.Event()
        self._says.put((topic, message, said))
        return said

    def _turn(self, reader: Reader, producer: Producer, metrics: TextIO) -> None:
        try:
            self._speak(producer)
            records = reader.poll(POLL_MS)
        except BusUnavailable as error:
            away = clock.monotonic_s() - self._heard_at
            self._log.warning("log_away", seconds=round(away), error=error)
            if away > self._settings.broker.timeout_s:
                self.failed = f"the log has been away for {away:.0f} s (broker.timeout_s): {error}"
            self._leave.wait(0.5)
            return
        self._heard_at = clock.monotonic_s()
        for record in records:
            self._take(self._topics.kind(record.topic), record, metrics)
        metrics.flush()
        if clock.monotonic_s() - self._shown_at >= SHOW_PERIOD_S:
            self._show()

    def _speak(self, producer: Producer) -> None:
        while not self._says.empty():
            topic, message, said = self._says.queue[0]
            publish(producer, topic, message)
            producer.flush(SAY_TIMEOUT_S)
            self._says.get_nowait()
            said.set()

    def _take(self, kind: str, record: Record, metrics: TextIO) -> None:
        try:
            decode_of_topic(kind, record.value, record.headers)
        except BadRecord as error:  # its readers bury it
            self._log.warning("unreadable", topic=record.topic, offset=record.offset, reason=error)
            return
        value: dict[str, Any] = json.loads(record.value)
        match kind:
            case "journal":
                self._tally.take(value)
                self.lost = dict(self._tally.lost)
            case "metrics":
                metrics.write(json.dumps(value) + "\n")
                self._tally.take_point(value)
            case "dead-letters":
                self._tally.dead_letters += 1
            case "control" if value["kind"] == "end_run":
                self.ended = Ended(value["outcome"], value["reason"])

    def _show(self) -> None:
        self._shown_at = clock.monotonic_s()
        self.snapshot = self._tally.snapshot(self._settings, self._settings.steps or None)
