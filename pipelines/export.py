"""`dora export`: a version of a run as a Hugging Face folder, checked against its manifest."""

import shutil
from pathlib import Path

from pipelines import versions
from schemas.messages import WeightsRecord
from workers.runtime.errors import BadInput
from workers.transport.weights.manifest import MANIFEST
from workers.transport.weights.store import Store


def export(run_dir: Path, version: int | None, target: Path) -> WeightsRecord:
    """Copy it (None: the newest) to `target`, which must be new or empty. BadInput, WeightsUnavailable."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} exists and is not empty: choose a new folder")
    record = versions.kept(run_dir, version)
    folder, _ = Store.open(record)
    unfinished = target.with_name(target.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(folder, unfinished, ignore=shutil.ignore_patterns(MANIFEST))
    if target.exists():
        target.rmdir()
    unfinished.rename(target)
    return record
