"""The services of a run, with small fake processes for the broker."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.children import RunLock
from pipelines.faults import ServiceFailed
from pipelines.local_services import Service
from pipelines.services import BROKER_RESTARTS_MAX, Services
from tests.unit.pipeline_parts import some_settings


def test_a_broker_that_ends_is_started_again_without_waiting_for_it_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []

    def start_kafka(home: Path, *, wait: bool = True, stopped: Callable[[], bool]) -> Service:
        assert not stopped()
        waited.append(wait)
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait(60.0)
        return Service("kafka", "127.0.0.1:9", ended.pid, home / "kafka.log", ended)

    monkeypatch.setattr("pipelines.local_services.start_kafka", start_kafka)
    lock = RunLock(tmp_path)
    lock.take()
    services = Services(some_settings(tmp_path), tmp_path, lock)
    services.start_broker()
    for _ in range(BROKER_RESTARTS_MAX):
        services.keep()
    assert waited == [True] + [False] * BROKER_RESTARTS_MAX
    with pytest.raises(ServiceFailed, match="the broker ended 6 times"):
        services.keep()
