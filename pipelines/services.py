"""The broker of one run: the given one, that of `dora up`, or one of the run's own that ends with it.

Rule 1: an embedded broker's data lie in the run's folder; if the broker ends in mid-run it is started again there.
Rule 2: a run whose log is in its own folder is resumed there, whatever is up now.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from pipelines import home, local_services
from pipelines.children import RunLock
from pipelines.faults import ServiceFailed
from pipelines.local_services import HomeInUse, Service
from schemas.settings import Settings
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.runtime.log import Log
from workers.transport.records.bus import BusUnavailable

FORMER_OWNER_S_MAX = 20.0
BROKER_CONNECT_S_MAX = 5.0
"""A given broker must answer within this."""
BROKER_RESTARTS_MAX = 5
ON_UP = "on-the-broker-of-dora-up"
"""In the folder of a run whose log is there."""


class Services:
    """`broker` is its address. All calls come from one thread that outlives the broker. Nothing is waited for once
    `stopped` says so."""

    def __init__(
        self, settings: Settings, run_dir: Path, lock: RunLock, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._settings, self._run_dir, self._lock, self._stopped = settings, run_dir, lock, stopped
        self._kafka: Service | None = None
        self._restarts = 0
        self._log = Log("services")
        self.broker = ""

    def start_broker(self) -> None:
        """BadInput if the given address is none; ServiceFailed, StartStopped."""
        self.broker = os.environ.get("DORA_BROKER") or self._settings.broker.address or self._broker_of_up()
        if not self.broker:
            self._kafka = self._start_kafka()
            self.broker = self._kafka.address
        else:
            self._refuse_dead_broker()
        self._lock.note(broker=self.broker)

    def _broker_of_up(self) -> str:
        """Empty if there is none, or if the run's log is in its own folder. BadInput if it is on one that is not up."""
        if (self._run_dir / "kafka").exists():
            return ""
        address = os.environ.get("DORA_PREFECT") or self._settings.prefect.address
        kept = home.kept(home.folder(address)) or home.kept(home.folder())
        mark = self._run_dir / ON_UP
        if kept is not None and kept.broker:
            mark.touch()
            return kept.broker
        if mark.exists():
            raise BadInput(f"the log of run {self._settings.name} is on the broker of `dora up`: start that first")
        return ""

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
        if self._kafka is not None:
            self._kafka.stop()

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
