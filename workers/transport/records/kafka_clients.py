"""What sends to and reads from Apache Kafka: the halves of `kafka_bus.py`, and what Kafka's errors mean to us.

Rule 1: Kafka's errors become ours. Fenced: a younger producer has the id. BusUnavailable: no answer within the limit.
A misuse of the client stays what it is: our bug.
Rule 2: what is in flight is bounded (INFLIGHT_BYTES_MAX); the next send, flush or commit reports a failed delivery.
Rule 3: an offset without a record (a transaction's marker, an aborted record) is stepped over, never waited for.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka import errors as kafka_errors
from kafka.structs import OffsetAndMetadata

from schemas.ids import Position
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.transport.records.bus import BusUnavailable, Fenced, Record, Start, check_size

INFLIGHT_BYTES_MAX = 64 << 20
CLOSE_S_MAX = 5.0
COMMIT_ATTEMPT_S = 3.0
COMMIT_S_USUAL = 1.0
"""A transaction that takes longer may have met a broker that died: whether it can be read is looked at."""
READ_AHEAD_MAX = 200
"""`read_exactly` reads over at most this many unwanted records; a wider gap is jumped."""
_FENCED = (
    kafka_errors.ProducerFencedError,
    kafka_errors.InvalidProducerEpochError,
    kafka_errors.TransactionCoordinatorFencedError,
)
_FENCING_UNDER_WAY = "Unhandled error in EndTxnResponse: [Error -1]"
"""What the client makes of a commit that comes while the broker is fencing its producer: there the broker fails with
"transition to ONGOING while it already a pending state PREPARE_EPOCH_FENCE" (Kafka 4.3)."""
_BUGS = (kafka_errors.IllegalStateError, kafka_errors.IllegalArgumentError)
_REBALANCED = (
    kafka_errors.CommitFailedError,
    kafka_errors.RebalanceInProgressError,
    kafka_errors.IllegalGenerationError,
    kafka_errors.UnknownMemberIdError,
)


class Broker(Protocol):
    """What a sender or a reader asks of the bus it came from."""

    address: str
    timeout_s: float

    def ends(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The end offsets of those that exist: readers see committed records below them, none above."""

    def start_offset(self, group: str | None, place: TopicPartition, start: Start) -> int:
        """The offset that `start` means now."""


@contextmanager
def kafka_errors_of(address: str) -> Iterator[None]:
    """Rule 1."""
    try:
        yield
    except _BUGS:
        raise
    except kafka_errors.KafkaConfigurationError as error:
        raise BadInput(f"[kafka]: {error}") from error
    except kafka_errors.KafkaError as error:
        if _is_fencing(error):
            raise Fenced(str(error)) from error
        raise BusUnavailable(f"Kafka at {address}: {error}") from error


def _is_fencing(error: BaseException) -> bool:
    """A producer that failed says later only that it did, with the reason inside or in the text."""
    inner = [part for part in error.args if isinstance(part, BaseException)]
    named = any(name in str(error) for name in (_FENCING_UNDER_WAY, *(kind.__name__ for kind in _FENCED)))
    return isinstance(error, _FENCED) or named or any(map(_is_fencing, inner))


def _within(call: Callable[[], None], timeout_s: float, what: str) -> None:
    """Run a call that has no limit of its own. KafkaTimeoutError."""
    done: list[bool] = []
    failed: list[kafka_errors.KafkaError] = []

    def body() -> None:
        try:
            call()
        except kafka_errors.KafkaError as error:
            failed.append(error)
        done.append(True)

    thread = threading.Thread(target=body, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise kafka_errors.KafkaTimeoutError(f"no answer to {what} within {timeout_s} s")
    assert done, f"{what} failed in a way Kafka's client does not speak of"
    if failed:
        raise failed[0]


def forget(cluster: Any, topics: Iterable[str]) -> None:
    """Stop asking for these topics. kafka-python follows a topic for ever, and asks many times a second once it is
    deleted: the set it follows only grows (`ClusterMetadata.set_topics`). Replaced whole: other threads iterate it."""
    cluster._topics = cluster._topics - set(topics)


def to_record(found: Any) -> Record:
    """Headers of strangers that are no UTF-8 are read with replacement characters; their schema is refused later."""
    headers = {name: (text or b"").decode(errors="replace") for name, text in found.headers}
    at = found.timestamp * 1000
    return Record(found.topic, found.partition, found.offset, at, found.key, found.value or b"", headers)


def read_exactly(client: KafkaConsumer, positions: Iterable[Position], timeout_s: float) -> dict[Position, Record]:
    wanted: dict[TopicPartition, deque[int]] = defaultdict(deque)
    for position in sorted(set(positions)):
        wanted[TopicPartition(position.topic, position.partition)].append(position.offset)
    found: dict[Position, Record] = {}
    client.assign(list(wanted))
    if wanted:
        client.resume(*wanted)
    for place, offsets in wanted.items():
        client.seek(place, offsets[0])
    limit = clock.monotonic_s() + timeout_s
    while any(wanted.values()):
        for place, records in client.poll(timeout_ms=50).items():
            offsets = wanted[place]
            for record in records:
                if offsets and record.offset == offsets[0]:
                    found[Position(place.topic, place.partition, offsets.popleft())] = to_record(record)
        for place, offsets in wanted.items():
            reached = client.position(place)
            if not offsets:
                client.pause(place)
            elif reached > offsets[0]:
                raise BusUnavailable(f"there is no record at {place.topic}[{place.partition}] {offsets[0]}")
            elif offsets[0] - reached > READ_AHEAD_MAX:
                client.seek(place, offsets[0])
        if any(wanted.values()) and clock.monotonic_s() > limit:
            place, offsets = next((place, offsets) for place, offsets in wanted.items() if offsets)
            raise BusUnavailable(f"no record at {place.topic}[{place.partition}] {offsets[0]} after {timeout_s} s")
    return found


class _Sent:
    """A `bus.Delivery`."""

    def __init__(self, address: str, future: Any, size: int) -> None:
        self._address = address
        self.future = future
        self.size = size

    def offset(self, timeout_s: float) -> int:
        with kafka_errors_of(self._address):
            return int(self.future.get(timeout=timeout_s).offset)


class KafkaSender:
    """A `bus.Producer`."""

    def __init__(self, broker: Broker, client: KafkaProducer, transactional: bool) -> None:
        self._broker = broker
        self._client = client
        self._transactional = transactional
        self._open = False
        self._closed = False
        self._forgotten: set[str] = set()
        self._in_flight: deque[_Sent] = deque()
        self._bytes = 0
        self._began = 0.0
        self._written: dict[TopicPartition, _Sent] = {}
        self._written_before: dict[TopicPartition, _Sent] = {}

    def send(
        self, topic: str, value: bytes, headers: Mapping[str, str], *, partition: int = 0, key: bytes | None = None
    ) -> _Sent:
        check_size(topic, value, headers, key)
        assert self._open == self._transactional, "a transactional producer sends between begin and commit"
        self._settle(INFLIGHT_BYTES_MAX - len(value), self._broker.timeout_s)
        pairs = [(name, text.encode()) for name, text in headers.items()]
        with kafka_errors_of(self._broker.address):
            future = self._client.send(topic, value=value, key=key, headers=pairs, partition=partition)
        sent = _Sent(self._broker.address, future, len(value))
        self._in_flight.append(sent)
        self._bytes += sent.size
        if self._transactional:
            self._written[TopicPartition(topic, partition)] = sent
        return sent

    def _settle(self, bytes_max: int, timeout_s: float) -> None:
        """Forget what is acknowledged, and wait until at most `bytes_max` are not (rule 2)."""
        limit = clock.monotonic_s() + timeout_s
        while self._in_flight and (self._bytes > bytes_max or self._in_flight[0].future.is_done):
            sent = self._in_flight.popleft()
            self._bytes -= sent.size
            sent.offset(max(0.001, limit - clock.monotonic_s()))

    def flush(self, timeout_s: float) -> None:
        with kafka_errors_of(self._broker.address):
            self._client.flush(timeout=timeout_s)
        self._settle(-1, timeout_s)

    def begin(self) -> None:
        assert self._transactional, "not a transactional producer"
        assert not self._open, "the transaction before is still open"
        with kafka_errors_of(self._broker.address):
            self._client.begin_transaction()
        self._open = True
        self._began = clock.monotonic_s()
        if self._written:
            self._written_before, self._written = self._written, {}

    def commit(self, timeout_s: float) -> None:
        assert self._open, "no transaction is open"
        self.flush(timeout_s)
        with kafka_errors_of(self._broker.address):
            _within(self._client.commit_transaction, timeout_s, "commit")
        self._open = False
        if clock.monotonic_s() - self._began > COMMIT_S_USUAL:
            self._show({**self._written_before, **self._written}, timeout_s)

    def _show(self, written: Mapping[TopicPartition, _Sent], timeout_s: float) -> None:
        """Wait until readers see what was committed. A broker that is killed while it commits may come back, call the
        transaction complete and have left markers out (Kafka 4.3, one node: it takes partitions that it has not loaded
        yet for deleted ones); their readers would wait for ever. A commit of the same partitions writes the markers."""
        last = {place: sent.offset(timeout_s) for place, sent in written.items()}
        limit = clock.monotonic_s() + timeout_s
        patience = clock.monotonic_s() + COMMIT_S_USUAL
        while last:
            ends = self._broker.ends(last)  # without those that were deleted meanwhile
            last = {place: offset for place, offset in last.items() if ends.get(place, offset + 1) <= offset}
            if last and clock.monotonic_s() > limit:
                hidden = ", ".join(f"{place.topic}[{place.partition}]" for place in last)
                raise BusUnavailable(f"Kafka at {self._broker.address}: what was committed to {hidden} cannot be read")
            if last and clock.monotonic_s() > patience:
                with kafka_errors_of(self._broker.address):
                    self._client.begin_transaction()
                    for place in last:
                        self._client._transaction_manager.maybe_add_partition_to_transaction(place)
                    _within(self._client.commit_transaction, timeout_s, "commit")
                patience = clock.monotonic_s() + COMMIT_S_USUAL
            if last:
                threading.Event().wait(0.02)

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        self._in_flight.clear()
        self._bytes = 0
        self._written = {}
        with suppress(Fenced), kafka_errors_of(self._broker.address):  # who is fenced has been aborted
            _within(self._client.abort_transaction, self._broker.timeout_s, "abort")

    def touch(self, topic: str) -> None:
        """Learn of a fresh topic now; else its first record would wait for that. Any thread may call it."""
        self._forgotten.discard(topic)
        if not self._closed:
            with kafka_errors_of(self._broker.address):
                self._client.partitions_for(topic)

    def forget(self, topics: Iterable[str]) -> None:
        """These topics are deleted. The client keeps a queue for each partition that it ever sent to, and looks without
        a pause for the leaders of all: half a core, once one of them is gone. Its own thread may bring an empty queue
        back that it is just looking at, so those of earlier times are looked for again."""
        self._forgotten.update(topics)
        forget(self._client._metadata, self._forgotten)
        queues = self._client._accumulator
        for place in [place for place in list(queues._batches) if place.topic in self._forgotten]:
            with queues._tp_lock(place):
                if not queues._batches[place]:
                    del queues._batches[place]

    def close(self) -> None:
        self._closed = True
        with suppress(BusUnavailable):  # what was not acknowledged is the caller's to know, by flush
            self.abort()
        with suppress(kafka_errors.KafkaError):
            self._client.close(timeout=CLOSE_S_MAX)


class KafkaReader:
    """A `bus.Reader`. `_ready`: what the client has given and `poll` has not yet."""

    def __init__(self, broker: Broker, client: KafkaConsumer, group: str | None, *, member: bool) -> None:
        self._broker = broker
        self._client = client
        self._group = group
        self._member = member
        self._next: dict[TopicPartition, int] = {}
        self._ready: deque[Record] = deque()

    def add(self, topic: str, partition: int, start: Start) -> None:
        assert not self._member, "the group gives a member its partitions"
        place = TopicPartition(topic, partition)
        offset = self._broker.start_offset(self._group, place, start)
        self._drop(place)
        self._next[place] = offset
        self._client.assign(list(self._next))
        self._client.seek(place, offset)

    def remove(self, topic: str, partition: int) -> None:
        assert not self._member, "the group gives a member its partitions"
        self._drop(TopicPartition(topic, partition))
        self._client.assign(list(self._next))
        if all(place.topic != topic for place in self._next):
            forget(self._client._cluster, [topic])

    def _drop(self, place: TopicPartition) -> None:
        self._next.pop(place, None)
        self._ready = deque(record for record in self._ready if (record.topic, record.partition) != place)

    def poll(self, timeout_ms: int, records_max: int = 500) -> list[Record]:
        if not self._ready:
            self._fetch(timeout_ms, records_max)
        records = [self._ready.popleft() for _ in range(min(records_max, len(self._ready)))]
        for record in records:
            self._next[TopicPartition(record.topic, record.partition)] = record.offset + 1
        return records

    def _fetch(self, timeout_ms: int, records_max: int) -> None:
        with kafka_errors_of(self._broker.address):
            found = self._client.poll(timeout_ms=timeout_ms, max_records=records_max)
        if self._member:
            for place in [place for place in self._next if place not in self._client.assignment()]:
                self._drop(place)
        self._ready.extend(to_record(record) for records in found.values() for record in records)

    def position(self, topic: str, partition: int) -> int:
        place = TopicPartition(topic, partition)
        if place in self._next:
            return self._next[place]
        with kafka_errors_of(self._broker.address):
            return int(self._client.position(place, timeout_ms=self._broker.timeout_s * 1000) or 0)

    def at_end(self) -> bool:
        ends = self._broker.ends(self._client.assignment())
        limit = clock.monotonic_s() + self._broker.timeout_s
        while not self._ready:
            if all((self._reached(place) or 0) >= end for place, end in ends.items()):
                return True
            if clock.monotonic_s() > limit:
                raise BusUnavailable(f"Kafka at {self._broker.address}: nothing more came, yet the end is not reached")
            self._fetch(50, 500)  # a marker is stepped over, a record is kept for `poll`
            ends = {place: end for place, end in ends.items() if place in self._client.assignment()}
        return False

    def _reached(self, place: TopicPartition) -> int | None:
        """Where the client goes on: behind the markers that follow the last record."""
        with kafka_errors_of(self._broker.address):
            reached: int | None = self._client.position(place, timeout_ms=1000)
            return reached

    def commit(self) -> None:
        assert self._group is not None, "only a group has committed offsets"
        waiting = {TopicPartition(record.topic, record.partition) for record in self._ready}
        held = self._client.assignment()
        offsets = {
            place: OffsetAndMetadata(after if place in waiting else max(after, self._reached(place) or 0), "", -1)
            for place, after in self._next.items()
            if place in held
        }
        limit = clock.monotonic_s() + self._broker.timeout_s
        while offsets:
            if not self._member:  # a member's topics are never deleted
                there = self._broker.ends(offsets)
                offsets = {place: offset for place, offset in offsets.items() if place in there}
            if not offsets or self._committed(offsets, last=clock.monotonic_s() >= limit):
                return

    def _committed(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], *, last: bool) -> bool:
        """One attempt: a topic that was deleted meanwhile would hold it up until the very end, so look again."""
        with kafka_errors_of(self._broker.address):
            try:
                self._client.commit(dict(offsets), timeout_ms=COMMIT_ATTEMPT_S * 1000)
            except _REBALANCED:
                if not self._member:
                    raise
            except kafka_errors.KafkaTimeoutError:
                if last:
                    raise
                return False
        return True

    def close(self) -> None:
        with suppress(kafka_errors.KafkaError):
            self._client.close(autocommit=False, timeout_ms=CLOSE_S_MAX * 1000)
