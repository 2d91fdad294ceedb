"""The versions of a run after it: which were announced, and which still have their files."""

from pathlib import Path

from pipelines import archived
from schemas.messages import WeightsRecord
from workers.runtime.errors import BadInput
from workers.transport.weights.store import Store


def announced(run_dir: Path, damage: list[str]) -> dict[int, WeightsRecord]:
    """By version, from the archive: the first record of a version is the one that counts. What cannot be read is said
    in `damage`."""
    found: dict[int, WeightsRecord] = {}
    for record in archived.of_archive(run_dir, "weights", damage):
        assert isinstance(record, WeightsRecord)
        found.setdefault(record.version, record)
    return found


def kept(run_dir: Path, version: int | None) -> WeightsRecord:
    """What was announced of a version (None: the newest) whose files are there. BadInput says which are kept, and how
    to keep more."""
    damage: list[str] = []
    known, there = announced(run_dir, damage), Store(run_dir / "weights").versions()
    if version not in known:
        archived.complain(damage)
    if version is None:
        version = max(known, default=0)
    said = ", ".join(map(str, there)) or "none"
    if version not in known:
        which = f"announced: 0 to {max(known)}; kept: {said}" if known else "announced: none yet"
        raise BadInput(f"run {run_dir.name} has announced no version {version} ({which})")
    if version not in there:
        raise BadInput(
            f"the files of version {version} are gone (kept: {said}); start the run with a larger "
            "scheduling.weights_keep or with scheduling.weights_keep_every, or copy a version with `dora export` while "
            "it is there"
        )
    return known[version]
