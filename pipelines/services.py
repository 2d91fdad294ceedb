"""The services of one run: the given ones, or local ones that end with it.

Rule 1: an embedded broker's data lie in the run's folder; if the broker ends in mid-run it is started again there.
Rule 2: one Prefect server serves all runs of a checkout (`.run/`); a run that finds one uses it. Without one a run
is the same run.
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from pipelines import local_services
from pipelines.children import RunLock
from pipelines.local_services import HomeInUse, Service, ServiceFailed
from schemas.settings import Settings
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.runtime.log import Log
from workers.transport.records.bus import BusUnavailable

SHARED = Path(".run")
FORMER_OWNER_S_MAX = 20.0
BROKER_CONNECT_S_MAX = 5.0
"""A given broker must answer within this."""
BROKER_RESTARTS_MAX = 5
_PREFECT_CLIENT = {
    "PREFECT_CLIENT_MAX_RETRIES": "2",  # a server that is away must not hold up the end of a run for minutes
    "PREFECT_LOGGING_LEVEL": "CRITICAL",  # the terminal is ours; logs are in the run's folder
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
}


class Services:
    """`broker` and `prefect` are addresses ("" = none). All calls come from one thread that outlives the services.
    Nothing is waited for once `stopped` says so."""

    def __init__(
        self, settings: Settings, run_dir: Path, lock: RunLock, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._settings, self._run_dir, self._lock, self._stopped = settings, run_dir, lock, stopped
        self._kafka: Service | None = None
        self._prefect: Service | None = None
        self._restarts = 0
        self._log = Log("services")
        self.broker = ""
        self.prefect = ""

    def start_broker(self) -> None:
        """BadInput if the given address is none; ServiceFailed, StartStopped."""
        self.broker = os.environ.get("DORA_BROKER") or self._settings.broker.address
        if not self.broker:
            self._kafka = self._start_kafka()
            self.broker = self._kafka.address
        else:
            self._refuse_dead_broker()
        self._lock.note(broker=self.broker)

    def _refuse_dead_broker(self) -> None:
        """A wrong address is a person's mistake, and is said soon."""
        key = "DORA_BROKER (over broker.address)" if os.environ.get("DORA_BROKER") else "broker.address"
        for place in self.broker.split(","):
            host, colon, port = place.strip().rpartition(":")
            if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
                raise BadInput(f"{key}: {place!r} is no host:port")
        from workers.transport.records.kafka_bus import KafkaBus

        limit = min(BROKER_CONNECT_S_MAX, self._settings.broker.timeout_s)
        try:
            KafkaBus(self.broker, self._settings.kafka, self._settings.broker.replication, limit).close()
        except BusUnavailable as error:
            raise BadInput(f"{key}: {error}; correct it, or leave it empty for a broker of the run's own") from error

    def start_prefect(self) -> None:
        """Nothing if it is switched off or does not start: the run does not need it."""
        if not self._settings.prefect.enabled:
            return
        self.prefect = os.environ.get("DORA_PREFECT") or self._settings.prefect.address
        if not self.prefect:
            SHARED.mkdir(exist_ok=True)
            try:
                self._prefect = local_services.start_prefect(SHARED, stopped=self._stopped)
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
        """Start the embedded broker again if it ended; never wait for it, a stop must be heard meanwhile.
        ServiceFailed."""
        if self._kafka is None or self._kafka.process.poll() is None:
            return
        self._log.warning("broker_ended", code=self._kafka.process.returncode)
        self._restarts += 1
        if self._restarts > BROKER_RESTARTS_MAX:
            raise ServiceFailed(f"the broker ended {self._restarts} times; see {self._kafka.log}")
        self._kafka = self._start_kafka(wait=False)
        assert self._kafka.address == self.broker, "a home keeps its ports"

    def stop(self) -> None:
        for service in (self._kafka, self._prefect):
            if service is not None:
                service.stop()

    def _start_kafka(self, *, wait: bool = True) -> Service:
        """A broker whose supervisor was killed may take a moment to end."""
        limit = clock.monotonic_s() + FORMER_OWNER_S_MAX
        while True:
            try:
                service = local_services.start_kafka(self._run_dir, wait=wait, stopped=self._stopped)
                self._lock.add("kafka", service.pid)
                return service
            except HomeInUse:
                if clock.monotonic_s() > limit or self._stopped():
                    raise
                threading.Event().wait(0.5)


def _address_in(lock: Path) -> str:
    """The address that a live server's lock file says; "" while it is starting."""
    try:
        return str(json.loads(lock.read_text()).get("address", ""))
    except (json.JSONDecodeError, FileNotFoundError):
        return ""
