"""Runs that stop in the middle, by hand or by force, and are resumed: nothing is lost or doubled."""

import json
import shutil
import signal
import threading
from pathlib import Path

import pytest

from tests.integration import killing
from tests.integration.killing import assert_survived, at_a_random_moment, chance, in_log, until, until_step
from tests.integration.parts import LIMIT_S, QUICK, REAL, Parts, process_of, quick, trained
from tests.integration.whole_run import Running
from workers.runtime import clock

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.mark.full
@quick
def test_the_supervisor_is_killed_and_the_run_is_resumed(parts: Parts, tmp_path: Path) -> None:
    dice = chance("supervisor")
    with parts.run(tmp_path) as before:
        at = at_a_random_moment(before, dice, parts.steps - 3)
        before.popen.kill()
        before.popen.wait()
        with parts.run(tmp_path, resume=True) as running:
            assert_survived(running.wait(LIMIT_S), running, parts.steps, [at])
        assert before.processes() == []


@pytest.mark.full
@quick
def test_without_their_supervisor_all_processes_end(parts: Parts, tmp_path: Path) -> None:
    """Nobody resumes: what waits for a log that has gone gives up."""
    dice = chance("orphans")
    with parts.run(tmp_path) as running:
        at_a_random_moment(running, dice, parts.steps - 3)
        running.popen.kill()
        running.popen.wait()
        began = clock.monotonic_s()
        while left := running.processes():
            assert clock.monotonic_s() - began < 30.0, [" ".join(process.cmdline()) for process in left]
            threading.Event().wait(0.1)
        print(f"all ended after {clock.monotonic_s() - began:.1f} s")


@trained
def test_everything_is_killed_at_once_and_the_run_is_resumed(parts: Parts, tmp_path: Path) -> None:
    dice = chance("all")
    with parts.run(tmp_path) as before:
        at = at_a_random_moment(before, dice, parts.steps - 3)
        killing.kill_all(before)
        assert before.processes() == []
    with parts.run(tmp_path, resume=True) as running:
        assert_survived(running.wait(LIMIT_S), running, parts.steps, [at])


@pytest.mark.parametrize(
    ("parts", "stops"), [pytest.param(QUICK, 2, id="quick"), pytest.param(REAL, 5, marks=pytest.mark.full, id="real")]
)
def test_sigint_leaves_nothing_after_10_s_and_the_run_is_resumed(parts: Parts, stops: int, tmp_path: Path) -> None:
    """G01, G02, G04: stopped and resumed again and again, no prompt is skipped, none doubled; the newest checkpoint and
    the newest weights may be lost meanwhile. A stop is no fault."""
    dice = chance("sigint")
    for stop in range(stops):
        with parts.run(tmp_path, resume=stop > 0) as running:
            _ask_to_stop(running, stop + 1, dice.randint(1, parts.steps - 2) * (stop + 1) // stops)
        _lose(running.run_dir, "checkpoint" if stop % 2 == 0 else "weights")
    with parts.run(tmp_path, resume=True) as running:
        ran = running.wait(LIMIT_S)
        assert_survived(ran, running, parts.steps)
    assert (ran.summary.faults.engine_lost, ran.summary.faults.restarts) == (0, 0)


@pytest.mark.full
@quick
def test_sigint_while_the_broker_is_away_leaves_nothing_after_10_s_and_the_run_is_resumed(
    parts: Parts, tmp_path: Path
) -> None:
    dice = chance("sigint without broker")
    with parts.run(tmp_path) as running:
        at = at_a_random_moment(running, dice, parts.steps - 3)
        process_of(running, "kafka.Kafka").kill()
        until(lambda: in_log(running.run_dir, "supervisor", "broker_ended"), running, "the supervisor sees it")
        asked = clock.monotonic_s()
        running.popen.send_signal(signal.SIGINT)
        assert running.wait(40.0).code == 130
        assert running.processes() == []
        assert clock.monotonic_s() - asked < 10.0
    with parts.run(tmp_path, resume=True) as running:
        assert_survived(running.wait(LIMIT_S), running, parts.steps, [at])


@pytest.mark.full
def test_sigint_while_it_starts_is_heard_and_the_run_is_resumed(tmp_path: Path) -> None:
    """At a random moment of the start, before there is anything to watch."""
    parts = Parts("paced", 2)
    dice = chance("early sigint")
    with parts.run(tmp_path) as running:
        until((running.run_dir / "supervisor.json").exists, running, "it claims its folder")
        threading.Event().wait(dice.random() * 4.0)
        asked = clock.monotonic_s()
        running.popen.send_signal(signal.SIGINT)
        ran = running.wait(40.0)
        took = clock.monotonic_s() - asked
        print(f"stopped within {took:.1f} s")
        assert (ran.code, running.processes()) == (130, []), ran.said
        assert took < 10.0
    with parts.run(tmp_path, resume=True) as running:
        assert_survived(running.wait(LIMIT_S), running, parts.steps)


def _ask_to_stop(running: Running, start: int, step: int) -> None:
    """SIGINT once this step is trained and the trainer is up for the `start`-th time, and what must be true then."""
    log = running.run_dir / "logs" / "trainer.log"
    until(lambda: log.exists() and log.read_text().count("trainer resumed ") >= start, running, "the trainer is up")
    until_step(running, step)
    asked = clock.monotonic_s()
    running.popen.send_signal(signal.SIGINT)
    ran = running.wait(40.0)
    took = clock.monotonic_s() - asked
    print(f"stopped after step {step} within {took:.1f} s")
    assert (ran.code, running.processes()) == (130, []), ran.said
    assert "--resume" in ran.said
    assert took < 10.0
    made = ran.summary.trajectories
    assert made.generated >= made.trained or "the archive was cut short" in ran.said, made


def _lose(run_dir: Path, what: str) -> None:
    """A byte of the newest checkpoint, or the newest version."""
    if what == "weights":
        shutil.rmtree(max((run_dir / "weights").glob("v*")))
    elif folders := list((run_dir / "checkpoints").glob("step-*")):
        files = [file for file in max(folders).rglob("*") if file.is_file() and file.suffix != ".json"]
        largest = max(files, key=lambda file: file.stat().st_size)
        value = bytearray(largest.read_bytes())
        value[len(value) // 2] ^= 1
        largest.write_bytes(value)


# --- cases with real processes ----------------------------------------------------------------

_POISON = """\
import os, threading
from pathlib import Path
from workers.reward.verdict import ids_only

SEEN = Path(__file__).with_name("poisoned")


@ids_only
def grade(item):
    said = " ".join(map(str, item.response_ids))
    if item.answer == "poison":
        try:
            with SEEN.open("x") as file:
                file.write(said)
        except FileExistsError:
            pass
        if SEEN.read_text() in ("", said):
            threading.Event().wait()
    return sum(token % 2 == 0 for token in item.response_ids) / len(item.response_ids)
"""


@pytest.mark.full
def test_a_resumed_run_gets_past_a_prompt_of_which_one_answer_is_graded_for_ever(tmp_path: Path) -> None:
    """A02: one member of a group of 8 sleeps for ever; checkpoint; resume. (Its row is none that the check tries.)"""
    (tmp_path / "poison.py").write_text(_POISON)
    rows = [{"prompt": f"say {number}", "answer": "poison" if number == 5 else "fine"} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (
        f'dataset=[{{path = "{tmp_path}/rows.jsonl", grader = "poison:grade"}}]',
        "evaluation.samples=0",
        "group_size=8",
        "groups_per_batch=2",
        "reward.timeout_s=3.0",
        "training.checkpoint_every=1",
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    with QUICK.run(tmp_path, *more, environment=environment) as running:
        until((tmp_path / "poisoned").exists, running, "the poison prompt is graded")
        until(lambda: in_log(running.run_dir, "trainer", "checkpoint step="), running, "a checkpoint")
        running.popen.send_signal(signal.SIGINT)
        assert running.wait(40.0).code == 130
    with QUICK.run(tmp_path, *more, environment=environment, resume=True) as running:
        ran = running.wait(LIMIT_S)
        assert_survived(ran, running, QUICK.steps)
    assert ran.summary.groups.voided.get("failed", 0) >= 1
    assert "void group=" in (ran.run_dir / "logs" / "orchestrator.log").read_text()
