"""A log with trajectories and batches as the trainer meets them, for its tests."""

from pathlib import Path
from typing import Any

from schemas.arrow import to_bytes
from schemas.codec import arrow_headers, decode
from schemas.messages import STATUS, BatchRecord, CheckpointSaved, Member, MetricPoint, WeightsRecord
from schemas.settings import Settings
from schemas.topics import Topics, score_partition, version_key
from workers.transport.records.bus import Bus, publish
from workers.transport.records.memory_bus import MemoryBus

GROUP_SIZE = 2
MODEL_CONFIG = '{"vocab_size": 512, "model_type": "llama"}'


def row(group: int, index: int, version: int, *, attempt: int = 0, **changes: Any) -> dict[str, Any]:
    ids = [1 + group, 2 + index, 3]
    stay = {"engine": "e", "version": version, "fingerprint": "f", "tokens": 3, "kv_reused": 0, "kv_recomputed": 0}
    said = {
        "run": "r",
        "task": "t",
        "purpose": "train",
        "version": version,
        "group": group,
        "prompt_row": group,
        "index": index,
        "attempt": attempt,
        "prompt_ids": [9, 9, group],
        "response_ids": ids,
        "answer": "",
        "logprobs": [-1.0, -0.5, -0.25],
        "kept_logmass": None,
        "loss_mask": [True] * 3,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "finish_reason": "stop",
        "engine_path": [stay],
        "queued_at": 1,
        "started_at": 2,
        "finished_at": 3,
        "scored_at": 4,
        "reward": float(index),
        "outcome": float(index),
        "reward_parts": {},
        "score_error": None,
        "attachments": {},
        "metadata": "{}",
    }
    return said | changes


class World:
    """One run on an in-memory log."""

    def __init__(self, run_dir: Path, model: Path | None = None, **changes: Any) -> None:
        """`model`: a folder; without one a configuration alone, which is enough for the paced learner."""
        if model is None:
            model = run_dir / "model"
            model.mkdir(parents=True)
            (model / "config.json").write_text(MODEL_CONFIG)
        tree = {
            "name": "r",
            "model": str(model),
            "dtype": "float32",
            "steps": 100,
            "group_size": GROUP_SIZE,
            "groups_per_batch": 2,
            "staleness_max": 2,
            "training": {"kind": "paced", "checkpoint_every": 2},
            "dataset": [{"path": "rows.jsonl"}],
        }
        self.run_dir = run_dir
        self.settings = Settings.model_validate(tree | changes)
        self.topics = Topics("r")
        self.bus: Bus = MemoryBus()
        self.bus.make_topics(self.topics.specs())
        self.producer = self.bus.producer()
        self.next_group = 0

    def add_row(self, data: dict[str, Any]) -> Member:
        partition = score_partition(data["group"])
        delivery = self.producer.send(
            self.topics.trajectories,
            to_bytes([data]),
            arrow_headers(data["group"], data["index"], data["attempt"]),
            partition=partition,
            key=version_key(data["version"]),
        )
        where = {"partition": partition, "offset": delivery.offset(5), "row": 0}
        return Member(group=data["group"], index=data["index"], attempt=data["attempt"], **where)

    def batch(self, step: int, versions: list[int] | None = None, **changes: Any) -> BatchRecord:
        """A batch of new groups of these versions (two of version `step` unless said), its rows on the log."""
        pairs, members = [], []
        for version in versions or [step, step]:
            group, self.next_group = self.next_group, self.next_group + 1
            pairs.append((group, version))
            members += [self.add_row(row(group, index, version)) for index in range(GROUP_SIZE)]
        record = BatchRecord(run="r", step=step, exhausted=False, groups=tuple(pairs), members=tuple(members))
        return record.model_copy(update=changes)

    def send_batch(self, record: BatchRecord) -> None:
        publish(self.producer, self.topics.batches, record)

    def _all(self, topic: str) -> list[Any]:
        reader = self.bus.reader()
        reader.add(topic, 0, "earliest")
        return reader.poll(0)

    def weights(self) -> list[WeightsRecord]:
        return [decode(WeightsRecord, one.value, one.headers) for one in self._all(self.topics.weights)]

    def metrics(self) -> list[MetricPoint]:
        return [decode(MetricPoint, one.value, one.headers) for one in self._all(self.topics.metrics)]

    def checkpoints(self) -> list[CheckpointSaved]:
        said = [decode(STATUS, one.value, one.headers) for one in self._all(self.topics.status)]
        return [one for one in said if isinstance(one, CheckpointSaved)]
