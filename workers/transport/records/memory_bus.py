"""The log in memory: the twin of `kafka_bus.py` inside one process, for any number of threads.

Rule 1: offsets are Kafka's. A transaction's records take theirs when they are sent; each partition that it touched gets
one more entry, the marker, at its end. Offsets of aborted records and markers are never returned and never used again.
Rule 2: a reader sees a partition up to its first open transaction, as a `read_committed` consumer does.
Rule 3: a blocked `poll` or `read` wakes up the moment there is something for it.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.ids import Position
from schemas.topics import TopicSpec
from workers.runtime import clock
from workers.transport.records.bus import BusUnavailable, Fenced, Record, Start, check_size

_Place = tuple[str, int]
"""Topic and partition."""


@dataclass(eq=False)
class _Transaction:
    committed: bool = False


@dataclass
class _Partition:
    """`entries[offset]`; None is a marker. `open_from`: the first offset of every transaction that is still open."""

    entries: list[tuple[Record | None, _Transaction | None]] = field(default_factory=list)
    open_from: dict[_Transaction, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return min(self.open_from.values(), default=len(self.entries))

    def append(self, record: Record, transaction: _Transaction | None) -> None:
        if transaction is not None:
            self.open_from.setdefault(transaction, len(self.entries))
        self.entries.append((record, transaction))

    def end_transaction(self, transaction: _Transaction) -> None:
        if self.open_from.pop(transaction, None) is not None:
            self.entries.append((None, None))

    def next(self, offset: int) -> Record | None:
        """The first committed record at `offset` or later, if there is one."""
        for place in range(offset, self.end):
            record, transaction = self.entries[place]
            if record is not None and (transaction is None or transaction.committed):
                return record
        return None


@dataclass(frozen=True, slots=True)
class _Delivered:
    at: int

    def offset(self, timeout_s: float) -> int:
        del timeout_s  # it is there already
        return self.at


class MemoryBus:
    """A `bus.Bus`. Give the same object to all who share the log."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.log: dict[str, list[_Partition]] = {}
        self.offsets: dict[str, dict[_Place, int]] = {}
        self.members: dict[str, list[MemoryReader]] = {}
        self.newest: dict[str, MemoryProducer] = {}

    def producer(self, transactional_id: str | None = None) -> "MemoryProducer":
        with self.changed:
            producer = MemoryProducer(self, transactional_id)
            if transactional_id is not None:
                if (older := self.newest.get(transactional_id)) is not None:
                    older.end(committed=False)
                self.newest[transactional_id] = producer
            return producer

    def reader(self, group: str | None = None, gather_ms: int = 0) -> "MemoryReader":  # noqa: ARG002
        return MemoryReader(self, group, None)

    def subscribe(self, group: str, topics: Sequence[str]) -> "MemoryReader":
        member = MemoryReader(self, group, tuple(topics))
        with self.changed:
            self.members.setdefault(group, []).append(member)
            self.share(group)
        return member

    def make_topics(self, specs: Iterable[TopicSpec]) -> None:
        with self.changed:
            for spec in specs:
                self.log.setdefault(spec.name, [_Partition() for _ in range(spec.partitions)])
            self._share_all()

    def delete_topics(self, names: Iterable[str]) -> None:
        with self.changed:
            for name in names:
                self.log.pop(name, None)
                for offsets in self.offsets.values():
                    for place in [place for place in offsets if place[0] == name]:
                        del offsets[place]
            self._share_all()

    def topics(self, prefix: str) -> dict[str, int]:
        with self.changed:
            return {name: len(parts) for name, parts in sorted(self.log.items()) if name.startswith(prefix)}

    def end_offsets(self, topic: str) -> dict[int, int]:
        with self.changed:
            return {number: part.end for number, part in enumerate(self.partitions(topic))}

    def committed(self, group: str, topic: str) -> dict[int, int]:
        with self.changed:
            offsets = self.offsets.get(group, {})
            return {number: offsets.get((topic, number), 0) for number in range(len(self.partitions(topic)))}

    def read(self, positions: Iterable[Position], timeout_s: float = 30.0) -> dict[Position, Record]:
        wanted = list(positions)
        found: dict[Position, Record] = {}

        def all_there() -> bool:
            for position in wanted:
                part = self.partition((position.topic, position.partition))
                record = None if part is None else part.next(position.offset)
                if record is not None and record.offset == position.offset:
                    found[position] = record
            return len(found) == len(set(wanted))

        with self.changed:
            if not self.changed.wait_for(all_there, timeout_s):
                missing = next(position for position in wanted if position not in found)
                raise BusUnavailable(f"no committed record at {missing} after {timeout_s} s")
        return found

    def close(self) -> None:
        """Nothing to give back; the log stays for others who hold this object."""

    def partitions(self, topic: str) -> list[_Partition]:
        if topic not in self.log:
            raise BusUnavailable(f"topic {topic} does not exist")
        return self.log[topic]

    def partition(self, place: _Place) -> _Partition | None:
        topic, number = place
        parts = self.log.get(topic, [])
        return parts[number] if number < len(parts) else None

    def share(self, group: str) -> None:
        """Deal the partitions of the group's topics out to its members, in turn. Kept ones keep their position."""
        members = self.members.get(group, [])
        for topic in {topic for member in members for topic in member.topics or ()}:
            readers = [member for member in members if topic in (member.topics or ())]
            for number in range(len(self.log.get(topic, []))):
                for turn, member in enumerate(readers):
                    if turn == number % len(readers):
                        member.places.setdefault((topic, number), self.offsets.get(group, {}).get((topic, number), 0))
                    else:
                        member.places.pop((topic, number), None)
        self.changed.notify_all()

    def _share_all(self) -> None:
        for group in self.members:
            self.share(group)


class MemoryProducer:
    """A `bus.Producer`."""

    def __init__(self, bus: MemoryBus, transactional_id: str | None) -> None:
        self._bus = bus
        self._id = transactional_id
        self._open: _Transaction | None = None

    def send(
        self, topic: str, value: bytes, headers: Mapping[str, str], *, partition: int = 0, key: bytes | None = None
    ) -> _Delivered:
        check_size(topic, value, headers, key)
        with self._bus.changed:
            self._refuse_if_fenced()
            assert (self._id is None) == (self._open is None), "a transactional producer sends between begin and commit"
            parts = self._bus.partitions(topic)
            if not 0 <= partition < len(parts):
                raise ValueError(f"{topic} has {len(parts)} partitions, none with number {partition}")
            part = parts[partition]
            offset = len(part.entries)
            record = Record(topic, partition, offset, clock.now_us(), key, bytes(value), dict(headers))
            part.append(record, self._open)
            self._bus.changed.notify_all()
            return _Delivered(offset)

    def flush(self, timeout_s: float) -> None:
        """All is there already."""

    def begin(self) -> None:
        with self._bus.changed:
            assert self._id is not None, "not a transactional producer"
            assert self._open is None, "the transaction before is still open"
            self._refuse_if_fenced()
            self._open = _Transaction()

    def commit(self, timeout_s: float) -> None:
        del timeout_s
        with self._bus.changed:
            self._refuse_if_fenced()
            assert self._open is not None, "no transaction is open"
            self.end(committed=True)

    def abort(self) -> None:
        with self._bus.changed:
            self.end(committed=False)

    def close(self) -> None:
        with self._bus.changed:
            self.end(committed=False)

    def end(self, *, committed: bool) -> None:
        """End the open transaction, if there is one. The caller holds the bus."""
        transaction, self._open = self._open, None
        if transaction is None:
            return
        transaction.committed = committed
        for parts in self._bus.log.values():
            for part in parts:
                part.end_transaction(transaction)
        self._bus.changed.notify_all()

    def _refuse_if_fenced(self) -> None:
        if self._id is not None and self._bus.newest[self._id] is not self:
            raise Fenced(f"a younger producer writes as {self._id}")


class MemoryReader:
    """A `bus.Reader`. `places`: what it reads and the offset that comes next; `topics`: None unless it is a member."""

    def __init__(self, bus: MemoryBus, group: str | None, topics: tuple[str, ...] | None) -> None:
        self._bus = bus
        self._group = group
        self.topics = topics
        self.places: dict[_Place, int] = {}

    def add(self, topic: str, partition: int, start: Start) -> None:
        assert self.topics is None, "the group gives a member its partitions"
        with self._bus.changed:
            parts = self._bus.partitions(topic)
            if not 0 <= partition < len(parts):
                raise ValueError(f"{topic} has {len(parts)} partitions, none with number {partition}")
            self.places[topic, partition] = self._start(topic, partition, start)

    def _start(self, topic: str, partition: int, start: Start) -> int:
        match start:
            case int():
                return start
            case "earliest":
                return 0
            case "latest":
                return self._bus.log[topic][partition].end
            case "committed":
                assert self._group is not None, "only a group has committed offsets"
                return self._bus.offsets.get(self._group, {}).get((topic, partition), 0)

    def remove(self, topic: str, partition: int) -> None:
        assert self.topics is None, "the group gives a member its partitions"
        with self._bus.changed:
            self.places.pop((topic, partition), None)

    def poll(self, timeout_ms: int, records_max: int = 500) -> list[Record]:
        with self._bus.changed:
            self._bus.changed.wait_for(self._any, timeout_ms / 1000)
            records: list[Record] = []
            for place in list(self.places):
                self._take(place, records, records_max)
            for record in records[:1]:  # whoever came first goes to the back: no partition starves another
                self.places[record.topic, record.partition] = self.places.pop((record.topic, record.partition))
            return records

    def _take(self, place: _Place, records: list[Record], records_max: int) -> None:
        part = self._bus.partition(place)
        while part is not None and len(records) < records_max:
            record = part.next(self.places[place])
            if record is None:
                return
            records.append(record)
            self.places[place] = record.offset + 1

    def _any(self) -> bool:
        return any(self._next(place) is not None for place in self.places)

    def _next(self, place: _Place) -> Record | None:
        part = self._bus.partition(place)
        return None if part is None else part.next(self.places[place])

    def position(self, topic: str, partition: int) -> int:
        with self._bus.changed:
            return self.places[topic, partition]

    def at_end(self) -> bool:
        with self._bus.changed:
            return not self._any()

    def commit(self) -> None:
        assert self._group is not None, "only a group has committed offsets"
        with self._bus.changed:
            stored = self._bus.offsets.setdefault(self._group, {})
            for place, offset in self.places.items():
                part, record = self._bus.partition(place), self._next(place)
                if part is not None:
                    stored[place] = max(offset, part.end) if record is None else record.offset

    def close(self) -> None:
        with self._bus.changed:
            if self.topics is not None and self._group is not None:
                members = self._bus.members.get(self._group, [])
                if self in members:
                    members.remove(self)
                    self._bus.share(self._group)
            self.places.clear()
