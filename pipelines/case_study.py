"""The paper's case study (DORA, arXiv 2604.26256) of any archive: is a stale group worse, or only another one?

Long responses end late, so what is stale is harder and longer: a pass rate that falls with lag may be selection. So lag
is looked at within groups of one difficulty (the share of a group's samples that are correct).

Rule 1: of trained groups only, by the members that their batches name; a sample is correct if its outcome is >= 0.5.
Rule 2: lengths are response tokens, variances those of a group's rewards (population), a bubble is the share of its
time in which an engine had nothing to run.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pvariance
from typing import Any

from pipelines import archived
from pipelines.pictures import grid
from schemas.tables import STRATA
from schemas.tables import stratum as stratum_of
from workers.taps import archive

TITLES = {"by_lag": "trained groups by lag", "by_difficulty": "by difficulty", "bubble": "engines with nothing to run"}
"""What each table is called."""
COLUMNS = ("group", "index", "attempt", "response_ids", "reward", "outcome", "offset")


@dataclass(frozen=True, slots=True)
class Group:
    """A trained group: `tokens`, `rewards`, `outcomes` of its members in order."""

    lag: int
    tokens: tuple[int, ...]
    rewards: tuple[float, ...]
    outcomes: tuple[float, ...]

    @property
    def passed(self) -> float:
        return fmean(outcome >= 0.5 for outcome in self.outcomes)

    @property
    def stratum(self) -> str:
        return stratum_of(sum(outcome >= 0.5 for outcome in self.outcomes), len(self.outcomes))


def case_study(run_dir: Path, damage: list[str]) -> dict[str, Any]:
    """All tables as plain rows; empty ones where the archive has nothing of it. `damage` hears of what could not be
    read."""
    return tables(trained_groups(run_dir, damage)) | {"bubble": bubbles(run_dir, damage)}


def tables(groups: Sequence[Group]) -> dict[str, list[dict[str, Any]]]:
    by_lag, by_stratum = _by(groups, lambda g: g.lag), _by(groups, lambda g: g.stratum)
    lags = sorted(by_lag)
    return {
        "by_lag": [{"lag": lag} | _figures(by_lag[lag]) for lag in lags],
        "by_difficulty": [
            {"correct": stratum, "groups": len(by_stratum[stratum])}
            | {"reward_variance": round(fmean(pvariance(g.rewards) for g in by_stratum[stratum]), 4)}
            | {f"pass_lag_{lag}": _passed([g for g in by_stratum[stratum] if g.lag == lag]) for lag in lags}
            for stratum in STRATA
            if stratum in by_stratum
        ],
    }


def _figures(groups: Sequence[Group]) -> dict[str, Any]:
    tokens = [count for group in groups for count in group.tokens]
    lengths = {"tokens_median": median(tokens), "tokens_mean": round(fmean(tokens), 1)}
    return {"groups": len(groups), "pass": _passed(groups)} | lengths


def _passed(groups: Sequence[Group]) -> float | None:
    return round(fmean(group.passed for group in groups), 4) if groups else None


def _by(groups: Iterable[Group], key: Any) -> dict[Any, list[Group]]:
    found: dict[Any, list[Group]] = defaultdict(list)
    for group in groups:
        found[key(group)].append(group)
    return found


def trained_groups(run_dir: Path, damage: list[str]) -> list[Group]:
    """In the order of training; members without a reward are left out, and groups without members."""
    rows: dict[tuple[int, int, int], tuple[int, float, float]] = {}
    for _, _, table in archive.files(run_dir, "trajectories", COLUMNS, damage):
        columns = (table.column(name).to_pylist() for name in COLUMNS[:-1])
        for group, index, attempt, ids, reward, outcome in zip(*columns, strict=True):
            if reward is not None:
                rows[group, index, attempt] = (len(ids), reward, outcome)
    groups = []
    for batch in archived.messages(run_dir, "batches", damage):
        members = defaultdict(list)
        for member in batch["members"]:
            row = rows.get((member["group"], member["index"], member["attempt"]))
            if row is not None:
                members[member["group"]].append(row)
        for group, version in batch["groups"]:
            if members[group]:
                groups.append(Group(batch["step"] - version, *zip(*members[group], strict=True)))
    return groups


def bubbles(run_dir: Path, damage: list[str]) -> list[dict[str, Any]]:
    """By engine, from the last heartbeat of each incarnation."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for word in archived.messages(run_dir, "status", damage):
        if word["kind"] == "heartbeat":
            last[word["engine"], word["incarnation"]] = word
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (engine, _), word in last.items():
        sums[engine][0] += word["idle_s"]
        sums[engine][1] += sum(word[name] for name in ("idle_s", "decode_s", "prefill_s", "load_s", "migrate_s"))
    return [
        {"engine": engine, "idle_share": round(idle / all_s, 4)}
        for engine, (idle, all_s) in sorted(sums.items())
        if all_s
    ]


def as_text(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    parts = []
    for name, title in TITLES.items():
        if found[name]:
            rows = [list(found[name][0]), *([shown(cell) for cell in row.values()] for row in found[name])]
            parts += ["", f"{title}:", *(f"  {line}" for line in grid(rows))]
    return "\n".join(parts)


def shown(cell: Any) -> str:
    """A cell of a table as people read it."""
    return "-" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)
