"""The supervisor: starts, watches and alone restarts the processes of a run, and ends them all.

    topics -> archive, orchestrator, trainer, prompts, reward, rollout -> watch ... EndRun
    -> SIGTERM to all but the archive -> SIGTERM to the archive (it reads every topic to its end)

Rule 1: a process that ends unasked is started again, at most RESTARTS_MAX times in RESTART_WINDOW_S; exit code 2
(bad input) never. After that the run fails with the process' last log lines.
Rule 2: an engine that ended, or that the orchestrator gave up, is told of (`EngineGone`) before it is started again.
Rule 3: nothing outlives the supervisor: every child has a session of its own, which is killed at its limit.
Rule 4: `run` starts all children from the calling thread and stays in it.
"""

import json
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from pipelines import children, processes
from pipelines.children import Child, RunLock
from pipelines.processes import ProcessSpec
from pipelines.runs import STATUS
from pipelines.snapshot import Snapshot
from pipelines.watch import Watcher
from schemas.settings import Settings
from schemas.topics import Topics
from workers.runtime import clock
from workers.runtime.log import Log
from workers.transport.records.bus import Bus

RESTARTS_MAX = 5
RESTART_WINDOW_S = 600.0
RESTART_DELAY_S = 0.5
WATCH_PERIOD_S = 0.2
STATUS_PERIOD_S = 1.0
STOP_LIMITS_S = {"trainer": 120.0, "archive": 180.0}
"""After SIGTERM; others STOP_LIMIT_S. The trainer writes its checkpoint, the archive reads to the end."""
STOP_LIMIT_S = 10.0
CANCEL_LIMIT_S, CANCEL_ARCHIVE_LIMIT_S = 5.0, 8.0
"""When people want it to stop now, from that moment on; what is not done then is done by a resume."""
LAST_WORD_S_MAX = 10.0
"""Between the orchestrator's end and its `EndRun` as the watcher reads it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `exit_code`: 0 done, 1 failed, 3 suspended, 130 cancelled."""

    kind: Literal["done", "failed", "cancelled", "suspended"]
    reason: str

    @property
    def exit_code(self) -> int:
        return {"done": 0, "failed": 1, "suspended": 3, "cancelled": 130}[self.kind]


class StopRequest:
    """What people may ask of a live run, from any thread or signal handler."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.outcome: Outcome | None = None
        self.in_a_hurry = False

    def ask(self, kind: Literal["cancelled", "suspended"], reason: str) -> None:
        if self.outcome is None:
            self.outcome = Outcome(kind, reason)
        self.in_a_hurry = self.in_a_hurry or kind == "cancelled"
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    @property
    def asked(self) -> bool:
        return self._event.is_set()


Progress = Callable[[Snapshot], None]


class Supervisor:
    """One run. `keep_services` is called every period: it starts an embedded broker again that ended."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        broker: str,
        bus: Bus,
        *,
        lock: RunLock,
        keep_services: Callable[[], None] = lambda: None,
        specs: list[ProcessSpec] | None = None,
    ) -> None:
        self.settings, self.run_dir = settings, run_dir
        self._bus, self._lock, self._keep_services = bus, lock, keep_services
        self._specs = processes.specs(settings, run_dir, broker) if specs is None else specs
        self._children: dict[str, Child] = {}
        self._due: dict[str, float] = {}
        self._restarts: dict[str, list[float]] = defaultdict(list)
        self._log = Log("supervisor")
        self._watcher = Watcher(bus, settings, run_dir)
        self._shown_at = 0.0

    @property
    def snapshot(self) -> Snapshot:
        return self._watcher.snapshot

    def run(self, on_progress: Progress, stop: StopRequest) -> Outcome:
        """Start everything, watch until the end, end everything. From the first `status.json` on topics are its own."""
        self._show(on_progress)
        self._bus.make_topics(Topics(self.settings.name).specs())
        self._watcher.start()
        if self._watcher.resumes:
            engines = [spec.engine for spec in self._specs if spec.engine is not None]
            self._watcher.run_was_stopped(engines, wait_s=5.0)
        outcome = Outcome("failed", "the supervisor was interrupted")
        try:
            for spec in self._specs:
                self._start(spec)
            outcome = self._watch(on_progress, stop)
            outcome = self._stop_all(outcome, stop)
        finally:
            for child in self._children.values():
                child.kill()
            self._watcher.close(wait_s=10.0)
            self._show(on_progress, final=outcome)
        return outcome

    # --- watching ---------------------------------------------------------------------------

    def _watch(self, on_progress: Progress, stop: StopRequest) -> Outcome:
        while not stop.wait(WATCH_PERIOD_S):
            self._keep_services()
            for spec in self._specs:
                outcome = self._look_at(spec)
                if outcome is not None:
                    return outcome
            if self._watcher.failed is not None:
                return Outcome("failed", self._watcher.failed)
            self._show(on_progress)
        assert stop.outcome is not None
        return stop.outcome

    def _look_at(self, spec: ProcessSpec) -> Outcome | None:
        """Start it again if it is due, notice its end; the run's outcome if this decides it."""
        if spec.name in self._due:
            if clock.monotonic_s() >= self._due[spec.name]:
                del self._due[spec.name]
                self._start(spec)
            return None
        child = self._children[spec.name]
        self._kill_if_given_up(child)
        code = child.ended()
        if code is None:
            return None
        children.kill_group(child.popen.pid)
        if spec.kind == "orchestrator" and code == 0 and (ended := self._last_word()) is not None:
            return ended
        reason = f"exit code {code}" if code >= 0 else f"signal {-code}"
        self._log.warning("process_ended", process=spec.name, reason=reason)
        if spec.engine is not None:
            self._watcher.engine_gone(spec.engine, reason, wait_s=2.0)
        if code == 2 or self._used_up(spec):
            often = "" if code == 2 else f" for the {RESTARTS_MAX + 1}th time in {RESTART_WINDOW_S / 60:.0f} minutes"
            return Outcome(
                "failed",
                f"{spec.name} ended ({reason}){often}{_perhaps(spec.kind, code)}; {child.log} ends with:\n"
                f"{child.last_lines()}",
            )
        self._watcher.restarted(spec.name)
        self._restarts[spec.name].append(clock.monotonic_s())
        self._due[spec.name] = clock.monotonic_s() + RESTART_DELAY_S * len(self._restarts[spec.name])
        return None

    def _last_word(self) -> Outcome | None:
        """The orchestrator ended by itself: its `EndRun` is on the log, and comes within seconds."""
        limit = clock.monotonic_s() + LAST_WORD_S_MAX
        while self._watcher.ended is None and clock.monotonic_s() < limit:
            threading.Event().wait(WATCH_PERIOD_S)
        ended = self._watcher.ended
        if ended is None:
            return None
        kinds: dict[str, Literal["done", "failed", "cancelled"]] = {"done": "done", "cancelled": "cancelled"}
        return Outcome(kinds.get(ended.outcome, "failed"), ended.reason)

    def _kill_if_given_up(self, child: Child) -> None:
        """The orchestrator gave this very incarnation up, but the process is there: it hangs."""
        engine = child.spec.engine
        if engine is not None and self._watcher.lost.get(engine, 0) >= child.started_at and child.ended() is None:
            self._log.warning("killing_lost_engine", process=child.spec.name)
            child.kill()

    def _used_up(self, spec: ProcessSpec) -> bool:
        recent = clock.monotonic_s() - RESTART_WINDOW_S
        self._restarts[spec.name] = [at for at in self._restarts[spec.name] if at > recent]
        return len(self._restarts[spec.name]) >= RESTARTS_MAX

    def _start(self, spec: ProcessSpec) -> None:
        child = children.start(spec, self.run_dir / "logs" / f"{spec.name}.log")
        self._children[spec.name] = child
        self._lock.add(spec.name, child.popen.pid)
        self._log.info("process_started", process=spec.name, pid=child.popen.pid)

    # --- ending -----------------------------------------------------------------------------

    def _stop_all(self, outcome: Outcome, stop: StopRequest) -> Outcome:
        """End everything; a run that is done without a whole archive is not done."""
        hurry = outcome.kind == "cancelled"  # a suspended run has the time to write its checkpoint and archive
        first = [child for child in self._children.values() if child.spec.kind != "archive"]
        archive = [child for child in self._children.values() if child.spec.kind == "archive"]
        begun = clock.monotonic_s()
        self._stop(first, hurry, stop, CANCEL_LIMIT_S)
        spent = clock.monotonic_s() - begun if hurry else 0.0
        self._stop(archive, hurry, stop, CANCEL_ARCHIVE_LIMIT_S - spent)
        torn = [child for child in archive if child.ended() != 0]
        if outcome.kind in ("cancelled", "suspended") and torn:
            cut = "the archive was cut short: until a resume its figures may be too low"
            return replace(outcome, reason=f"{outcome.reason} ({cut})")
        if outcome.kind == "done" and torn:
            story = f"the archive is not complete, {torn[0].log} ends with:\n{torn[0].last_lines()}"
            return Outcome("failed", f"{outcome.reason}, but {story}\n`--resume` completes it")
        return outcome

    def _stop(self, group: list[Child], hurry: bool, stop: StopRequest, hurry_limit_s: float) -> None:
        """SIGTERM to these, SIGKILL at each one's limit."""
        begun = clock.monotonic_s()
        for child in group:
            child.terminate()
        left = list(group)
        while left:
            threading.Event().wait(0.05)
            self._keep_services()
            # Someone who asks during the normal end wants it short too.
            short = hurry or stop.in_a_hurry
            for child in [child for child in left if child.ended() is not None]:
                left.remove(child)
            waited = clock.monotonic_s() - begun
            for child in left:
                limit = hurry_limit_s if short else STOP_LIMITS_S.get(child.spec.kind, STOP_LIMIT_S)
                if waited > limit:
                    self._log.warning("killing", process=child.spec.name, after_s=round(waited, 1))
                    child.kill()

    def _show(self, on_progress: Progress, final: Outcome | None = None) -> None:
        now = clock.monotonic_s()
        if final is None and now - self._shown_at < STATUS_PERIOD_S:
            return
        self._shown_at = now
        snapshot = self.snapshot
        view = asdict(snapshot) | {"at": clock.now_us(), "outcome": None if final is None else asdict(final)}
        children.write_whole(self.run_dir / STATUS, json.dumps(view, indent=1))
        on_progress(snapshot)


def _perhaps(kind: str, code: int) -> str:
    """Nobody kills a process again and again but a system that has no memory left."""
    lower = {"trainer": "training.micro_batch_tokens", "rollout": "engines.kv_mib or engines.count"}.get(kind)
    return f"; if memory ran out, lower {lower}" if code == -signal.SIGKILL and lower else ""
