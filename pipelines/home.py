"""The folder that the commands of a checkout share (`.run`, or DORA_HOME): who keeps services there, who uses them.

    services.json   what the keeper says: its identity and addresses
    up.json         people want it up (`dora up`)
    users/          identities of processes that use it: the keeper ends after the last one
    launches/       one folder per flow run: what it was asked, where its run is, what it said

Rule 1: whoever joins or leaves does so under the door's lock, so that a keeper never ends under a new user.
Rule 2: a given Prefect server has a home of its own below, with a worker only.
Rule 3: what may hold secrets (an environment) is readable by its owner alone.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.children import identity_of, is_alive, write_whole
from workers.runtime import clock

SERVICES, UP, USERS, LAUNCHES = "services.json", "up.json", "users", "launches"
HOME_VARIABLE, PREFECT_VARIABLE, LAUNCH_VARIABLE = "DORA_HOME", "DORA_PREFECT", "DORA_LAUNCH"
LAUNCHES_KEPT_DAYS = 30


@dataclass(frozen=True, slots=True)
class Kept:
    """What a live keeper says. `ready` = server and worker answer; `error` = why there is no broker."""

    keeper: dict[str, Any]
    prefect: str = ""
    place: str = ""
    broker: str = ""
    ready: bool = False
    error: str = ""

    @property
    def ui(self) -> str:
        """Where people look."""
        return self.prefect.removesuffix("/api")


def folder(address: str = "") -> Path:
    """The home for runs under the Prefect server at `address` ("" = our own)."""
    home = Path(os.environ.get(HOME_VARIABLE) or ".run").resolve()
    if address:
        home = home / f"at-{hashlib.sha256(address.encode()).hexdigest()[:8]}"
    return home


def kept(home: Path) -> Kept | None:
    """None if no keeper lives."""
    try:
        said = Kept(**json.loads((home / SERVICES).read_text()))
    except FileNotFoundError:
        return None
    return said if is_alive(said.keeper) else None


def say(home: Path, said: Kept) -> None:
    fields = {name: getattr(said, name) for name in Kept.__slots__}
    write_whole(home / SERVICES, json.dumps(fields, indent=1))


@contextlib.contextmanager
def door(home: Path) -> Iterator[None]:
    """One at a time comes and goes."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "door.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def join(home: Path, pid: int) -> None:
    """`pid` uses the services until it ends or leaves."""
    (home / USERS).mkdir(parents=True, exist_ok=True)
    write_whole(home / USERS / f"{pid}.json", json.dumps(identity_of(pid)))


def leave(home: Path, pid: int) -> None:
    (home / USERS / f"{pid}.json").unlink(missing_ok=True)


def users(home: Path) -> list[dict[str, Any]]:
    """Identities of the live ones; the dead are forgotten."""
    found = []
    for file in sorted((home / USERS).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            identity = json.loads(file.read_text())
            if is_alive(identity):
                found.append(identity)
            else:
                file.unlink()
    return found


def start_keeper(home: Path, address: str) -> "subprocess.Popen[bytes]":
    """A process of its own session, which outlives us. Under the door's lock."""
    with (home / "keeper.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pipelines.keeper", str(home), address],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


# --- launches ---------------------------------------------------------------------------------


class Launch:
    """What is known here of one flow run, from its request to its end."""

    def __init__(self, home: Path, name: str) -> None:
        self.folder = home / LAUNCHES / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stdout, self.stderr = self.folder / "stdout.txt", self.folder / "stderr.txt"

    def ask(self, stem: str, environment: dict[str, str]) -> None:
        """Of a command: what an unnamed run is called after, and the environment it shall have."""
        mine = {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}
        unfinished = self.folder / "asked.tmp"
        unfinished.touch(mode=0o600)
        unfinished.write_text(json.dumps({"stem": stem, "environment": mine}))
        unfinished.replace(self.folder / "asked.json")

    def asked(self) -> dict[str, Any]:
        return self._read("asked.json") or {}

    def note(self, what: str, **fields: object) -> None:
        write_whole(self.folder / f"{what}.json", json.dumps(fields))

    def noted(self, what: str) -> dict[str, Any] | None:
        return self._read(f"{what}.json")

    def forget(self, what: str) -> None:
        (self.folder / f"{what}.json").unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            said: dict[str, Any] = json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None
        return said


def forget_old_launches(home: Path) -> None:
    """Those that nobody touched for LAUNCHES_KEPT_DAYS."""
    limit = clock.now_us() / 1e6 - LAUNCHES_KEPT_DAYS * 86_400
    for old in (home / LAUNCHES).glob("*"):
        if old.stat().st_mtime < limit:
            shutil.rmtree(old, ignore_errors=True)
