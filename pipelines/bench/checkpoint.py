"""What a checkpoint costs training: the real learner on SmolLM2, its state copied and written beside the next step,
against a checkpoint that training waits for.

Each round: a step alone; a checkpoint that is waited for; a step alone; a checkpoint that is begun, with a step beside
it. Held is what the trainer's thread cannot use: `begin`, the wait for the copy before the optimizer's step, and
`finish`. What the step beside it takes longer, because it shares the cores with the writing thread, is a figure of its
own.
"""

import random
import statistics
import tempfile
import threading
from pathlib import Path

from pipelines import device
from pipelines.bench.benchmarks import Bench
from pipelines.config_file import read_settings
from pipelines.models import resolve_model
from workers.runtime import clock
from workers.runtime.collector import set_aside
from workers.trainer.checkpoint import Outcome, Progress, Writer
from workers.trainer.learners.base import Learner, Sample, Snapshot

CONFIG = Path(__file__).parents[2] / "configs/quickstart.toml"
CACHE = Path(".models")
ROUNDS = 5
GROUPS, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 64, 24  # of 8 samples: 2,048 tokens
_POLL_S = 0.002


def measure() -> Bench:
    """A row per round."""
    with tempfile.TemporaryDirectory(prefix="dora-bench-") as folder:  # TMPDIR: where; a disk, not memory
        return checkpoint_cost(Path(folder))


def checkpoint_cost(folder: Path, rounds: int = ROUNDS) -> Bench:
    """Seconds of each round, with checkpoints under `folder`. OSError if one cannot be written."""
    from workers.trainer.learners.megatron_learner import MegatronLearner

    settings = read_settings(CONFIG)
    model = resolve_model(settings.model, CACHE)
    settings = settings.model_copy(update={"model": str(model), "dtype": device.best_dtype()})
    learner = MegatronLearner(settings, model)
    rig = _Rig(learner, folder, _samples())
    rig.step()  # the optimizer makes its state at the first one
    set_aside()  # as the trainer does
    rows = []
    for _ in range(rounds):
        row = {"step_s": rig.step()}
        row["sync_s"] = rig.waited_for()
        row["step_s"] = (row["step_s"] + rig.step()) / 2
        rows.append({name: round(value, 4) for name, value in (row | rig.beside()).items()})
    rig.writer.close()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Bench([dict(row) for row in rows], _figures(rows) | {"checkpoint_bytes": size})


class _Rig:
    """A learner with its writer; each call is timed in seconds."""

    def __init__(self, learner: Learner, folder: Path, samples: list[Sample]) -> None:
        self.learner, self.samples, self.writer = learner, samples, Writer(folder, 1)
        self._number = 0

    def step(self) -> float:
        began = clock.monotonic_s()
        self._number += 1
        self.learner.train(self.samples, self._number)
        return clock.monotonic_s() - began

    def waited_for(self) -> float:
        began = clock.monotonic_s()
        self._begin()
        _check(self.writer.wait())
        return clock.monotonic_s() - began

    def beside(self) -> dict[str, float]:
        began = clock.monotonic_s()
        snapshot = self._begin()
        begun = clock.monotonic_s()
        took = self.step()
        turned = 0.0
        outcome = None
        while outcome is None:  # as the trainer does between its steps
            before = clock.monotonic_s()
            outcome = self.writer.turn()
            turned += clock.monotonic_s() - before
            threading.Event().wait(_POLL_S)
        _check(outcome)
        waited = float(getattr(snapshot, "waited_s", 0.0))
        return {
            "begin_s": begun - began,
            "copy_wait_s": waited,
            "finish_s": turned,
            "step_beside_s": took,
            "written_after_s": clock.monotonic_s() - began,
        }

    def _begin(self) -> Snapshot:
        taken: list[Snapshot] = []

        def snapshot(folder: Path) -> Snapshot:
            taken.append(self.learner.snapshot(folder))
            return taken[0]

        progress = Progress(step=self._number, version=self._number, positions={}, fingerprint="")
        _check(self.writer.begin(progress, snapshot))
        return taken[0]


def _check(outcome: Outcome | None) -> None:
    if outcome is not None and outcome.error is not None:
        raise outcome.error


def _figures(rows: list[dict[str, float]]) -> dict[str, float | int]:
    held = [row["begin_s"] + row["copy_wait_s"] + row["finish_s"] for row in rows]
    ratios = [one / row["sync_s"] for one, row in zip(held, rows, strict=True)]
    return {
        "checkpoint_async_over_sync": round(statistics.median(ratios), 4),
        "checkpoint_async_over_sync_max": round(max(ratios), 4),
        "held_s": round(statistics.median(held), 4),
        "sync_s": round(statistics.median(row["sync_s"] for row in rows), 3),
        "step_s": round(statistics.median(row["step_s"] for row in rows), 3),
        "step_beside_over_alone": round(statistics.median(row["step_beside_s"] / row["step_s"] for row in rows), 3),
        "all_over_sync": round(
            statistics.median(
                (one + row["step_beside_s"] - row["copy_wait_s"] - row["step_s"]) / row["sync_s"]
                for one, row in zip(held, rows, strict=True)
            ),
            3,
        ),
    }


def _samples() -> list[Sample]:
    chance = random.Random(0)

    def ids(count: int) -> list[int]:
        return [chance.randrange(1000, 40000) for _ in range(count)]

    samples = []
    for group in range(GROUPS):
        prompt = ids(PROMPT_TOKENS)
        for index in range(8):
            mask, behaviour = [True] * RESPONSE_TOKENS, [-10.0] * RESPONSE_TOKENS
            samples.append(Sample(prompt, ids(RESPONSE_TOKENS), behaviour, mask, 1.0, index - 3.5, group))
    return samples
