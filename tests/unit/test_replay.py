"""`dora replay --step`: a trained step comes out again from the archive alone, and what is wrong is said."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from pipelines import environment
from pipelines.cli import app
from pipelines.config_file import write_resolved
from pipelines.replay import replay
from tests.unit.trainer_world import World
from workers.runtime.errors import BadInput
from workers.runtime.process import Process
from workers.taps import archive
from workers.trainer.learners.paced_learner import PacedLearner
from workers.trainer.service import serve

STEPS = 5


class Stopping(PacedLearner):
    """Ends the trainer after so many steps."""

    def __init__(self, process: Process, steps: int) -> None:
        super().__init__(process.settings, pace=0.0)
        self.process, self.left = process, steps

    def train(self, *args: Any) -> dict[str, float]:
        self.left -= 1
        if not self.left:
            self.process.stopping.set()
        return super().train(*args)


def trained(folder: Path, *stints: int, model: Path | None = None) -> World:
    """A run of `STEPS` steps, archived; the trainer was started once for each stint."""
    folder.mkdir(exist_ok=True)
    world = World(folder, model)
    write_resolved(world.settings, folder)
    for step in range(STEPS):
        world.send_batch(world.batch(step, [max(0, step - 1), step]))
    for steps in stints or (STEPS,):
        process = Process("trainer", world.settings, folder)
        environment.note(folder, world.settings)
        assert serve(process, world.bus, Stopping(process, steps)) == 0
    process = Process("archive", world.settings, folder)
    process.stopping.set()
    assert archive.serve(process, world.bus) == 0
    return world


def asked(folder: Path, step: str, *more: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of the command."""
    done = CliRunner().invoke(app, ["replay", str(folder), "--step", step, *more], catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def say(folder: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every record of a topic in the archive."""
    for file in (folder / "archive" / kind).glob("*.arrow"):
        with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        texts = []
        for text in table.column("value").to_pylist():
            said = json.loads(text)
            change(said)
            texts.append(json.dumps(said))
        place = table.column_names.index("value")
        archive.write_file(file, table.set_column(place, table.schema.field(place), pa.array(texts)))


@pytest.mark.parametrize("stints", [(STEPS,), (1, 4), (3, 1, 1)])
def test_all_steps_come_out_again_also_of_a_run_that_was_stopped_and_went_on(
    tmp_path: Path, stints: tuple[int, ...]
) -> None:
    world = trained(tmp_path, *stints)
    said = replay(tmp_path, None)
    assert said.same
    assert (said.start, said.checkpoint, said.machine) == (0, None, [])
    assert [one.step for one in said.steps] == list(range(STEPS))
    assert [one.compared["weights"].again for one in said.steps] == [one.fingerprint for one in world.weights()[1:]]


@pytest.mark.parametrize(("step", "start"), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 4)])
def test_a_step_is_trained_again_from_the_nearest_checkpoint(tmp_path: Path, step: int, start: int) -> None:
    """Kept are the checkpoints before step 4, and the last."""
    trained(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000005"]
    said = replay(tmp_path, step)
    assert said.same
    assert said.start == start
    assert [one.step for one in said.steps] == list(range(start, step + 1))


def test_a_damaged_checkpoint_is_not_started_from(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "checkpoints" / "step-000004" / "state.bin").write_bytes(b"x" * 16)
    said = replay(tmp_path, 4)
    assert said.same
    assert said.start == 0


@pytest.mark.parametrize("of", ["loss", "grad_norm", "fingerprint"])
def test_a_difference_is_shown_and_ends_with_1(tmp_path: Path, of: str) -> None:
    trained(tmp_path)

    def change(said: dict[str, Any]) -> None:
        if said["version"] == 3:
            (said if of == "fingerprint" else said["metrics"])[of] = "0" * 64 if of == "fingerprint" else 1e-9

    say(tmp_path, "weights", change)
    code, out, _ = asked(tmp_path, "all")
    assert code == 1
    assert "steps 2 differ" in out
    assert out.count("DIFFERS") == 1
    code, out, _ = asked(tmp_path, "2", "--json")
    assert code == 1
    said = json.loads(out)
    assert [one["same"] for one in said["steps"]] == [True, True, False]
    assert asked(tmp_path, "1")[0] == 0


def test_what_an_engine_is_said_to_have_sampled_counts(tmp_path: Path) -> None:
    """A trained token that is another one in the archive changes the weights."""
    trained(tmp_path)
    for file in sorted((tmp_path / "archive" / "trajectories").glob("*.arrow"))[:1]:
        with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        place = table.column_names.index("response_ids")
        other = [[7, *ids[1:]] for ids in table.column("response_ids").to_pylist()]
        field = table.schema.field(place)
        archive.write_file(file, table.set_column(place, field, pa.array(other, field.type)))
    assert not replay(tmp_path, None).same


def test_the_table_has_a_line_for_each_step_and_a_sentence_at_the_end(tmp_path: Path) -> None:
    trained(tmp_path)
    code, out, _ = asked(tmp_path, "all")
    assert code == 0
    head, *lines, end = out.splitlines()
    assert head.split() == ["step", "trajectories", "loss", "grad_norm", "weights", "recorded"]
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3", "4"]
    assert all(line.endswith("same") for line in lines)
    assert end == (
        "5 steps again, from the initial weights: loss, gradient norm and weights are those that were recorded, to the "
        "last bit"
    )


def test_nothing_is_written_into_the_run(tmp_path: Path) -> None:
    trained(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    replay(tmp_path, None)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_another_machine_is_said(tmp_path: Path) -> None:
    world = trained(tmp_path)
    file = tmp_path / environment.FILE
    said = json.loads(file.read_text())
    said["environment"] |= {"threads": "64", "cpu features": f"{said['environment']['cpu features']} avx9"}
    file.write_text(json.dumps(said) + '\n{"at": 1, "st')
    assert replay(tmp_path, None).machine == [
        f"threads: 64 then, {world.settings.training.threads} now",
        "cpu features: -avx9",
    ]
    assert "the last bits may differ: threads: 64 then" in asked(tmp_path, "0")[1]
    file.unlink()
    assert replay(tmp_path, None).machine is None


def test_a_schedule_that_a_resume_has_stretched_is_followed(tmp_path: Path) -> None:
    """The learning rate falls until `steps`, which was 4 for the first two steps."""
    training = {"kind": "paced", "checkpoint_every": 2, "learning_rate": 1.0, "schedule": "linear"}
    world = World(tmp_path, training=training, steps=4)
    for step in range(STEPS):
        world.send_batch(world.batch(step))
    rates = []
    for steps, stint in ((4, 2), (10, 3)):
        world.settings = world.settings.model_copy(update={"steps": steps})
        write_resolved(world.settings, tmp_path)
        environment.note(tmp_path, world.settings)
        process = Process("trainer", world.settings, tmp_path)
        assert serve(process, world.bus, Stopping(process, stint)) == 0
    process = Process("archive", world.settings, tmp_path)
    process.stopping.set()
    assert archive.serve(process, world.bus) == 0
    rates = [one.metrics["learning_rate"] for one in world.weights()[1:]]
    assert rates == pytest.approx([1.0, 0.75, 0.8, 0.7, 0.6])
    said = replay(tmp_path, None)
    assert said.same
    assert [one.compared["learning_rate"].again for one in said.steps] == rates


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["5", "99", "-1", "all of them", "1.5", "²", ""])
def test_a_step_that_was_not_trained_is_refused(tmp_path: Path, step: str) -> None:
    trained(tmp_path)
    code, out, err = asked(tmp_path, step)
    assert code == 2
    assert "Traceback" not in out + err
    assert "steps 0 to 4" in err or "a step's number" in err


def test_an_unknown_run_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    trained(tmp_path / "short-000")
    code, _, err = asked(tmp_path / "short-001", "all")
    assert code == 2
    assert "did you mean short-000" in err


def test_a_run_that_has_not_trained_yet_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    write_resolved(world.settings, tmp_path)
    code, _, err = asked(tmp_path, "all")
    assert code == 2
    assert "nothing was trained" in err


def _remove_a_record(folder: Path) -> None:
    for file in (folder / "archive" / "trajectories").glob("*.arrow"):
        file.unlink()


def _cut(folder: Path) -> None:
    for file in (folder / "archive" / "trajectories").glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:-200])


def _empty(folder: Path) -> None:
    for file in (folder / "archive" / "weights").glob("*.arrow"):
        file.write_bytes(b"")


def _no_weights(folder: Path) -> None:
    shutil.rmtree(folder / "archive" / "weights")


def _no_model(folder: Path) -> None:
    shutil.rmtree(folder / "model")


def _another_run(folder: Path) -> None:
    """Rows of other groups at the same places."""
    for file in (folder / "archive" / "trajectories").glob("*.arrow"):
        with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        place = table.column_names.index("group")
        other = pa.array([group + 100 for group in table.column("group").to_pylist()], pa.int64())
        archive.write_file(file, table.set_column(place, table.schema.field(place), other))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_remove_a_record, r"trajectories: row 0 of record \d+/\d+, which step 0 trained, is not there"),
        (_cut, r"trajectories/\d+\.\d+\.arrow"),
        (_empty, r"weights/0\.\d+\.arrow"),
        (_no_weights, r"weights: version 0 is not in it"),
        (_no_model, r"model: .*model is gone: put"),
        (_another_run, r"trajectories: not what the run trained .*group is 100"),
    ],
)
def test_an_archive_that_is_damaged_is_refused_with_the_file_and_what_to_do(
    tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    trained(tmp_path)
    harm(tmp_path)
    with pytest.raises(BadInput, match=said):
        replay(tmp_path, None)


def test_a_byte_that_changes_in_the_archive_is_never_taken_for_the_run(tmp_path: Path) -> None:
    """Refused, or the weights differ; or the byte means nothing to training."""
    trained(tmp_path / "run")
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    files = sorted((tmp_path / "run" / "archive" / "trajectories").glob("*.arrow"))
    for _ in range(40):
        file = dice.choice(files)
        whole = file.read_bytes()
        other = bytearray(whole)
        other[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        file.write_bytes(other)
        code, out, err = asked(tmp_path / "run", "all")
        assert code in (0, 1, 2), (out, err)
        assert "Traceback" not in out + err
        file.write_bytes(whole)


# --- decisions and groups ---------------------------------------------------------------------


def test_exactly_one_thing_can_be_asked_for(tmp_path: Path) -> None:
    trained(tmp_path)
    for more in ([], ["--step", "1", "--decisions"], ["--group", "1", "--what-if", "seed=2"]):
        done = CliRunner().invoke(app, ["replay", str(tmp_path), *more], catch_exceptions=False)
        assert done.exit_code == 2
        assert "Give one of" in done.stderr
