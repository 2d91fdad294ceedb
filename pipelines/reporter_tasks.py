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
        self._starts: tuple[dict[str, str], frozenset[str]] = {}, frozenset()  # every one, and those of now
        self._made: dict[str, UUID] = {}
        self._ended: set[str] = set()
        self._begun = False

    def see(self, run_dir: Path) -> None:
        """What `supervisor.json` says now. Never waits: the server, which may be slow, is told by `show`, and of each
        start that was seen before the run ended."""
        lock = read_lock(run_dir)
        if lock is not None:
            now = {f"{name} {identity['created']}": name for name, identity in lock["processes"].items()}
            self._starts = self._starts[0] | now, frozenset(now)

    def show(self, client: SyncPrefectClient, ended: str | None = None) -> None:
        """What was seen; `ended` is the kind of the run's outcome."""
        if not self._begun:
            self._close_former(client)
        seen, now = self._starts
        for start, name in seen.items():
            if start not in self._made:
                kind = Task(_never_called, name=name.rstrip("-0123456789"))
                made = client.create_task_run(kind, self._flow_run, start, name=name, state=Running())
                self._made[start] = made.id
        for start in [start for start in seen if start not in self._ended]:
            if start not in now:
                self._end(client, start, Crashed(message="It died; the supervisor starts it again."))
            elif ended is not None:
                state = {"failed": Failed, "cancelled": Cancelled}.get(ended, Completed)
                self._end(client, start, state(message=_WHY[ended]))

    def _close_former(self, client: SyncPrefectClient) -> None:
        """What a process of this flow run that died left open."""
        mine = FlowRunFilter(id=FlowRunFilterId(any_=[self._flow_run]))
        for former in client.read_task_runs(flow_run_filter=mine):
            if former.state is not None and former.state.is_running():
                client.set_task_run_state(former.id, Crashed(message="It ended with its supervisor."), force=True)
        self._begun = True

    def _end(self, client: SyncPrefectClient, start: str, state: State[Any]) -> None:
        client.set_task_run_state(self._made[start], state, force=True)
        self._ended.add(start)
