"""`dora up`, `dora down`, and how a run comes to the services of its home.

Rule 1: who uses services joins first, then waits for a keeper (or starts one): it never ends between the two.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines import home
from pipelines.children import is_alive
from pipelines.faults import ServiceFailed
from pipelines.home import Kept
from workers.runtime import clock

READY_S_MAX = 300.0
DOWN_S_MAX = 60.0
RUNS_END_S_MAX = 30.0


def up() -> dict[str, str]:
    """Where everything is, once it answers. ServiceFailed."""
    folder, address = _mine()
    with home.door(folder):
        (folder / home.UP).touch()
    kept = wait_ready(folder, address, lambda kept: bool(kept.broker or kept.error))
    if kept.error:
        raise ServiceFailed(kept.error)
    return {"broker": kept.broker, "prefect": kept.ui, "home": str(folder)}


def down() -> list[str]:
    """What was ended. Runs get SIGTERM, as by Ctrl-C; then the keeper ends by itself, at the latest when it is told."""
    folder, _ = _mine()
    kept = home.kept(folder)
    with home.door(folder):
        was_up = (folder / home.UP).exists()
        (folder / home.UP).unlink(missing_ok=True)
        using = home.users(folder)
    for identity in using:
        _terminate(identity)
    wait_until(lambda: not any(map(is_alive, using)), RUNS_END_S_MAX)
    if kept is not None:
        _terminate(kept.keeper)
        wait_until(lambda: not is_alive(kept.keeper), DOWN_S_MAX)
    ended = [f"{len(using)} commands and runs"] if using else []
    return ended + (["broker"] if was_up else []) + (["Prefect server", "worker"] if kept is not None else [])


def _mine() -> tuple[Path, str]:
    address = os.environ.get(home.PREFECT_VARIABLE, "")
    return home.folder(address), address


def _terminate(identity: dict[str, Any]) -> None:
    if is_alive(identity):
        with contextlib.suppress(ProcessLookupError):
            os.kill(identity["pid"], signal.SIGTERM)


def wait_until(until: Callable[[], bool], limit_s: float) -> bool:
    limit = clock.monotonic_s() + limit_s
    while not until():
        if clock.monotonic_s() > limit:
            return False
        threading.Event().wait(0.1)
    return True


@contextlib.contextmanager
def using(folder: Path) -> Iterator[None]:
    """This process is a user. Afterwards, if it was the last one, wait until all has ended."""
    with home.door(folder):
        home.join(folder, os.getpid())
    try:
        yield
    finally:
        with home.door(folder):
            home.leave(folder, os.getpid())
            last = not home.users(folder) and not (folder / home.UP).exists()
        if last:
            wait_until(lambda: home.kept(folder) is None and not _locked(folder), DOWN_S_MAX)


def _locked(folder: Path) -> bool:
    """A keeper that no longer says a word may still be ending its services."""
    import fcntl

    with (folder / "keeper.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_ready(
    folder: Path,
    address: str,
    also: Callable[[Kept], bool] = lambda _: True,
    stopped: Callable[[], bool] = lambda: False,
) -> Kept:
    """The keeper's word when server and worker answer and `also` holds; a keeper is started if there is none.
    ServiceFailed."""
    mine: subprocess.Popen[bytes] | None = None
    limit = clock.monotonic_s() + READY_S_MAX
    while clock.monotonic_s() < limit and not stopped():
        kept = home.kept(folder)
        if kept is not None and kept.ready and also(kept):
            return kept
        if kept is None:
            if mine is None:
                with home.door(folder):
                    mine = home.start_keeper(folder, address)
            elif mine.poll() is not None:
                raise ServiceFailed(f"the local services did not start; the end of {_tail(folder / 'keeper.log')}")
        threading.Event().wait(0.2)
    raise ServiceFailed(f"the local services were not ready; the end of {_tail(folder / 'keeper.log')}")


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
    return "\n".join([f"{log}:", *lines])
