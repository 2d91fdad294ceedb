"""One rollout service on a log in memory, and what others would say to it and hear from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from schemas import messages as m
from schemas.arrow import to_rows, to_table
from schemas.codec import decode
from schemas.ids import RequestKey, sampling_seed
from schemas.settings import Dataset, Engines, Settings
from schemas.topics import score_partition
from workers.rollout.engines.paced_engine import PacedEngine
from workers.rollout.service import RolloutService
from workers.runtime import clock
from workers.runtime.process import Process
from workers.transport.records.bus import Reader, publish
from workers.transport.records.memory_bus import MemoryBus

NUMBER = 1
LIMIT_S = 8.0


def settings(
    seats: int = 4, mode: Literal["dora", "partial"] = "dora", model: str = "none", snapshot_tokens: int = 0
) -> Settings:
    return Settings(
        name="r",
        mode=mode,
        model=model,
        steps=1,
        group_size=2,
        engines=Engines(
            kind="paced",
            count=2,
            seats=seats,
            kv_mib=64,
            tokens_per_request_max=64,
            snapshot_tokens=snapshot_tokens,
        ),
        dataset=(Dataset(path="none.jsonl"),),
    )


class House:
    """One service and what others would say to it and hear from it."""

    def __init__(
        self,
        tmp_path: Path,
        engine: PacedEngine | None = None,
        seats: int = 4,
        mode: Literal["dora", "partial"] = "dora",
        model: str = "none",
        *,
        snapshot_tokens: int = 0,
    ) -> None:
        self.bus = MemoryBus()
        self.process = Process("rollout-1", settings(seats, mode, model, snapshot_tokens), tmp_path)
        self.topics = self.process.topics
        self.bus.make_topics(self.topics.specs())
        self.engine = engine or PacedEngine(self.process.settings, pace=0)
        self.producer = self.bus.producer()
        self.heard = {name: self._reader(name) for name in ("status", "partials", "completions", "dead-letters")}
        self.said: list[Any] = []
        self.sequence = -1
        self.service = RolloutService(self.process, self.bus, self.engine, NUMBER, "host", poll_s=0.0)

    def _reader(self, kind: str) -> Reader:
        reader = self.bus.reader()
        topic = self.topics.of(kind)
        for partition in range(self.bus.topics(topic)[topic]):
            reader.add(topic, partition, "earliest")
        return reader

    def announce(self, version: int) -> None:
        self.bus.make_topics([self.topics.requests_spec(version, 2)])
        weights = m.WeightsRecord(
            run="r",
            version=version,
            step=None,
            groups=(),
            trajectories=0,
            location="",
            manifest_sha256="",
            fingerprint=f"fingerprint-{version}",
            created_at=0,
        )
        publish(self.producer, self.topics.weights, weights)

    def swap(self, version: int, after: int | None = None, incarnation: int | None = None) -> None:
        self.command(
            m.Swap(
                engine=NUMBER,
                incarnation=incarnation or self.service.incarnation,
                version=version,
                after_sequence=self.sequence if after is None else after,
            )
        )

    def stop(self, *keys: RequestKey, keep: bool, reason: m.StopReason = "moved") -> None:
        incarnation = self.service.incarnation
        self.command(m.Stop(engine=NUMBER, incarnation=incarnation, requests=keys, keep=keep, reason=reason))

    def command(self, word: m.Message) -> None:
        publish(self.producer, self.topics.control, word)

    def request(self, group: int, index: int, version: int, **changes: Any) -> m.RequestRecord:
        """Of a sequence of its own, not sent yet."""
        if "sequence" not in changes:
            self.sequence += 1
        fields: dict[str, Any] = {
            "run": "r",
            "group": group,
            "index": index,
            "attempt": 0,
            "version": version,
            "engine": NUMBER,
            "incarnation": self.service.incarnation,
            "sequence": self.sequence,
            "purpose": "train",
            "task": "t",
            "prompt_row": group,
            "prompt_ids": (1, 2, 3),
            "answer": "4",
            "seed": sampling_seed(0, group, index),
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_new_tokens": 8,
            "queued_at": 5,
        }
        return m.RequestRecord(**(fields | changes))

    def send(self, request: m.RequestRecord, topic_version: int | None = None) -> RequestKey:
        version = request.version if topic_version is None else topic_version
        publish(self.producer, self.topics.requests(version), request, partition=NUMBER)
        return request.key

    def issue(self, group: int, index: int, version: int, **changes: Any) -> RequestKey:
        return self.send(self.request(group, index, version, **changes))

    def listen(self) -> None:
        for record in self.heard["status"].poll(0):
            self.said.append(decode(m.STATUS, record.value, record.headers))
        for record in self.heard["partials"].poll(0):
            self.said.append(decode(m.PartialRecord, record.value, record.headers))
        for record in self.heard["dead-letters"].poll(0):
            self.said.append(decode(m.DeadLetter, record.value, record.headers))
        for record in self.heard["completions"].poll(0):
            for row in to_rows(to_table(record.value)):
                assert record.partition == score_partition(row["group"])
                self.said.append(row)

    def of(self, kind: type[Any]) -> list[Any]:
        return [word for word in self.said if isinstance(word, kind)]

    def until(self, happened: Callable[[], bool]) -> None:
        end = clock.monotonic_s() + LIMIT_S
        while clock.monotonic_s() < end:
            self.listen()
            if happened():
                return
            self.service.turn()
        raise AssertionError(f"never happened in {LIMIT_S} s; said: {self.said[-5:]}")

    def tokens_so_far(self, key: RequestKey) -> int:
        one = self.service._running.get(key)
        return 0 if one is None else len(one.ids)
