"""What was simulated as one HTML page: the table, and for each mode who hosted what, time shares, lag, splits."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines import plots
from pipelines.simulate.compare import Found
from pipelines.simulate.record import Stay, Tape

COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#0ea5e9", "#84cc16", "#ec4899")
WIDE, LEFT, TOP = 900, 60, 24
ROWS_MAX = 64
"""So many engines are drawn at most."""


def write(file: Path, title: str, table: str, parts: Sequence[str]) -> None:
    file.write_text(
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<body style="font-family: sans-serif; margin: 2em"><h1>{html.escape(title)}</h1>'
        f"<pre>{html.escape(table)}</pre>{''.join(parts)}</body>\n",
        encoding="utf-8",
    )


def of_modes(found: Mapping[str, Found]) -> list[str]:
    parts = []
    for mode, one in found.items():
        parts += [f"<h2>{mode}</h2>", gantt(one.tape, f"engines by version, {mode}"), "<br>"]
        parts.append(plots.bars(_shares(one), "time shares after the warm-up", percent=True))
        parts.append(plots.bars({f"lag {age}": count for age, count in one.figures.lag.items()}, "trajectories by lag"))
        if one.tried:
            minutes = {f"{rollout} engines": value for rollout, value in sorted(one.tried.items())}
            parts.append(plots.bars(minutes, "minutes a step by engines for rollout (smaller copy)"))
    return parts


def of_sweep(key: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Step time against what was swept, a plot for each mode."""
    return [
        plots.bars(
            {f"{key.rpartition('.')[2]} {row['value']}": row["modes"][mode]["step_minutes"] for row in rows},
            f"{mode}: minutes a step",
        )
        for mode in rows[0]["modes"]
    ]


def of_advice(tried: Sequence[Mapping[str, Any]]) -> list[str]:
    """Step time against K and the live groups."""
    minutes = {f"K {row['staleness_max']}, live {row['live_factor']:g}": row["step_minutes"] for row in tried}
    return [plots.bars(minutes, "minutes a step (smaller copy)")]


def _shares(one: Found) -> dict[str, float]:
    spent = one.tape.since(one.warm_up)
    engine_s = one.figures.engines_rollout * spent.at
    parts = {"decode": spent.decode_s, "prefill and moves": spent.stall_s, "load": spent.load_s}
    shares = {f"engines: {name}": seconds / engine_s for name, seconds in parts.items()}
    shares["engines: nothing"] = max(0.0, 1 - sum(shares.values()))
    return shares | {
        "trainer: trains": spent.train_s / spent.at,
        "trainer: waits": max(0.0, 1 - spent.train_s / spent.at),
    }


def gantt(tape: Tape, title: str) -> str:
    """An SVG: a row per engine, a bar for each version it served; lines where versions were announced."""
    stays: list[Stay] = [stay for stay in tape.stays if stay.engine < ROWS_MAX]
    until = max((stay.ended for stay in stays), default=0.0) or 1.0
    rows = 1 + max((stay.engine for stay in stays), default=0)
    tall = 14 if rows <= 16 else 6

    def x(at: float) -> float:
        return LEFT + at / until * (WIDE - LEFT - 10)

    drawn = [
        f'<rect x="{x(stay.began):.1f}" y="{TOP + tall * stay.engine}" width="{x(stay.ended) - x(stay.began):.1f}" '
        f'height="{tall - 1}" fill="{COLOURS[stay.version % len(COLOURS)]}"><title>engine {stay.engine}, version '
        f"{stay.version}, {stay.began:.0f} to {stay.ended:.0f} s</title></rect>"
        for stay in stays
    ]
    low = TOP + tall * rows
    for step in tape.steps:
        drawn.append(f'<line x1="{x(step.at):.1f}" x2="{x(step.at):.1f}" y1="{TOP}" y2="{low}" stroke="black"/>')
    drawn.append(f'<text x="2" y="{TOP + 11}">engine 0</text><text x="{LEFT}" y="{low + 14}">0 .. {until:.0f} s</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{low + 20}" font-family="sans-serif" '
        f'font-size="11"><text x="{LEFT}" y="15">{html.escape(title)}</text>{"".join(drawn)}</svg>'
    )
