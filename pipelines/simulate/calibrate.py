"""A cost model and a load out of a real run's archive: what decoding, loading, training, scoring took there.

Rule 1: decoding is fitted on pairs of heartbeats of one engine with the same number of requests at both: the seconds in
between are `t0_s` for each step and `t1_s` for each token. Once without and once with a trainer that trains.
Rule 2: an archive that lacks what is needed is refused with topic and column; nothing is guessed.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.simulate.cost import CostModel, Work
from pipelines.simulate.lengths import Empirical
from workers.runtime.errors import BadInput
from workers.taps import archive

ROWS = ("prompt_row", "group", "prompt_ids", "response_ids", "engine_path", "finished_at", "scored_at", "purpose")
JSON = ("timestamp", "value")
PAIRS_MIN = 3
"""Fewer pairs of heartbeats give no line."""
POLL_S = 0.2
"""The orchestrator's poll, and what the log takes: no record says it."""
SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class Pair:
    """Between two heartbeats of an engine with `running` requests: `steps` of `decode_s` seconds together."""

    running: int
    steps: float
    decode_s: float
    began: float
    ended: float


def calibrate(run_dir: Path) -> tuple[CostModel, Work]:
    """BadInput if the archive lacks something."""
    rows = _table(run_dir, "trajectories", ROWS)
    status, weights, batches = (_said(run_dir, topic) for topic in ("status", "weights", "batches"))
    trained = _trained(batches, weights, run_dir)
    pairs = _pairs([(at, word) for at, word in status if word.get("kind") == "heartbeat"])
    idle: list[Pair] = []
    busy: list[Pair] = []
    for pair in pairs:
        share = sum(max(0.0, min(pair.ended, b) - max(pair.began, a)) for a, b, _ in trained)
        (busy if share > (pair.ended - pair.began) / 2 else idle).append(pair)
    if len(pairs) < PAIRS_MIN:
        raise BadInput(
            f"{run_dir}: status has {len(pairs)} pairs of heartbeats with requests, a line needs {PAIRS_MIN}"
        )
    both = [line(some if len(some) >= PAIRS_MIN else pairs) for some in (idle, busy)]
    spans = [ended - began for began, ended, _ in trained]
    train_s = fmean(seconds for _, _, seconds in trained)
    evaluated = _if_there(run_dir, "evaluations", ROWS)
    cost = CostModel(
        t0_s=both[0][0],
        t1_s=both[0][1],
        t0_busy_s=both[1][0],
        t1_busy_s=both[1][1],
        prefill_tokens_per_s=_prefill(status, [rows, *evaluated]),
        load_s=_load_s(status),
        publish_s=max(0.0, fmean(spans) - train_s),
        train_s=train_s,
        score_s=_score_s(rows),
        poll_s=POLL_S,
    )
    joined = [word["kv_tokens_max"] for _, word in status if word.get("kind") == "joined"]
    if not joined:
        raise BadInput(f"{run_dir}: status has no engine that joined: kv_tokens_max is not known")
    prompts = [len(ids) for ids in rows.column("prompt_ids").to_pylist()]
    return cost, Work(lengths_of(rows), max(prompts), min(joined))


def lengths_of(rows: pa.Table) -> Empirical:
    """By prompt, in the order of the rows."""
    by_prompt: dict[int, list[int]] = defaultdict(list)
    for prompt, ids in zip(rows.column("prompt_row").to_pylist(), rows.column("response_ids").to_pylist(), strict=True):
        by_prompt[prompt].append(len(ids))
    return Empirical(tuple(tuple(lengths) for lengths in by_prompt.values()))


def line(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Least squares of seconds on (steps, tokens): `t0_s` > 0, `t1_s` >= 0. One number of requests alone says nothing
    of how it grows: then all is `t0_s`."""
    steps = np.array([pair.steps for pair in pairs])
    tokens = steps * np.array([pair.running for pair in pairs])
    seconds = np.array([pair.decode_s for pair in pairs])
    if len({pair.running for pair in pairs}) > 1:
        (t0_s, t1_s), *_ = np.linalg.lstsq(np.stack([steps, tokens], axis=1), seconds, rcond=None)
        if t0_s > 0 and t1_s >= 0:
            return float(t0_s), float(t1_s)
        if t0_s <= 0:
            return 1e-6, float((tokens @ seconds) / (tokens @ tokens))
    return float((steps @ seconds) / (steps @ steps)), 0.0


def _pairs(beats: Iterable[tuple[float, dict[str, Any]]]) -> list[Pair]:
    by_engine: dict[tuple[int, int], list[tuple[float, dict[str, Any]]]] = defaultdict(list)
    for at, word in beats:
        by_engine[word["engine"], word["incarnation"]].append((at, word))
    pairs = []
    for heard in by_engine.values():
        for (began, before), (ended, after) in pairwise(sorted(heard, key=lambda item: item[0])):
            tokens, running = after["tokens"] - before["tokens"], after["running"]
            seconds = after["decode_s"] - before["decode_s"]
            if running and running == before["running"] and tokens > 0 and seconds > 0:
                pairs.append(Pair(running, tokens / running, seconds, began, ended))
    return pairs


def _trained(
    batches: Sequence[tuple[float, dict[str, Any]]], weights: Sequence[tuple[float, dict[str, Any]]], run_dir: Path
) -> list[tuple[float, float, float]]:
    """(batch chosen, version announced, seconds of training) of each step."""
    chosen = {word["step"]: at for at, word in batches}
    trained = []
    for at, word in weights:
        if word["step"] in chosen:
            span = at - chosen[word["step"]]
            trained.append((chosen[word["step"]], at, min(span, word["metrics"].get("train_s", span))))
    if not trained:
        raise BadInput(f"{run_dir}: no step of it was trained: weights has no version after 0")
    return trained


def _load_s(status: Iterable[tuple[float, dict[str, Any]]]) -> float:
    """Of versions after 0, if there are any: an engine that starts loads with nothing prepared."""
    loads = [(word["version"], word["load_s"]) for _, word in status if word.get("kind") == "hosting"]
    later = [seconds for version, seconds in loads if version > 0]
    return fmean(later or [seconds for _, seconds in loads] or [0.0])


def _prefill(status: Iterable[tuple[float, dict[str, Any]]], tables: Iterable[pa.Table]) -> float:
    """Tokens per second. `tables`: all rows of the engines, evaluation too, for the seconds are of all of them."""
    last: dict[tuple[int, int], float] = {}
    for _, word in status:
        if word.get("kind") == "heartbeat":
            last[word["engine"], word["incarnation"]] = word["prefill_s"]
    seen, tokens = set(), 0
    for table in tables:
        columns = (table.column(name).to_pylist() for name in ("group", "prompt_ids", "engine_path"))
        for group, ids, path in zip(*columns, strict=True):
            for stay in path:
                tokens += stay["kv_recomputed"]
                if (group, stay["engine"]) not in seen:
                    seen.add((group, stay["engine"]))
                    tokens += len(ids)
    seconds = sum(last.values())
    return tokens / seconds if seconds > 0 else 1e6


def _score_s(rows: pa.Table) -> float:
    columns = (rows.column(name).cast(pa.int64()).to_pylist() for name in ("finished_at", "scored_at"))
    return fmean(max(0, scored - finished) for finished, scored in zip(*columns, strict=True)) / SECOND_US


def _table(run_dir: Path, topic: str, columns: Sequence[str]) -> pa.Table:
    """These columns. BadInput if a file lacks one, or there are no rows."""
    tables = _if_there(run_dir, topic, columns)
    if not any(table.num_rows for table in tables):
        raise BadInput(f"{run_dir}: its archive has no rows of {topic}")
    return pa.concat_tables(tables)


def _if_there(run_dir: Path, topic: str, columns: Sequence[str]) -> list[pa.Table]:
    """Only these columns. BadInput if a file lacks one."""
    return [table for _, _, table in archive.files(run_dir, topic, (*columns, "offset"))]


def _said(run_dir: Path, topic: str) -> list[tuple[float, dict[str, Any]]]:
    """(seconds since 1970, the record) in order."""
    table = _table(run_dir, topic, JSON)
    times = [at / SECOND_US for at in table.column("timestamp").cast(pa.int64()).to_pylist()]
    texts = table.column("value").to_pylist()
    return sorted(((at, json.loads(text)) for at, text in zip(times, texts, strict=True)), key=lambda item: item[0])
