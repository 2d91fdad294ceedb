"""How far the engines' log-probs are from the trainer's: by dtype, and as the trainer's weights move on.

A short whole run per dtype keeps every version that it publishes. Of each version's rows the log-probs that the engine
reported (it had loaded the export) are held against those of the trainer's model under the published weights of that
version (lag 0: the same weights, two implementations) and of the versions after it (the policy has moved on). The
tiny model runs in float32, where implementations must agree to rounding; SmolLM2 in bfloat16, where they cannot: a
bfloat16 has 8 bits, so two right orders of the same sums differ in each layer.
"""

import contextlib
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from pipelines.bench import whole_runs
from pipelines.bench.benchmarks import Bench
from pipelines.config_file import read_resolved
from workers.taps import archive
from workers.trainer.samples import samples_of

CASES = (
    ("float32", "tiny", ("steps=6", "staleness_max=2")),
    ("bfloat16", "quickstart", ("steps=4", "staleness_max=2", "groups_per_batch=4", "engines.count=1")),
)
ALWAYS = ("scheduling.weights_keep=99", "evaluation.samples=0")
LAGS = (0, 1, 2)
ROWS_MAX = 32
"""Of a version."""


def measure() -> Bench:
    """A row per dtype and lag: mean and largest |difference| in nats over all tokens of the rows looked at."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dora-bench-") as folder:
        for dtype, config, settings in CASES:
            run_dir = Path(folder) / f"parity-{dtype}"
            whole_runs.complete(run_dir, config, (*settings, *ALWAYS, f"dtype={dtype}"))
            rows += [{"dtype": dtype} | row for row in differences(run_dir)]
    names = ("mean", "max")
    return Bench(rows, {f"{row['dtype']}_lag_{row['lag']}_{name}": row[name] for row in rows for name in names})


def differences(run_dir: Path) -> list[dict[str, Any]]:
    """By lag: mean and max of |engine's - trainer's| log-prob, tokens, versions; of a run that kept its versions."""
    from workers.trainer.learners.megatron_learner import MegatronLearner

    settings = read_resolved(run_dir)
    words = [json.loads(text) for text in archive.read(run_dir, "weights").column("value").to_pylist()]
    folders = {word["version"]: Path(word["location"].removeprefix("file://")) for word in words}
    by_version = _rows(run_dir)
    found: dict[int, list[float]] = defaultdict(list)
    versions: dict[int, int] = defaultdict(int)
    for version, folder in sorted(folders.items()):
        sampled = {lag: by_version[version - lag] for lag in LAGS if version - lag in by_version}
        if not sampled:
            continue
        with contextlib.closing(MegatronLearner(settings, folder)) as learner:
            for lag, rows in sampled.items():
                ours = learner.logprobs(samples_of(rows, version, settings))
                versions[lag] += 1
                found[lag] += [
                    abs(mine - theirs)
                    for row, logprobs in zip(rows, ours, strict=True)
                    for mine, theirs in zip(logprobs, row["logprobs"], strict=True)
                ]
    return [
        {
            "lag": lag,
            "versions": versions[lag],
            "tokens": len(values),
            "mean": float(f"{fmean(values):.3g}"),
            "max": float(f"{max(values):.3g}"),
        }
        for lag, values in sorted(found.items())
    ]


def _rows(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """The first scored rows of each version."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in archive.read(run_dir, "trajectories").to_pylist():
        if row["reward"] is not None and len(found[row["version"]]) < ROWS_MAX:
            found[row["version"]].append(row)
    return dict(found)
