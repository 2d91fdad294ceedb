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


@pytest.mark.parametrize("torn", ["", "{", '{"step": 39}', "[]"])
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
    (tmp_path / "step-000050" / MARKER).write_text(json.dumps({"step": 50}))
    found = latest_complete(tmp_path)
    assert found is not None
    assert found.step == 10


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "checkpoints") is None
