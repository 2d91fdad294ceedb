"""The process of a flow run, as the worker starts it: takes the environment that was asked for, then is Prefect's.

Rule 1: it leads a session of its own: a worker that ends, or is killed with its group, takes no run with it.
Rule 2: it is a user of the home's services until it ends, and says who it is before anything slow happens.
"""

import os
import sys
import threading

from pipelines import home
from pipelines.children import identity_of, is_alive
from workers.runtime import clock

KEPT = ("PREFECT_", home.LAUNCH_VARIABLE, home.HOME_VARIABLE)
"""Of the worker's environment, whatever was asked for."""

FORMER_S_MAX = 330.0
"""A suspended run stops its trainer and archive at their limits, 300 s together."""


def _wait_for_former(launch: home.Launch) -> None:
    """Who presses Resume at once meets the process that is still stopping."""
    former = launch.noted("process")
    limit = clock.monotonic_s() + FORMER_S_MAX
    while former is not None and is_alive(former) and clock.monotonic_s() < limit:
        threading.Event().wait(0.2)


def main() -> None:
    """Never returns: the same process goes on as Prefect's engine."""
    if os.getpid() != os.getpgrp():
        os.setsid()
    name = os.environ.setdefault(home.LAUNCH_VARIABLE, os.environ["PREFECT__FLOW_RUN_ID"])
    folder = home.folder()
    home.join(folder, os.getpid())
    launch = home.Launch(folder, name)
    _wait_for_former(launch)
    launch.forget("ended")
    launch.note("process", **identity_of(os.getpid()))
    given = {key: value for key, value in os.environ.items() if key.startswith(KEPT)}
    environment = launch.asked().get("environment", dict(os.environ)) | given
    os.execve(sys.executable, [sys.executable, "-m", "prefect.engine"], environment)


if __name__ == "__main__":
    main()
