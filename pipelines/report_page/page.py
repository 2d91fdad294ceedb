"""The report of a run as one HTML file: nothing is fetched, nothing runs; it can be mailed and read on a phone.

Rule 1: every text of the run is escaped, what a model said above all; the page's policy forbids scripts and requests.
"""

import html
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from pipelines import case_study, environment, pictures
from pipelines.children import write_whole
from pipelines.report_page import charts
from pipelines.report_page.facts import Facts, Said, gather
from schemas.settings import Settings
from workers.runtime.errors import BadInput
from workers.taps import evaluate

TEXT_CHARACTERS_MAX = 4000
BINS = 24
LETTERS_MAX = 20
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --fore: #1b1f24; --soft: #59636e; --rule: #d1d9e0; --card: #f6f8fa;
  --c0: #0072b2; --c1: #e69f00; --c2: #009e73; --c3: #cc79a7; --c4: #56b4e9; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --fore: #e6edf3; --soft: #9198a1; --rule: #3d444d;
  --card: #151b23; --c0: #3f9fdc; --c4: #f0e442; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 12px; background: var(--back); color: var(--fore);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: 8px 0 0; overflow-wrap: anywhere; } h2 { margin: 28px 0 8px; font-size: 19px; }
p { margin: 4px 0; } .soft, .none { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 10px 0; } nav a { color: var(--c0); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; margin: 12px 0; }
.tiles div, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 8px 12px; }
.tiles b { display: block; font-size: 20px; } .tiles span { color: var(--soft); font-size: 13px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 10px; }
figure { margin: 0 0 10px; min-width: 0; } figcaption { font-weight: 600; margin-bottom: 6px; }
.plot { display: block; font-size: 12px; overflow: visible; } .plot text { fill: var(--fore); }
.plot text.end { text-anchor: end; } .plot text.in { fill: #101010; font-weight: 600; }
.plot .grid { stroke: var(--rule); }
.plot circle { stroke: none; } .line { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0 0; padding: 0;
  font-size: 13px; }
.key { width: 24px; height: 12px; margin-right: 5px; vertical-align: -1px; } .key line { stroke-width: 2; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td:first-child, th:first-child, td.text { text-align: left; }
td.text { overflow-wrap: anywhere; } td.text:first-child { white-space: nowrap; }
.narrow { max-width: 640px; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 8px; margin: 4px 0 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace; max-height: 30em;
  overflow-y: auto; }
"""
_DASHES = ("none", "7 4", "2 3", "9 3 2 3", "12 3")


def write(settings: Settings, run_dir: Path, file: Path, damage: list[str]) -> None:
    """The page of this run; `damage` hears of what could not be read. BadInput if the file cannot be written."""
    text = page(gather(settings, run_dir, damage))
    try:
        write_whole(file, text)
    except OSError as error:
        raise BadInput(f"--html {file}: {error.strerror}; give a file in a folder that there is") from error


def page(facts: Facts) -> str:
    """The whole document."""
    sections = list(_sections(facts))
    links = "".join(f'<a href="#{name}">{_t(title)}</a>' for name, title, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{_t(title)}</h2>{inner}</section>' for name, title, inner in sections)
    run = _t(facts.summary.run)
    marks = "".join(
        f".s{n} {{ stroke: var(--c{n}); stroke-dasharray: {dashes}; }} .c{n}, circle.s{n} {{ fill: var(--c{n}); }} "
        f".key.c{n} {{ background: var(--c{n}); }}\n"
        for n, dashes in enumerate(_DASHES)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{run}</title><style>{_STYLE}{marks}</style></head><body><h1>{run}</h1>"
        f"<p>{_lead(facts)}</p><nav>{links}</nav>{body}</body></html>\n"
    )


def _lead(facts: Facts) -> str:
    made = facts.summary
    return _t(
        f"Mode {made.mode}, at most {made.staleness_max} versions late; {made.steps} steps of {made.groups_per_batch} "
        f"groups of {made.group_size} in {pictures.duration(made.seconds)}."
    )


def _sections(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """(id, title, inner HTML)."""
    made = facts.summary
    yield "summary", "Summary", _tiles(facts) + _table(["", ""], list(pictures.summary_rows(made.model_dump())))
    rewards = charts.lines("mean reward of a step's trajectories", {"reward": facts.rewards}, "step")
    yield "reward", "Reward", rewards
    yield "heldout", "Held-out accuracy", _heldout(facts)
    trained = {f"lag {lag}": float(count) for lag, count in made.lag.histogram.items()}
    yield "lag", "Lag", f'<div class="narrow">{charts.bars("trained trajectories by lag", trained)}</div>'
    over_time = charts.stacked("a step's trajectories by lag", facts.lags, "step", "lag")
    yield "lag-over-time", "Lag over time", over_time
    hosts = charts.gantt("who served which version", facts.stays, facts.published, facts.seconds)
    yield "engines", "Engines by version", hosts + "<p class=soft>Gaps: weights are loaded. Lines: a version came.</p>"
    yield "time", "Where time went", _time(facts)
    yield "lengths", "Lengths", _lengths(facts)
    yield "moves", "Moves", _moves(facts)
    yield "mismatch", "Mismatch KL", _of_trainer(facts, "mismatch_kl", "KL of what sampled to the weights at the step")
    yield "ess", "Effective sample size", _of_trainer(facts, "ess", "share of a step's tokens (1 = on policy)")
    yield (
        "training",
        "Loss and gradient",
        _pair(
            _of_trainer(facts, "loss", "loss of the objective", by_lag=False),
            _of_trainer(facts, "grad_norm", "gradient norm", by_lag=False),
        ),
    )
    yield "case-study", "Is a stale group worse?", _study(facts)
    yield "best", "Best trajectories", _said(facts.best)
    yield "worst", "Worst trajectories", _said(facts.worst)
    yield "faults", "Faults", _faults(facts)
    yield "settings", "Settings", f"<pre>{_t(_settings(facts.settings))}</pre>"
    yield "environment", "Environment", _environment(facts.starts)


def _tiles(facts: Facts) -> str:
    made = facts.summary
    reward = made.reward
    tiles = [
        ("steps", str(made.steps)),
        ("tokens per second", f"{made.tokens_per_second:,.0f}"),
        ("reward, first and last step", f"{pictures.number(reward.first)} → {pictures.number(reward.last)}"),
        ("held-out accuracy", f"{pictures.percent(reward.heldout_before)} → {pictures.percent(reward.heldout_after)}"),
        ("largest lag", f"{made.lag.max} of {made.staleness_max}"),
        ("versions hosted at once", str(made.versions.hosted_max)),
        ("engines idle", pictures.percent(made.time_share.idle)),
    ]
    inner = "".join(f"<div><b>{_t(value)}</b><span>{_t(name)}</span></div>" for name, value in tiles)
    return f'<div class="tiles">{inner}</div>'


def _heldout(facts: Facts) -> str:
    found = facts.heldout
    tags = sorted({tag for of in found.values() for tag in of}, key=lambda tag: (tag != evaluate.ALL, tag))
    series = {
        tag: {version: mean for version, of in found.items() if tag in of and (mean := of[tag].mean) is not None}
        for tag in tags
    }
    rows = [
        [
            f"version {version}",
            tag,
            pictures.percent(one.mean),
            f"{one.rows:,}",
            f"{one.errors:,}",
            facts.fingerprints.get(version, "")[:16],
        ]
        for version, of in found.items()
        for tag, one in of.items()
    ]
    table = _table(["", "rows", "accuracy", "samples", "without a verdict", "weights"], rows)
    return charts.lines("accuracy on held-out rows", series, "version", low=0.0) + table


def _time(facts: Facts) -> str:
    share = facts.summary.time_share
    engines = {"decode": share.decode, "prefill": share.prefill, "weights": share.load_weights}
    engines |= {"moves": share.migrate, "idle": share.idle}
    trainer = {}
    if facts.seconds and facts.trainer_s:
        of = {name: facts.trainer_s.get(f"{name}_s", 0.0) / facts.seconds for name in ("gather", "train", "publish")}
        trainer = {"gathers rows": of["gather"], "trains": of["train"], "publishes": of["publish"]}
        trainer["waits"] = max(0.0, 1 - sum(trainer.values()))
    run = {"waits for the oldest": share.blocked_by_oldest, "decides": share.decide}
    return _pair(
        charts.bars("engines", engines if any(engines.values()) else {}, percent=True),
        charts.bars("trainer", trainer, percent=True),
        charts.bars("orchestrator", run, percent=True),
    )


def _lengths(facts: Facts) -> str:
    tokens, of = facts.lengths.tokens, facts.lengths.of_version
    series = {version: fmean(of[version]) for version in sorted(of)}
    cut = {version: facts.lengths.cut[version] / len(of[version]) for version in sorted(of)}
    return _pair(
        charts.columns("trajectories by response tokens", _binned(tokens), "tokens"),
        charts.lines("mean response tokens", {"tokens": series}, "version", low=0.0),
        charts.lines("share cut at the limit", {"cut": cut}, "version", low=0.0),
    )


def _binned(tokens: Sequence[int]) -> dict[str, int]:
    if not tokens:
        return {}
    low, high = min(tokens), max(tokens)
    wide = -(-(high - low + 1) // BINS)
    bins = [0] * ((high - low) // wide + 1)
    for count in tokens:
        bins[(count - low) // wide] += 1
    starts = [low + place * wide for place in range(len(bins))]
    return {
        str(start) if wide == 1 else f"{start}-{start + wide - 1}": n for start, n in zip(starts, bins, strict=True)
    }


def _moves(facts: Facts) -> str:
    of = facts.summary.migrations
    rows = [
        ["requests that moved", f"{of.count:,}"],
        ["with their KV cache", f"{of.kv_reused:,}"],
        *([f"prefilled again: {reason}", f"{count:,}"] for reason, count in of.reprefilled.items()),
        ["tokens computed again", f"{of.tokens_recomputed:,}"],
        ["engines' time for that", pictures.percent(facts.summary.time_share.reprefill)],
        ["MiB of KV loaded", f"{of.bytes / 2**20:,.1f}"],
        ["seconds to stop and copy out", f"{of.seconds:,.1f}"],
    ]
    return _table(["", ""], rows)


def _of_trainer(facts: Facts, name: str, title: str, *, by_lag: bool = True) -> str:
    """A figure of the trainer's steps; by lag if it is said so."""
    series = {"all": facts.trainer[name]} if name in facts.trainer else {}
    if by_lag:
        lags = sorted({lag for of in facts.lags.values() for lag in of})
        found = {f"lag {lag}": facts.trainer.get(f"lag_{lag}_{name}", {}) for lag in lags}
        series |= {key: of for key, of in found.items() if of} if len(lags) > 1 else {}
    return charts.lines(title, series, "step")


def _study(facts: Facts) -> str:
    parts = []
    for name, title in case_study.TITLES.items():
        rows = facts.study[name]
        if rows:
            parts.append(f"<p><b>{_t(title)}</b></p>")
            parts.append(_table(list(rows[0]), [[case_study.shown(cell) for cell in row.values()] for row in rows]))
    note = (
        "<p class=soft>What is stale is longer and harder: compare within one difficulty (the share of a group that is "
        "correct).</p>"
    )
    return "".join(parts) + note if parts else charts.nothing("groups by lag and difficulty")


def _said(found: Sequence[Said]) -> str:
    return (
        "".join(
            f"<p><b>reward {one.reward:.3f}</b>, group {one.group} sample {one.index}, version {one.version}, "
            f"{one.tokens:,} tokens, {_t(one.finish_reason)}</p><pre><b>prompt</b>\n{_t(_cut(one.prompt))}\n"
            f"<b>response</b>\n{_t(_cut(one.response))}</pre>"
            for one in found
        )
        or '<p class="none">No trajectory has a reward.</p>'
    )


def _cut(text: str) -> str:
    rest = len(text) - TEXT_CHARACTERS_MAX
    return text if rest <= 0 else f"{text[:TEXT_CHARACTERS_MAX]} ... ({rest:,} more characters)"


def _faults(facts: Facts) -> str:
    rows = [["restarts of processes", str(facts.summary.faults.restarts)]]
    rows += [[f"lost at {at:.0f} s", what] for at, what in facts.lost]
    rows += [[f"groups voided: {reason}", str(count)] for reason, count in facts.voided.items()]
    rows += [["the last voided", facts.voided_last]] if facts.voided_last else []
    rows += [
        [f"dead letter {letter['topic']} {letter['partition']}:{letter['offset']}", str(letter["reason"])]
        for letter in facts.letters[:LETTERS_MAX]
    ]
    rest = len(facts.letters) - LETTERS_MAX
    rows += [["more dead letters", str(rest)]] if rest > 0 else []
    return _table(["", ""], rows, texts=True)


def _settings(settings: Settings) -> str:
    """As TOML; passwords of a cluster are not for everybody who reads a report."""
    import tomli_w

    tree = settings.model_dump(mode="json")
    tree["kafka"] = {key: "(hidden)" if "password" in key else value for key, value in tree["kafka"].items()}
    return tomli_w.dumps(tree)


def _environment(starts: Sequence[environment.Start]) -> str:
    if not starts:
        return '<p class="none">The run does not say where it was trained.</p>'
    parts = []
    for place, start in enumerate(starts):
        at = datetime.fromtimestamp(start.at / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        parts.append(f"<p><b>the trainer started {at}</b></p>")
        if place == 0:
            parts.append(_table(["", ""], [list(pair) for pair in start.environment.items()], texts=True))
        else:
            changed = environment.differences(starts[place - 1].environment, start.environment)
            parts.append(f"<p>{_t('; '.join(changed) or 'as before')}</p>")
    return "".join(parts)


# --- HTML -------------------------------------------------------------------------------------


def _pair(*figures: str) -> str:
    return f'<div class="pair">{"".join(figures)}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: bool = False) -> str:
    if not rows:
        return ""
    names = "".join(f"<th>{_t(name)}</th>" for name in head) if any(head) else ""
    css = ' class="text"' if texts or not any(head) else ""
    lines = "".join(f"<tr>{''.join(f'<td{css}>{_t(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{f"<tr>{names}</tr>" if names else ""}{lines}</table></div>'


def _t(text: str) -> str:
    return html.escape(text)
