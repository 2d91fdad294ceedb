"""Checkpoints of a run: folders `checkpoints/step-000010`, found again only when complete.

Rule 1: written under a temporary name. The marker file is written last, with size and sha256 of every other file; then
   the folder gets its name. A folder without its marker, or with a file that is not as the marker says, is as good as
   none: whoever lists looks at names and sizes, whoever resumes at every byte.
Rule 2: what a resume needs is in it: the learner's state, and `Progress` (step, version, stream positions, lineage).
Rule 3: the newest `keep` stay; whatever else has the name of a checkpoint is removed once a newer one is complete.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from workers.runtime.files import sync, write_synced

MARKER = "complete.json"
_EXTRA = "extra.json"
_NAME = re.compile(r"step-(\d{6,})")


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


def write(
    root: Path, progress: Progress, save: Callable[[Path, Mapping[str, object]], None], keep: int
) -> list[Checkpoint]:
    """Save one (`save` is `Learner.save`), drop old ones; all complete checkpoints, oldest first. OSError (disk)."""
    final = root / f"step-{progress.step:06d}"
    if not _is_complete(final, every_byte=True):
        unfinished = root / f".{final.name}.tmp"
        for leftover in (unfinished, final):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save(unfinished, progress.model_dump())
        marker = _Marker(step=progress.step, files=_files_in(unfinished))
        for name in marker.files:
            sync(unfinished / name)
        write_synced(unfinished / MARKER, marker.model_dump_json(indent=1).encode())
        unfinished.rename(final)
        sync(root)
    held = complete(root)
    for checkpoint in held[:-keep]:
        shutil.rmtree(checkpoint.folder)
    return held[-keep:]


def complete(root: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    if not root.is_dir():
        return []
    matches = [(path, _NAME.fullmatch(path.name)) for path in root.iterdir()]
    found = [Checkpoint(int(match[1]), path) for path, match in matches if match and _is_complete(path)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest_complete(root: Path) -> Checkpoint | None:
    """The newest checkpoint of which every byte is as it was written."""
    intact = (one for one in reversed(complete(root)) if _is_complete(one.folder, every_byte=True))
    return next(intact, None)


def progress_of(extra: Mapping[str, object]) -> Progress:
    """What `Learner.restore` gave back. ValueError if it is none of ours."""
    return Progress.model_validate(extra)


def versions(checkpoints: list[Checkpoint]) -> tuple[int, ...]:
    """Versions that these checkpoints need: a checkpoint before step n stands on version n."""
    return tuple(checkpoint.step for checkpoint in checkpoints)


def write_extra(folder: Path, extra: Mapping[str, object]) -> None:
    """For learners: `extra` beside their own files."""
    write_synced(folder / _EXTRA, json.dumps(dict(extra)).encode())


def read_extra(folder: Path) -> dict[str, object]:
    """For learners: what `write_extra` wrote."""
    extra: dict[str, object] = json.loads((folder / _EXTRA).read_text())
    return extra


def _is_complete(folder: Path, *, every_byte: bool = False) -> bool:
    try:
        marker = _Marker.model_validate_json((folder / MARKER).read_bytes())
        progress = progress_of(read_extra(folder))
        whole = all((folder / name).stat().st_size == file.size for name, file in marker.files.items())
        if whole and every_byte:
            whole = all(_sha256(folder / name) == file.sha256 for name, file in marker.files.items())
    except (OSError, ValueError, ValidationError):
        return False
    return whole and marker.step == progress.step and folder.name == f"step-{progress.step:06d}"


def _files_in(folder: Path) -> dict[str, _File]:
    """All files below it, the marker apart."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MARKER]
    return {
        path.relative_to(folder).as_posix(): _File(size=path.stat().st_size, sha256=_sha256(path)) for path in paths
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
