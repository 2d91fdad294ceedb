"""Every process of a run with `prometheus.port` answers Prometheus while it runs, with figures of its own."""

import socket
import threading
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.parts import LIMIT_S, QUICK
from tests.integration.whole_run import assert_good
from workers.runtime import clock
from workers.runtime.metrics import ADDRESS

pytestmark = [pytest.mark.integration, pytest.mark.full]
FIRST_OF = {
    "archive": "process_resident_memory_bytes",
    "orchestrator": "dora_orchestrator_version",
    "trainer": "dora_trainer_loss",
    "prompts": "process_resident_memory_bytes",
    "reward-0": "dora_reward_scored",
    "rollout-0": "dora_rollout_tokens",
    "rollout-1": "dora_rollout_tokens",
}


def _free_ports(count: int) -> int:
    """The first of so many that are free side by side."""
    for first in range(21000, 60000, count):
        with closing(socket.socket()) as probe:
            try:
                probe.bind((ADDRESS, first))
            except OSError:
                continue
        return first
    raise AssertionError("no free ports")


def test_every_process_of_a_run_shows_its_figures(tmp_path: Path) -> None:
    port = _free_ports(len(FIRST_OF))
    missing = {name: (port + place, figure) for place, (name, figure) in enumerate(FIRST_OF.items())}
    with QUICK.run(tmp_path, f"prometheus.port={port}", "steps=40", "engines.count=2") as running:
        end, pause = clock.monotonic_s() + LIMIT_S, threading.Event()
        while missing:
            assert running.popen.poll() is None, f"it ended; not seen: {missing}\n{running.story()}"
            assert clock.monotonic_s() < end, f"not seen: {missing}\n{running.story()}"
            missing = {name: place for name, place in missing.items() if not _shows(*place)}
            pause.wait(0.1)
        assert_good(running.wait(LIMIT_S), running, 40)


def _shows(port: int, figure: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{ADDRESS}:{port}/metrics", timeout=5) as answer:
            return f"\n{figure}" in answer.read().decode()
    except (urllib.error.URLError, OSError):
        return False
