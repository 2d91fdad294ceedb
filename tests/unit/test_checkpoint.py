"""Checkpoints are written beside training and found only when complete (case G04)."""

import json
import os
import random
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from workers.trainer import checkpoint
from workers.trainer.checkpoint import MARKER, Checkpoint, Outcome, Progress, Writer, complete, latest_complete

FILES = ("progress.json", MARKER, "weights.bin", "shards/one.bin", "shards/.metadata")
NO_SPACE = OSError(28, "No space left on device")


@dataclass
class Part:
    """A snapshot of three files; one of them comes at the end, as Megatron's metadata does."""

    folder: Path
    fails: str = ""
    may_write: threading.Event = field(default_factory=threading.Event)

    def write(self) -> None:
        self.may_write.wait()
        (self.folder / "shards").mkdir()
        (self.folder / "weights.bin").write_bytes(b"w" * 8)
        (self.folder / "shards" / "one.bin").write_bytes(bytes(range(100)))
        if self.fails == "write":
            raise NO_SPACE

    def finish(self) -> None:
        if self.fails == "finish":
            raise NO_SPACE
        (self.folder / "shards" / ".metadata").write_bytes(b"what lies where")


def progress(step: int) -> Progress:
    return Progress(step=step, version=step, positions={"t/0": 5}, fingerprint="f")


def begin(writer: Writer, step: int, fails: str = "", *, held_up: bool = False) -> Part:
    parts: list[Part] = []

    def snapshot(folder: Path) -> Part:
        parts.append(Part(folder, fails))
        return parts[0]

    assert writer.begin(progress(step), snapshot) is None
    if not held_up:
        parts[0].may_write.set()
    return parts[0]


def write(root: Path, *steps: int, keep: int = 3) -> tuple[Checkpoint, ...]:
    writer = Writer(root, keep)
    held: tuple[Checkpoint, ...] = ()
    for step in steps:
        begin(writer, step)
        outcome = writer.wait()
        assert outcome is not None
        assert (outcome.step, outcome.error) == (step, None)
        held = outcome.held
    writer.close()
    return held


def found(root: Path) -> int | None:
    newest = latest_complete(root)
    return None if newest is None else newest.step


def damage(file: Path, how: str, dice: random.Random) -> None:
    value = bytearray(file.read_bytes())
    match how:
        case "cut":
            os.truncate(file, dice.randrange(len(value)))
        case "empty":
            os.truncate(file, 0)
        case "another bit":
            value[dice.randrange(len(value))] ^= 1 << dice.randrange(8)
            file.write_bytes(value)
        case "longer":
            file.write_bytes(value + b"x")
        case _:
            file.unlink()


DAMAGES = ("cut", "empty", "another bit", "longer", "gone")


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_whatever_happens_to_a_file_of_step_40_step_30_is_found(tmp_path: Path, name: str, how: str) -> None:
    write(tmp_path, 30, 40)
    assert sorted(p.relative_to(tmp_path / "step-000040").as_posix() for p in checkpoint_files(tmp_path, 40)) == sorted(
        FILES
    )
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    file = tmp_path / "step-000040" / name
    before = file.read_bytes()
    for number in range(40 if how in ("cut", "another bit") else 1):
        damage(file, how, random.Random(f"{seed}/{number}"))
        assert found(tmp_path) == 30
        file.write_bytes(before)
        assert found(tmp_path) == 40


def checkpoint_files(root: Path, step: int) -> list[Path]:
    return [path for path in (root / f"step-{step:06d}").rglob("*") if path.is_file()]


@pytest.mark.parametrize("torn", ["", "{", '{"step": 40}', '{"step": 39, "files": {}}', "[]"])
def test_a_marker_that_cannot_be_read_is_none(tmp_path: Path, torn: str) -> None:
    write(tmp_path, 40)
    (tmp_path / "step-000040" / MARKER).write_text(torn)
    assert found(tmp_path) is None


def test_nothing_is_there_until_all_is_written_and_the_trainer_is_not_held(tmp_path: Path) -> None:
    write(tmp_path, 10)
    writer = Writer(tmp_path, 1)
    part = begin(writer, 20, held_up=True)
    assert writer.turn() is None
    assert [one.step for one in complete(tmp_path)] == [10]
    part.may_write.set()
    assert writer.wait() == Outcome(20, (Checkpoint(20, tmp_path / "step-000020"),))
    assert writer.turn() is None
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000020"]


def test_turn_says_once_what_came_of_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1)
    begin(writer, 20)
    said = []
    while not said:
        said += [outcome for outcome in [writer.turn()] if outcome is not None]
        threading.Event().wait(0.001)
    assert [outcome.step for outcome in said] == [20]
    assert writer.turn() is None
    assert writer.wait() is None
    writer.close()


def test_closing_completes_what_is_pending(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1)
    begin(writer, 20)
    writer.close()
    assert found(tmp_path) == 20


@pytest.mark.parametrize("moment", ["write", "finish"])
def test_one_that_cannot_be_written_is_reported_leaves_nothing_and_the_older_one_stays(
    tmp_path: Path, moment: str
) -> None:
    write(tmp_path, 10)
    writer = Writer(tmp_path, 1)
    begin(writer, 20, fails=moment)
    outcome = writer.wait()
    assert outcome is not None
    assert (outcome.step, outcome.held, outcome.error) == (20, (), NO_SPACE)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
    begin(writer, 30)
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000030"]


def test_one_that_cannot_be_begun_is_reported(tmp_path: Path) -> None:
    def fails(_: Path) -> Part:
        raise NO_SPACE

    write(tmp_path, 10)
    writer = Writer(tmp_path, 1)
    assert writer.begin(progress(20), fails) == Outcome(20, error=NO_SPACE)
    assert writer.wait() is None
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


def test_only_the_newest_are_kept_and_torn_ones_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 10, 20, 30, keep=5)
    (tmp_path / "step-000020" / MARKER).unlink()
    (tmp_path / ".step-000025.tmp").mkdir()
    held = write(tmp_path, 40, keep=2)
    assert checkpoint.versions(held) == (30, 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000030", "step-000040"]


def test_a_later_one_that_a_resume_passed_over_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    write(tmp_path, 30, 40)
    damage(tmp_path / "step-000040" / "weights.bin", "another bit", random.Random(0))
    assert found(tmp_path) == 30
    assert checkpoint.versions(write(tmp_path, 35, keep=1)) == (35,)
    assert found(tmp_path) == 35
    assert [path.name for path in tmp_path.iterdir()] == ["step-000035"]


def test_what_a_resume_needs_comes_back(tmp_path: Path) -> None:
    write(tmp_path, 10)
    newest = latest_complete(tmp_path)
    assert newest is not None
    assert checkpoint.progress_in(newest.folder) == progress(10)


def test_a_copy_under_another_steps_name_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path, 10)
    shutil.copytree(tmp_path / "step-000010", tmp_path / "step-000050")
    marker = tmp_path / "step-000050" / MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"step": 50}))
    assert found(tmp_path) == 10


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "checkpoints") is None


def test_a_damaged_checkpoint_is_written_again_when_its_step_comes_again(tmp_path: Path) -> None:
    write(tmp_path, 30, 40)
    damage(tmp_path / "step-000040" / "weights.bin", "another bit", random.Random(1))
    write(tmp_path, 40)
    assert found(tmp_path) == 40
