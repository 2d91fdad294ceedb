"""Child processes that never outlive us: own session each, a log file each, the whole group killed at the end.

Rule 1: a child is started from a thread that lives as long as the child (Linux ends it with that thread).
Rule 2: `RunLock` names everything that was started; the next start of the run clears what a crash left behind.
"""

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

from workers.runtime import clock
from workers.runtime.errors import BadInput

if TYPE_CHECKING:  # `dora status` looks at the lock only, and must answer at once
    from pipelines.processes import ProcessSpec

LOCK = "supervisor.json"


@dataclass
class Child:
    """A running worker."""

    spec: "ProcessSpec"
    popen: "subprocess.Popen[bytes]"
    started_at: int
    log: Path

    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return self.popen.poll()

    def terminate(self) -> None:
        """Ask it to finish its step and end."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything it started."""
        kill_group(self.popen.pid)
        self.popen.wait()

    def last_lines(self, count: int = 12) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 8192))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return "\n".join("  " + line for line in lines[-count:])


def start(spec: "ProcessSpec", log: Path) -> Child:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        popen = subprocess.Popen(
            spec.argv,
            env=os.environ | spec.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Child(spec, popen, clock.now_us(), log)


def kill_group(pid: int) -> None:
    """SIGKILL to the session that `pid` leads, members that outlived their leader included."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class RunLock:
    """`supervisor.json` of a run folder: who runs it now, and its processes."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / LOCK
        self._said: dict[str, Any] = {}

    def take(self) -> list[str]:
        """Claim the run; end what a crashed supervisor left behind and return the names. BadInput if it is live."""
        before = read_lock(self._file.parent)
        if before is not None and is_alive(before["supervisor"]):
            raise BadInput(
                f"run {self._file.parent.name} is running now (process {before['supervisor']['pid']}); "
                "stop that one first, or watch it with `dora status`"
            )
        cleared = []
        for name, identity in (before or {}).get("processes", {}).items():
            if is_alive(identity):
                kill_group(identity["pid"])
                cleared.append(name)
        self._said = {"supervisor": identity_of(os.getpid()), "processes": {}}
        self._write()
        return cleared

    def note(self, **fields: object) -> None:
        """Say more about the live run (the broker's address, the UI)."""
        self._said |= fields
        self._write()

    def add(self, name: str, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._said["processes"][name] = identity_of(pid)
            self._write()

    def release(self) -> None:
        self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        write_whole(self._file, json.dumps(self._said, indent=1))


def read_lock(run_dir: Path) -> dict[str, Any] | None:
    """What the live (or crashed) supervisor said of itself."""
    try:
        said: dict[str, Any] = json.loads((run_dir / LOCK).read_text())
    except FileNotFoundError:
        return None
    return said


def is_live(run_dir: Path) -> bool:
    """A supervisor works on this run now."""
    said = read_lock(run_dir)
    return said is not None and is_alive(said["supervisor"])


def identity_of(pid: int) -> dict[str, Any]:
    """A process id alone may be used again; with its start time it is one process."""
    return {"pid": pid, "created": psutil.Process(pid).create_time()}


def is_alive(identity: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(identity["pid"])
        same = abs(process.create_time() - identity["created"]) < 1.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def write_whole(file: Path, text: str) -> None:
    """Readers see the old text or the new one, never half."""
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(text)
    unfinished.replace(file)
