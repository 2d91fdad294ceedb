"""The reporter of a run: one thread that owns all calls to Prefect while the run works.

Rule 1: `offer` never waits; only the newest snapshot counts. A call that fails is dropped, the next turn says more.
Rule 2: one progress, one table, one report: each made once per flow run and then updated in place. A task run for each
start of a process, a line in the log now and then.
Rule 3: what people press is seen by reading our own state every HEAR_S, whatever became of the worker or the server.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Suspended

from pipelines import pictures, plots, snapshot
from pipelines.artifacts import Artifacts
from pipelines.children import write_whole
from pipelines.home import Launch
from pipelines.reporter_tasks import ProcessTasks
from pipelines.runs import FLOW_RUN, STATUS
from pipelines.snapshot import Snapshot
from pipelines.supervise import Outcome, StopRequest
from schemas.settings import Settings
from workers.runtime import clock
from workers.runtime.log import Log

HEAR_S = 1.0
SHOW_S = 3.0
SAY_S = 10.0
"""Between two lines in the flow run's log."""
LAST_WORD_S_MAX = {"done": 180.0, "failed": 180.0, "cancelled": 8.0, "suspended": 8.0}
"""How long a server that is away is waited for at the end. Who runs the command is not kept by it; who pressed a button
expects the processes to be gone."""
IMPATIENT = {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: 10.0}
"""We try again ourselves: after a server that was away, what people press is heard within a second."""
AWAY = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
"""What Prefect's client raises when its server does not answer (at a flow's start a plain RuntimeError)."""


@dataclass(frozen=True, slots=True)
class Told:
    """What automations have been told."""

    steps: int = 0
    version: int = -1
    engines_lost: int = 0


class Reporter(threading.Thread):
    """Shows a run in the UI, and hears what people press there. `begin` starts it."""

    def __init__(self, flow_run: UUID, launch: Launch, ui: str) -> None:
        super().__init__(name="prefect-reporter", daemon=True)
        self.ui = ui
        self.paused: State[Any] | None = None
        self._flow_run, self._launch = flow_run, launch
        self._run = self._folder = ""
        self._stop_request = StopRequest()
        self._latest: Snapshot | None = None
        self._shown: Snapshot | None = None
        self._shown_at = self._said_at = 0.0
        self._outcome: Outcome | None = None
        self._artifacts = Artifacts(flow_run)
        self._named = False
        self._told = Told()
        self._history = plots.History()
        self._leave = threading.Event()
        self._log = Log("prefect")
        self._processes = ProcessTasks(flow_run)

    def begin(self, settings: Settings, run_dir: Path, stop: StopRequest) -> None:
        """The run has its folder."""
        self._run, self._folder, self._stop_request = settings.name, str(run_dir), stop
        self._launch.note("run", folder=str(run_dir))
        write_whole(
            run_dir / FLOW_RUN, json.dumps({"flow_run": str(self._flow_run), "launch": self._launch.folder.name})
        )
        with contextlib.suppress(FileNotFoundError):
            before = snapshot.read(json.loads((run_dir / STATUS).read_text()))
            version = -1 if before.version is None else before.version
            self._told = Told(before.step, version, before.engines_lost)
        self.start()

    def offer(self, now: Snapshot) -> None:
        """Keep only the newest, and each start of a process; never waits."""
        self._latest = now
        self._processes.see(Path(self._folder))

    def close(self, outcome: Outcome) -> None:
        """Say how it ended; a server that is away is waited for, but not longer than LAST_WORD_S_MAX."""
        self._outcome = outcome
        self._leave.set()
        if self.ident is None:
            self.start()  # a run that was refused has a report too
        self.join(LAST_WORD_S_MAX[outcome.kind] + HEAR_S)

    def run(self) -> None:
        with temporary_settings(IMPATIENT), get_client(sync_client=True) as client:
            while not self._leave.wait(HEAR_S):
                if clock.monotonic_s() - self._shown_at >= SHOW_S:
                    self._try(self._show, client)
                self._try(self._hear, client)
            patience_s = LAST_WORD_S_MAX[self._outcome.kind] if self._outcome is not None else 0.0
            limit = clock.monotonic_s() + patience_s
            while not self._try(self._show, client) and clock.monotonic_s() < limit:
                threading.Event().wait(HEAR_S)

    def _try(self, call: Callable[[SyncPrefectClient], None], client: SyncPrefectClient) -> bool:
        """Whether it was done; the next turn says more."""
        try:
            call(client)
        except AWAY as error:
            self._log.warning("dropped", error=f"{type(error).__name__}: {error}")
            return False
        return True

    # --- hearing ----------------------------------------------------------------------------

    def _hear(self, client: SyncPrefectClient) -> None:
        state = client.read_flow_run(self._flow_run).state
        if state is None:
            return
        if state.is_cancelling() or state.is_cancelled():
            self._stop_request.ask("cancelled", "cancelled in the Prefect UI")
        elif state.is_paused() and self.paused is None:
            if not state.state_details.pause_reschedule or state.state_details.pause_timeout is not None:
                # A pause that keeps its process, or that ends by itself, becomes one that waits for people.
                kept: State[Any] = Suspended(message="Stopped at a checkpoint; Resume goes on from there.")
                state = client.set_flow_run_state(self._flow_run, kept, force=True).state or state
            self.paused = state
            self._stop_request.ask("suspended", "suspended in the Prefect UI")

    # --- showing ----------------------------------------------------------------------------

    def _show(self, client: SyncPrefectClient) -> None:
        now = self._latest
        if self._outcome is None and (now is None or now is self._shown):
            return
        if not self._named and self._run:
            client.update_flow_run(self._flow_run, name=self._run)
            self._named = True
        if now is not None:
            self._history.take(now)
            self._tell(client, now)
            self._show_line(client, now)
            self._put(client, "progress", pictures.share_done(now))
            self._put(client, "table", json.dumps(pictures.table(now)))
        self._processes.show(client, ended=None if self._outcome is None else self._outcome.kind)
        self._put(client, "markdown", plots.report(now, self._history, self._outcome, self._folder))
        self._shown, self._shown_at = now, clock.monotonic_s()

    def _put(self, client: SyncPrefectClient, kind: str, data: Any) -> None:
        word = {"markdown": "report"}.get(kind, kind)
        text = {"progress": "Steps done.", "table": "Window, queues and engines."}.get(kind, "How the run stands.")
        self._artifacts.put(client, kind, f"{self._run or 'refused'}-{word}", data, text)

    def _show_line(self, client: SyncPrefectClient, now: Snapshot) -> None:
        """How it stands, now and then; how it ended."""
        if self._outcome is not None or clock.monotonic_s() - self._said_at >= SAY_S:
            self._said_at = clock.monotonic_s()
            self._say(client, logging.INFO, pictures.line(now))
        if self._outcome is not None:
            self._say(client, logging.INFO, f"{self._outcome.kind}: {self._outcome.reason}")

    def _say(self, client: SyncPrefectClient, level: int, text: str) -> None:
        """A line in the flow run's log."""
        at = datetime.fromtimestamp(clock.now_us() / 1e6, UTC)
        client.create_logs(
            [LogCreate(name="dora", level=level, message=text, timestamp=at, flow_run_id=self._flow_run)]
        )

    def _tell(self, client: SyncPrefectClient, now: Snapshot) -> None:
        """Events for automations: one per step, version and lost engine, once in the life of a run."""
        told = self._told
        newest = -1 if now.version is None else now.version
        for step in range(told.steps, now.step):
            reward = now.rewards[step] if step < len(now.rewards) else None
            self._emit("dora.step.trained", {"step": step, "reward": reward})
        for version in range(told.version + 1, newest + 1):
            self._emit("dora.version.published", {"version": version})
        for lost in range(told.engines_lost, now.engines_lost):
            self._emit("dora.engine.lost", {"lost": lost + 1})
            text = f"an engine was lost (number {lost + 1} of this run); its requests go on elsewhere"
            self._say(client, logging.WARNING, text)
        self._told = Told(
            max(told.steps, now.step), max(told.version, newest), max(told.engines_lost, now.engines_lost)
        )

    def _emit(self, event: str, payload: dict[str, Any]) -> None:
        """What is told is in the resource's labels too: triggers of automations match those alone."""
        resource = {"prefect.resource.id": f"dora.run.{self._run}", "prefect.resource.name": self._run}
        resource |= {"dora.folder": self._folder, **{f"dora.{name}": str(value) for name, value in payload.items()}}
        related = [{"prefect.resource.id": f"prefect.flow-run.{self._flow_run}", "prefect.resource.role": "flow-run"}]
        emit_event(event, resource=resource, related=related, payload=payload)
