"""What people press in the Prefect UI, as the requests that it sends; and what it shows."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.runtime import clock

ANSWER_S_MAX = 60.0
"""SQLite is locked for moments (503); a server may just be starting."""
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


class Ui:
    """One Prefect server; `address` is its API."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def ask(self, path: str, body: object = None, method: str = "") -> Any:
        """The answer's JSON; tried again while the server is away or busy."""
        limit = clock.monotonic_s() + ANSWER_S_MAX
        request = urllib.request.Request(
            self.address + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method or ("GET" if body is None else "POST"),
        )
        while True:
            try:
                with urllib.request.urlopen(request, timeout=20.0) as answer:
                    text = answer.read()
                    return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code != 503 or clock.monotonic_s() > limit:
                    raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error
            except OSError:
                if clock.monotonic_s() > limit:
                    raise
            threading.Event().wait(0.3)

    # --- what people press ------------------------------------------------------------------

    def suspend(self, flow_run: str) -> None:
        self._set(flow_run, "PAUSED", "Suspended", state_details={"pause_reschedule": True})

    def pause(self, flow_run: str) -> None:
        """No button does this, the API can."""
        self._set(flow_run, "PAUSED", "Paused", state_details={"pause_reschedule": False})

    def cancel(self, flow_run: str) -> None:
        self._set(flow_run, "CANCELLING", "Cancelling")

    def retry(self, flow_run: str) -> None:
        self._set(flow_run, "SCHEDULED", "AwaitingRetry", force=True)

    def resume(self, flow_run: str) -> None:
        answer = self.ask(f"/flow_runs/{flow_run}/resume", {})
        assert answer["status"] == "ACCEPT", answer

    def start(self, place: str, *, flow: str = "train", **parameters: Any) -> str:
        """The form of a deployment; the flow run's id."""
        deployment = self.ask(f"/deployments/name/{flow}/{place}")["id"]
        made = self.ask(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})
        return str(made["id"])

    def automate(self, place: str, flow: str, event: str, match: dict[str, str], **parameters: str | int) -> str:
        """The form of an automation: at this event of such a resource run a deployment. The deployment's id."""
        deployment = str(self.ask(f"/deployments/name/{flow}/{place}")["id"])
        trigger = {
            "type": "event",
            "posture": "Reactive",
            "expect": [event],
            "match": match,
            "threshold": 1,
            "within": 0,
        }
        action = {"type": "run-deployment", "deployment_id": deployment, "parameters": parameters}
        self.ask("/automations/", {"name": f"{flow} at {event}", "trigger": trigger, "actions": [action]})
        return deployment

    def runs_of(self, deployment: str) -> list[str]:
        """Its flow runs."""
        found = self.ask("/flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}})
        return [str(run["id"]) for run in found]

    def _set(self, flow_run: str, kind: str, name: str, *, force: bool = False, **more: Any) -> None:
        state = {"type": kind, "name": name, "message": "pressed in a test", **more}
        answer = self.ask(f"/flow_runs/{flow_run}/set_state", {"state": state, "force": force})
        assert answer["status"] == "ACCEPT", answer

    # --- what it shows ----------------------------------------------------------------------

    def state(self, flow_run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(f"/flow_runs/{flow_run}")["state"]
        return found

    def wait_state(self, flow_run: str, true: Callable[[dict[str, Any]], bool], limit_s: float) -> dict[str, Any]:
        """Its state once it is so; AssertionError after `limit_s`."""
        limit = clock.monotonic_s() + limit_s
        while not true(state := self.state(flow_run)):
            assert clock.monotonic_s() < limit, f"after {limit_s} s the flow run is {state['name']}: {state['message']}"
            threading.Event().wait(0.3)
        return state

    def artifacts(self, flow_run: str) -> dict[str, Any]:
        """Type -> data of this flow run's artifacts; there is one of each."""
        found = self.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}})
        assert len({one["type"] for one in found}) == len(found), [one["key"] for one in found]
        return {one["type"]: one["data"] for one in found}

    def artifact(self, flow_run: str, kind: str) -> str:
        """The id of one."""
        found = self.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}})
        return next(str(one["id"]) for one in found if one["type"] == kind)

    def lines(self, flow_run: str) -> list[str]:
        """Our lines of its log, oldest first."""
        wanted = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC"}
        return [one["message"] for one in self.ask("/logs/filter", wanted) if one["name"] == "dora"]

    def tasks(self, flow_run: str) -> list[tuple[str, str]]:
        """Name and state of its task runs."""
        wanted = {"flow_runs": {"id": {"any_": [flow_run]}}}
        return [(one["name"], one["state"]["type"]) for one in self.ask("/task_runs/filter", wanted)]

    def wait_events(self, name: str, run: str, count: int, limit_s: float) -> list[dict[str, Any]]:
        """Payloads of this run's events of a name, oldest first, once there are so many: the server writes them down
        every few seconds. AssertionError after `limit_s`."""
        limit = clock.monotonic_s() + limit_s
        while len(found := self.events(name, run)) < count:
            assert clock.monotonic_s() < limit, f"after {limit_s} s there are {len(found)} events {name}: {found}"
            threading.Event().wait(0.3)
        return found

    def events(self, name: str, run: str) -> list[dict[str, Any]]:
        """Payloads of this run's events of a name, oldest first."""
        wanted = {"filter": {"event": {"name": [name]}, "resource": {"id": [f"dora.run.{run}"]}}, "limit": 50}
        page = self.ask("/events/filter", wanted)
        found = list(page["events"])
        while page["next_page"]:
            page = self.ask(page["next_page"].removeprefix(self.address))
            found += page["events"]
        return [event["payload"] for event in sorted(found, key=lambda event: str(event["occurred"]))]


def flow_run_of(run_dir: Path) -> str:
    """The flow run that works on a run."""
    return str(json.loads((run_dir / "flow_run.json").read_text())["flow_run"])
