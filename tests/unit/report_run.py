"""An archive written by hand, for the reports: two steps, a move, a duplicate, a void, a lost engine."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas import messages as m
from tests.unit.reward_rows import a_row
from workers.taps import archive

SECOND = 1_000_000


def text_file(run_dir: Path, kind: str, values: list[m.Message]) -> None:
    rows = [
        {"partition": 0, "offset": n, "timestamp": n, "key": None, "id": str(n), "value": value.model_dump_json()}
        for n, value in enumerate(values)
    ]
    table = pa.Table.from_pylist(rows, schema=archive.TEXT_SCHEMA)
    archive.write_file(run_dir / "archive" / kind / f"0.{0:020d}.arrow", table)


def token_file(run_dir: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    numbered = [{**row, "partition": 0, "offset": offset} for offset, row in enumerate(rows)]
    table = pa.Table.from_pylist(numbered, schema=archive.schema_of("trajectories"))
    archive.write_file(run_dir / "archive" / kind / f"0.{0:020d}.arrow", table)


def scored(group: int, index: int, reward: float, **other: Any) -> dict[str, Any]:
    row = a_row(group, index, **other) | {"scored_at": 40, "reward": reward, "outcome": reward}
    return row | {name: other[name] for name in ("engine_path", "purpose", "metadata") if name in other}


def _member(group: int, index: int, offset: int) -> m.Member:
    return m.Member(group=group, index=index, attempt=1, partition=0, offset=offset, row=0)


def _batch(step: int, group: int, version: int, offset: int) -> m.BatchRecord:
    members = tuple(_member(group, index, offset + index) for index in range(2))
    return m.BatchRecord(run="r", step=step, exhausted=False, groups=((group, version),), members=members)


def _issue(group: int, version: int, purpose: m.Purpose = "train") -> m.Issue:
    return m.Issue(
        group=group, index=0, attempt=1, version=version, engine=0, incarnation=1, sequence=group, purpose=purpose,
        prompt_row=group, queued_at=1,
    )  # fmt: skip


MOVED: dict[str, Any] = {
    "taken": 1, "carried": 0, "tokens_recomputed": 4, "reprefill_s": 0.5, "reprefills": {"no_handle": 1},
}  # fmt: skip
RETURNED: dict[str, Any] = {
    "taken": 2, "carried": 1, "tokens_carried": 30, "tokens_recomputed": 38, "size": 90, "reprefill_s": 1.5,
    "reprefills": {"checksum": 1},
}  # fmt: skip


def _score(group: int, index: int, reward: float, offset: int) -> m.Scored:
    return m.Scored(
        group=group, index=index, attempt=1, version=0, purpose="train", reward=reward, outcome=reward, error=None,
        partition=0, offset=offset, row=0,
    )  # fmt: skip


def _beat(incarnation: int, tokens: int, decode_s: float, idle_s: float, **moves: Any) -> m.Heartbeat:
    return m.Heartbeat(
        engine=0, incarnation=incarnation, version=0, running=1, waiting=0, kv_tokens=5, tokens=tokens,
        decode_s=decode_s, idle_s=idle_s, moves=m.Moves(**moves),
    )  # fmt: skip


def journal() -> list[m.Message]:
    polls: list[tuple[int, list[m.Event], list[m.Effect]]] = [
        (1, [m.WeightsArrived(version=0, groups=(), fingerprint="f0")], []),
        (2, [m.Hosting(engine=0, incarnation=1, version=0, fingerprint="f0", load_s=0.1)], []),
        (3, [_beat(1, 0, 0.0, 0.0)], [_issue(0, 0, "eval"), *(_issue(group, 0) for group in range(10, 14))]),
        (5, [_score(10, 0, 1.0, 0), _score(10, 1, 0.0, 1)], [_batch(0, 10, 0, 0)]),
        (7, [m.WeightsArrived(version=1, groups=((10, 0),), fingerprint="f1"), _beat(1, 200, 3.0, 1.0, **MOVED)], []),
        (8, [], [m.EngineLost(engine=0, incarnation=1, reason="killed")]),
        (9, [_beat(9, 0, 1.0, 3.0, **RETURNED)], [m.VoidGroup(group=12, version=0, reason="failed")]),
        (11, [_score(11, 0, 1.0, 3), _score(11, 1, 1.0, 4)], [_batch(1, 11, 0, 3)]),
        (13, [m.WeightsArrived(version=2, groups=((11, 0),), fingerprint="f2")], []),
    ]  # fmt: skip
    return [
        m.JournalRecord(
            run="r", sequence=n, inputs={}, events=(m.Tick(now=at * SECOND), *events), effects=tuple(effects)
        )
        for n, (at, events, effects) in enumerate(polls)
    ]


def write_run(run: Path) -> Path:
    """The archive in a new folder."""
    run.mkdir()
    text_file(run, "journal", journal())
    stays = [
        {"engine": "0", "version": 0, "fingerprint": "f0", "tokens": 1, "kv_reused": 0, "kv_recomputed": 0},
        {"engine": "1", "version": 0, "fingerprint": "f0", "tokens": 1, "kv_reused": 0, "kv_recomputed": 4},
    ]
    moved = scored(11, 0, 1.0, engine_path=stays)
    token_file(
        run, "trajectories", [scored(10, 0, 1.0), scored(10, 1, 0.0), scored(10, 1, 0.0), moved, scored(11, 1, 1.0)]
    )
    unseen = json.dumps({"unseen": True})
    held = [(0, 0.0, "{}"), (0, 1.0, unseen), (2, 1.0, "{}"), (2, 1.0, unseen)]
    token_file(
        run,
        "evaluations",
        [scored(n, 0, r, version=v, purpose="eval", metadata=tag) for n, (v, r, tag) in enumerate(held)],
    )
    points = [
        m.MetricPoint(run="r", source="orchestrator", at=1, values={"decide_s": 0.5, "blocked_by_oldest_s": 1.2}),
        m.MetricPoint(run="r", source="orchestrator", at=2, values={"decide_s": 0.1, "blocked_by_oldest_s": 2.4}),
        m.MetricPoint(run="r", source="supervisor", at=3, values={"restarts": 1.0}),
        m.MetricPoint(run="r", source="trainer", at=4, step=0, values={"loss": 0.25}),
    ]
    text_file(run, "metrics", list(points))
    return run
