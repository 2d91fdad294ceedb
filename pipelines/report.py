"""`summary.json` and `metrics.parquet` of a run, from nothing but its archive and its configuration.

Rule 1: token rows are counted once: of rows with the same (group, index, attempt) the first counts, the rest are
duplicates; of several attempts of one sample that were scored, one counts as generated and the rest as duplicates.
Rule 2: held-out rows are in `reward.heldout_*` and nowhere else.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines import archived, pictures
from pipelines.children import write_whole
from pipelines.runs import SUMMARY
from pipelines.tally import Tally
from schemas import summary as s
from schemas.settings import Settings
from workers.taps import archive, evaluate

METRICS = "metrics.parquet"
_METRIC_SCHEMA = pa.schema(
    [
        ("at", pa.timestamp("us", tz="UTC")),
        ("source", pa.string()),
        ("step", pa.int64()),
        ("name", pa.string()),
        ("value", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Scored training rows: figures per sample, and rewards by place on the log."""

    tokens: dict[tuple[int, int], int]
    tokens_at: dict[tuple[int, int, int], int]
    reward_at: dict[tuple[int, int, int], float | None]
    duplicates: int


def write(settings: Settings, run_dir: Path) -> s.Summary:
    """Both files; returns the summary. Of a damaged archive they hold what can be read; `dora report` says of what
    cannot."""
    damage: list[str] = []
    made = summarise(settings, run_dir, damage)
    write_whole(run_dir / SUMMARY, made.model_dump_json(indent=2) + "\n")
    _write_metrics(run_dir, damage)
    return made


def summarise(settings: Settings, run_dir: Path, damage: list[str]) -> s.Summary:
    """The summary of what the archive says; `damage` hears of what could not be read."""
    tally = tally_of(run_dir, damage)
    rows = _rows(run_dir, damage)
    metrics = list(archived.messages(run_dir, "metrics", damage))
    members = [member for step in sorted(tally.trained_steps) for member in tally.members.get(step, [])]
    places = [(member["partition"], member["offset"], member["row"]) for member in members]
    generated = sum(rows.tokens.values())
    working_s = _seconds(tally.first_issue_us, tally.last_weights_us)
    lag = tally.lag_histogram()
    voided: dict[str, int] = defaultdict(int)
    for reason in tally.voided.values():
        voided[reason] += 1
    return s.Summary(
        run=settings.name,
        mode=settings.mode,
        staleness_max=settings.lag_max,
        group_size=settings.group_size,
        groups_per_batch=settings.groups_per_batch,
        steps=len(tally.trained_steps),
        seconds=round(tally.working_us / 1e6, 3),
        tokens_generated=generated,
        tokens_trained=sum(rows.tokens_at.get(place, 0) for place in places),
        tokens_per_second=round(generated / working_s, 2) if working_s else 0.0,
        groups=s.Groups(opened=len(tally.opened), trained=len(tally.trained), voided=dict(voided), live=tally.live),
        trajectories=s.Trajectories(
            generated=len(rows.tokens), trained=len(members), duplicates_ignored=rows.duplicates
        ),
        lag=s.Lag(histogram=lag, max=max(lag, default=0)),
        versions=s.Versions(published=len(tally.fingerprints), hosted_max=tally.hosted_max),
        migrations=_migrations(tally),
        time_share=_time_share(tally, metrics),
        reward=_reward(tally, rows, evaluate.heldout(run_dir, damage)),
        weights=s.WeightsSummary(
            fingerprint_first=tally.fingerprints.get(0, ""),
            fingerprint_last=tally.fingerprints[max(tally.fingerprints)] if tally.fingerprints else "",
        ),
        faults=s.Faults(
            engine_lost=tally.engines_lost,
            restarts=int(sum(point["values"].get("restarts", 0) for point in metrics)),
        ),
    )


def tally_of(run_dir: Path, damage: list[str]) -> Tally:
    """The fold of the archived journal."""
    tally = Tally()
    for record in archived.messages(run_dir, "journal", damage):
        tally.take(record)
    return tally


def _rows(run_dir: Path, damage: list[str]) -> _Rows:
    table = archive.read(run_dir, "trajectories", damage)
    names = ("group", "index", "attempt", "partition", "offset", "reward")
    columns = [table.column(name).to_pylist() for name in names]
    lengths = pc.list_value_length(table.column("response_ids")).to_pylist()
    rows = _Rows({}, {}, {}, 0)
    duplicates = 0
    before: tuple[int, int] = (-1, -1)
    row = 0
    for group, index, _, partition, offset, reward, tokens in zip(*columns, lengths, strict=True):
        row = row + 1 if (partition, offset) == before else 0
        before = (partition, offset)
        rows.tokens_at[partition, offset, row] = tokens
        rows.reward_at[partition, offset, row] = reward
        if (group, index) in rows.tokens:
            duplicates += 1
        else:
            rows.tokens[group, index] = tokens
    return _Rows(rows.tokens, rows.tokens_at, rows.reward_at, duplicates)


def _seconds(start: int | None, end: int | None) -> float:
    return max(0.0, (end - start) / 1e6) if start is not None and end is not None else 0.0


def _migrations(tally: Tally) -> s.Migrations:
    of, start = tally.engine_moves(), "reprefills/"
    return s.Migrations(
        count=of["taken"],
        kv_reused=of["carried"],
        reprefilled={name.removeprefix(start): count for name, count in of.items() if name.startswith(start)},
        tokens_recomputed=of["tokens_recomputed"],
        bytes=of["size"],
        seconds=round(tally.engine_seconds()["migrate_s"], 3),
    )


def _time_share(tally: Tally, metrics: list[dict[str, Any]]) -> s.TimeShare:
    of = tally.engine_seconds()
    whole = sum(of.values()) or 1.0
    run_s = tally.working_us / 1e6 or 1.0
    said = [point["values"] for point in metrics if point["source"] == "orchestrator"]
    blocked = max((float(values.get("blocked_by_oldest_s", 0.0)) for values in said), default=0.0)
    return s.TimeShare(
        decode=round(of["decode_s"] / whole, 4),
        prefill=round(of["prefill_s"] / whole, 4),
        reprefill=round(tally.engine_moves()["reprefill_s"] / whole, 4),
        idle=round(of["idle_s"] / whole, 4),
        load_weights=round(of["load_s"] / whole, 4),
        migrate=round(of["migrate_s"] / whole, 4),
        blocked_by_oldest=round(min(1.0, blocked / run_s), 4),
        decide=round(min(1.0, _added_up([float(values.get("decide_s", 0.0)) for values in said]) / run_s), 4),
    )


def _added_up(counter: list[float]) -> float:
    """A counter that starts at 0 again with its process: the sum of its last values."""
    ends = [value for value, after in pairwise(counter) if after < value]
    return sum(ends) + (counter[-1] if counter else 0.0)


def _reward(tally: Tally, rows: _Rows, heldout: dict[int, dict[str, evaluate.Accuracy]]) -> s.RewardSummary:
    steps = sorted(tally.trained_steps & tally.members.keys())

    def mean(step: int) -> float | None:
        places = [(m["partition"], m["offset"], m["row"]) for m in tally.members[step]]
        found = [reward for place in places if (reward := rows.reward_at.get(place)) is not None]
        return round(sum(found) / len(found), 4) if found else None

    before = heldout[min(heldout)] if heldout else {}
    after = heldout[max(heldout)] if len(heldout) > 1 else {}

    def accuracy(tags: dict[str, evaluate.Accuracy], tag: str) -> float | None:
        found = tags.get(tag)
        return None if found is None or found.mean is None else round(found.mean, 4)

    return s.RewardSummary(
        first=mean(steps[0]) if steps else None,
        last=mean(steps[-1]) if steps else None,
        heldout_before=accuracy(before, evaluate.ALL),
        heldout_after=accuracy(after, evaluate.ALL),
        unseen_before=accuracy(before, "unseen"),
        unseen_after=accuracy(after, "unseen"),
    )


def _write_metrics(run_dir: Path, damage: list[str]) -> None:
    points = [
        {"at": point["at"], "source": point["source"], "step": point["step"], "name": name, "value": value}
        for point in archived.messages(run_dir, "metrics", damage)
        for name, value in point["values"].items()
    ]
    unfinished = run_dir / f"{METRICS}.tmp"
    pq.write_table(pa.Table.from_pylist(points, schema=_METRIC_SCHEMA), unfinished)
    unfinished.replace(run_dir / METRICS)


def as_text(made: s.Summary) -> str:
    """The summary for people."""
    rows = pictures.summary_rows(made.model_dump(mode="json"))
    return "\n".join([f"run {made.run}:", *pictures.aligned(rows)])
