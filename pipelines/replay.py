"""`dora replay RUN --step N|all`: steps trained again from the archive alone, against what the run said of them.

    checkpoint, or the initial weights -> batches and trajectories of the archive -> workers/trainer/steps.py
    -> loss, gradient norm, weights' fingerprint against the archive's `weights`

Rule 1: it is the trainer's own code on the trainer's own inputs. No engine, no broker; nothing is written to the run.
Rule 2: equal means to the last bit. Where threads, CPU features or libraries are not those of the trainer
   (`pipelines/environment.py`), a difference may mean no more than that, and it is said.
Rule 3: what the archive lacks, or what in it cannot have been trained, is bad input: with the file, and what to do.
"""

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from pipelines import environment
from pipelines.config_file import read_resolved
from pipelines.learners import learner_of
from pipelines.processes import set_environment
from schemas.arrow import TRAJECTORY, to_rows
from schemas.messages import BatchRecord, Message, WeightsRecord
from schemas.settings import Settings
from workers.runtime.errors import BadInput
from workers.taps import archive
from workers.trainer import checkpoint, steps
from workers.trainer.learners.base import Learner
from workers.transport.weights.manifest import fingerprint

FIGURES = ("loss", "grad_norm", "learning_rate")
_Record = TypeVar("_Record", bound=Message)
Value = float | str | None


@dataclass(frozen=True, slots=True)
class Compared:
    """What the run said of something, and what came now; None: nothing finite was said."""

    recorded: Value
    again: Value

    @property
    def same(self) -> bool:
        return self.recorded == self.again


@dataclass(frozen=True, slots=True)
class StepAgain:
    """A step: `trajectories` trained, its figures and the weights after it."""

    step: int
    trajectories: int
    compared: dict[str, Compared]

    @property
    def same(self) -> bool:
        return all(one.same for one in self.compared.values())


@dataclass
class Replay:
    """`start`: the version that training began on, `checkpoint` its folder or None (the initial weights), `weights` of
    that start. `machine`: what is not as it was when the run trained; None if the run has no record of it."""

    run: str
    start: int
    checkpoint: Path | None
    weights: Compared
    machine: list[str] | None
    steps: list[StepAgain] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return self.weights.same and all(one.same for one in self.steps)


def replay(run_dir: Path, wanted: int | None, on_step: Callable[[StepAgain], None] = lambda _: None) -> Replay:
    """Train step `wanted` again, from the nearest checkpoint on; None = all steps, from the initial weights. `on_step`
    hears of each as it comes. BadInput."""
    settings = read_resolved(run_dir)
    set_environment(settings, "trainer")
    run = _Archived(run_dir, settings)
    last = run.last_step() if wanted is None else run.trained_step(wanted)
    found = None if wanted is None else checkpoint.latest_complete(run_dir / "checkpoints", until=wanted)
    first = 0 if found is None else found.step
    learner = _Learner(run, first)
    try:
        before = run.weights[first].fingerprint
        if found is not None:
            before = checkpoint.progress_in(found.folder).fingerprint
            learner.now.restore(found.folder)
        said = Replay(
            settings.name,
            first,
            None if found is None else found.folder,
            Compared(before, fingerprint(learner.now.export())),
            run.other_machine(),
        )
        for step in range(first, last + 1):
            said.steps.append(_again(run, learner, step))
            on_step(said.steps[-1])
    finally:
        learner.now.close()
    return said


def _again(run: "_Archived", learner: "_Learner", step: int) -> StepAgain:
    record, recorded = run.batches[step], run.weights[step + 1]
    settings = learner.under_settings_of(step)
    rows = run.rows(record)
    try:
        figures = steps.train(learner.now, record, rows, settings)
    except AssertionError as error:
        raise BadInput(
            f"{run.folder / 'trajectories'}: not what the run trained ({error}): a file there is damaged or of another "
            "run; restore the folder from a copy"
        ) from error
    compared = {name: Compared(recorded.metrics.get(name), _finite(figures[name])) for name in FIGURES}
    compared["weights"] = Compared(recorded.fingerprint, fingerprint(learner.now.export()))
    return StepAgain(step, len(record.members), compared)


def _finite(value: float) -> float | None:
    """The trainer leaves out what is not."""
    return float(value) if math.isfinite(value) else None


class _Learner:
    """The learner that trains now. Another one goes on with its state where `steps`, and with it the learning rate's
    schedule, was changed by a resume."""

    def __init__(self, run: "_Archived", first: int) -> None:
        self._run = run
        self._settings = run.settings_of(first)
        self.now: Learner = learner_of(self._settings)

    def under_settings_of(self, step: int) -> Settings:
        settings = self._run.settings_of(step)
        if settings != self._settings:
            with tempfile.TemporaryDirectory(prefix="dora-replay-") as folder:
                snapshot = self.now.snapshot(Path(folder))
                snapshot.write()
                snapshot.finish()
                self.now.close()
                self.now = learner_of(settings)
                self.now.restore(Path(folder))
            self._settings = settings
        return settings


class _Archived:
    """What the archive of a run says of its training. `batches` by step, `weights` by version."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        self.folder = run_dir / "archive"
        self._run_dir, self._settings = run_dir, settings
        self.batches = {one.step: one for one in reversed(list(_records(run_dir, "batches", BatchRecord)))}
        self.weights = {one.version: one for one in reversed(list(_records(run_dir, "weights", WeightsRecord)))}
        self._starts = environment.starts(run_dir)
        self._tables: dict[tuple[int, int], pa.Table] | None = None

    def last_step(self) -> int:
        """The last one before which none is missing. BadInput if none was trained."""
        trained = list(itertools.takewhile(self._is_trained, itertools.count()))
        return self.trained_step(trained[-1] if trained else 0)

    def trained_step(self, step: int) -> int:
        """The same; BadInput if it was not trained, or one before it is missing, or the initial model is gone."""
        if 0 not in self.weights:
            raise BadInput(f"{self.folder / 'weights'}: version 0 is not in it: nothing was trained, or it was cut")
        missing = [one for one in range(step + 1) if not self._is_trained(one)]
        if step in missing or step < 0:
            there = sorted(one for one in self.batches if self._is_trained(one))
            known = f"trained were steps {there[0]} to {there[-1]}" if there else "none was trained yet"
            raise BadInput(f"run {self._settings.name} has no trained step {step} in {self.folder}: {known}")
        if missing:
            raise BadInput(
                f"{self.folder}: step {missing[0]} is not in `batches` and `weights`: restore them from a copy"
            )
        model = Path(self._settings.model)
        if not (model / "config.json").is_file():
            raise BadInput(f"model: {model} is gone: put the initial model there again (config.toml names it)")
        return step

    def _is_trained(self, step: int) -> bool:
        return step in self.batches and step + 1 in self.weights

    def rows(self, record: BatchRecord) -> list[dict[str, Any]]:
        """The rows that the batch names, in its order. BadInput."""
        if self._tables is None:
            self._tables = self._read_tables()
        held: dict[tuple[int, int], list[dict[str, Any]]] = {}
        rows: list[dict[str, Any]] = []
        for member in record.members:
            place = member.partition, member.offset
            if place not in held and place in self._tables:
                held[place] = to_rows(self._tables[place])
            if member.row >= len(held.get(place, [])):
                raise BadInput(
                    f"{self.folder / 'trajectories'}: row {member.row} of record {member.partition}/{member.offset}, "
                    f"which step {record.step} trained, is not there: a file is missing; restore it from a copy"
                )
            rows.append(held[place][member.row])
        return rows

    def _read_tables(self) -> dict[tuple[int, int], pa.Table]:
        """The records of `trajectories` that were trained, by partition and offset."""
        wanted: dict[int, set[int]] = {}
        for batch in self.batches.values():
            for member in batch.members:
                wanted.setdefault(member.partition, set()).add(member.offset)
        tables: dict[tuple[int, int], pa.Table] = {}
        archive.check(self._run_dir, "trajectories")
        for _, partition, table in archive.files(self._run_dir, "trajectories"):
            offsets = pa.array(sorted(wanted.get(partition, ())), pa.int64())
            kept = table.filter(pc.is_in(table.column("offset"), value_set=offsets))
            for offset in pc.unique(kept.column("offset")).to_pylist():
                found = kept.filter(pc.equal(kept.column("offset"), offset)).select(TRAJECTORY.names)
                tables[partition, offset] = found
        return tables

    def settings_of(self, step: int) -> Settings:
        """As they were when it was trained: a resume may have changed `steps`."""
        start = self._start_of(step)
        return self._settings if start is None else self._settings.model_copy(update={"steps": start.steps})

    def _start_of(self, step: int) -> environment.Start | None:
        """The trainer's start under which the step was trained first."""
        at = self.weights[step + 1].created_at
        return next((start for start in reversed(self._starts) if start.at <= at), None)

    def other_machine(self) -> list[str] | None:
        """What is not as it was at one of the trainer's starts; None if there is no record of them."""
        if not self._starts:
            return None
        now = environment.environment(self._settings)
        said = [text for start in self._starts for text in environment.differences(start.environment, now)]
        return list(dict.fromkeys(said))


def _records(run_dir: Path, kind: str, of: type[_Record]) -> Iterator[_Record]:
    """What was said there, but for what the trainer too could not read."""
    archive.check(run_dir, kind)
    for text in archive.read(run_dir, kind).column("value").to_pylist():
        try:
            yield of.model_validate_json(text)
        except ValidationError:
            continue
