"""What `dora simulate` prints: one JSON object, or tables for people."""

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from pipelines.pictures import grid
from pipelines.simulate.deployment import Deployment

_SHARES = ("rollout_only_share", "idle_share", "seats_share")


def cost_of(deployment: Deployment) -> dict[str, Any]:
    """The cost model and the load, as they were used."""
    work = {"lengths": deployment.work.lengths.describe(), "prompt": deployment.work.prompt}
    mean = round(deployment.work.lengths.mean(deployment.settings.sampling.max_new_tokens), 1)
    work |= {"mean": mean, "kv_tokens": deployment.work.kv_tokens}
    return deployment.cost.model_dump() | {"work": work, "engines_total": deployment.engines_total}


def table(modes: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per mode; the paper's step beside it where there is one."""
    base = modes.get("sync", {}).get("step_minutes")
    paper_base = modes.get("sync", {}).get("paper", {}).get("step_minutes")
    head = ["mode", "engines", "step, min", "+-", "speed-up", "paper", "speed-up", "bound", "of it"]
    head += ["tokens/s", "rollout only", "idle", "seats", "blocked, s", "moves", "lag"]
    rows = [head]
    for name, found in modes.items():
        step, paper = found["step_minutes"], found["paper"].get("step_minutes")
        spread = stdev(found["seeds"]) if len(found["seeds"]) > 1 else 0.0
        row = [name, str(found["engines_rollout"]), f"{step:.2f}", f"{spread:.2f}"]
        row += [f"{base / step:.2f}x" if base else "", f"{paper:.2f}" if paper else ""]
        row += [f"{paper_base / paper:.2f}x" if paper and paper_base else ""]
        row += [f"{found['work_bound_minutes']:.2f}", f"{found['work_bound_minutes'] / step:.3f}"]
        row += [f"{found['tokens_per_second']:,.0f}", *(f"{found[share]:.1%}" for share in _SHARES)]
        row += [f"{found['blocked_by_oldest_seconds']:.1f}", f"{found['moves']:.0f}", _lag(found["lag"])]
        rows.append(row)
    return "\n".join(grid(rows))


def _lag(lag: Mapping[str, int]) -> str:
    total = sum(lag.values())
    return " ".join(f"{age}:{count / total:.0%}" for age, count in lag.items()) if total else ""


def sweep_table(key: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Step minutes (and engines for rollout) of each mode, a row per value."""
    modes = list(rows[0]["modes"])
    lines = [[key, *modes]]
    for row in rows:
        cells = [
            f"{row['modes'][mode]['step_minutes']:.2f} ({row['modes'][mode]['engines_rollout']})" for mode in modes
        ]
        lines.append([str(row["value"]), *cells])
    return "\n".join(grid(lines)) + "\n\nminutes a step (engines for rollout)"


def advice_text(said: Mapping[str, Any]) -> str:
    return (
        f"staleness_max = {said['staleness_max']}, scheduling.live_factor = {said['live_factor']:g}, "
        f"{said['engines_rollout']} engines for rollout: {said['step_minutes']:.2f} min a step, "
        f"{said['over_best'] - 1:.1%} over the best found"
    )
