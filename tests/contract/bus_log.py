"""A log of its own for each test of the contract, in memory and on Apache Kafka, and ways to look at it."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.topics import RECORD_BYTES_MAX, TopicSpec
from workers.transport.records.bus import Bus, Producer, Reader, Record

LIMIT_S = 20.0
NONE: dict[str, str] = {}


@dataclass
class Log:
    """A log of its own run, and everything that a test opened on it."""

    bus: Bus
    prefix: str = field(default_factory=lambda: f"dora.t{uuid.uuid4().hex[:8]}.")
    opened: list[Producer | Reader] = field(default_factory=list)

    def topic(self, name: str = "a", partitions: int = 1) -> str:
        topic = self.prefix + name
        self.bus.make_topics([TopicSpec(topic, partitions, {"max.message.bytes": str(RECORD_BYTES_MAX)})])
        return topic

    def producer(self, transactional_id: str | None = None) -> Producer:
        producer = self.bus.producer(transactional_id and self.prefix + transactional_id)
        self.opened.append(producer)
        return producer

    def reader(self, topic: str = "", partition: int = 0, group: str | None = None, start: str = "earliest") -> Reader:
        reader = self.bus.reader(group and self.prefix + group)
        self.opened.append(reader)
        if topic:
            reader.add(topic, partition, start)  # type: ignore[arg-type]
        return reader

    def member(self, group: str, topic: str) -> Reader:
        member = self.bus.subscribe(self.prefix + group, [topic])
        self.opened.append(member)
        return member

    def write(self, topic: str, *values: bytes, partition: int = 0) -> None:
        producer = self.producer()
        for value in values:
            producer.send(topic, value, NONE, partition=partition)
        producer.flush(LIMIT_S)


def take(reader: Reader, count: int) -> list[Record]:
    """The next `count` records, and no more than these."""
    records: list[Record] = []
    limit = time.monotonic() + LIMIT_S
    while len(records) < count and time.monotonic() < limit:
        records += reader.poll(500)
    assert len(records) == count, f"{len(records)} of {count} records came"
    return records


def values(records: list[Record]) -> list[bytes]:
    return [record.value for record in records]


def until(holds: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit, f"waited {LIMIT_S} s for {what}"
