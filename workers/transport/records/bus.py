"""The log as the workers see it: one Protocol, implemented by `memory_bus.py` and `kafka_bus.py`, one contract suite.

Delivery: a producer is idempotent; readers see only committed records (`read_committed`), at least once.
All calls of one producer or reader come from one thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from schemas.codec import encode
from schemas.ids import Position
from schemas.messages import Message
from schemas.topics import RECORD_BYTES_MAX, TopicSpec
from workers.runtime.errors import DoraError

Start = int | Literal["earliest", "latest", "committed"]
"""An offset; `committed` = the group's committed offset, earliest if it has none."""


class BusUnavailable(DoraError):
    """The log did not answer within its limit. The caller stops; the supervisor starts it again."""


class Fenced(DoraError):
    """A younger producer with the same transactional id has taken over. The caller must stop at once."""


@dataclass(frozen=True, slots=True)
class Record:
    topic: str
    partition: int
    offset: int
    timestamp_us: int
    key: bytes | None
    value: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def position(self) -> Position:
        return Position(self.topic, self.partition, self.offset)


_FRAME_BYTES = 512
"""What the wire adds to a record at most, without its headers (and 16 to each of these)."""


def check_size(topic: str, value: bytes, headers: Mapping[str, str], key: bytes | None) -> None:
    """ValueError if the record, as it goes over the wire, is larger than RECORD_BYTES_MAX."""
    names = sum(len(name.encode()) + len(text.encode()) + 16 for name, text in headers.items())
    size = len(value) + len(key or b"") + names + _FRAME_BYTES
    if size > RECORD_BYTES_MAX:
        raise ValueError(f"a record of {size} bytes for {topic}: the limit is {RECORD_BYTES_MAX}")


class Delivery(Protocol):
    """A record on its way."""

    def offset(self, timeout_s: float) -> int:
        """The record's offset once acknowledged. BusUnavailable after `timeout_s`."""


class Producer(Protocol):
    """Sends records; in order per partition."""

    def send(
        self, topic: str, value: bytes, headers: Mapping[str, str], *, partition: int = 0, key: bytes | None = None
    ) -> Delivery:
        """Put on its way (buffered). ValueError if larger than RECORD_BYTES_MAX."""

    def flush(self, timeout_s: float) -> None:
        """Return when all is acknowledged; BusUnavailable after `timeout_s`."""

    def begin(self) -> None:
        """Open a transaction (transactional producers only). Fenced."""

    def commit(self, timeout_s: float) -> None:
        """All or nothing of what was sent since `begin`; readers see it a moment later. Fenced, BusUnavailable."""

    def abort(self) -> None:
        """Nothing of what was sent since `begin`."""

    def close(self) -> None: ...


class Reader(Protocol):
    """Reads partitions from positions of its own; with a group it can commit them."""

    def add(self, topic: str, partition: int, start: Start) -> None:
        """Read this partition too, from `start`. The topic exists."""

    def remove(self, topic: str, partition: int) -> None: ...

    def poll(self, timeout_ms: int, records_max: int = 500) -> list[Record]:
        """Records as they come, in order per partition, at once when there are any; empty after `timeout_ms`."""

    def position(self, topic: str, partition: int) -> int:
        """The offset after the last record that `poll` returned (or where it starts)."""

    def at_end(self) -> bool:
        """Nothing committed is left unread in the partitions that this reader has (asked of the broker)."""

    def commit(self) -> None:
        """Store the positions of all that `poll` has returned under the group's name, markers right behind included: a
        group that has read all has committed the end offsets. A member's partitions that went to another are left out.
        """

    def close(self) -> None: ...


class Bus(Protocol):
    """Connects to the log."""

    def producer(self, transactional_id: str | None = None) -> Producer:
        """With an id: transactional, and any older producer with that id is fenced."""

    def reader(self, group: str | None = None, gather_ms: int = 0) -> Reader:
        """Partitions by `add`; `group` is only a name to commit under. With `gather_ms` records may come so much later,
        many at once: for those who follow a run, so that it does not notice (each answer costs the broker, too)."""

    def subscribe(self, group: str, topics: Sequence[str]) -> Reader:
        """A member of a consumer group that shares the topics' partitions (`add` and `remove` are refused). Starts at
        the group's committed offsets, else at the earliest."""

    def make_topics(self, specs: Iterable[TopicSpec]) -> None:
        """Make what is missing and wait until it can be written without delay."""

    def delete_topics(self, names: Iterable[str]) -> None:
        """Delete what exists."""

    def topics(self, prefix: str) -> dict[str, int]:
        """Name -> number of partitions, of all topics with this prefix."""

    def end_offsets(self, topic: str) -> dict[int, int]:
        """Partition -> the offset after its last committed record (a commit marker may count)."""

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Partition -> offset committed by the group; 0 where it has none."""

    def read(self, positions: Iterable[Position], timeout_s: float = 30.0) -> dict[Position, Record]:
        """Exactly these records. BusUnavailable if one does not come within `timeout_s`."""

    def close(self) -> None: ...


def publish(
    producer: Producer, topic: str, message: Message, *, partition: int = 0, key: bytes | None = None
) -> Delivery:
    """Send a message with its headers."""
    value, headers = encode(message)
    return producer.send(topic, value, headers, partition=partition, key=key)
