"""The report of a run for the Prefect UI: markdown with SVG plots (reward, lag, engines by version, time shares).

Pure text, no library. Every plot has at most POINTS_MAX points, so that a report stays some tens of kB.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipelines import pictures
from pipelines.pictures import POINTS_MAX
from pipelines.snapshot import Snapshot
from pipelines.supervise import Outcome

_WIDE, _HIGH, _EDGE = 480, 160, 24
_TALL = 300
"""Of a plot of several lines."""
_COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#0ea5e9", "#84cc16", "#ec4899")


class History:
    """Engines by version over time, thinned to POINTS_MAX moments."""

    def __init__(self) -> None:
        self.moments: list[tuple[float, dict[int, int]]] = []

    def take(self, now: Snapshot) -> None:
        hosts: dict[int, int] = {}
        for view in now.engines.values():
            if view.version is not None:
                hosts[view.version] = hosts.get(view.version, 0) + 1
        self.moments.append((now.seconds, hosts))
        if len(self.moments) > 2 * POINTS_MAX:
            self.moments = self.moments[::2]


def report(now: Snapshot | None, history: History, outcome: Outcome | None, folder: str) -> str:
    """Of a live run (`outcome` None) or of one that ended: then what happened and what to do come first."""
    text = []
    if outcome is not None:
        text += what_happened(outcome, folder)
    if now is None:
        return "\n".join(text or ["The run is starting."])
    text += [pictures.markdown(now), ""]
    drawn = [("mean reward per step", pictures.curve(now.rewards, "mean reward per step"))] if now.rewards else []
    drawn += [("lag", bars({str(lag): n for lag, n in now.lag.items()}, "trained trajectories by lag"))] * bool(now.lag)
    if len(history.moments) > 1:
        drawn.append(("engines by version", areas(history.moments[-POINTS_MAX:], "engines by version")))
    shares = time_shares(now)
    if shares:
        drawn.append(("time shares", bars(shares, "time shares", percent=True)))
    text += [_image(name, svg) for name, svg in drawn]
    return "\n".join(text)


def what_happened(outcome: Outcome, folder: str) -> list[str]:
    """For people who find a run that is over."""
    by_hand = f"`dora run {folder}/config.toml --resume`"
    todo = {
        "done": "Nothing. `dora report` and `dora export` read the run's folder.",
        "suspended": f"Press **Resume** here, or {by_hand}: it goes on from the checkpoint.",
        "cancelled": f"Press **Retry** here, or {by_hand}, to go on from the checkpoint.",
        "failed": "Correct what is named above, start it again."
        if not folder
        else "Look at what is named above and "
        f"at `{folder}/logs`; then press **Retry** here, or {by_hand}: it goes on from the checkpoint.",
    }[outcome.kind]
    if outcome.kind == "done":
        todo = f"Nothing; the run is in `{folder}`."
    story = ["```", outcome.reason, "```"] if "\n" in outcome.reason else [outcome.reason]
    return [f"# {outcome.kind}", "", "**What happened**", "", *story, "", "**What to do**", "", todo, ""]


def time_shares(now: Snapshot) -> dict[str, float]:
    """Of the trainer's time, and of all engines' time."""
    shares = {f"engines: {name}": share for name, share in now.engine_shares.items() if share}
    if now.trainer_train_share is not None:
        shares["trainer: trains"] = now.trainer_train_share
        shares["trainer: publishes"] = now.trainer_publish_share or 0.0
        shares["trainer: waits"] = now.trainer_wait_share or 0.0
    return shares


def bars(of: Mapping[str, float], title: str, *, percent: bool = False) -> str:
    """An SVG with one bar per entry."""
    most = max(of.values(), default=0) or 1
    high = 2 * _EDGE + 18 * len(of)
    lines = []
    for place, (name, value) in enumerate(of.items()):
        y = _EDGE + 18 * place
        wide = value / most * (_WIDE - 220)
        shown = f"{100 * value:.1f} %" if percent else f"{value:g}"
        lines.append(
            f'<text x="4" y="{y + 11}">{name}</text><rect x="130" y="{y}" width="{wide:.1f}" height="14" '
            f'fill="{_COLOURS[0]}"/><text x="{136 + wide:.1f}" y="{y + 11}">{shown}</text>'
        )
    return _svg(high, title, "".join(lines))


def areas(moments: Sequence[tuple[float, Mapping[int, int]]], title: str) -> str:
    """An SVG of stacked steps: how many engines host each version over time; colours go round."""
    start, end = moments[0][0], moments[-1][0]
    most = max((sum(hosts.values()) for _, hosts in moments), default=0) or 1
    wide, high = _WIDE - 2 * _EDGE, _HIGH - 2 * _EDGE
    drawn = []
    for (at, hosts), (until, _) in pairwise(moments):
        left, right = (_EDGE + (t - start) / ((end - start) or 1.0) * wide for t in (at, until))
        top = float(_HIGH - _EDGE)
        for version in sorted(hosts):
            tall = hosts[version] / most * high
            top -= tall
            drawn.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left + 0.3:.1f}" height="{tall:.1f}" '
                f'fill="{_COLOURS[version % len(_COLOURS)]}"><title>version {version}</title></rect>'
            )
    newest = ", ".join(f"v{version}: {n}" for version, n in sorted(moments[-1][1].items())) or "none"
    drawn.append(f'<text x="{_EDGE}" y="{_HIGH - 6}">{start:.0f} s .. {end:.0f} s; now {newest}</text>')
    drawn.append(f'<text x="2" y="{_EDGE + 4}">{most}</text>')
    return _svg(_HIGH, title, "".join(drawn))


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y) in order of x; `half` > 0 shades y - half .. y + half."""

    name: str
    points: tuple[tuple[float, float], ...]
    half: float = 0.0


def lines(drawn: Sequence[Line], title: str) -> str:
    """An SVG of several lines on the same axes, with their names below; colours go round."""
    points = [point for line in drawn for point in line.points]
    lows = [y - line.half for line in drawn for _, y in line.points]
    highs = [y + line.half for line in drawn for _, y in line.points]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(lows), max(highs)
    wide, tall = _WIDE - 2 * _EDGE, _TALL - 3 * _EDGE

    def place(x: float, y: float) -> str:
        across, up = (x - left) / ((right - left) or 1.0), (y - low) / ((high - low) or 1.0)
        return f"{_EDGE + across * wide:.1f},{_EDGE + (1 - up) * tall:.1f}"

    shapes = []
    for number, line in enumerate(drawn):
        colour = _COLOURS[number % len(_COLOURS)]
        if line.half:
            above = [place(x, y + line.half) for x, y in line.points]
            below = [place(x, y - line.half) for x, y in reversed(line.points)]
            shapes.append(f'<polygon fill="{colour}" opacity="0.15" points="{" ".join([*above, *below])}"/>')
        path = " ".join(place(x, y) for x, y in line.points)
        shapes.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        at = _EDGE + number * wide / max(1, len(drawn))
        shapes.append(f'<text x="{at:.1f}" y="{_TALL - 6}" fill="{colour}">{line.name}</text>')
    foot = _TALL - 2 * _EDGE + 14
    for x, y, text in ((2, _EDGE + 4, high), (2, foot - 14, low), (_EDGE, foot, left), (_WIDE - _EDGE, foot, right)):
        shapes.append(f'<text x="{x}" y="{y}">{text:.3g}</text>')
    return _svg(_TALL, title, "".join(shapes))


def stacked(svgs: Sequence[str]) -> str:
    """One SVG of several of `lines`, from top to bottom."""
    inner = "".join(svg.replace("<svg ", f'<svg y="{place * _TALL}" ', 1) for place, svg in enumerate(svgs))
    return _svg(_TALL * len(svgs), "", inner)


def _svg(high: int, title: str, inner: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{high}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/><text x="{_EDGE}" y="15">{title}</text>'
        f"{inner}</svg>"
    )


def _image(name: str, svg: str) -> str:
    return f"![{name}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})\n"
