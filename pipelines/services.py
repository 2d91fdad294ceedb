"""The services of one run: the given ones, or local ones that end with it.

Rule 1: an embedded broker's data lie in the run's folder; if the broker ends in mid-run it is started again there.
Rule 2: one Prefect server serves all runs of a checkout (`.run/`); a run that finds one uses it. Without one a run
is the same run.
"""

import json
import os
import threading
from pathlib import Path

from pipelines import local_services
from pipelines.children import RunLock
from pipelines.local_services import HomeInUse, Service, ServiceFailed
from schemas.settings import Settings
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.runtime.log import Log

SHARED = Path(".run")
FORMER_OWNER_S_MAX = 20.0
_PREFECT_CLIENT = {
    "PREFECT_CLIENT_MAX_RETRIES": "2",  # a server that is away must not hold up the end of a run for minutes
    "PREFECT_LOGGING_LEVEL": "CRITICAL",  # the terminal is ours; logs are in the run's folder
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
}


class Services:
    """`broker` and `prefect` are addresses ("" = none). All calls come from one thread that outlives the services."""

    def __init__(self, settings: Settings, run_dir: Path, lock: RunLock) -> None:
        self._settings, self._run_dir, self._lock = settings, run_dir, lock
        self._kafka: Service | None = None
        self._prefect: Service | None = None
        self._log = Log("services")
        self.broker = ""
        self.prefect = ""

    def start_broker(self) -> None:
        """BadInput if the given address is none; ServiceFailed."""
        self.broker = os.environ.get("DORA_BROKER") or self._settings.broker.address
        if not self.broker:
            self._kafka = self._start_kafka()
            self.broker = self._kafka.address
        elif ":" not in self.broker:
            raise BadInput(f"broker.address: {self.broker!r} is no host:port")
        self._lock.note(broker=self.broker)

    def start_prefect(self) -> None:
        """Nothing if it is switched off or does not start: the run does not need it."""
        if not self._settings.prefect.enabled:
            return
        self.prefect = os.environ.get("DORA_PREFECT") or self._settings.prefect.address
        if not self.prefect:
            SHARED.mkdir(exist_ok=True)
            try:
                self._prefect = local_services.start_prefect(SHARED)
                self.prefect = self._prefect.address
            except HomeInUse:
                self.prefect = _address_in(SHARED / "prefect.lock")
            except ServiceFailed as error:
                self._log.warning("no_prefect", error=error)
                return
            os.environ["PREFECT_HOME"] = str((SHARED / "prefect").resolve())
        os.environ["PREFECT_API_URL"] = self.prefect
        os.environ |= _PREFECT_CLIENT
        self._lock.note(prefect=self.ui)

    @property
    def ui(self) -> str:
        """Where people look."""
        return self.prefect.removesuffix("/api")

    def keep(self) -> None:
        """Start the embedded broker again if it ended. ServiceFailed."""
        if self._kafka is not None and self._kafka.process.poll() is not None:
            self._log.warning("broker_ended", code=self._kafka.process.returncode)
            self._kafka = self._start_kafka()
            assert self._kafka.address == self.broker, "a home keeps its ports"

    def stop(self) -> None:
        for service in (self._kafka, self._prefect):
            if service is not None:
                service.stop()

    def _start_kafka(self) -> Service:
        """A broker whose supervisor was killed may take a moment to end."""
        limit = clock.monotonic_s() + FORMER_OWNER_S_MAX
        while True:
            try:
                service = local_services.start_kafka(self._run_dir)
                self._lock.add("kafka", service.pid)
                return service
            except HomeInUse:
                if clock.monotonic_s() > limit:
                    raise
                threading.Event().wait(0.5)


def _address_in(lock: Path) -> str:
    """The address that a live server's lock file says; "" while it is starting."""
    try:
        return str(json.loads(lock.read_text()).get("address", ""))
    except (json.JSONDecodeError, FileNotFoundError):
        return ""
