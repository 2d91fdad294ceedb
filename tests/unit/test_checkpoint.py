"""Checkpoints are found only when complete (case G04)."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from workers.trainer import checkpoint
from workers.trainer.checkpoint import MARKER, Progress, complete, latest_complete, write, write_extra


def save(folder: Path, extra: Mapping[str, object]) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 8)
    write_extra(folder, extra)


def progress(step: int) -> Progress:
    return Progress(step=step, version=step, positions={"t/0": 5}, fingerprint="f")


def test_step_40_is_torn_and_30_complete_so_30_is_found(tmp_path: Path) -> None:
    for step in (30, 40):
        write(tmp_path, progress(step), save, keep=3)
    (tmp_path / "step-000040" / MARKER).unlink()
    found = latest_complete(tmp_path)
    assert found is not None
    assert found.step == 30


@pytest.mark.parametrize("torn", ["", "{", '{"step": 40}', '{"step": 39, "files": {}}', "[]"])
def test_a_marker_that_cannot_be_read_is_none(tmp_path: Path, torn: str) -> None:
    write(tmp_path, progress(40), save, keep=2)
    (tmp_path / "step-000040" / MARKER).write_text(torn)
    assert latest_complete(tmp_path) is None


def test_a_learner_that_fails_while_saving_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, progress(10), save, keep=2)

    def fails(folder: Path, extra: Mapping[str, object]) -> None:
        save(folder, extra)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write(tmp_path, progress(20), fails, keep=2)
    assert [one.step for one in complete(tmp_path)] == [10]
    assert [one.step for one in write(tmp_path, progress(20), save, keep=2)] == [10, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000020"]


def test_only_the_newest_are_kept_and_torn_ones_do_not_count(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, progress(step), save, keep=5)
    (tmp_path / "step-000020" / MARKER).unlink()
    held = write(tmp_path, progress(40), save, keep=2)
    assert checkpoint.versions(held) == (30, 40)
    assert not (tmp_path / "step-000010").exists()


def test_writing_a_complete_one_again_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, progress(10), save, keep=2)

    def never(*_: object) -> None:
        raise AssertionError("it is there already")

    write(tmp_path, progress(10), never, keep=2)


def test_what_a_resume_needs_comes_back(tmp_path: Path) -> None:
    write(tmp_path, progress(10), save, keep=2)
    found = latest_complete(tmp_path)
    assert found is not None
    assert checkpoint.progress_of(checkpoint.read_extra(found.folder)) == progress(10)


def test_a_copy_under_another_steps_name_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path, progress(10), save, keep=2)
    shutil.copytree(tmp_path / "step-000010", tmp_path / "step-000050")
    marker = tmp_path / "step-000050" / MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"step": 50}))
    found = latest_complete(tmp_path)
    assert found is not None
    assert found.step == 10


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "checkpoints") is None


def _damage(file: Path, how: str) -> None:
    value = file.read_bytes()
    match how:
        case "shorter":
            file.write_bytes(value[:-1])
        case "another byte":
            file.write_bytes(value[:-1] + bytes([value[-1] ^ 1]))
        case _:
            file.unlink()


@pytest.mark.parametrize("how", ["shorter", "another byte", "gone"])
@pytest.mark.parametrize("name", ["weights.bin", "extra.json"])
def test_a_damaged_file_makes_the_checkpoint_none_and_the_older_one_is_found(
    tmp_path: Path, name: str, how: str
) -> None:
    for step in (30, 40):
        write(tmp_path, progress(step), save, keep=3)
    _damage(tmp_path / "step-000040" / name, how)
    found = latest_complete(tmp_path)
    assert found is not None
    assert found.step == 30


def test_a_damaged_checkpoint_is_written_again_when_its_step_comes_again(tmp_path: Path) -> None:
    for step in (30, 40):
        write(tmp_path, progress(step), save, keep=3)
    _damage(tmp_path / "step-000040" / "weights.bin", "another byte")
    write(tmp_path, progress(40), save, keep=3)
    found = latest_complete(tmp_path)
    assert found is not None
    assert found.step == 40
