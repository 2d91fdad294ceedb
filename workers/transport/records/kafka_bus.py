"""The log on Apache Kafka. kafka-python is known here and in `kafka_clients.py` only.

Rule 1: writes are idempotent and acknowledged by all replicas; reads are `read_committed`.
Rule 2: a question is asked again while what went wrong may pass, until `timeout_s`; then it is BusUnavailable.
Each producer or reader belongs to one thread; the bus itself may be shared.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka import errors as kafka_errors
from kafka.admin import OffsetSpec

from schemas.ids import Position
from schemas.settings import Settings
from schemas.topics import RECORD_BYTES_MAX, TopicSpec
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.transport.records.bus import BusUnavailable, Record, Start
from workers.transport.records.kafka_clients import (
    CLOSE_S_MAX,
    KafkaReader,
    KafkaSender,
    kafka_errors_of,
    read_exactly,
)

CONNECT_S_MAX = 30.0
GATHER_BYTES = 1 << 20
"""A reader that gathers is answered earlier once so much waits for it."""
_PAUSE_S = 0.02
_MISSING = kafka_errors.UnknownTopicOrPartitionError.errno
_EXISTS = kafka_errors.TopicAlreadyExistsError.errno
# A broker that was away is found again within half a second (the client's own default is 30 s).
_FAST_RECONNECT = {"reconnect_backoff_ms": 50, "reconnect_backoff_max_ms": 500, "retry_backoff_ms": 50}
_READS = {
    "isolation_level": "read_committed",
    "enable_auto_commit": False,
    "allow_auto_create_topics": False,
    "metrics_enabled": False,
    "max_partition_fetch_bytes": 4 << 20,
    "fetch_max_wait_ms": 100,  # a partition that was just added waits for the fetch before it at most so long
    "session_timeout_ms": 10_000,
    "heartbeat_interval_ms": 1_000,
    "max_poll_interval_ms": 600_000,
}
_OURS = frozenset(
    {"bootstrap_servers", "acks", "enable_idempotence", "transactional_id", "group_id", "isolation_level"}
    | {"enable_auto_commit", "auto_offset_reset", "max_request_size", "allow_auto_create_topics"}
)
T = TypeVar("T")


def open_bus(settings: Settings, address: str) -> "KafkaBus":
    """The run's log. BusUnavailable; BadInput for a key of `[kafka]` that the client does not have."""
    return KafkaBus(address, settings.kafka, settings.broker.replication, settings.broker.timeout_s)


class KafkaBus:
    """A `bus.Bus`. `client_settings` go to every client that knows them."""

    def __init__(self, address: str, client_settings: Mapping[str, Any], replication: int, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._replication = replication
        self._given = dict(client_settings)
        self._check_given()
        self._lock = threading.Lock()
        self._exact_lock = threading.Lock()
        self._exact: KafkaConsumer | None = None
        self._senders: weakref.WeakSet[KafkaSender] = weakref.WeakSet()
        try:
            self._admin = KafkaAdminClient(**self._options(KafkaAdminClient, {}))
        except kafka_errors.KafkaTimeoutError as error:
            raise BusUnavailable(f"no Kafka broker answers at {address} (waited {self._connect_s:.0f} s)") from error

    @property
    def _connect_s(self) -> float:
        return min(self.timeout_s, CONNECT_S_MAX)

    def _check_given(self) -> None:
        known = {*KafkaAdminClient.DEFAULT_CONFIG, *KafkaConsumer.DEFAULT_CONFIG, *KafkaProducer.DEFAULT_CONFIG}
        for key in self._given:
            if key in _OURS:
                raise BadInput(f"kafka.{key}: the log relies on its own value; remove it")
            if key not in known:
                raise BadInput(f"kafka.{key}: kafka-python has no such setting")

    def _options(self, client: type[Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        timeouts = {
            "bootstrap_timeout_ms": int(self._connect_s * 1000),
            "request_timeout_ms": int(self._connect_s * 1000),
        }
        given = {key: value for key, value in self._given.items() if key in client.DEFAULT_CONFIG}
        return {"bootstrap_servers": self.address, **_FAST_RECONNECT, **timeouts, **ours, **given}

    def _ask(self, call: Callable[[], T], gone: Callable[[], bool] = lambda: False) -> T:
        """Ask the broker, again while what goes wrong may pass; not once what it is about is `gone`."""
        limit = clock.monotonic_s() + self.timeout_s
        while True:
            with kafka_errors_of(self.address):
                try:
                    with self._lock:
                        return call()
                except kafka_errors.KafkaError as error:
                    if not error.retriable or clock.monotonic_s() > limit or gone():
                        raise
            threading.Event().wait(_PAUSE_S)

    def producer(self, transactional_id: str | None = None) -> KafkaSender:
        ours = {
            "compression_type": "lz4",
            "max_request_size": RECORD_BYTES_MAX,
            "allow_auto_create_topics": False,
            "metrics_enabled": False,
            "max_block_ms": int(self.timeout_s * 1000),
            "delivery_timeout_ms": int(self.timeout_s * 1000),
            "transactional_id": transactional_id,
        }
        with kafka_errors_of(self.address):
            client = KafkaProducer(**self._options(KafkaProducer, ours))
            if transactional_id is not None:
                client.init_transactions()
        sender = KafkaSender(self, client, transactional_id is not None)
        self._senders.add(sender)
        return sender

    def consumer(self, **ours: Any) -> KafkaConsumer:
        with kafka_errors_of(self.address):
            return KafkaConsumer(**self._options(KafkaConsumer, {**_READS, **ours}))

    def reader(self, group: str | None = None, gather_ms: int = 0) -> KafkaReader:
        gather = {"fetch_max_wait_ms": gather_ms, "fetch_min_bytes": GATHER_BYTES} if gather_ms else {}
        client = self.consumer(group_id=group, auto_offset_reset="none", **gather)
        return KafkaReader(self, client, group, member=False)

    def subscribe(self, group: str, topics: Sequence[str]) -> KafkaReader:
        client = self.consumer(group_id=group, auto_offset_reset="earliest")
        client.subscribe(list(topics))
        return KafkaReader(self, client, group, member=True)

    def make_topics(self, specs: Iterable[TopicSpec]) -> None:
        wanted = {spec.name: spec for spec in specs}
        existing = self._counts(list(wanted))
        missing = {
            name: {"num_partitions": s.partitions, "replication_factor": self._replication, "configs": s.config}
            for name, s in wanted.items()
            if name not in existing
        }
        if missing:
            answer = self._ask(lambda: self._admin.create_topics(missing, raise_errors=False))
            self._refuse(answer["topics"], _EXISTS)
        self._until(lambda: self._counts(list(wanted)).keys() == wanted.keys(), f"topics {', '.join(wanted)}")
        for sender in list(self._senders):
            for name in missing:
                sender.touch(name)

    def delete_topics(self, names: Iterable[str]) -> None:
        existing = list(self._counts(list(names)))
        if existing:
            answer = self._ask(lambda: self._admin.delete_topics(existing, raise_errors=False))
            self._refuse(answer["topics"], _MISSING)
            self._until(lambda: not self._counts(existing), f"the end of {', '.join(existing)}")
        for sender in list(self._senders):
            sender.forget(existing)

    def topics(self, prefix: str) -> dict[str, int]:
        return {name: count for name, count in sorted(self._counts(None).items()) if name.startswith(prefix)}

    def end_offsets(self, topic: str) -> dict[int, int]:
        ends = self.ends([TopicPartition(topic, number) for number in range(self._count(topic))])
        return {place.partition: offset for place, offset in ends.items()}

    def committed(self, group: str, topic: str) -> dict[int, int]:
        places = [TopicPartition(topic, number) for number in range(self._count(topic))]
        stored = self._ask(lambda: self._admin.list_group_offsets({group: places}))[group]
        return {p.partition: max(0, stored[p].offset) if p in stored else 0 for p in places}

    def read(self, positions: Iterable[Position], timeout_s: float = 30.0) -> dict[Position, Record]:
        with self._exact_lock, kafka_errors_of(self.address):
            if self._exact is None:
                self._exact = self.consumer(auto_offset_reset="none", fetch_max_wait_ms=10)
            return read_exactly(self._exact, positions, timeout_s)

    def close(self) -> None:
        with self._exact_lock, self._lock:
            if self._exact is not None:
                self._exact.close(autocommit=False, timeout_ms=CLOSE_S_MAX * 1000)
            self._admin.close()

    def ends(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The end offsets of those that exist: readers see committed records below them, none above."""
        places = list(places)
        while True:
            counts = self._counts({place.topic for place in places}) if places else {}
            there = [place for place in places if place.partition < counts.get(place.topic, 0)]
            try:
                return self._offsets(there, OffsetSpec.LATEST)
            except BusUnavailable:
                if not self._deleted(sorted({place.topic for place in there})):
                    raise  # else one went between the two questions: ask for the others

    def start_offset(self, group: str | None, place: TopicPartition, start: Start) -> int:
        if isinstance(start, int):
            return start
        if self._count(place.topic) <= place.partition:
            raise ValueError(f"{place.topic} has no partition {place.partition}")
        if start == "latest":
            return self.ends([place])[place]
        earliest = self._offsets([place], OffsetSpec.EARLIEST)[place]
        if start == "earliest":
            return earliest
        assert group is not None, "only a group has committed offsets"
        return max(earliest, self.committed(group, place.topic)[place.partition])

    def _offsets(self, places: list[TopicPartition], spec: OffsetSpec) -> dict[TopicPartition, int]:
        asked = dict.fromkeys(places, spec)
        level = "read_committed"
        topics = sorted({place.topic for place in places})
        found = (
            self._ask(
                lambda: self._admin.list_partition_offsets(asked, isolation_level=level),
                gone=lambda: self._deleted(topics),
            )
            if places
            else {}
        )
        return {place: answer.offset for place, answer in found.items()}

    def _deleted(self, topics: list[str]) -> bool:
        """One of them does not exist (a topic without a leader does)."""
        return any(topic["error_code"] == _MISSING for topic in self._ask(lambda: self._admin.describe_topics(topics)))

    def _counts(self, names: Iterable[str] | None) -> dict[str, int]:
        """Partitions of those topics (None = of all) that exist. Those that are named may be used at once: one that has
        no leader just now (a broker that was killed comes back) is waited for, never taken for one that is gone."""
        asked = None if names is None else list(names)
        if asked == []:
            return {}
        limit = clock.monotonic_s() + self.timeout_s
        while True:
            said = [topic for topic in self._ask(lambda: self._admin.describe_topics(asked)) if not topic["error_code"]]
            leaderless = [t["name"] for t in said if any(part["leader_id"] < 0 for part in t["partitions"])]
            if asked is None or not leaderless:
                return {topic["name"]: len(topic["partitions"]) for topic in said}
            if clock.monotonic_s() > limit:
                late = f"waited {self.timeout_s} s for a leader of {', '.join(leaderless)}"
                raise BusUnavailable(f"Kafka at {self.address}: {late}")
            threading.Event().wait(_PAUSE_S)

    def _count(self, topic: str) -> int:
        count = self._counts([topic]).get(topic)
        if count is None:
            raise BusUnavailable(f"topic {topic} does not exist at {self.address}")
        return count

    def _refuse(self, answers: Iterable[Mapping[str, Any]], harmless: int) -> None:
        for answer in answers:
            if answer["error_code"] not in (0, harmless):
                kind = kafka_errors.for_code(answer["error_code"])
                raise BusUnavailable(f"topic {answer['name']}: {kind.__name__} {answer.get('error_message') or ''}")

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        limit = clock.monotonic_s() + self.timeout_s
        while not holds():
            if clock.monotonic_s() > limit:
                raise BusUnavailable(f"Kafka at {self.address}: waited {self.timeout_s} s for {what}")
            threading.Event().wait(_PAUSE_S)
