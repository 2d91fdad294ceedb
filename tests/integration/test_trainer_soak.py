"""A real trainer is killed at many random moments of training, publishing and checkpoint writing; in the end its
weights are those of `dora replay --step all`, which trains the recorded batches one after the other.

DORA_KILLS says how often (`make soak`: 50). A supervisor takes five deaths in ten minutes, so a run has so many.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.archive_checker import Run
from tests.integration.killing import chance, rows_opened_wrongly, steps_of, until
from tests.integration.parts import LIMIT_S, TRAINED
from tests.integration.whole_run import ROOT, Ran, Running, assert_good

KILLS = int(os.environ.get("DORA_KILLS", "5"))
KILLS_PER_RUN = 5
STEPS = 60
pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(300 + 60 * KILLS)]
MOMENTS_S = {"resumed": 0.5, "trained": 0.3, "published": 0.3, "checkpoint_begun": 0.1, "checkpoint": 0.2}
"""What the trainer's log says, and how long after it a kill may come."""


def test_a_trainer_that_is_killed_again_and_again_ends_with_the_weights_of_a_replay(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    while found["kills"] < KILLS:
        number = found["runs"]
        found += _a_run(tmp_path / "runs", chance(f"soak {number}"), min(KILLS_PER_RUN, KILLS - found["kills"]))
        shutil.rmtree(tmp_path / "runs")
    print(f"all: {dict(found)}")


def _a_run(folder: Path, dice: random.Random, kills: int) -> Counter[str]:
    """One run with so many kills; what happened in it, counted."""
    found = Counter(runs=1, kills=kills)
    with TRAINED.run(folder, f"steps={STEPS}") as running:
        for _ in range(kills):
            found += _kill(running, dice)
        ran = running.wait(LIMIT_S)
        assert_good(ran, running, STEPS, faults=True)
    assert ran.summary.faults.restarts == kills
    assert rows_opened_wrongly(ran.run_dir) == []
    again = _replayed(ran)
    assert again["same"], [one for one in again["steps"] if not one["same"]]
    assert [one["step"] for one in again["steps"]] == list(range(STEPS))
    assert again["steps"][-1]["weights"]["again"] == ran.summary.weights.fingerprint_last
    assert [record["lineage"] for record in Run(ran.run_dir).weights.values() if record["lineage"]] == []
    trained = [step for _, step in steps_of(ran.run_dir)]
    found += Counter(steps_trained=len(trained), steps_trained_again=len(trained) - len(set(trained)))
    return found


def _kill(running: Running, dice: random.Random) -> Counter[str]:
    """Wait for something that the trainer says and for a random part of a second, then kill it: where it was caught."""
    event, number = dice.choice(list(MOMENTS_S)), dice.randint(1, 3)
    number = 1 if event == "resumed" else number
    until(lambda: _said(running.run_dir, event) >= number, running, f"{event} for the {number}. time")
    wait_s = dice.random() * MOMENTS_S[event]
    threading.Event().wait(wait_s)
    lives, pid = _lives(running.run_dir), running.worker("trainer")
    os.kill(pid, signal.SIGKILL)
    left = {
        "in a checkpoint's write": list((running.run_dir / "checkpoints").glob(".step-*.tmp")),
        "in a version's write": list((running.run_dir / "weights").glob(".v*.tmp")),
    }
    where = [name for name, paths in left.items() if paths] or ["elsewhere"]
    print(f"kill: {wait_s:.3f} s after {event} for the {number}. time: {', '.join(where)}")
    until(lambda: _lives(running.run_dir) > lives, running, "it is started again")
    return Counter(where)


def _log(run_dir: Path) -> str:
    log = run_dir / "logs" / "trainer.log"
    return log.read_text(errors="replace") if log.exists() else ""


def _lives(run_dir: Path) -> int:
    return len(re.findall(r" INFO trainer started ", _log(run_dir)))


def _said(run_dir: Path, event: str) -> int:
    """How often it said so since it was started last."""
    return len(re.findall(rf" INFO trainer {event} ", _log(run_dir).rsplit(" INFO trainer started ", 1)[-1]))


def _replayed(ran: Ran) -> dict[str, Any]:
    """As a person asks for it, in a process of its own."""
    argv = [sys.executable, "-m", "pipelines.cli", "replay", str(ran.run_dir), "--step", "all", "--json"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode in (0, 1), done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said
