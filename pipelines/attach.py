"""`dora run` under Prefect: makes a flow run of the deployment `train`, follows it, and ends as it ends.

    check (exit 2) -> services of the home -> flow run -> the worker begins it -> status.json, what it says -> exit code

Rule 1: what is followed is the launch and the run's folder, never the server: it may be away from the first step on.
Rule 2: SIGINT and SIGTERM are handed to the run's own process. (A command that is killed leaves the run working.)
Rule 3: no server, no worker, nobody begins it: the run goes on here, without Prefect.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from pipelines import config_file, home, launch, snapshot, updown
from pipelines.children import is_alive
from pipelines.faults import ServiceFailed
from pipelines.home import Kept, Launch
from pipelines.progress import ProgressView
from pipelines.runs import FLOW_RUN, STATUS
from schemas.settings import Settings
from workers.runtime import clock
from workers.runtime.process import on_stop_signals

BEGIN_S_MAX = 180.0
"""The worker has begun the flow run after this long, or nobody will."""
LOOK_S = 0.3
LOOK_AT_STATE_S = 2.0
LEAVE_S_MAX = 40.0
"""Between the end of the run and that of its process: Prefect hears of the end."""


def run_config(config: Path, overrides: Sequence[str], resume: bool) -> int:
    """Run it; the exit code. BadInput, DoraError."""
    settings = config_file.read_settings(config, overrides)
    settings = launch.ready(settings, str(config), resume)
    if not settings.prefect.enabled:
        return launch.run(settings, config.stem, resume).exit_code
    address = os.environ.get(home.PREFECT_VARIABLE) or settings.prefect.address
    folder = home.folder(address)
    stop = threading.Event()
    on_stop_signals(lambda _: stop.set())
    with updown.using(folder):
        try:
            kept = updown.wait_ready(folder, address, stopped=stop.is_set)
        except ServiceFailed as error:
            print(f"no Prefect: {error}\nthe run goes on without it", file=sys.stderr)
        else:
            code = _Attached(settings, config.stem, resume=resume, folder=folder, kept=kept, stop=stop).follow()
            if code is not None:
                return code
    if stop.is_set():
        return 130
    return launch.run(settings, config.stem, resume).exit_code


class _Attached:
    """One flow run as its command sees it."""

    def __init__(
        self, settings: Settings, stem: str, *, resume: bool, folder: Path, kept: Kept, stop: threading.Event
    ) -> None:
        self._settings, self._resume, self._kept, self._stop = settings, resume, kept, stop
        os.environ |= {
            "PREFECT_API_URL": kept.prefect,
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_CLIENT_MAX_RETRIES": "2",
            "PREFECT_LOGGING_LEVEL": "CRITICAL",
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        }
        self._begun_at = clock.now_us()
        before = self._before()
        self._suspended = None if before is None else UUID(before["flow_run"])
        self._launch = Launch(folder, uuid.uuid4().hex if before is None else before["launch"])
        self._launch.ask(stem, dict(os.environ))
        if before is not None:
            self._launch.note("run", folder=str((Path(settings.runs_dir) / settings.name).resolve()))
        self._heard = {
            file: file.stat().st_size if file.exists() else 0 for file in (self._launch.stderr, self._launch.stdout)
        }

    def _before(self) -> dict[str, str] | None:
        """The flow run that the run to be resumed was in."""
        file = Path(self._settings.runs_dir) / self._settings.name / FLOW_RUN
        if not self._resume or not file.is_file():
            return None
        said: dict[str, str] = json.loads(file.read_text())
        return said

    def follow(self) -> int | None:
        """The run's exit code; None if it did not begin, and never will."""
        from pipelines import deployments

        begun_before = self._launch.noted("process")
        try:
            flow_run = self._start()
        except deployments.AWAY as error:
            print(f"no Prefect: {type(error).__name__}: {error}\nthe run goes on without it", file=sys.stderr)
            return None
        begun = self._begun(flow_run, begun_before)
        if begun is not None:
            return begun if begun >= 0 else None
        with ProgressView() as view:
            code = self._watch(view)
        sys.stdout.write(self._new(self._launch.stdout))
        if code == 0:
            self._launch.remove()
        return code

    def _start(self) -> UUID:
        from pipelines import deployments

        if self._suspended is not None:
            if deployments.resume_suspended(self._suspended, self._settings):
                return self._suspended
            environment = self._launch.asked()
            self._launch = Launch(self._launch.folder.parent.parent, uuid.uuid4().hex)
            self._launch.ask(environment["stem"], environment["environment"])
            self._heard = dict.fromkeys((self._launch.stderr, self._launch.stdout), 0)
        return deployments.create_run(self._kept.place, self._settings, self._resume, self._launch.folder.name)

    def _begun(self, flow_run: UUID, before: dict[str, object] | None) -> int | None:
        """None once a process works on it; else the exit code of one that never will, -1 = it shall go on here."""
        from pipelines import deployments

        limit = clock.monotonic_s() + BEGIN_S_MAX
        looked_at = clock.monotonic_s()
        name, message, final = "", "", False
        while (now := self._launch.noted("process")) is None or now == before:
            if clock.monotonic_s() - looked_at > LOOK_AT_STATE_S:
                looked_at = clock.monotonic_s()
                with contextlib.suppress(*deployments.AWAY):
                    name, message, final = deployments.state_of(flow_run)
            if final:
                print(f"dora: the flow run is {name}: {message}", file=sys.stderr)
                return 130 if name in ("Cancelled", "Cancelling") else 1
            if self._stop.wait(LOOK_S) or clock.monotonic_s() > limit:
                self._launch.note("withdrawn")
                with contextlib.suppress(*deployments.AWAY):
                    deployments.withdraw(flow_run, "its command ended before it began")
                if self._stop.is_set():
                    return 130
                print("no worker began the flow run: the run goes on without Prefect", file=sys.stderr)
                return -1
        return None

    def _watch(self, view: ProgressView) -> int:
        process = self._launch.noted("process")
        assert process is not None
        told = False
        while (ended := self._launch.noted("ended")) is None and is_alive(process):
            if self._stop.is_set() and not told:
                os.kill(process["pid"], signal.SIGTERM)
                told = True
            self._show(view)
            threading.Event().wait(LOOK_S) if told else self._stop.wait(LOOK_S)
        updown.wait_until(lambda: not is_alive(process), LEAVE_S_MAX)
        self._show(view)
        ended = self._launch.noted("ended")
        if ended is None:
            where = (self._launch.noted("run") or {}).get("folder", "its folder")
            view.say(f"dora: the run's process was killed; go on with: dora run {where}/config.toml --resume")
        return 1 if ended is None else int(ended["code"])

    def _show(self, view: ProgressView) -> None:
        for line in self._new(self._launch.stderr).splitlines():
            view.say(line)
        run = self._launch.noted("run")
        if run is not None:
            with contextlib.suppress(FileNotFoundError):
                said = json.loads((Path(run["folder"]) / STATUS).read_text())
                if said["at"] >= self._begun_at:  # not what a former start said last
                    view.show(snapshot.read(said))

    def _new(self, file: Path) -> str:
        """What it said since last time."""
        if not file.exists():
            return ""
        with file.open(errors="replace") as said:
            said.seek(self._heard[file])
            text = said.read()
            self._heard[file] = said.tell()
        return text
