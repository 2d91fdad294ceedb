"""A snapshot or a summary as people read it: one line, lines with labels, tables, an SVG curve.

Pure text, no library; bars are block letters.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipelines.snapshot import EngineView, Snapshot

POINTS_MAX = 150
BAR = 12
REASON_CHARACTERS_MAX = 120
ENGINES_SHOWN_MAX = 16
"""More engines than this are shown by version."""
_WIDE, _HIGH, _EDGE = 480, 160, 24
Rows = Iterator[tuple[str, str]]
"""(label, text); the label "" goes on with the one before."""


def line(snapshot: Snapshot) -> str:
    """One line for logs and terminals."""
    if snapshot.version is None:
        return f"{snapshot.run}: starting (models are loading)"
    goal = "" if snapshot.steps is None else f"/{snapshot.steps}"
    parts = [
        f"{snapshot.run}: step {snapshot.step}{goal}",
        f"version {snapshot.version}",
        f"reward {number(snapshot.reward)}",
        f"{snapshot.tokens_per_second:.0f} tokens/s",
        f"live groups {snapshot.queues.groups_live}",
        f"engines {' '.join(view.label for view in snapshot.engines.values()) or 'none yet'}",
    ]
    if snapshot.voided:
        parts.append(f"voided {sum(snapshot.voided.values())} groups (the last {_short(snapshot.voided_last)})")
    if snapshot.restarts:
        parts.append(f"restarts {snapshot.restarts}")
    return ", ".join(parts)


def markdown(snapshot: Snapshot) -> str:
    """The figures of the Prefect UI's report."""
    queues = snapshot.queues
    rows = [
        ("step", f"{snapshot.step} of {snapshot.steps or 'all epochs'}"),
        ("newest version", "-" if snapshot.version is None else snapshot.version),
        ("reward of the last batch", number(snapshot.reward)),
        ("tokens per second", f"{snapshot.tokens_per_second:.0f}"),
        ("live groups", f"{queues.groups_live} of {queues.groups_live_max}, {queues.groups_complete} complete"),
        ("voided groups", _voided(snapshot)),
        ("lag of trained trajectories", counts(snapshot.lag)),
        ("engines lost, restarts", f"{snapshot.engines_lost}, {snapshot.restarts}"),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join([f"# {snapshot.run}", "", "| | |", "|---|---|", *lines])


def share_done(snapshot: Snapshot) -> float:
    """Percent of the steps; of a run without a number of steps 0."""
    return round(100 * snapshot.step / snapshot.steps, 1) if snapshot.steps else 0.0


def table(snapshot: Snapshot) -> list[dict[str, str]]:
    """Window, queues and engines as one table of the Prefect UI."""
    queues = snapshot.queues
    window = f"v{snapshot.window_from} .. v{snapshot.step_next} (K = {snapshot.staleness_max})"
    rows = [("window", window, "newest " + ("none yet" if snapshot.version is None else f"v{snapshot.version}"))]
    rows.append(
        ("groups", f"{queues.groups_live} live of {queues.groups_live_max}", f"{queues.groups_complete} complete")
    )
    rows.append(("requests", f"{queues.requests_running} running", f"{queues.requests_waiting} waiting"))
    if len(snapshot.engines) <= ENGINES_SHOWN_MAX:
        rows += [
            (f"engine {n}", view.label.replace(">", " to "), _fill([view])) for n, view in snapshot.engines.items()
        ]
    else:
        rows += [("engines", name, _fill(views)) for name, views in sorted(_by_version(snapshot.engines).items())]
    return [{"what": what, "now": now, "more": more} for what, now, more in rows]


# --- lines with labels ------------------------------------------------------------------------


def aligned(rows: Rows) -> list[str]:
    """Rows as lines of text."""
    return [f"  {label:<15}{text}".rstrip() for label, text in rows]


def grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of text: the first column to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def snapshot_rows(now: Snapshot, *, live: bool) -> Rows:
    """Where a run stands; of one that is not `live` only what it did."""
    yield "progress", _progress(now, live=live)
    if live:
        newest = "none yet" if now.version is None else f"v{now.version}"
        window = f"v{now.window_from} .. v{now.step_next} (K = {now.staleness_max})"
        yield "window", f"{window}, newest {newest}, next to choose: batch {now.step_next}"
        yield from _engines(now.engines)
        yield from _queues(now)
    yield "lag", f"trained     {_bars(now.lag)}"
    if live:
        yield "", f"live        {counts(now.lag_live)} (groups, if chosen next)"
        yield "", f"complete    {counts(now.lag_complete)}"
    yield from _rates(now, live=live)
    yield "waiting", _waiting(now)
    yield "moves", f"{now.moves:,} requests moved, {now.tokens_prefilled_again:,} tokens prefilled again"
    faults = f"{now.engines_lost} engines lost, {now.restarts} restarts, {now.dead_letters} dead letters"
    yield "faults", faults
    yield "voided", _voided(now)


def _voided(now: Snapshot) -> str:
    said = f"groups: {counts(now.voided) if now.voided else 0}"
    return f"{said}; the last {_short(now.voided_last)}" if now.voided_last else said


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= REASON_CHARACTERS_MAX else line[: REASON_CHARACTERS_MAX - 3] + "..."


def _progress(now: Snapshot, *, live: bool) -> str:
    if now.steps is None:
        said = f"step {now.step}"
    else:
        said = f"{_bar(now.step / now.steps, 2 * BAR)}  step {now.step} of {now.steps}"
        if live and now.steps_per_minute and now.step < now.steps:
            said += f", about {duration(60 * (now.steps - now.step) / now.steps_per_minute)} to go"
    return f"{said}, up for {duration(now.seconds)}, reward {number(now.reward)}"


def _engines(engines: Mapping[int, EngineView]) -> Rows:
    if not engines:
        yield "engines", "none yet: models are loading"
        return
    label = "engines"
    if len(engines) <= ENGINES_SHOWN_MAX:
        for engine, view in engines.items():
            yield label, f"{engine:<4} {view.label:<10} {_fill([view])}"
            label = ""
        return
    for name, views in sorted(_by_version(engines).items()):
        yield label, f"{len(views):>4} x {name:<8} {_fill(views)}"
        label = ""


def _by_version(engines: Mapping[int, EngineView]) -> dict[str, list[EngineView]]:
    found: dict[str, list[EngineView]] = {}
    for view in engines.values():
        found.setdefault("loading" if view.loading is not None else view.label, []).append(view)
    return found


def _fill(views: Sequence[EngineView]) -> str:
    running, seats = sum(view.running for view in views), sum(view.seats for view in views)
    tokens, most = sum(view.kv_tokens for view in views), sum(view.kv_tokens_max for view in views)
    waiting = sum(view.waiting for view in views)
    said = f"{_bar(running / (seats or 1), BAR)} {running}/{seats} seats, KV {tokens:,}/{most:,} tokens"
    loading = ", loading" if any(view.loading is not None for view in views) else ""
    return said + (f", {waiting} waiting" if waiting else "") + loading


def _queues(now: Snapshot) -> Rows:
    queues = now.queues
    yield (
        "queues",
        f"groups      {queues.groups_live} live of {queues.groups_live_max}, {queues.groups_complete} complete; "
        f"{queues.groups_chosen} chosen, {queues.groups_evaluating} evaluating",
    )
    yield (
        "",
        f"requests    {queues.requests_running} running, {queues.requests_waiting} waiting; "
        f"{queues.prompts_unread} prompts unread",
    )


def _rates(now: Snapshot, *, live: bool) -> Rows:
    recent = f"{now.tokens_per_second:,.0f} tokens/s now, " if live else ""
    trainer = "" if now.trainer_tokens_per_second is None else f", {now.trainer_tokens_per_second:,.0f} tokens/s"
    last = "" if now.last_step_s is None else f", the last took {now.last_step_s:.1f} s"
    yield "rates", f"engines     {recent}{now.tokens_per_second_overall:,.0f} tokens/s over all"
    yield "", f"trainer     {now.steps_per_minute:.1f} steps/min{last}{trainer}"


def _waiting(now: Snapshot) -> str:
    said = f"blocked by the oldest {now.blocked_by_oldest_s:.1f} s ({percent(now.blocked_share)})"
    if now.trainer_wait_share is None:
        return said
    trains, publishes = percent(now.trainer_train_share), percent(now.trainer_publish_share)
    return f"{said}; trainer waits {percent(now.trainer_wait_share)}, trains {trains}, publishes {publishes}"


def summary_rows(made: Mapping[str, Any]) -> Rows:
    """A finished run, from `summary.json`."""
    groups, share, reward, faults = made["groups"], made["time_share"], made["reward"], made["faults"]
    trajectories, moves, lag = made["trajectories"], made["migrations"], made["lag"]["histogram"]
    yield "steps", f"{made['steps']} in {duration(made['seconds'])}, {made['tokens_per_second']:,.0f} tokens/s"
    yield (
        "versions",
        f"{made['versions']['published']} published, up to {made['versions']['hosted_max']} hosted at once",
    )
    ended = f"{groups['opened']} opened, {groups['trained']} trained, {groups['live']} live"
    yield "groups", f"{ended}; voided: {counts(groups['voided']) if groups['voided'] else 'none'}"
    yield (
        "trajectories",
        f"{trajectories['generated']} generated, {trajectories['trained']} trained, "
        f"{trajectories['duplicates_ignored']} duplicates ignored",
    )
    trained = ", ".join(f"lag {key}: {count}" for key, count in lag.items()) or "nothing trained"
    yield "lag", f"{trained} (at most {made['staleness_max']} allowed)"
    again = f"; prefilled again: {counts(moves['reprefilled'])}" if moves["reprefilled"] else ""
    yield "moves", f"{moves['count']}, {moves['kv_reused']} with their KV{again}"
    yield (
        "engines' time",
        f"decode {percent(share['decode'])}, prefill {percent(share['prefill'])} "
        f"(again {percent(share.get('reprefill'))}), idle {percent(share['idle'])}, "
        f"weights {percent(share['load_weights'])}, moves {percent(share['migrate'])}",
    )
    yield (
        "run's time",
        f"blocked by the oldest {percent(share['blocked_by_oldest'])}, deciding {percent(share['decide'])}",
    )
    yield "reward", f"{number(reward['first'])} at the first step, {number(reward['last'])} at the last"
    if reward["heldout_before"] is None and reward["heldout_after"] is None:
        return
    yield "held-out", f"{percent(reward['heldout_before'])} before, {percent(reward['heldout_after'])} after"
    if reward["unseen_before"] is not None:
        yield "never trained", f"{percent(reward['unseen_before'])} before, {percent(reward['unseen_after'])} after"
    if faults["engine_lost"] or faults["restarts"]:
        yield "faults", f"{faults['engine_lost']} engines lost, {faults['restarts']} restarts"


# --- words ------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def counts(of: Mapping[Any, int]) -> str:
    """`0: 12, 1: 4`."""
    return ", ".join(f"{key}: {count}" for key, count in of.items()) or "-"


def duration(seconds: float) -> str:
    """`7 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = round(seconds)
    for size, name, small, part in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // small} {part}"
    return f"{whole} s"


def _bar(share: float, cells: int) -> str:
    full = round(min(1.0, max(0.0, share)) * cells)
    return "█" * full + "░" * (cells - full)


def _bars(histogram: Mapping[int, int]) -> str:
    """Lags with their counts and shares, one beside the other."""
    whole = sum(histogram.values())
    return (
        "   ".join(
            f"{lag}: {count} {'█' * max(1, round(BAR * count / whole))} {100 * count / whole:.0f} %"
            for lag, count in histogram.items()
            if count
        )
        or "nothing yet"
    )


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
