"""A whole `dora run` with paced parts on a real broker and under a real Prefect server: end, faults, stop, resume."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.integration.whole_run import Running, assert_good, dora_run
from workers.runtime import clock

pytestmark = pytest.mark.integration
START_LIMIT_S = 120.0


def _until_step(running: Running, step: int) -> None:
    """Wait until the run has trained that many steps or more."""
    limit = clock.monotonic_s() + START_LIMIT_S
    while _step(running) < step:
        assert running.popen.poll() is None, running._story()
        assert clock.monotonic_s() < limit, running._story()
        threading.Event().wait(0.1)


def _step(running: Running) -> int:
    file = running.run_dir / "status.json"
    return int(json.loads(file.read_text())["step"]) if file.exists() else 0


def test_a_paced_run_under_prefect_ends_well_and_leaves_nothing_running(tmp_path: Path) -> None:
    with dora_run("paced", tmp_path) as running:
        ran = running.wait()
        assert_good(ran, running, steps=8)
    assert "Prefect UI http://127.0.0.1:" in ran.said
    assert ran.summary.groups.trained == 32
    assert ran.summary.lag.max <= 2
    assert (ran.run_dir / "metrics.parquet").is_file()


def test_an_engine_killed_in_mid_run_costs_nothing_but_time(tmp_path: Path) -> None:
    with dora_run("paced", tmp_path, "prefect.enabled=false", "steps=20") as running:
        _until_step(running, 2)
        os.kill(running.worker("rollout-1"), signal.SIGKILL)
        ran = running.wait()
        assert_good(ran, running, steps=20, faults=True)
    assert ran.summary.faults.restarts >= 1
    assert ran.summary.faults.engine_lost >= 1


def test_sigint_stops_within_seconds_and_resume_ends_the_run(tmp_path: Path) -> None:
    with dora_run("paced", tmp_path, "prefect.enabled=false", "steps=20") as running:
        _until_step(running, 3)
        running.popen.send_signal(signal.SIGINT)
        ran = running.wait(40.0)
        assert ran.code == 130, ran.said
        assert "--resume" in ran.said
        assert running.processes() == []
    with dora_run("paced", tmp_path, "prefect.enabled=false", "steps=20", resume=True) as running:
        assert_good(running.wait(), running, steps=20, faults=True)


def _kill(running: Running, *words: str) -> None:
    """SIGKILL to the process of this run whose command line has these words."""
    (found,) = [p for p in running.processes() if all(word in " ".join(p.cmdline()) for word in words)]
    found.kill()


@pytest.mark.full
def test_a_prefect_server_killed_in_mid_run_changes_nothing(tmp_path: Path) -> None:
    with dora_run("paced", tmp_path, "steps=20") as running:
        _until_step(running, 2)
        _kill(running, "prefect", "server", "start")
        assert_good(running.wait(), running, steps=20)


@pytest.mark.full
def test_a_broker_killed_in_mid_run_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    with dora_run("paced", tmp_path, "prefect.enabled=false", "steps=20") as running:
        _until_step(running, 2)
        _kill(running, "kafka.Kafka")
        assert_good(running.wait(), running, steps=20, faults=True)


@pytest.mark.full
def test_the_run_of_a_killed_supervisor_is_resumed_and_what_was_left_running_is_cleared(tmp_path: Path) -> None:
    with dora_run("paced", tmp_path, "prefect.enabled=false", "steps=20") as before:
        _until_step(before, 2)
        before.popen.kill()
        before.popen.wait()
        with dora_run("paced", tmp_path, "prefect.enabled=false", "steps=20", resume=True) as running:
            assert_good(running.wait(), running, steps=20, faults=True)
        assert before.processes() == []
