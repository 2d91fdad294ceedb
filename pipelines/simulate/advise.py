"""The least staleness and the fewest live groups that cost nothing, and the engines to give to rollout.

Rule 1: looked for on the smaller copy of the deployment, one seed.
"""

from dataclasses import replace
from typing import Any

from pipelines.simulate.compare import Say, best_splits, copy_of, figures, in_mode, ranked, with_changes
from pipelines.simulate.cost import Split
from pipelines.simulate.deployment import Deployment
from pipelines.simulate.runs import Many, many

WITHIN = 1.02
STALENESS = (0, 1, 2, 3, 4)
LIVE_FACTORS = (1.0, 1.5, 2.0, 3.0)


def advise(deployment: Deployment, say: Say) -> dict[str, Any]:
    """`staleness_max`, then `live_factor`: the smallest with a step within 2 % of the best found. `tried`: all."""
    with many(deployment) as together:
        tried = [row for staleness in STALENESS for row in _tried(deployment, staleness, together, say)]
    best = min(row["step_minutes"] for row in tried)
    good = [row for row in tried if row["step_minutes"] <= WITHIN * best]
    least = min(good, key=lambda row: (row["staleness_max"], row["live_factor"]))
    return least | {"over_best": round(least["step_minutes"] / best, 4), "tried": tried}


def _tried(deployment: Deployment, staleness: int, together: Many, say: Say) -> list[dict[str, Any]]:
    settings = deployment.settings
    if settings.steps and staleness >= settings.steps:
        return []
    case = replace(deployment, settings=with_changes(settings, {"staleness_max": staleness}))
    case = in_mode(case, "dora")
    split = Split(ranked(best_splits(case, together, lambda _: None))[0], case.engines_total)
    rows = []
    for factor in LIVE_FACTORS if staleness else LIVE_FACTORS[:1]:
        scheduling = settings.scheduling.model_dump() | {"live_factor": factor}
        small = copy_of(replace(case, settings=with_changes(case.settings, {"scheduling": scheduling})))
        minutes = figures(small, split, together).step_minutes
        say(f"staleness_max {staleness}, live_factor {factor:g}, {split.rollout} for rollout: {minutes:.2f} min a step")
        names = {"staleness_max": staleness, "live_factor": factor, "engines_rollout": split.rollout}
        rows.append(names | {"step_minutes": minutes})
    return rows
