"""The trainer on an in-memory log with a paced learner: versions, duplicates, crashes, checkpoints."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.trainer_world import World
from workers.runtime.process import Process
from workers.trainer import checkpoint
from workers.trainer.checkpoint import MARKER
from workers.trainer.learners.base import Sample, Snapshot
from workers.trainer.learners.paced_learner import PacedLearner
from workers.trainer.service import LostLog, serve
from workers.transport.weights.manifest import fingerprint
from workers.transport.weights.store import Store


class Crash(Exception):
    """The process is killed here."""


class Watched(PacedLearner):
    """Stops the trainer after so many steps, or crashes before one; remembers what it trained."""

    def __init__(self, process: Process, steps: int, crash_at: int | None = None, salt: float = 0.0) -> None:
        super().__init__(process.settings, pace=0.0)
        self.process, self.steps, self.crash_at, self.salt = process, steps, crash_at, salt
        self.trained: list[list[Sample]] = []
        self.rates: list[float] = []
        self.says: dict[str, float] = {}

    def train(self, samples: Sequence[Sample], step: int = 0) -> dict[str, float]:
        if self.crash_at == len(self.trained):
            raise Crash
        self.trained.append(list(samples))
        if len(self.trained) == self.steps:
            self.process.stopping.set()
        salted = [
            Sample(s.prompt_ids, s.response_ids, s.logprobs, s.loss_mask, s.temperature, s.advantage + self.salt)
            for s in samples
        ]
        said = super().train(salted, step) | self.says
        self.rates.append(said["learning_rate"])
        return said


def train(world: World, steps: int, crash_at: int | None = None, salt: float = 0.0) -> Watched:
    """Serve until `steps` steps were trained (0: until it is up), or until the crash."""
    process = Process("trainer", world.settings, world.run_dir)
    if not steps:
        process.stopping.set()
    learner = Watched(process, steps, crash_at, salt)
    if crash_at is None:
        assert serve(process, world.bus, learner) == 0
    else:
        with pytest.raises(Crash):
            serve(process, world.bus, learner)
    return learner


def test_the_first_start_publishes_version_0_and_a_second_one_does_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    train(world, 0)
    train(world, 0)
    (only,) = world.weights()
    assert (only.version, only.step, only.groups, only.trajectories) == (0, None, (), 0)
    folder, manifest = Store(tmp_path / "weights").open(only)
    assert manifest.fingerprint == only.fingerprint
    assert (folder / "model.safetensors").is_file()


def test_each_batch_makes_the_next_version_with_its_groups_in_order(tmp_path: Path) -> None:
    world = World(tmp_path)
    records = [world.batch(0), world.batch(1, [0, 1]), world.batch(2, [1, 2])]
    for record in records:
        world.send_batch(record)
    learner = train(world, 3)
    said = world.weights()
    assert [one.version for one in said] == [0, 1, 2, 3]
    assert [one.step for one in said] == [None, 0, 1, 2]
    assert [one.groups for one in said[1:]] == [record.groups for record in records]
    assert len({one.fingerprint for one in said}) == 4
    assert said[2].metrics["lag_max"] == 1.0
    assert [point.step for point in world.metrics()] == [0, 1, 2]
    assert [sample.advantage for sample in learner.trained[0]] == pytest.approx([-1.0, 1.0, -1.0, 1.0])


def test_the_learning_rate_is_that_of_the_steps_number_also_after_a_crash(tmp_path: Path) -> None:
    training = {"kind": "paced", "checkpoint_every": 2, "learning_rate": 1.0, "warmup_steps": 8}
    world = World(tmp_path, training=training)
    for step in range(5):
        world.send_batch(world.batch(step))
    assert train(world, 9, crash_at=3).rates == pytest.approx([1 / 8, 2 / 8, 3 / 8])
    assert train(world, 3).rates == pytest.approx([3 / 8, 4 / 8, 5 / 8])
    assert world.metrics()[3].values["learning_rate"] == pytest.approx(4 / 8)


@pytest.mark.parametrize(
    ("says", "warning"),
    [
        ({}, None),
        ({"updates_skipped": 1.0, "loss": math.nan}, "update_skipped"),
        ({"nonfinite": 3.0}, "tokens_left_out"),
        ({"tokens": 0.0}, "step_empty"),
    ],
)
def test_a_step_that_did_less_than_it_should_is_reported_and_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, says: dict[str, float], warning: str | None
) -> None:
    """D04, E01: skipped updates, tokens without a usable log-prob, no token at all."""
    world = World(tmp_path)
    world.send_batch(world.batch(0))
    process = Process("trainer", world.settings, world.run_dir)
    learner = Watched(process, 1)
    learner.says = says
    assert serve(process, world.bus, learner) == 0
    assert [one.version for one in world.weights()] == [0, 1]
    (point,) = world.metrics()
    assert point.values["figures_not_finite"] == float(math.isnan(says.get("loss", 0.0)))
    warned = [one.getMessage().split()[0] for one in caplog.records if one.levelname == "WARNING"]
    assert warned == [warning] * (warning is not None)


def test_a_batch_that_comes_twice_is_trained_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second = world.batch(0), world.batch(1)
    for record in (first, first, second, first):
        world.send_batch(record)
    learner = train(world, 2)
    assert len(learner.trained) == 2
    assert [one.version for one in world.weights()] == [0, 1, 2]


def test_a_batch_with_too_old_a_group_stops_the_trainer_before_the_gradient(tmp_path: Path) -> None:
    world = World(tmp_path, staleness_max=0)
    world.send_batch(world.batch(0))
    world.send_batch(world.batch(1, [0, 1]))
    process = Process("trainer", world.settings, world.run_dir)
    learner = Watched(process, 9)
    with pytest.raises(AssertionError, match="lag 1 > 0"):
        serve(process, world.bus, learner)
    assert len(learner.trained) == 1
    assert [one.version for one in world.weights()] == [0, 1]


def test_a_gap_in_the_batches_is_a_bug(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send_batch(world.batch(1))
    process = Process("trainer", world.settings, world.run_dir)
    with pytest.raises(AssertionError, match="step 0 is next"):
        serve(process, world.bus, Watched(process, 1))


def test_a_stop_saves_a_checkpoint_and_the_next_start_goes_on_from_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    for step in range(5):
        world.send_batch(world.batch(step))
    train(world, 3)
    assert [one.version for one in world.checkpoints()] == [2, 3]
    assert world.checkpoints()[-1].kept == (2, 3)
    learner = train(world, 2)
    assert [sample.prompt_ids[-1] for sample in learner.trained[0]] == [6, 6, 7, 7]
    assert [one.version for one in world.weights()] == [0, 1, 2, 3, 4, 5]
    assert [point.step for point in world.metrics()] == [0, 1, 2, 3, 4]


def test_a_crash_trains_later_batches_again_and_writes_nothing_twice(tmp_path: Path) -> None:
    world = World(tmp_path)
    for step in range(6):
        world.send_batch(world.batch(step))
    train(world, 9, crash_at=3)
    assert [one.version for one in world.weights()] == [0, 1, 2, 3]
    learner = train(world, 4)
    assert len(learner.trained) == 4
    assert [sample.prompt_ids[-1] for sample in learner.trained[0]] == [4, 4, 5, 5]
    said = world.weights()
    assert [one.version for one in said] == [0, 1, 2, 3, 4, 5, 6]
    assert all(one.lineage == "" for one in said)
    assert [point.step for point in world.metrics()] == [0, 1, 2, 3, 4, 5]
    straight = World(tmp_path / "straight")
    for step in range(6):
        straight.send_batch(straight.batch(step))
    train(straight, 6)
    assert [one.fingerprint for one in straight.weights()] == [one.fingerprint for one in said]


def test_a_crash_before_any_checkpoint_starts_from_the_initial_weights(tmp_path: Path) -> None:
    world = World(tmp_path)
    for step in range(3):
        world.send_batch(world.batch(step))
    train(world, 9, crash_at=1)
    learner = train(world, 3)
    assert len(learner.trained) == 3
    assert [one.version for one in world.weights()] == [0, 1, 2, 3]
    assert all(one.lineage == "" for one in world.weights())


def test_other_weights_on_training_again_leave_the_announced_files_and_say_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    for step in range(5):
        world.send_batch(world.batch(step))
    train(world, 9, crash_at=3)
    announced = world.weights()[3]
    train(world, 2, salt=0.5)
    said = world.weights()
    assert [one.version for one in said] == [0, 1, 2, 3, 4]
    assert said[3] == announced
    Store(tmp_path / "weights").open(said[3])
    assert announced.fingerprint[:16] in said[4].lineage
    train(world, 1)
    assert world.weights()[5].lineage == said[4].lineage


def test_a_torn_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    world = World(tmp_path)
    for step in range(5):
        world.send_batch(world.batch(step))
    train(world, 4)
    (tmp_path / "checkpoints" / "step-000004" / MARKER).unlink()
    learner = train(world, 3)
    assert [sample.prompt_ids[-1] for sample in learner.trained[0]] == [4, 4, 5, 5]
    assert [one.version for one in world.weights()] == [0, 1, 2, 3, 4, 5]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    world = World(tmp_path)
    for step in range(5):
        world.send_batch(world.batch(step))
    train(world, 4)
    shard = tmp_path / "checkpoints" / "step-000004" / "state.bin"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    learner = train(world, 3)
    assert [sample.prompt_ids[-1] for sample in learner.trained[0]] == [4, 4, 5, 5]
    assert all(one.lineage == "" for one in world.weights())


class Full(Watched):
    """Its disk is full for the snapshots of these versions."""

    full: tuple[int, ...] = ()

    def snapshot(self, folder: Path) -> Snapshot:
        if len(self.trained) in self.full:
            raise OSError(28, "No space left on device")
        return super().snapshot(folder)


@pytest.mark.parametrize(("full", "saved"), [((2,), [4, 5]), ((4,), [2, 5]), ((2, 4), [5]), ((5,), [2, 4])])
def test_a_checkpoint_that_cannot_be_written_is_said_and_the_next_one_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full: tuple[int, ...], saved: list[int]
) -> None:
    world = World(tmp_path)
    for step in range(6):
        world.send_batch(world.batch(step))
    process = Process("trainer", world.settings, world.run_dir)
    learner = Full(process, 5)
    learner.full = full
    assert serve(process, world.bus, learner) == 0
    assert [one.version for one in world.checkpoints()] == saved
    failed = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert len(failed) == len(full)
    assert all("checkpoint_failed" in text and "No space" in text for text in failed)
    assert [point.values["checkpoints_failed"] for point in world.metrics()][-1] == len(
        [one for one in full if one < 5]
    )
    assert train(world, 1).trained[0][0].prompt_ids[-1] == 2 * saved[-1]


def test_a_checkpoint_stands_for_the_step_at_which_it_was_begun(tmp_path: Path) -> None:
    """Training goes on while it is written: step, positions, weights are of one moment."""
    world = World(tmp_path)
    for step in range(5):
        world.send_batch(world.batch(step))
    learner = train(world, 3)
    found = checkpoint.progress_in(tmp_path / "checkpoints" / "step-000002")
    assert found.fingerprint == world.weights()[2].fingerprint
    assert sum(found.positions.values()) <= 2 * 4
    again = Watched(Process("trainer", world.settings, world.run_dir), 9)
    again.restore(tmp_path / "checkpoints" / "step-000002")
    assert fingerprint(again.export()) == found.fingerprint
    again.train(learner.trained[2], 2)
    assert fingerprint(again.export()) == world.weights()[3].fingerprint


def _lose(folder: Path, how: str) -> None:
    if how == "gone":
        shutil.rmtree(folder)
    else:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_files_of_the_checkpoints_version_that_are_lost_are_written_again_at_a_resume(tmp_path: Path, how: str) -> None:
    world = World(tmp_path)
    for step in range(2):
        world.send_batch(world.batch(step))
    train(world, 2)
    _lose(tmp_path / "weights" / "v000002", how)
    train(world, 0)
    said = world.weights()
    assert [one.version for one in said] == [0, 1, 2]
    Store(tmp_path / "weights").open(said[2])


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_files_of_the_newest_version_that_are_lost_are_written_again_when_it_is_trained_again(
    tmp_path: Path, how: str
) -> None:
    world = World(tmp_path)
    for step in range(4):
        world.send_batch(world.batch(step))
    train(world, 9, crash_at=3)
    _lose(tmp_path / "weights" / "v000003", how)
    shutil.rmtree(tmp_path / "weights" / "v000001")  # nobody needs it: a deletion stays
    train(world, 2)
    said = world.weights()
    assert [one.version for one in said] == [0, 1, 2, 3, 4]
    Store(tmp_path / "weights").open(said[3])
    assert not (tmp_path / "weights" / "v000001").exists()


def test_files_of_a_version_that_was_never_announced_are_taken_up(tmp_path: Path) -> None:
    world = World(tmp_path)
    made = Store(tmp_path / "weights").publish(
        0,
        PacedLearner(world.settings).export(),
        model_folder=Path(world.settings.model),
        probe_logprobs=[-1.0] * 63,
        dtype="float32",
    )
    train(world, 0)
    assert world.weights()[0].fingerprint == made.fingerprint == fingerprint(PacedLearner(world.settings).export())


def test_the_last_step_is_checkpointed_whatever_the_period(tmp_path: Path) -> None:
    world = World(tmp_path, steps=3)
    for step in range(3):
        world.send_batch(world.batch(step))
    train(world, 3)
    assert [one.version for one in world.checkpoints()] == [2, 3]


def test_an_exhausted_data_sets_smaller_batch_is_trained_and_checkpointed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send_batch(world.batch(0, [0], exhausted=True))
    train(world, 1)
    assert [one.version for one in world.weights()] == [0, 1]
    assert world.weights()[1].trajectories == 2
    assert [one.version for one in world.checkpoints()] == [1]


def test_a_checkpoint_on_a_log_that_does_not_know_its_version_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    for step in range(2):
        world.send_batch(world.batch(step))
    train(world, 2)
    world.bus.delete_topics([world.topics.weights])
    world.bus.make_topics(world.topics.specs())
    process = Process("trainer", world.settings, world.run_dir)
    with pytest.raises(LostLog, match="version 2"):
        serve(process, world.bus, Watched(process, 1))
