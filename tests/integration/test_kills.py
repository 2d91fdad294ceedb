"""Every process of a run is killed at random or exact moments: the run completes, and nothing is lost or doubled.

What must hold afterwards is `assert_survived`: the archive checker, each prompt once, and the weights of every version
equal to those of training the recorded batches without interruption. What it cost is printed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines.processes import RUN_MARK
from tests.integration import killing
from tests.integration.killing import Death, assert_survived, at_a_random_moment, chance, in_log, until
from tests.integration.parts import LIMIT_S, QUICK, REAL, TRAINED, Parts, process_of, quick, real_engines
from tests.integration.whole_run import MARK, ROOT, Running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def _kill_worker(running: Running, name: str) -> None:
    os.kill(running.worker(name), signal.SIGKILL)


# --- one process at a random moment -----------------------------------------------------------


@real_engines
def test_an_engine_is_killed(parts: Parts, tmp_path: Path) -> None:
    dice = chance("engine")
    with parts.run(tmp_path) as running:
        at = at_a_random_moment(running, dice, parts.steps - 3)
        _kill_worker(running, f"rollout-{dice.randrange(2)}")
        ran = running.wait(LIMIT_S)
        paid = assert_survived(ran, running, parts.steps, [at])
    assert paid.restarts >= 1
    assert ran.summary.faults.engine_lost >= 1


@quick
@pytest.mark.parametrize(
    "name", ["reward-0", *(pytest.param(name, marks=pytest.mark.full) for name in ("archive", "prompts"))]
)
def test_a_worker_is_killed(parts: Parts, name: str, tmp_path: Path) -> None:
    dice = chance(name)
    with parts.run(tmp_path) as running:
        at = at_a_random_moment(running, dice, parts.steps - 3)
        _kill_worker(running, name)
        paid = assert_survived(running.wait(LIMIT_S), running, parts.steps, [at])
    assert paid.restarts >= 1
    assert paid.steps_again == 0


@quick
def test_the_broker_is_killed(parts: Parts, tmp_path: Path) -> None:
    dice = chance("broker")
    with parts.run(tmp_path) as running:
        at = at_a_random_moment(running, dice, parts.steps - 3)
        process_of(running, "kafka.Kafka").kill()
        assert_survived(running.wait(LIMIT_S), running, parts.steps, [at])


@pytest.mark.full
@quick
def test_the_prefect_server_is_killed(parts: Parts, tmp_path: Path) -> None:
    dice = chance("prefect")
    with parts.run(tmp_path, "prefect.enabled=true") as running:
        at = at_a_random_moment(running, dice, parts.steps - 3)
        process_of(running, "prefect", "server", "start").kill()
        paid = assert_survived(running.wait(LIMIT_S), running, parts.steps, [at])
    assert paid.restarts == 0


# --- the trainer at exact moments -------------------------------------------------------------

_LEARNER = "workers.trainer.learners.megatron_learner:MegatronLearner"
_MOMENTS = {
    "before the gradient": (f"{_LEARNER}.train", "before"),
    "after the optimizer step": (f"{_LEARNER}.train", "after"),
    "files written, not announced": ("workers.transport.weights.store:Store.publish", "after"),
    "announced, no checkpoint yet": ("workers.trainer.service:_Trainer._checkpoint", "before"),
    "during the checkpoint write": ("workers.trainer.checkpoint:_files_in", "before"),
    "checkpoint written, no marker": ("workers.trainer.checkpoint:_seal", "before"),
    "checkpoint there, not said": ("workers.trainer.checkpoint:_seal", "after"),
}


def _trainer_deaths(parts: Parts, moments: Sequence[str], folder: Path, dice: random.Random) -> None:
    """The trainer dies at each of these moments, once."""
    deaths = [Death(*_MOMENTS[moment], dice.randint(1, 2)) for moment in moments]
    print(deaths)
    with parts.run(folder, environment=killing.dying(folder / "deaths", *deaths)) as running:
        ran = running.wait(LIMIT_S)
        paid = assert_survived(ran, running, parts.steps, killing.assert_died(folder / "deaths", *deaths))
    assert paid.restarts >= len(deaths)


def test_the_trainer_dies_in_the_middle(tmp_path: Path) -> None:
    """At one of the moments; each of them with real engines is below."""
    dice = chance("trainer")
    _trainer_deaths(TRAINED, [dice.choice(list(_MOMENTS))], tmp_path, dice)


@pytest.mark.full
@pytest.mark.parametrize("moment", _MOMENTS)
def test_the_trainer_of_real_parts_dies_in_the_middle(moment: str, tmp_path: Path) -> None:
    _trainer_deaths(REAL, [moment], tmp_path, chance(f"trainer {moment}"))


# --- the orchestrator at exact moments --------------------------------------------------------


@quick
def test_the_orchestrator_dies_before_a_commit_after_one_and_between_polls(parts: Parts, tmp_path: Path) -> None:
    dice = chance("orchestrator")
    sender = "workers.transport.records.kafka_clients:KafkaSender"
    hands = "workers.orchestrator.service:Hands"
    deaths = [
        Death(f"{sender}.commit", "before", dice.randint(5, 20)),
        Death(f"{sender}.commit", "after", dice.randint(5, 20)),
        Death(f"{hands}.turn", "after", dice.randint(5, 25)),
    ]
    print(deaths)
    with parts.run(tmp_path, environment=killing.dying(tmp_path / "deaths", *deaths)) as running:
        ran = running.wait(LIMIT_S)
        paid = assert_survived(ran, running, parts.steps, killing.assert_died(tmp_path / "deaths", *deaths))
    assert paid.restarts >= len(deaths)


# --- late and second ones ---------------------------------------------------------------------


@pytest.mark.full
@real_engines
def test_an_engine_that_wakes_up_after_it_was_given_up_is_not_heard(parts: Parts, tmp_path: Path) -> None:
    """Engine and supervisor hang (SIGSTOP) for longer than the engine's timeout; the engine wakes up first and talks.
    Woken first, the supervisor would kill it at once."""
    dice = chance("late engine")
    steps = parts.steps + 12  # the others go on meanwhile, but must not come to the end
    with parts.run(tmp_path, "engines.timeout_s=8.0", f"steps={steps}") as running:
        at = at_a_random_moment(running, dice, 3)
        engine = running.worker("rollout-1")
        running.popen.send_signal(signal.SIGSTOP)
        os.kill(engine, signal.SIGSTOP)
        until(lambda: in_log(running.run_dir, "orchestrator", "engine_lost engine=1"), running, "it is given up")
        os.kill(engine, signal.SIGCONT)
        threading.Event().wait(3.0)  # it says what it has to say: a heartbeat each second
        running.popen.send_signal(signal.SIGCONT)
        ran = running.wait(LIMIT_S)
        assert_survived(ran, running, steps, [at])
    late = [words for words in killing.late_words(ran.run_dir) if words.engine == 1]
    assert any(words.kinds for words in late), late
    print(f"late words: {[(words.incarnation, len(words.kinds)) for words in late]}")
    assert "killing_lost_engine process=rollout-1" in (ran.run_dir / "logs" / "supervisor.log").read_text()


@pytest.mark.full
@quick
def test_of_two_orchestrators_the_older_is_fenced_and_says_so(parts: Parts, tmp_path: Path) -> None:
    """A second one by hand takes over; the supervisor starts the first again, which takes over from the second."""
    dice = chance("two orchestrators")
    steps = 3 * parts.steps  # the second one must not come to the end of the run before it is fenced in its turn
    with parts.run(tmp_path, f"steps={steps}") as running:
        at = at_a_random_moment(running, dice, parts.steps)
        said = json.loads((running.run_dir / "supervisor.json").read_text())
        argv = [sys.executable, "-m", "pipelines.cli", "worker", "orchestrator", "--run-dir", str(running.run_dir)]
        output = tmp_path / "second.txt"
        with output.open("wb") as sink:
            environment = {**os.environ, MARK: running.mark, RUN_MARK: str(running.run_dir)}
            second = subprocess.Popen(
                [*argv, "--broker", said["broker"]], cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT
            )
        assert second.wait(60.0) == 1, output.read_text()
        ran = running.wait(LIMIT_S)
        paid = assert_survived(ran, running, steps, [at])
    assert paid.restarts >= 1
    for text in (output.read_text(), (ran.run_dir / "logs" / "orchestrator.log").read_text()):
        assert "another orchestrator of this run has taken over" in text, text


@pytest.mark.full
@pytest.mark.parametrize(
    ("parts", "engine"),
    [
        pytest.param(QUICK, "paced_engine:PacedEngine", id="quick"),
        pytest.param(REAL, "vllm_engine:VllmEngine", marks=pytest.mark.full, id="real"),
    ],
)
def test_an_engine_dies_while_it_loads_a_version(parts: Parts, engine: str, tmp_path: Path) -> None:
    """A09: its requests go elsewhere, and the run's view says so."""
    dice = chance("loading")
    death = Death(f"workers.rollout.engines.{engine}.load", "before", dice.randint(1, 3))
    with parts.run(tmp_path, environment=killing.dying(tmp_path / "deaths", death)) as running:
        until(lambda: death.file(tmp_path / "deaths").exists(), running, str(death))
        until(lambda: _status(running)["engines_lost"] >= 1, running, "the view says so", 30.0)
        ran = running.wait(LIMIT_S)
        assert_survived(ran, running, parts.steps, killing.assert_died(tmp_path / "deaths", death))
    assert ran.summary.faults.engine_lost >= 1


def _status(running: Running) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((running.run_dir / "status.json").read_text())
    return said
