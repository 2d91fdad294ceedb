"""Deaths for whole runs: at random moments from outside, at exact ones from inside; what they cost; and whether the
weights are those of training that nothing interrupted.

Rule 1: the product has no hook. A process dies at an exact moment because the run's PYTHONPATH has a `sitecustomize.py`
of ours, which wraps the named function; each named death happens once (its file says when).
Rule 2: `trained_straight` reads the archive alone, and trains with a learner of its own.
"""

import contextlib
import json
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil

from schemas.settings import Settings
from tests.archive_checker import Run
from tests.integration.whole_run import Ran, Running, assert_good
from workers.runtime import clock
from workers.trainer.learners.base import Learner
from workers.trainer.learners.paced_learner import PacedLearner
from workers.trainer.samples import samples_of
from workers.transport.weights.manifest import fingerprint

START_LIMIT_S = 150.0
_TRAINED = re.compile(r"^(\S+)Z INFO trainer trained step=(\d+) ", re.MULTILINE)

_SITECUSTOMIZE = '''\
"""Kills this process at named moments: DORA_TEST_DIE = "module|function|before or after|n-th call|file|within;..."."""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time

_ALL = [text.split("|") for text in os.environ.get("DORA_TEST_DIE", "").split(";") if text]
_DEATHS = [death for *death, within in _ALL if within in sys.orig_argv or not within]
_MODULES = {module for module, *_ in _DEATHS}


def _die(file):
    try:
        seen = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(seen, str(time.time()).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def _wrap(module, function, when, number, file):
    *path, name = function.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if when == "before" and len(calls) == number:
            _die(file)
        answer = real(*args, **kwargs)
        if when == "after" and len(calls) == number:
            _die(file)
        return answer

    setattr(owner, name, wrapped)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for named, function, when, number, file in _DEATHS:
                if named == name:
                    _wrap(module, function, when, int(number), file)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
'''


@dataclass(frozen=True, slots=True)
class Death:
    """SIGKILL by its own hand before or after the `number`-th call of `module:function` in one process; `within` a
    word of its command line, if there is one."""

    where: str
    when: str
    number: int
    within: str = ""

    def file(self, folder: Path) -> Path:
        return folder / "".join(c if c.isalnum() else "-" for c in f"{self.where}-{self.when}-{self.number}")


def dying(folder: Path, *deaths: Death) -> dict[str, str]:
    """The environment in which processes of a run die so; `folder` keeps what happened."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    texts = [
        "|".join([*death.where.split(":"), death.when, str(death.number), str(death.file(folder)), death.within])
        for death in deaths
    ]
    return {"DORA_TEST_DIE": ";".join(texts), "PYTHONPATH": str(folder)}


def assert_died(folder: Path, *deaths: Death) -> list[float]:
    """Each of them happened; when (seconds since 1970)."""
    missing = [death for death in deaths if not death.file(folder).exists()]
    assert missing == [], f"these moments never came: {missing}"
    return [float(death.file(folder).read_text()) for death in deaths]


def chance(test: str) -> random.Random:
    """Random moments: the same ones again with DORA_SEED."""
    seed = os.environ.get("DORA_SEED") or str(random.SystemRandom().randrange(10**6))
    print(f"\n{test}: DORA_SEED={seed}")
    return random.Random(f"{seed}/{test}")


def until(true: Callable[[], bool], running: Running, what: str, limit_s: float = START_LIMIT_S) -> None:
    """Wait for it; AssertionError with the run's story if it does not come or the run ends before."""
    limit = clock.monotonic_s() + limit_s
    while not true():
        assert running.popen.poll() is None, f"the run ended before: {what}\n{running.story()}"
        assert clock.monotonic_s() < limit, f"not within {limit_s:.0f} s: {what}\n{running.story()}"
        threading.Event().wait(0.02)


def steps_of(run_dir: Path) -> list[tuple[float, int]]:
    """(seconds since 1970, step) of everything that the trainer trained, steps trained again included."""
    log = run_dir / "logs" / "trainer.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return [(datetime.fromisoformat(at + "+00:00").timestamp(), int(step)) for at, step in _TRAINED.findall(text)]


def until_step(running: Running, step: int) -> None:
    """Wait until this step is trained."""
    until(lambda: any(s >= step for _, s in steps_of(running.run_dir)), running, f"step {step}")


def at_a_random_moment(running: Running, dice: random.Random, last_step: int) -> float:
    """Wait for a random step of 1 .. `last_step`, then for a random part of a step's time; now (since 1970)."""
    step = dice.randint(1, last_step)
    until_step(running, step)
    times = [at for at, _ in steps_of(running.run_dir)]
    usual = (times[-1] - times[0]) / max(1, len(times) - 1)
    wait_s = dice.random() * min(5.0, usual or 1.0)
    threading.Event().wait(wait_s)
    print(f"moment: {wait_s:.3f} s after step {step}")
    return clock.now_us() / 1e6


def in_log(run_dir: Path, process: str, text: str) -> bool:
    """A process has said this."""
    log = run_dir / "logs" / f"{process}.log"
    return log.exists() and text in log.read_text(errors="replace")


def kill_all(running: Running) -> None:
    """Everything of the run at once, the supervisor first: it may not start anything again."""
    running.popen.send_signal(signal.SIGKILL)
    limit = clock.monotonic_s() + 10.0
    while (left := running.processes()) and clock.monotonic_s() < limit:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        threading.Event().wait(0.02)
    running.popen.wait()


@dataclass(frozen=True, slots=True)
class Cost:
    """What deaths cost. `until_next_step_s`: from each death to the next step that was not trained before (perhaps one
    whose batch was there already); `pause_s`: the longest time between two such steps after it; `requests_again`:
    issued once more from the prompt, `tokens_again_max`: if each had been at its end."""

    until_next_step_s: list[float]
    pause_s: list[float]
    steps_again: int
    requests_again: int
    tokens_again_max: int
    restarts: int


def cost(ran: Ran, killed_at: Iterable[float]) -> Cost:
    """From the trainer's log and the archive."""
    trained = steps_of(ran.run_dir)
    first: dict[int, float] = {}
    for at, step in trained:
        first.setdefault(step, at)
    run = Run(ran.run_dir)
    rows = [row for _, row in run.token_rows(("trajectories", "evaluations"))]
    lengths = {(row["group"], row["index"]): len(row["response_ids"]) for row in rows}
    again = [(e["group"], e["index"]) for e in run.effects("issue") if e["attempt"] > 0 and e["partial"] is None]
    after = [[at, *sorted(t for t in first.values() if t > at)] for at in killed_at]
    return Cost(
        until_next_step_s=[round(times[1] - times[0], 1) for times in after if len(times) > 1],
        pause_s=[round(max(two - one for one, two in pairwise(times)), 1) for times in after if len(times) > 1],
        steps_again=len(trained) - len(first),
        requests_again=len(again),
        tokens_again_max=sum(lengths.get(sample, 0) for sample in again),
        restarts=ran.summary.faults.restarts,
    )


def assert_survived(ran: Ran, running: Running, steps: int, killed_at: Sequence[float] = ()) -> Cost:
    """A good run in spite of it: whole archive, every prompt once, weights as never interrupted. Prints the cost."""
    assert_good(ran, running, steps, faults=True)
    assert rows_opened_wrongly(ran.run_dir) == []
    assert_weights_as_never_interrupted(ran.run_dir)
    paid = cost(ran, killed_at)
    print(f"cost: {paid}")
    return paid


def rows_opened_wrongly(run_dir: Path) -> list[str]:
    """Training prompts were opened in order, each once, none left out (G01, G02)."""
    run = Run(run_dir)
    training = [row for row, prompt in enumerate(run.said["prompts"]) if prompt["purpose"] == "train"]
    groups: dict[int, int] = {}
    for effect in run.effects("issue"):
        if effect["purpose"] == "train":
            groups.setdefault(effect["group"], effect["prompt_row"])
    opened = list(groups.values())
    wanted = training[: len(opened)]
    return [] if opened == wanted else [f"opened were rows {opened}, not {wanted}"]


# --- the same training without interruption ---------------------------------------------------


def learner_of(settings: Settings) -> Learner:
    """As the trainer makes it, on the initial weights."""
    if settings.training.kind == "paced":
        return PacedLearner(settings, pace=0.0)
    from workers.trainer.learners.ranked_learner import megatron_learner_of

    return megatron_learner_of(settings, Path(settings.model))


def chosen_rows(run: Run) -> dict[int, list[dict[str, object]]]:
    """The rows of each step's batch, as the archive has them, in the batch's order."""
    rows: dict[int, list[dict[str, object]]] = {batch["step"]: [] for batch in run.batches}
    members = [batch["step"] for batch in run.batches for _ in batch["members"]]
    for (_, _, row), step in zip(run.members(), members, strict=True):
        assert row is not None
        rows[step].append(row)
    return rows


def trained_straight(run_dir: Path) -> Iterator[tuple[int, str]]:
    """(version, fingerprint) of training the archived batches one after the other."""
    run = Run(run_dir)
    learner = learner_of(run.settings)
    try:
        yield 0, fingerprint(learner.export())
        for step, rows in sorted(chosen_rows(run).items()):
            learner.train(samples_of(rows, step, run.settings), step)
            yield step + 1, fingerprint(learner.export())
    finally:
        learner.close()


def assert_weights_as_never_interrupted(run_dir: Path) -> None:
    """Every announced version has the fingerprint of straight training, and none says that it differs."""
    run = Run(run_dir)
    announced = {version: record["fingerprint"] for version, record in run.weights.items()}
    assert [record["lineage"] for record in run.weights.values() if record["lineage"]] == []
    assert dict(trained_straight(run_dir)) == announced
    last = json.loads((run_dir / "summary.json").read_text())["weights"]["fingerprint_last"]
    assert last == announced[max(announced)]


# --- what engines said after they were given up -----------------------------------------------


@dataclass
class LateWords:
    """Words of an incarnation on `status` after the journal says that it was lost."""

    engine: int
    incarnation: int
    kinds: list[str] = field(default_factory=list)


def late_words(run_dir: Path) -> list[LateWords]:
    """Of every lost incarnation, what it said after that. Read from the journal: the events of later records."""
    run = Run(run_dir)
    found: dict[tuple[int, int], LateWords] = {}
    for record in run.journal:
        for event in record["events"]:
            key = (event.get("engine"), event.get("incarnation"))
            if key in found and event["kind"] not in ("engine_gone", "scored"):
                found[key].kinds.append(event["kind"])
        for effect in record["effects"]:
            if effect["kind"] == "engine_lost":
                key = (effect["engine"], effect["incarnation"])
                found[key] = LateWords(*key)
    return list(found.values())
