"""Learning curves out of archives, and how they compare. Accuracy is that of the sampling policy: the mean outcome of
all scored training samples of version v, whichever step they were trained in; v = updates that the policy had seen.

The band. Runs of one mode differ by their seed: by its rows' order, and by what was sampled. s^2 is the variance over
seeds within one version, pooled over all versions; a mean of m runs lies within t s sqrt(1/n + 1/m) of the mean of n
other runs of the same policy at 95 % of the versions. (Versions of one run are not independent, so t's degrees of
freedom are too many, and the band a little too narrow: strict, not kind.)

Shapes: a curve is {version: value}. Minutes are since the first request was issued.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.runs import SUMMARY
from workers.taps import archive

NAME = re.compile(r"learn-(?P<mode>[a-z_]+-k\d+)-s(?P<seed>\d+)")
Curve = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Learned:
    """One run: `mode` with its K (`dora-k2`); `accuracy`, `minutes` (when the version was published); held-out
    accuracy before and after; mean lag of trained trajectories; minutes of the run's work."""

    mode: str
    seed: int
    accuracy: Curve
    minutes: Curve
    heldout: tuple[float | None, float | None]
    unseen: tuple[float | None, float | None]
    lag_mean: float
    tokens_per_second: float

    @property
    def minutes_all(self) -> float:
        return max(self.minutes.values())


def read_run(run_dir: Path) -> Learned | None:
    """None if the folder is no run of this benchmark, or one that has not ended."""
    named = NAME.fullmatch(run_dir.name)
    if named is None or not (run_dir / SUMMARY).is_file():
        return None
    summary = json.loads((run_dir / SUMMARY).read_text())
    histogram = {int(lag): count for lag, count in summary["lag"]["histogram"].items()}
    reward = summary["reward"]
    return Learned(
        mode=named["mode"],
        seed=int(named["seed"]),
        accuracy=accuracy_by_version(run_dir),
        minutes=minutes_by_version(run_dir),
        heldout=(reward["heldout_before"], reward["heldout_after"]),
        unseen=(reward["unseen_before"], reward["unseen_after"]),
        lag_mean=sum(lag * count for lag, count in histogram.items()) / max(1, sum(histogram.values())),
        tokens_per_second=summary["tokens_per_second"],
    )


def accuracy_by_version(run_dir: Path) -> dict[int, float]:
    """Of each sample the first row with a verdict counts."""
    outcomes: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    names = ("version", "group", "index", "outcome", "offset")
    for _, _, table in archive.files(run_dir, "trajectories", names):
        for version, group, index, outcome in zip(*(table.column(n).to_pylist() for n in names[:-1]), strict=True):
            if outcome is not None:
                outcomes[version].setdefault((group, index), outcome)
    return {version: fmean(of.values()) for version, of in sorted(outcomes.items())}


def minutes_by_version(run_dir: Path) -> dict[int, float]:
    """When each version was announced, since the first request was queued (both by the wall clock; the journal's own
    time is another); version 0, which everything waits for, at 0."""
    queued = [
        pc.min(table.column("queued_at"))
        for _, _, table in archive.files(run_dir, "trajectories", ("queued_at", "offset"))
    ]
    began = min(at.cast(pa.int64()).as_py() for at in queued)
    words = [json.loads(text) for text in archive.read(run_dir, "weights").column("value").to_pylist()]
    return {word["version"]: max(0.0, (word["created_at"] - began) / 60e6) for word in words}


# --- comparing --------------------------------------------------------------------------------


def mean_curve(curves: Sequence[Curve]) -> dict[int, float]:
    """Over the runs, at versions that all of them have."""
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {version: fmean(curve[version] for curve in curves) for version in sorted(shared)}


def scatter(curves: Sequence[Curve]) -> tuple[float, int]:
    """(s, degrees of freedom): standard deviation over runs within a version, pooled; (nan, 0) of a single run."""
    shared = mean_curve(curves)
    if len(curves) < 2 or not shared:
        return math.nan, 0
    pooled = fmean(variance([curve[version] for curve in curves]) for version in shared)
    return math.sqrt(pooled), (len(curves) - 1) * len(shared)


def half_width(curves: Sequence[Curve], others: int) -> float:
    """Of the 95 % band around the mean of `curves` for a mean of `others` runs; nan of a single run."""
    s, freedom = scatter(curves)
    return t_95(freedom) * s * math.sqrt(1 / len(curves) + 1 / others) if freedom else math.nan


def t_95(freedom: int) -> float:
    """The 97.5 % point of Student's t. Cornish-Fisher's expansion (Abramowitz and Stegun 26.7.5): exact to 1 % from 3
    degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / math.pow(freedom, power) for power, term in enumerate(terms, 1))


def compare(band: Sequence[Curve], others: Sequence[Curve]) -> dict[str, float | int]:
    """Of the mean of `others` against the band: at how many versions it is inside, the mean difference (with half of
    its 95 % interval, over the seeds' own means), and by how much it leaves the band at most."""
    centre, mean = mean_curve(band), mean_curve(others)
    shared = sorted(set(centre) & set(mean))
    half = half_width(band, len(others))
    differences = [mean[version] - centre[version] for version in shared]
    return {
        "versions": len(shared),
        "inside": sum(abs(difference) <= half for difference in differences),
        "half_width": round(half, 4),
        "difference_mean": round(fmean(differences), 4),
        "outside_max": round(max(0.0, max(abs(d) for d in differences) - half), 4),
    }


def slope(values: Sequence[float]) -> tuple[float, float]:
    """Least squares over 0, 1, 2, ...: (change per place, half of its 95 % interval). At least 4 values."""
    count, mean = len(values), fmean(values)
    centre = (count - 1) / 2
    square = sum((place - centre) ** 2 for place in range(count))
    found = sum((place - centre) * (value - mean) for place, value in enumerate(values)) / square
    rests = (value - mean - found * (place - centre) for place, value in enumerate(values))
    return found, t_95(count - 2) * math.sqrt(sum(rest * rest for rest in rests) / (count - 2) / square)


def trainer_series(run_dir: Path, name: str) -> list[float]:
    """A figure of the trainer's steps, in their order; of a step that was trained twice the last."""
    found: dict[int, float] = {}
    for text in archive.read(run_dir, "metrics").column("value").to_pylist():
        point: dict[str, Any] = json.loads(text)
        if point["source"] == "trainer" and name in point["values"]:
            found[point["step"]] = point["values"][name]
    return [value for _, value in sorted(found.items())]
