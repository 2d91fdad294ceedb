"""Does it learn as well with stale and with mixed versions? Quickstart's task by mode and seed, whole runs.

One run is one folder, `learn-MODE-kK-sSEED` under `--runs`. Runs that are missing are made, one after the other;
interrupted ones go on; those that have ended are read, whoever made them. Of the archives come a table
(`learning.md`) and a plot (`learning.svg`), beside the runs. How curves are compared: `learn_curves.py`.

`still-kK` is the control: learning rate 0. Nothing may change but by chance: neither the reward, nor the mismatch of
engines and trainer, nor one bit of the weights.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pipelines import plots
from pipelines.bench import learn_curves, whole_runs
from pipelines.bench.benchmarks import Bench
from pipelines.bench.learn_curves import Learned
from pipelines.children import write_whole
from pipelines.runs import SUMMARY
from workers.runtime.errors import BadInput

CONFIG = "quickstart"
MODES = "sync-k0,dora-k1,dora-k2,partial-k2,still-k2"
BAND_OF = "sync-k0"
STILL = "still"
STILL_SETTINGS = ("mode=dora", "training.learning_rate=0", "steps=50", "groups_per_batch=2", "evaluation.samples=0")
"""Small steps: fifty of them, and a step's mean reward is of 16 samples."""
SHOWN_EVERY = 2
TABLE, PLOT = "learning.md", "learning.svg"


def measure(*, runs: Path = Path("runs"), modes: str = "", seeds: str = "", steps: int = 12) -> Bench:
    """`runs`: folder of the runs' folders. `modes`: MODE-kK, by commas; `seeds` likewise. `steps` of a run that is
    missing; 0 = none is made, what is there is read. BadInput, whole_runs.RunFailed."""
    wanted = _wanted(modes or MODES, seeds or "1,2,3")
    if steps:
        for mode, seed in wanted:
            _make(runs, mode, seed, steps)
    learned = [run for mode, seed in wanted if (run := learn_curves.read_run(runs / _name(mode, seed))) is not None]
    by_mode: dict[str, list[Learned]] = defaultdict(list)
    for run in learned:
        by_mode[run.mode].append(run)
    still = [run for run in learned if run.mode.startswith(STILL)]
    curves = {mode: held for mode, held in by_mode.items() if not mode.startswith(STILL)}
    figures: dict[str, float | int] = {}
    for mode, held in curves.items():
        figures |= _figures(mode, held, curves.get(BAND_OF, []))
    for run in still:
        figures |= _still(runs / _name(run.mode, run.seed))
    if curves:
        write_whole(runs / TABLE, _table(curves, figures))
        write_whole(runs / PLOT, _plot(curves))
    return Bench([_row(run) for run in learned], figures)


def _wanted(modes: str, seeds: str) -> list[tuple[str, int]]:
    """Seed by seed, so that an interrupted benchmark has something of every mode. The control needs one seed."""
    names, numbers = modes.split(","), seeds.split(",")
    for name in names:
        if not re.fullmatch(r"(sync|one_step|partial|oversample|dora|still)-k\d+", name):
            raise BadInput(f"--modes {name}: write a mode and its K, such as dora-k2 (or {MODES})")
    for number in numbers:
        if not number.isdigit():
            raise BadInput(f"--seeds {number}: write numbers, such as 1,2,3")
    return [
        (name, int(number))
        for number in numbers
        for name in names
        if number == numbers[0] or not name.startswith(STILL)
    ]


def _name(mode: str, seed: int) -> str:
    return f"learn-{mode}-s{seed}"


def _make(runs: Path, mode: str, seed: int, steps: int) -> None:
    kind, _, k = mode.rpartition("-k")
    own = STILL_SETTINGS if kind == STILL else (f"mode={kind}", f"steps={steps}")
    whole_runs.complete(runs / _name(mode, seed), CONFIG, (f"seed={seed}", f"staleness_max={k}", *own))


# --- figures ----------------------------------------------------------------------------------


def _row(run: Learned) -> dict[str, Any]:
    return {
        "mode": run.mode,
        "seed": run.seed,
        "heldout_before": run.heldout[0],
        "heldout_after": run.heldout[1],
        "unseen_before": run.unseen[0],
        "unseen_after": run.unseen[1],
        "lag_mean": round(run.lag_mean, 3),
        "minutes": round(run.minutes_all, 2),
        "tokens_per_second": run.tokens_per_second,
        "accuracy": {version: round(value, 4) for version, value in run.accuracy.items()},
        "minutes_of_version": {version: round(value, 3) for version, value in run.minutes.items()},
    }


def _figures(mode: str, held: Sequence[Learned], band: Sequence[Learned]) -> dict[str, float | int]:
    key = mode.replace("-", "_")
    figures: dict[str, float | int] = {f"{key}_runs": len(held)}
    figures |= {f"{key}_minutes": round(fmean(run.minutes_all for run in held), 2)}
    after = [run.heldout[1] for run in held if run.heldout[1] is not None]
    if after:
        figures[f"{key}_heldout_after"] = round(fmean(after), 4)
    if mode != BAND_OF and len(band) > 1:
        compared = learn_curves.compare([run.accuracy for run in band], [run.accuracy for run in held])
        figures |= {f"{key}_{name}": value for name, value in compared.items()}
    return figures


def _still(run_dir: Path) -> dict[str, float | int]:
    """Slopes over steps with half of their 95 % intervals: flat = the interval holds 0."""
    weights = json.loads((run_dir / SUMMARY).read_text())["weights"]
    figures: dict[str, float | int] = {
        "still_weights_changed": int(weights["fingerprint_first"] != weights["fingerprint_last"])
    }
    for name in ("mismatch_kl", "reward_mean"):
        values = learn_curves.trainer_series(run_dir, name)
        change, half = learn_curves.slope(values)
        figures |= {
            "still_steps": len(values),
            f"still_{name}": float(f"{fmean(values):.4g}"),
            f"still_{name}_slope": float(f"{change:.3g}"),
            f"still_{name}_slope_half_width": float(f"{half:.3g}"),
            f"still_{name}_flat": int(abs(change) <= half),
        }
    return figures


# --- for people -------------------------------------------------------------------------------


def _table(curves: Mapping[str, Sequence[Learned]], figures: Mapping[str, float | int]) -> str:
    """Markdown: a row per mode, then accuracy at some versions."""
    head = ["mode", "runs", "held-out before", "after", "never trained, after", "mean lag", "minutes"]
    head += ["versions in the band", "mean difference", "beyond it at most"]
    lines = [head]
    for mode, held in curves.items():
        key = mode.replace("-", "_")
        cells = [mode.replace("-k", ", K = "), str(len(held))]
        cells += [_percents([run.heldout[place] for run in held]) for place in (0, 1)]
        cells += [_percents([run.unseen[1] for run in held]), f"{fmean(run.lag_mean for run in held):.2f}"]
        cells.append(f"{figures[f'{key}_minutes']:.1f}")
        if f"{key}_inside" in figures:
            cells.append(f"{figures[f'{key}_inside']} of {figures[f'{key}_versions']}")
            cells += [f"{100 * figures[f'{key}_{name}']:+.1f} points" for name in ("difference_mean", "outside_max")]
        else:
            cells += ["-"] * 3
        lines.append(cells)
    means = {mode: learn_curves.mean_curve([run.accuracy for run in held]) for mode, held in curves.items()}
    versions = sorted(set().union(*means.values()))[::SHOWN_EVERY]
    by_version = [["accuracy under version", *map(str, versions)]]
    for mode, mean in means.items():
        shown = [f"{100 * mean[version]:.0f} %" if version in mean else "-" for version in versions]
        by_version.append([mode.replace("-k", ", K = "), *shown])
    return f"{_markdown(lines)}\n\n{_markdown(by_version)}\n"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ruled)


def _percents(values: Sequence[float | None]) -> str:
    """Mean and standard deviation over runs."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{fmean(known):.1f} %" if len(known) == 1 else f"{fmean(known):.1f} ± {stdev(known):.1f} %"


def _plot(curves: Mapping[str, Sequence[Learned]]) -> str:
    """Accuracy against versions, with the band, and against minutes."""
    against_versions, against_minutes = [], []
    for mode, held in curves.items():
        accuracies = [run.accuracy for run in held]
        mean = learn_curves.mean_curve(accuracies)
        minutes = learn_curves.mean_curve([run.minutes for run in held])
        banded = mode == BAND_OF and len(held) > 1
        half = learn_curves.half_width(accuracies, len(held)) if banded else 0.0
        name = mode.replace("-k", ", K = ")
        against_versions.append(plots.Line(name, tuple(mean.items()), half))
        points = tuple((minutes[version], value) for version, value in mean.items() if version in minutes)
        against_minutes.append(plots.Line(name, points))
    return plots.stacked(
        [
            plots.lines(against_versions, "accuracy of training samples by version; shaded: 95 % band of sync"),
            plots.lines(against_minutes, "the same by minutes since the first request"),
        ]
    )
