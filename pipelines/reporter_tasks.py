"""The processes of a run as task runs of its flow run: the UI draws them over time, and shows which died when.

Rule 1: they are a picture. Prefect neither starts nor retries them (the supervisor alone does); `supervisor.json` says
which there are.
"""

from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Crashed, Failed, Running

from pipelines.children import read_lock

_WHY = {
    "done": "Ended with the run.",
    "suspended": "Stopped at a checkpoint.",
    "cancelled": "Stopped: the run was cancelled.",
    "failed": "Stopped: the run failed.",
}


def _never_called() -> None:
    """A task of Prefect needs a function."""


class ProcessTasks:
    """A task run for each start of each process."""

    def __init__(self, flow_run: UUID) -> None:
        self._flow_run = flow_run
        self._open: dict[str, UUID] = {}
        self._begun = False

    def show(self, client: SyncPrefectClient, run_dir: Path) -> None:
        """As `supervisor.json` says now."""
        if not self._begun:
            self._close_former(client)
        lock = read_lock(run_dir)
        if lock is None:
            return  # it has just ended: `close` says how
        starts = {f"{name} {identity['created']}": name for name, identity in lock["processes"].items()}
        for start in [start for start in self._open if start not in starts]:
            self._end(client, start, Crashed(message="It died; the supervisor starts it again."))
        for start in [start for start in starts if start not in self._open]:
            kind = Task(_never_called, name=starts[start].rstrip("-0123456789"))
            made = client.create_task_run(kind, self._flow_run, start, name=starts[start], state=Running())
            self._open[start] = made.id

    def close(self, client: SyncPrefectClient, kind: str) -> None:
        """The run has ended: `kind` is its outcome's."""
        for start in list(self._open):
            self._end(
                client, start, {"failed": Failed, "cancelled": Cancelled}.get(kind, Completed)(message=_WHY[kind])
            )

    def _close_former(self, client: SyncPrefectClient) -> None:
        """What a process of this flow run that died left open."""
        mine = FlowRunFilter(id=FlowRunFilterId(any_=[self._flow_run]))
        for former in client.read_task_runs(flow_run_filter=mine):
            if former.state is not None and former.state.is_running():
                client.set_task_run_state(former.id, Crashed(message="It ended with its supervisor."), force=True)
        self._begun = True

    def _end(self, client: SyncPrefectClient, start: str, state: State[Any]) -> None:
        client.set_task_run_state(self._open[start], state, force=True)
        del self._open[start]
