"""Figures of an optimizer update from the sums of its micro-batches (`losses.py`): of all tokens, and per lag. Pure.

Rule 1: sums are of the tokens that entered the loss; `*_max` is joined by max, everything else by addition.
Rule 2: figures of an update without a counted token are 0, `tokens` among them.
"""

import re
from collections.abc import Mapping, Sequence

_OF_LAG = re.compile(r"lag_(\d+)_(.+)")
_MEANS = {
    "ratio_mean": "ratio",
    "clip_low_share": "clip_low",
    "clip_high_share": "clip_high",
    "clip_dual_share": "clip_dual",
    "mismatch_kl": "k3",
    "entropy": "entropy",
    "tis_mean": "tis",
    "tis_cut_share": "tis_cut",
    "reference_kl": "reference_kl",
}


def join(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of several micro-batches as one."""
    joined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            before = joined.get(name, 0.0)
            joined[name] = max(before, value) if name.endswith("_max") else before + value
    return joined


def figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Figures of an update from its joined sums, and `lag_<lag>_...` of the tokens of each lag.

    `ratio_*` and the clip shares are of the objective's ratio: shares of tokens whose gradient the clip removed (cispo:
    whose ratio it cut). `mismatch_kl` is the mean k3 estimate of KL(what sampled, weights now), `ess` the effective
    sample size as a share (1 = on policy), both of tokens; `nonfinite` tokens have no usable log-prob. With their
    settings on: `tis_mean` and `tis_cut_share` (truncated or masked) of importance weights, `reference_kl`,
    `clip_dual_share`.
    """
    of_lags: dict[int, dict[str, float]] = {}
    for name, value in sums.items():
        if match := _OF_LAG.fullmatch(name):
            of_lags.setdefault(int(match[1]), {})[match[2]] = value
    said = _figures(sums) | {"loss": sums.get("loss", 0.0)}
    for lag, part in sorted(of_lags.items()):
        said |= {f"lag_{lag}_{name}": value for name, value in _figures(part).items()}
    return said


def _figures(sums: Mapping[str, float]) -> dict[str, float]:
    used, tokens = sums["finite"], sums["tokens"]
    said = {figure: sums[name] / used if used else 0.0 for figure, name in _MEANS.items() if name in sums}
    said["ratio_max"] = sums["ratio_max"]
    said["ess"] = sums["drift"] ** 2 / (used * sums["drift_squared"]) if used else 0.0
    return said | {"tokens": tokens, "nonfinite": tokens - used}
