"""The trainer's hands: read `batches`, gather the rows, train, publish the version, keep checkpoints.

    batches: step n -> rows (batches.py) -> samples.py -> Learner.train -> files -> `weights`: version n + 1 -> metrics

Rule 1: step n trains on top of version n and nothing else; a batch that was trained already is ignored (I3).
Rule 2: a version is announced after its files are complete, and never again (I5). A step that is trained again after
   a crash compares fingerprints: equal, nothing is written; different, the announced files stay, training goes on from
   its own weights, and the next announcement says so in `lineage`.
Rule 3: a checkpoint stands on an announced version.
Rule 4: a trainer that comes to hold an announced version once more writes its files again if they are gone or damaged
   and nobody can have deleted them for good: the checkpoint's version, and the newest ones.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from schemas.messages import BatchRecord, CheckpointSaved, Message, MetricPoint, WeightsRecord
from schemas.topics import version_key
from workers.runtime import clock
from workers.runtime.errors import BadInput, DoraError, WeightsUnavailable
from workers.runtime.process import Process
from workers.trainer import batches, checkpoint, steps
from workers.trainer.learners.base import Learner
from workers.transport.records.bus import Bus, publish
from workers.transport.records.letters import read_or_bury
from workers.transport.weights.manifest import fingerprint, probe_ids
from workers.transport.weights.store import Published, Store

POLL_MS_MAX = 200
SOURCE = "trainer"


class LostLog(DoraError):
    """The log does not have what the checkpoint stands on: it is another run's, or its data is gone."""


@dataclass
class _State:
    """`step` = the next step to train = the version that the learner holds; `fingerprint` = of what it holds.
    `checkpointed`: what the newest checkpoint stands for, pending ones included. `held_s`: seconds that checkpoints
    have taken from training since the last step."""

    step: int = 0
    lineage: str = ""
    fingerprint: str = ""
    checkpointed: int | None = 0
    checkpoints_failed: int = 0
    held_s: float = 0.0
    announced: dict[int, WeightsRecord] = field(default_factory=dict)


def serve(process: Process, bus: Bus, learner: Learner) -> int:
    """Run until `process.stopping`; 0. AssertionError on a batch that may not be trained, LostLog, BusUnavailable."""
    trainer = _Trainer(process, bus, learner)
    try:
        trainer.resume()
        trainer.loop()
    finally:
        trainer.close()
    return 0


class _Trainer:
    def __init__(self, process: Process, bus: Bus, learner: Learner) -> None:
        self._process, self._bus, self._learner = process, bus, learner
        self._settings = process.settings
        self._store = Store(process.weights_dir)
        self._model = Path(self._settings.model)
        self._probe_ids = probe_ids(_vocabulary(self._model))
        self._checkpoints = process.run_dir / "checkpoints"
        self._writer = checkpoint.Writer(self._checkpoints, self._settings.training.checkpoints_keep)
        self._producer = bus.producer()
        self._state = _State()
        self._positions: dict[str, int] = {}

    # --- start --------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take up the newest complete checkpoint; learn what is announced; publish version 0 if it is not."""
        state = self._state
        found = checkpoint.latest_complete(self._checkpoints)
        if found is not None:
            progress = checkpoint.progress_in(found.folder)
            self._learner.restore(found.folder)
            state.step, state.lineage, self._positions = progress.step, progress.lineage, progress.positions
            state.checkpointed = progress.step
            mine = state.fingerprint = fingerprint(self._learner.export())
            assert mine == progress.fingerprint, f"{found.folder} restored weights {mine}, saved {progress.fingerprint}"
        state.announced = self._announced()
        self._process.log.info("resumed", step=state.step, announced=len(state.announced))
        if state.step and state.step not in state.announced:
            raise LostLog(f"the checkpoint stands on version {state.step}, which the log does not announce")
        if not state.announced:
            self._publish(None, {})
        elif not state.step:
            self._compare()
        elif state.fingerprint == state.announced[state.step].fingerprint:
            self._mend(state.announced[state.step])
        self._gatherer = batches.Gatherer(self._bus, self._process.topics, self._positions)

    def _announced(self) -> dict[int, WeightsRecord]:
        reader = self._bus.reader()
        reader.add(self._process.topics.weights, 0, "earliest")
        found: dict[int, WeightsRecord] = {}
        while not reader.at_end():
            for record in reader.poll(POLL_MS_MAX):
                weights = read_or_bury(self._process, self._producer, WeightsRecord, record)
                if weights is not None:
                    found[weights.version] = weights
        reader.close()
        return found

    # --- steps --------------------------------------------------------------------------------

    def loop(self) -> None:
        """Batches as they come, until told to stop. A checkpoint at the end, if a step was trained since the last."""
        reader = self._bus.reader()
        reader.add(self._process.topics.batches, 0, "earliest")
        try:
            while not self._process.stopping.is_set():
                records = reader.poll(POLL_MS_MAX, 1)
                self._gatherer.read_ahead()
                self._report(self._writer.turn())
                for record in records:
                    batch = read_or_bury(self._process, self._producer, BatchRecord, record)
                    if batch is not None:
                        self._take(batch)
            self._report(self._writer.wait())
            if self._state.checkpointed != self._state.step:
                self._checkpoint()
                self._report(self._writer.wait())
        finally:
            reader.close()
            self._gatherer.close()

    def _take(self, record: BatchRecord) -> None:
        state = self._state
        if record.step < state.step:
            self._process.log.info("batch_ignored", step=record.step, next_step=state.step)
            return
        assert record.run == self._process.run, f"batch {record.step} belongs to run {record.run!r}"
        assert record.step == state.step, f"batch {record.step} came, step {state.step} is next"
        metrics = self._train(record)
        state.step += 1
        if state.step in state.announced:
            self._compare()
        else:
            self._publish(record, metrics)
        self._gatherer.prune(record, state.step - self._settings.lag_max)
        last = record.exhausted or state.step == self._settings.steps
        if last or state.step % self._settings.training.checkpoint_every == 0:
            self._checkpoint()

    def _train(self, record: BatchRecord) -> dict[str, float]:
        """One step; its figures."""
        began = clock.monotonic_s()
        rows = self._gatherer.rows(record)
        gathered, now = clock.monotonic_s(), clock.now_us()
        learned = steps.train(self._learner, record, rows, self._settings, self._process.vocabulary)
        trained = clock.monotonic_s()
        published = {version: weights.created_at for version, weights in self._state.announced.items()}
        figures = batches.figures(record, rows, published, now_us=now) | learned
        tokens = figures["trajectories"] * (figures["response_tokens_mean"] + figures["prompt_tokens_mean"])
        figures |= {
            "gather_s": gathered - began,
            "train_s": trained - gathered,
            "tokens_per_second": tokens / max(trained - gathered, 1e-9),
            "checkpoint_held_s": self._state.held_s,
            "checkpoints_failed": float(self._state.checkpoints_failed),
        }
        self._state.held_s = 0.0
        self._process.log.info(
            "trained", step=record.step, **{k: round(figures[k], 6) for k in _LOGGED if k in figures}
        )
        self._warn(record.step, figures)
        return _finite(figures)

    def _warn(self, step: int, figures: dict[str, float]) -> None:
        """What people must hear of a step that did less than it should; its version is published all the same."""
        if figures["updates_skipped"]:
            self._process.log.warning("update_skipped", step=step, updates=figures["updates_skipped"])
        if figures["nonfinite"]:
            self._process.log.warning("tokens_left_out", step=step, tokens=figures["nonfinite"])
        if not figures["tokens"]:
            self._process.log.warning("step_empty", step=step)

    # --- words --------------------------------------------------------------------------------

    def _publish(self, record: BatchRecord | None, metrics: dict[str, float]) -> None:
        """Write the files of the version that the learner holds, then announce it; metrics beside it."""
        began = clock.monotonic_s()
        version = self._state.step
        made = self._write_files(version)
        self._state.fingerprint = made.offered
        if made.differs:
            self._diverged(version, made.fingerprint, made.offered)
        now = clock.now_us()
        metrics = metrics | {"publish_s": clock.monotonic_s() - began}
        weights = WeightsRecord(
            run=self._process.run,
            version=version,
            step=record.step if record else None,
            groups=record.groups if record else (),
            trajectories=len(record.members) if record else 0,
            location=made.location,
            manifest_sha256=made.manifest_sha256,
            fingerprint=made.fingerprint,
            lineage=self._state.lineage,
            created_at=now,
            metrics=metrics,
        )
        topics = self._process.topics
        publish(self._producer, topics.weights, weights, key=version_key(version))
        if record is not None:
            point = MetricPoint(run=self._process.run, source=SOURCE, at=now, step=record.step, values=metrics)
            publish(self._producer, topics.metrics, point)
            self._process.figures.show(metrics | {"version": version})
        self._producer.flush(self._settings.broker.timeout_s)
        self._state.announced[version] = weights
        self._process.log.info("published", version=version, fingerprint=made.fingerprint[:16])

    def _write_files(self, version: int) -> Published:
        dtype = self._settings.dtype
        assert dtype != "auto", "a run's own configuration says which"
        return self._store.publish(
            version,
            self._learner.export(),
            model_folder=self._model,
            probe_logprobs=self._learner.probe(self._probe_ids),
            dtype=dtype,
        )

    def _compare(self) -> None:
        """The version was announced before a crash: a difference is remembered, lost files are written again."""
        version = self._state.step
        before = self._state.announced[version]
        mine = self._state.fingerprint = fingerprint(self._learner.export())
        if mine != before.fingerprint:
            self._diverged(version, before.fingerprint, mine)
        elif version == 0 or version > max(self._state.announced) - max(1, self._settings.lag_max):
            self._mend(before)
        self._process.log.info("compared", version=version, equal=mine == before.fingerprint)

    def _mend(self, announced: WeightsRecord) -> None:
        """The learner holds this version: if its files are gone or damaged they are made again, byte for byte."""
        try:
            self._store.open(announced)
        except WeightsUnavailable as error:
            self._process.log.warning("weights_lost", version=announced.version, error=error)
        else:
            return
        self._store.delete(announced.version)
        made = self._write_files(announced.version)
        if made.manifest_sha256 != announced.manifest_sha256:
            self._store.delete(announced.version)
            self._process.log.error("weights_not_the_same", version=announced.version, made=made.manifest_sha256)
        else:
            self._process.log.info("weights_mended", version=announced.version)

    def _diverged(self, version: int, before: str, mine: str) -> None:
        note = f"version {version} was made again: {mine[:16]} instead of the announced {before[:16]}"
        self._state.lineage = note if not self._state.lineage else f"{self._state.lineage}; {note}"
        self._process.log.warning("lineage", note=note)

    def _checkpoint(self) -> None:
        """Begin one; the one before must be done."""
        state, began = self._state, clock.monotonic_s()
        self._report(self._writer.wait())
        progress = checkpoint.Progress(
            step=state.step,
            version=state.step,
            positions=self._gatherer.positions(),
            fingerprint=state.fingerprint,
            lineage=state.lineage,
        )
        state.checkpointed = state.step
        self._report(self._writer.begin(progress, self._learner.snapshot))
        state.held_s += clock.monotonic_s() - began
        self._process.log.info("checkpoint_begun", step=state.step, held_s=round(state.held_s, 3))

    def _report(self, outcome: checkpoint.Outcome | None) -> None:
        """A checkpoint is complete, or is none: then the next period, or the end, tries again."""
        if outcome is None:
            return
        if outcome.error is not None:
            self._state.checkpointed = None
            self._state.checkpoints_failed += 1
            self._process.log.error("checkpoint_failed", step=outcome.step, error=outcome.error)
            return
        self._say(CheckpointSaved(version=outcome.step, kept=checkpoint.versions(outcome.held)))
        self._process.log.info("checkpoint", step=outcome.step)

    def _say(self, message: Message) -> None:
        publish(self._producer, self._process.topics.status, message)
        self._producer.flush(self._settings.broker.timeout_s)

    def close(self) -> None:
        self._writer.close()
        self._producer.close()


_LOGGED = ("reward_mean", "loss", "grad_norm", "lag_max", "tokens", "train_s")


def _finite(figures: dict[str, float]) -> dict[str, float]:
    """JSON has no NaN: what is not finite is left out and counted."""
    kept = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
    return kept | {"figures_not_finite": float(len(figures) - len(kept))}


def _vocabulary(model: Path) -> int:
    path = model / "config.json"
    try:
        return int(json.loads(path.read_text())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"model: {path}: {type(error).__name__}: {error}") from error
