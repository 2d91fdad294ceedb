"""`dora export`: a version of a run as a Hugging Face folder, checked against its manifest."""

import json
import shutil
from pathlib import Path

from schemas.messages import WeightsRecord
from workers.runtime.errors import BadInput
from workers.taps import archive
from workers.transport.weights.store import Store

MANIFEST = "manifest.json"


def export(run_dir: Path, version: int | None, target: Path) -> WeightsRecord:
    """Copy it (None: the newest) to `target`, which must be new or empty. BadInput, WeightsUnavailable."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} exists and is not empty: choose a new folder")
    announced, store = _announced(run_dir), Store(run_dir / "weights")
    if version is None:
        version = max(announced, default=0)
    kept = ", ".join(map(str, store.versions())) or "none"
    if version not in announced:
        known = f"announced: 0 to {max(announced)}; kept: {kept}" if announced else "announced: none yet"
        raise BadInput(f"run {run_dir.name} has announced no version {version} ({known})")
    if version not in store.versions():
        raise BadInput(
            f"the files of version {version} are gone (kept: {kept}); keep more with scheduling.weights_keep"
        )
    folder, _ = store.open(announced[version])
    unfinished = target.with_name(target.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(folder, unfinished, ignore=shutil.ignore_patterns(MANIFEST))
    if target.exists():
        target.rmdir()
    unfinished.rename(target)
    return announced[version]


def _announced(run_dir: Path) -> dict[int, WeightsRecord]:
    """The archive's word: the first record of a version is the one that counts."""
    found: dict[int, WeightsRecord] = {}
    for text in archive.read(run_dir, "weights").column("value").to_pylist():
        record = WeightsRecord.model_validate(json.loads(text))
        found.setdefault(record.version, record)
    return found
