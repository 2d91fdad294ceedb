"""Checkpoints of a run: folders `checkpoints/step-000010`, found again only when complete. `Writer` writes them beside
training.

    trainer's thread   begin (snapshot) ... train ... turn: finish, a moment ... train ... turn: what came of it
    writing thread        files, their hashes ->|           rest, marker, name, retention ->|

Rule 1: written under a temporary name. The marker file is written last, with size and sha256 of every other file; then
   the folder gets its name. A folder without its marker, or with a file that is not as the marker says, is as good as
   none: whoever lists looks at names and sizes, whoever resumes at every byte.
Rule 2: what a resume needs is in it: the learner's state, and `Progress` (step, version, stream positions, lineage),
   both of the moment of `begin`.
Rule 3: the newest `keep` stay; whatever else has the name of a checkpoint is removed once a newer one is complete.
Rule 4: what cannot be written is reported, and leaves nothing behind. The complete ones stay.
"""

import concurrent.futures
import hashlib
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from workers.runtime.files import sync, write_synced
from workers.trainer.learners.base import Snapshot

MARKER = "complete.json"
_PROGRESS = "progress.json"
_NAME = re.compile(r"step-(\d{6,})")
_ANY_NAME = re.compile(r"\.?step-\d{6,}(\.tmp)?")


class Progress(BaseModel):
    """`step` is the next step to train, on top of version `version` (the two are equal). `positions` maps
    `topic/partition` to the next offset to read; `fingerprint` is of the learner's weights as exported; `lineage` says
    how they differ from the announced ones (empty: not at all)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    version: int
    positions: dict[str, int]
    fingerprint: str
    lineage: str = ""


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    size: int
    sha256: str


class _Marker(BaseModel):
    """`files`: what the checkpoint consists of, by path in its folder."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    files: dict[str, _File]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one: `held` are all complete checkpoints, oldest first, or `error` says why this is none."""

    step: int
    held: tuple[Checkpoint, ...] = ()
    error: OSError | None = None


@dataclass
class _Pending:
    """One that is being written in `folder`. `work` is what the writing thread does: it gives the files when the
    snapshot is to be finished, then the complete checkpoints when all is done."""

    progress: Progress
    folder: Path
    snapshot: Snapshot
    work: Future[dict[str, _File] | tuple[Checkpoint, ...]]


class Writer:
    """Writes checkpoints one at a time. All calls from the learner's thread."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None

    def begin(self, progress: Progress, snapshot: Callable[[Path], Snapshot]) -> Outcome | None:
        """Take the snapshot (`Learner.snapshot`) and go on; an outcome if it cannot even be begun."""
        assert self._pending is None, f"checkpoint {progress.step} while another is being written: wait for it first"
        folder = self._root / f".{_folder_name(progress.step)}.tmp"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_synced(folder / _PROGRESS, progress.model_dump_json().encode())
            taken = snapshot(folder)
        except OSError as error:
            return _failed(progress.step, folder, error)
        self._pending = _Pending(progress, folder, taken, self._thread.submit(_write, folder, taken))
        return None

    def turn(self) -> Outcome | None:
        """Call it often: what came of the pending one, once, when all is done."""
        return self._next() if self._pending is not None and self._pending.work.done() else None

    def wait(self) -> Outcome | None:
        """Until nothing is pending; what came of it."""
        outcome = None
        while self._pending is not None:
            concurrent.futures.wait([self._pending.work])
            outcome = self._next()
        return outcome

    def close(self) -> None:
        """What is pending is completed first."""
        self.wait()
        self._thread.shutdown()

    def _next(self) -> Outcome | None:
        pending = self._pending
        assert pending is not None
        step = pending.progress.step
        try:
            made = pending.work.result()
            if isinstance(made, dict):
                pending.snapshot.finish()
                pending.work = self._thread.submit(_seal, pending.folder, step, made, self._keep)
                return None
        except OSError as error:
            self._pending = None
            return _failed(step, pending.folder, error)
        self._pending = None
        return Outcome(step, made)


def _write(folder: Path, snapshot: Snapshot) -> dict[str, _File]:
    snapshot.write()
    return _files_in(folder, {})


def _seal(folder: Path, step: int, known: Mapping[str, _File], keep: int) -> tuple[Checkpoint, ...]:
    """Hash what came since, then marker, name, retention."""
    root, files = folder.parent, dict(known) | _files_in(folder, known)
    for path in [*(folder / name for name in files), *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)
    write_synced(folder / MARKER, _Marker(step=step, files=files).model_dump_json(indent=1).encode())
    sync(folder)
    final = root / _folder_name(step)
    shutil.rmtree(final, ignore_errors=True)  # a resume passed it over, or it would not be written again
    folder.rename(final)
    sync(root)
    held = [one for one in complete(root) if one.step <= step][-keep:]  # later ones too were passed over
    for path in root.iterdir():
        if _ANY_NAME.fullmatch(path.name) and path not in [one.folder for one in held]:
            shutil.rmtree(path)
    return tuple(held)


def _failed(step: int, folder: Path, error: OSError) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(step, error=error)


def complete(root: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    if not root.is_dir():
        return []
    matches = [(path, _NAME.fullmatch(path.name)) for path in root.iterdir()]
    found = [Checkpoint(int(match[1]), path) for path, match in matches if match and _is_complete(path)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest_complete(root: Path, until: float = math.inf) -> Checkpoint | None:
    """The newest checkpoint, of step `until` at most, of which every byte is as it was written."""
    held = (one for one in reversed(complete(root)) if one.step <= until)
    return next((one for one in held if _is_complete(one.folder, every_byte=True)), None)


def progress_in(folder: Path) -> Progress:
    """OSError, ValueError (it is none of ours)."""
    return Progress.model_validate_json((folder / _PROGRESS).read_bytes())


def versions(checkpoints: Iterable[Checkpoint]) -> tuple[int, ...]:
    """Versions that these checkpoints need: a checkpoint before step n stands on version n."""
    return tuple(checkpoint.step for checkpoint in checkpoints)


def _is_complete(folder: Path, *, every_byte: bool = False) -> bool:
    try:
        marker = _Marker.model_validate_json((folder / MARKER).read_bytes())
        progress = progress_in(folder)
        whole = all((folder / name).stat().st_size == file.size for name, file in marker.files.items())
        if whole and every_byte:
            whole = all(_sha256(folder / name) == file.sha256 for name, file in marker.files.items())
    except (OSError, ValueError, ValidationError):
        return False
    return whole and marker.step == progress.step and folder.name == _folder_name(progress.step)


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _files_in(folder: Path, known: Mapping[str, _File]) -> dict[str, _File]:
    """All files below it but the marker and the known ones."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: _File(size=path.stat().st_size, sha256=_sha256(path))
        for name, path in paths.items()
        if name != MARKER and name not in known
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
