"""`dora replay --to`, as people use it: a run that has ended is said again on another broker, and a trainer started by
hand on that ends with the weights of the run."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parts import LIMIT_S, TRAINED
from tests.integration.whole_run import ROOT, assert_good
from workers.runtime import clock
from workers.transport.records.kafka_bus import KafkaBus

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * LIMIT_S)]


def _dora(*argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pipelines.cli", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.full
def test_a_fresh_trainer_on_a_run_that_was_said_again_ends_with_its_weights(
    tmp_path: Path, broker_address: str
) -> None:
    with TRAINED.run(tmp_path / "runs", name="original") as running:
        ran = running.wait(LIMIT_S)
        assert_good(ran, running, TRAINED.steps)
    topics = ("--topic", "batches", "--topic", "trajectories")
    done = _dora("replay", str(ran.run_dir), "--to", broker_address, *topics, "--json")
    assert done.returncode == 0, done.stderr
    again: dict[str, Any] = json.loads(done.stdout)
    assert again["records"]["batches"] == TRAINED.steps
    _train(Path(again["run_dir"]), broker_address, tmp_path / "trainer.log")
    assert _fingerprints(broker_address, again["as"])[TRAINED.steps] == ran.summary.weights.fingerprint_last
    taken = _dora("replay", str(ran.run_dir), "--to", broker_address, "--as", again["as"])
    assert taken.returncode == 2
    assert "choose another name" in taken.stderr


def _train(run_dir: Path, broker: str, log: Path) -> None:
    """A trainer started by hand, until it has made the last version."""
    argv = [sys.executable, "-m", "pipelines.cli", "worker", "trainer", "--run-dir", str(run_dir), "--broker", broker]
    with log.open("wb") as sink:
        trainer = subprocess.Popen(argv, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=sink)
    try:
        limit = clock.monotonic_s() + LIMIT_S
        while f"published version={TRAINED.steps} " not in log.read_text():
            assert trainer.poll() is None, log.read_text()
            assert clock.monotonic_s() < limit, log.read_text()
            threading.Event().wait(0.05)
        trainer.terminate()
        assert trainer.wait(LIMIT_S) == 0, log.read_text()
    finally:
        trainer.kill()
        trainer.wait()


def _fingerprints(address: str, name: str) -> dict[int, str]:
    bus = KafkaBus(address, {}, 1, 30.0)
    reader = bus.reader()
    reader.add(f"dora.{name}.weights", 0, "earliest")
    found = {}
    while not reader.at_end():
        for record in reader.poll(200):
            said = json.loads(record.value)
            found[said["version"]] = said["fingerprint"]
    reader.close()
    bus.close()
    return found


def test_a_broker_that_is_not_there_is_said(tmp_path: Path) -> None:
    """In a few seconds, not in the half minute that a run waits."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.toml").write_text((ROOT / "configs" / "paced.toml").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        done = _dora("replay", str(tmp_path / "r"), "--to", address)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"no Kafka broker answers at {address} (waited 5 s)")
