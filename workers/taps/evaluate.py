"""Held-out accuracy: what the rows with `purpose = eval` say of each version.

Rule 1: a row without a verdict (`score_error`) is counted apart; it is neither right nor wrong.
Rule 2: of rows that came twice, and of attempts of one sample, the last counts.
A row's tags are the keys of its metadata that are true: `{"unseen": true}`.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.taps.archive import files, read

ALL = "all"
_COLUMNS = ["version", "group", "index", "attempt", "outcome", "score_error", "metadata"]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Mean outcome of `rows` samples; None if none has a verdict. `errors`: samples without one."""

    mean: float | None
    rows: int
    errors: int


@dataclass(slots=True)
class _Tally:
    outcomes: list[float] = field(default_factory=list)
    errors: int = 0

    def accuracy(self) -> Accuracy:
        rows = len(self.outcomes)
        return Accuracy(sum(self.outcomes) / rows if rows else None, rows, self.errors)


def heldout(run_dir: Path, damage: list[str] | None = None) -> dict[int, dict[str, Accuracy]]:
    """Version -> tag -> accuracy, from the run's archive; the tag `all` is every row. BadInput, as `archive.files`."""
    return by_version(read(run_dir, "evaluations", damage).select(_COLUMNS).to_pylist())


def fingerprints(run_dir: Path, damage: list[str] | None = None) -> dict[int, str]:
    """Version -> fingerprint of the weights that its held-out rows were sampled with, as the engines said; of engines
    that do not agree all. BadInput, as `archive.files`."""
    found: dict[int, set[str]] = defaultdict(set)
    for _, _, table in files(run_dir, "evaluations", ("version", "engine_path", "offset"), damage):
        paths = table.column("engine_path").to_pylist()
        for version, path in zip(table.column("version").to_pylist(), paths, strict=True):
            found[version] |= {stay["fingerprint"] for stay in path}
    return {version: ", ".join(sorted(of)) for version, of in sorted(found.items())}


def by_version(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Accuracy]]:
    """As `heldout`, of rows of `evaluations`."""
    samples: dict[tuple[int, int, int], Mapping[str, Any]] = {}
    for row in rows:
        key = row["version"], row["group"], row["index"]
        if key not in samples or row["attempt"] >= samples[key]["attempt"]:
            samples[key] = row
    tallies: dict[int, dict[str, _Tally]] = defaultdict(lambda: defaultdict(_Tally))
    for row in samples.values():
        for tag in {ALL, *tags_of(row["metadata"])}:
            tally = tallies[row["version"]][tag]
            if row["score_error"] is None:
                tally.outcomes.append(row["outcome"])
            else:
                tally.errors += 1
    return {
        version: {tag: tally.accuracy() for tag, tally in sorted(tags.items())}
        for version, tags in sorted(tallies.items())
    }


def tags_of(metadata: str) -> list[str]:
    """The tags in a row's metadata."""
    try:
        found = json.loads(metadata)
    except json.JSONDecodeError:
        return []
    return [name for name, value in found.items() if value is True] if isinstance(found, dict) else []
