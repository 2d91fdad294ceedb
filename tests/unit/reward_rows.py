"""Rows and processes for the tests of reward and taps."""

from pathlib import Path
from typing import Any

from schemas import arrow
from schemas.codec import arrow_headers
from schemas.settings import Settings
from schemas.topics import Topics, score_partition, version_key
from workers.runtime import clock
from workers.runtime.process import Process
from workers.transport.records.memory_bus import MemoryBus

BY_ANSWER = "tests.unit.grader_examples:by_answer"
LIMIT_S = 60.0


def a_process(run_dir: Path, name: str = "reward-0", **reward: Any) -> Process:
    """A process of run `r`: dataset `rows` (train) and `held` (eval), G = 2, B = 2, K = 1."""
    settings = Settings.model_validate(
        {
            "name": "r",
            "model": str(run_dir),
            "steps": 3,
            "group_size": 2,
            "groups_per_batch": 2,
            "staleness_max": 1,
            "reward": {"pool": 2, "timeout_s": 1.0, **reward},
            "dataset": [
                {"path": "rows.jsonl", "grader": BY_ANSWER},
                {"path": "held.jsonl", "grader": BY_ANSWER, "purpose": "eval"},
            ],
        }
    )
    return Process(name, settings, run_dir)


def a_bus() -> MemoryBus:
    bus = MemoryBus()
    bus.make_topics(Topics("r").specs())
    return bus


def a_row(group: int, index: int, answer: str = "1", **other: Any) -> dict[str, Any]:
    """A valid unscored row of two response tokens."""
    version = other.get("version", 0)
    stay = {
        "engine": "0",
        "version": version,
        "fingerprint": f"weights-{version}",
        "tokens": 2,
        "kv_reused": 0,
        "kv_recomputed": 0,
    }
    return {
        "run": "r",
        "task": "rows",
        "purpose": "train",
        "version": version,
        "group": group,
        "prompt_row": group,
        "index": index,
        "attempt": 0,
        "prompt_ids": [5, 6, 7],
        "response_ids": [2, 3],
        "answer": answer,
        "logprobs": [-0.5, -1.5],
        "kept_logmass": None,
        "loss_mask": [True, True],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "finish_reason": "stop",
        "engine_path": [stay],
        "queued_at": 1_000_000,
        "started_at": 2_000_000,
        "finished_at": 3_000_000,
        "scored_at": None,
        "reward": None,
        "outcome": None,
        "reward_parts": {},
        "score_error": None,
        "attachments": {},
        "metadata": "{}",
        **other,
    }


def complete(bus: MemoryBus, rows: list[dict[str, Any]]) -> None:
    """Rows, as one record, onto `completions`."""
    first = rows[0]
    bus.producer().send(
        Topics("r").completions,
        arrow.to_bytes(rows, arrow.COMPLETION),
        arrow_headers(first["group"] or 0, first["index"] or 0, first["attempt"] or 0),
        partition=score_partition(first["group"] or 0),
        key=version_key(first["version"]),
    )


def records(bus: MemoryBus, topic: str) -> list[Any]:
    """All records of a topic."""
    reader = bus.reader()
    for partition in range(bus.topics(topic)[topic]):
        reader.add(topic, partition, "earliest")
    found = []
    while not reader.at_end():
        found += reader.poll(100)
    return found


class Deadline:
    """`while ...: deadline.check(what)`."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._end = clock.monotonic_s() + limit_s

    def check(self, what: object) -> None:
        assert clock.monotonic_s() < self._end, f"still waiting: {what}"
