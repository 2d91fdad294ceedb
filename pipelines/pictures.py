"""A snapshot as people read it: one line, a markdown report with an inline SVG curve. Pure text, no library."""

import base64

from pipelines.tally import Snapshot
from schemas.settings import Settings

POINTS_MAX = 150
_WIDE, _HIGH, _EDGE = 480, 160, 24


def line(snapshot: Snapshot) -> str:
    """One line for logs and terminals."""
    if snapshot.version is None:
        return f"{snapshot.run}: starting (models are loaded)"
    goal = "" if snapshot.steps is None else f"/{snapshot.steps}"
    reward = "-" if snapshot.reward is None else f"{snapshot.reward:.3f}"
    engines = " ".join("-" if version is None else f"v{version}" for version in snapshot.engines.values()) or "none yet"
    parts = [
        f"{snapshot.run}: step {snapshot.step}{goal}",
        f"version {snapshot.version}",
        f"reward {reward}",
        f"{snapshot.tokens_per_second:.0f} tokens/s",
        f"live groups {snapshot.live_groups}",
        f"engines {engines}",
    ]
    if snapshot.restarts:
        parts.append(f"restarts {snapshot.restarts}")
    return ", ".join(parts)


def markdown(snapshot: Snapshot, settings: Settings) -> str:
    """The report of the Prefect UI."""
    reward = "-" if snapshot.reward is None else f"{snapshot.reward:.3f}"
    goal = snapshot.steps or "all epochs"
    rows = [
        ("step", f"{snapshot.step} of {goal}"),
        ("newest version", "-" if snapshot.version is None else snapshot.version),
        ("reward of the last batch", reward),
        ("tokens per second", f"{snapshot.tokens_per_second:.0f}"),
        ("live groups", f"{snapshot.live_groups} of {settings.live_max}, {snapshot.queued_groups} complete"),
        ("voided groups", snapshot.voided),
        ("lag of trained trajectories", ", ".join(f"{lag}: {count}" for lag, count in snapshot.lag.items()) or "-"),
        ("engines lost, restarts", f"{snapshot.engines_lost}, {snapshot.restarts}"),
    ]
    engines = [("-" if version is None else f"v{version}") for version in snapshot.engines.values()]
    text = [f"# {snapshot.run}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    text += ["", "| engine | " + " | ".join(map(str, snapshot.engines)) + " |"] if engines else []
    text += ["|---|" + "---|" * len(engines), "| version | " + " | ".join(engines) + " |"] if engines else []
    if len(snapshot.rewards) > 1:
        encoded = base64.b64encode(curve(snapshot.rewards, "mean reward per step").encode()).decode()
        text += ["", f"![mean reward per step](data:image/svg+xml;base64,{encoded})"]
    return "\n".join(text)


def curve(values: tuple[float, ...], title: str) -> str:
    """An SVG line of `values` over their index, thinned to POINTS_MAX points."""
    every = max(1, -(-len(values) // POINTS_MAX))
    points = [(place, value) for place, value in enumerate(values) if place % every == 0 or place == len(values) - 1]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    last = max(1, len(values) - 1)
    wide, high_px = _WIDE - 2 * _EDGE, _HIGH - 2 * _EDGE
    path = " ".join(
        f"{_EDGE + place / last * wide:.1f},{_HIGH - _EDGE - (value - low) / span * high_px:.1f}"
        for place, value in points
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{_HIGH}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{_EDGE}" y="15">{title}</text>'
        f'<text x="2" y="{_EDGE + 4}">{high:.2f}</text><text x="2" y="{_HIGH - _EDGE}">{low:.2f}</text>'
        f'<polyline fill="none" stroke="#2563eb" stroke-width="2" points="{path}"/></svg>'
    )
