"""The keeper: one process per home that keeps the Prefect server, the worker and (after `dora up`) a broker alive.

    start -> server, worker, broker if wanted -> look every LOOK_S: who ended is started again
    -> nobody wants it up and nobody uses it: end all

Rule 1: runs are users, so no run loses a server that another one started.
Rule 2: it may be killed at any moment: its services end with it, runs go on without them.
"""

import contextlib
import fcntl
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipelines import home, local_services
from pipelines.children import identity_of
from pipelines.faults import ServiceFailed
from pipelines.local_services import HomeInUse, Service
from workers.runtime import clock
from workers.runtime.process import on_stop_signals

LOOK_S = 0.3
FORMER_KEEPER_S_MAX = 60.0
RESTART_PAUSE_S = 5.0
"""Between two starts of a service that ends."""


class Keeper:
    """`address` is a given Prefect server ("" = our own)."""

    def __init__(self, folder: Path, address: str, pid: int) -> None:
        self._home, self._address = folder, address
        self._services: dict[str, Service] = {}
        self._started_at: dict[str, float] = {}
        self._stop = threading.Event()
        self._said = home.Kept(keeper=identity_of(pid))

    def run(self) -> int:
        """Until nobody is left, or a stop signal. 1 if a service did not start."""
        on_stop_signals(lambda _: self._stop.set())
        home.say(self._home, self._said)
        home.forget_old_launches(self._home)
        try:
            while not self._stop.wait(LOOK_S):
                with home.door(self._home):
                    if not (self._home / home.UP).exists() and not home.users(self._home):
                        self._leave()
                        return 0
                self._keep()
        except ServiceFailed as error:
            print(error, file=sys.stderr, flush=True)
            return 1
        finally:
            self._leave()
            for name in ("worker", "prefect", "kafka"):
                if name in self._services:
                    self._services[name].stop()
        return 0

    def _leave(self) -> None:
        (self._home / home.SERVICES).unlink(missing_ok=True)

    def _keep(self) -> None:
        """Start what is wanted and does not run; say where all is."""
        error = ""
        if (self._home / home.UP).exists():
            try:
                self._start("kafka", lambda: local_services.start_kafka(self._home))
            except ServiceFailed as failed:
                error = str(failed)
        prefect = self._address
        if not prefect:
            self._start("prefect", lambda: local_services.start_prefect(self._home))
            prefect = self._services["prefect"].address
        place = local_services.place_of(Path.cwd())
        self._start("worker", lambda: local_services.start_worker(self._home, prefect, place))
        broker = self._services["kafka"].address if "kafka" in self._services else ""
        said = replace(self._said, prefect=prefect, place=place, broker=broker, error=error, ready=True)
        if said != self._said:
            self._said = said
            home.say(self._home, said)

    def _start(self, name: str, start: Callable[[], Service]) -> None:
        """Nothing while it runs; a service that ran once is tried again for ever, but not in a hurry."""
        before = self._services.get(name)
        if before is not None and before.process.poll() is None:
            return
        if before is not None and clock.monotonic_s() - self._started_at[name] < RESTART_PAUSE_S:
            return
        self._started_at[name] = clock.monotonic_s()
        try:
            self._services[name] = start()
        except (ServiceFailed, HomeInUse) as error:
            if before is None:
                raise ServiceFailed(f"{name}: {error}") from error
            print(f"{name} did not start again: {error}", file=sys.stderr, flush=True)


def main(folder: Path, address: str) -> int:
    """One keeper per home: wait until a former one has ended."""
    with (folder / "keeper.lock").open("w") as lock:
        limit = clock.monotonic_s() + FORMER_KEEPER_S_MAX
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if clock.monotonic_s() > limit:
                return 1
            threading.Event().wait(0.1)
        return Keeper(folder, address, os.getpid()).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
