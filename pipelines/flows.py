"""The Prefect flow of a run: people's view and control, a thin shell round the supervisor.

Rule 1: Prefect is never on the data path. A server that cannot be reached, or dies, changes nothing in the run.
Rule 2: the reporter thread owns all calls to Prefect while the run works; what fails is dropped.
Rule 3: one markdown artifact, updated in place. Cancel and Suspend in the UI are seen by reading our own state.
Annotations stay evaluated here (no `from __future__ import annotations`): Prefect reads them at run time.
"""

import threading
from collections.abc import Callable
from uuid import UUID

import httpx
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import PrefectException
from prefect.states import Cancelled, Completed, Failed

from pipelines import pictures
from pipelines.snapshot import Snapshot
from pipelines.supervise import Outcome, StopRequest
from schemas.settings import Settings
from workers.runtime.log import Log

REPORT_PERIOD_S = 3.0
LEAVE_S = 10.0
AWAY = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
"""What Prefect's client raises when its server does not answer (at a flow's start a plain RuntimeError)."""

Body = Callable[[Callable[[Snapshot], None]], Outcome]


def run_as_flow(settings: Settings, stop: StopRequest, body: Body) -> Outcome:
    """Run `body(on_progress)` inside the flow `train`; without Prefect if its server is away."""
    log = Log("prefect")
    held: list[Outcome | BaseException] = []

    @flow(name="train", flow_run_name=settings.name, persist_result=False, validate_parameters=False)
    def train(run: str, config: dict) -> State:  # type: ignore[type-arg]
        """`config` is the resolved configuration; the run folder has it as config.toml."""
        del run, config
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        reporter = Reporter(context.flow_run.id, settings, stop)
        reporter.start()
        try:
            outcome = body(reporter.offer)
            held.append(outcome)
        except BaseException as error:
            held.append(error)
            raise
        finally:
            reporter.close(LEAVE_S)
        return _state(outcome)

    try:
        train(settings.name, settings.model_dump(mode="json"), return_state=True)
    except AWAY as error:
        log.warning("prefect_away", error=f"{type(error).__name__}: {error}")
    if not held:
        log.warning("running_without_prefect")
        return body(lambda _: None)
    if isinstance(held[0], BaseException):
        raise held[0]
    return held[0]


def _state(outcome: Outcome) -> State:
    if outcome.kind == "done":
        return Completed(message=outcome.reason)
    if outcome.kind == "failed":
        return Failed(message=outcome.reason)
    return Cancelled(message=f"{outcome.reason}; go on with `dora run ... --resume`")


class Reporter(threading.Thread):
    """Shows the latest snapshot in the UI, and hears what people press there."""

    def __init__(self, flow_run: UUID, settings: Settings, stop: StopRequest) -> None:
        super().__init__(name="prefect-reporter", daemon=True)
        self._flow_run, self._settings, self._stop_request = flow_run, settings, stop
        self._latest: Snapshot | None = None
        self._shown: Snapshot | None = None
        self._artifact: UUID | None = None
        self._leave = threading.Event()
        self._log = Log("prefect")

    def offer(self, snapshot: Snapshot) -> None:
        """Keep only the newest; never waits."""
        self._latest = snapshot

    def close(self, wait_s: float) -> None:
        self._leave.set()
        self.join(wait_s)

    def run(self) -> None:
        with get_client(sync_client=True) as client:
            while True:
                leaving = self._leave.wait(REPORT_PERIOD_S)
                try:
                    self._turn(client)
                except AWAY as error:
                    self._log.warning("dropped", error=f"{type(error).__name__}: {error}")
                if leaving:
                    return

    def _turn(self, client: SyncPrefectClient) -> None:
        snapshot = self._latest
        if snapshot is not None and snapshot is not self._shown:
            self._show(client, snapshot)
            self._tell(snapshot)
            self._shown = snapshot
        state = client.read_flow_run(self._flow_run).state
        if state is not None and state.is_cancelling():
            self._stop_request.ask("cancelled", "cancelled in the Prefect UI")
        elif state is not None and state.name == "Suspended":
            self._stop_request.ask("suspended", "suspended in the Prefect UI")

    def _show(self, client: SyncPrefectClient, snapshot: Snapshot) -> None:
        markdown = pictures.markdown(snapshot)
        if self._artifact is None:
            key = "".join(c if c.isalnum() else "-" for c in f"report-{self._settings.name}".lower())
            create = ArtifactCreate(key=key, type="markdown", data=markdown, flow_run_id=self._flow_run)
            self._artifact = client.create_artifact(create).id
        else:
            client.update_artifact(self._artifact, ArtifactUpdate(data=markdown))

    def _tell(self, snapshot: Snapshot) -> None:
        """Events for automations, one per new version and lost engine."""
        before = self._shown
        resource = {"prefect.resource.id": f"dora.run.{self._settings.name}"}
        if snapshot.version is not None and (before is None or before.version != snapshot.version):
            emit_event("dora.version.published", resource=resource, payload={"version": snapshot.version})
        if before is not None and snapshot.engines_lost > before.engines_lost:
            emit_event("dora.engine.lost", resource=resource, payload={"lost": snapshot.engines_lost})
        if before is not None and snapshot.step > before.step:
            payload = {"step": snapshot.step - 1, "reward": snapshot.reward}
            emit_event("dora.step.trained", resource=resource, payload=payload)
