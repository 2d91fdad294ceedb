"""What `bus.py` promises, asked of the log in memory and of Apache Kafka."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from schemas.codec import decode
from schemas.ids import Position
from schemas.messages import CONTROL, WantPrompts
from schemas.topics import RECORD_BYTES_MAX, Topics, TopicSpec
from workers.transport.records.bus import Bus, BusUnavailable, Fenced, Producer, Reader, Record, publish
from workers.transport.records.kafka_bus import KafkaBus
from workers.transport.records.memory_bus import MemoryBus

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


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.integration)])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    kafka = request.param == "kafka"
    bus: Bus = KafkaBus(request.getfixturevalue("broker_address"), {}, 1, LIMIT_S) if kafka else MemoryBus()
    log = Log(bus)
    yield log
    for one in log.opened:
        one.close()
    bus.delete_topics(bus.topics(log.prefix))
    bus.close()


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


def test_a_record_comes_back_as_it_was_sent(log: Log) -> None:
    topic = log.topic(partitions=3)
    producer = log.producer()
    before = time.time_ns() // 1000
    sent = producer.send(topic, b"value", {"schema": "x/1", "id": "x/ä"}, partition=2, key=b"7")
    assert sent.offset(LIMIT_S) == 0
    (record,) = take(log.reader(topic, 2), 1)
    assert (record.topic, record.partition, record.offset) == (topic, 2, 0)
    assert (record.key, record.value) == (b"7", b"value")
    assert dict(record.headers) == {"schema": "x/1", "id": "x/ä"}
    assert before - 1000 <= record.timestamp_us <= time.time_ns() // 1000 + 1000
    assert record.position == Position(topic, 2, 0)


def test_a_record_without_key_and_with_empty_value_comes_back(log: Log) -> None:
    topic = log.topic()
    log.write(topic, b"")
    (record,) = take(log.reader(topic), 1)
    assert (record.key, record.value, dict(record.headers)) == (None, b"", {})


def test_publish_sends_a_message_with_its_headers(log: Log) -> None:
    topic = log.topic(partitions=2)
    said = WantPrompts(rows=3)
    publish(log.producer(), topic, said, partition=1, key=b"k").offset(LIMIT_S)
    (found,) = take(log.reader(topic, 1), 1)
    assert decode(CONTROL, found.value, found.headers) == said
    assert found.key == b"k"


def test_order_holds_within_a_partition(log: Log) -> None:
    topic = log.topic(partitions=2)
    producer = log.producer()
    for number in range(600):
        producer.send(topic, str(number).encode(), NONE, partition=number % 2)
    producer.flush(LIMIT_S)
    reader = log.reader(topic, 0)
    reader.add(topic, 1, "earliest")
    records = take(reader, 600)
    for partition in (0, 1):
        said = [int(r.value) for r in records if r.partition == partition]
        assert said == list(range(partition, 600, 2))
        assert [r.offset for r in records if r.partition == partition] == list(range(300))


def test_flush_returns_when_all_is_acknowledged(log: Log) -> None:
    topic = log.topic()
    log.write(topic, *[b"x"] * 50)
    assert log.bus.end_offsets(topic) == {0: 50}


def test_a_record_over_the_limit_is_refused_and_one_at_the_limit_passes(log: Log) -> None:
    topic = log.topic()
    producer = log.producer()
    with pytest.raises(ValueError, match="limit"):
        producer.send(topic, bytes(RECORD_BYTES_MAX), NONE)
    noise = uuid.uuid4().bytes * ((RECORD_BYTES_MAX - 512) // 16)
    producer.send(topic, noise, NONE)
    producer.send(topic, b"after", NONE)
    producer.flush(LIMIT_S)
    assert [len(value) for value in values(take(log.reader(topic), 2))] == [len(noise), 5]


def test_more_than_may_be_in_flight_goes_through_in_order(log: Log) -> None:
    topic = log.topic()
    producer = log.producer()
    for number in range(5):
        producer.send(topic, bytes([number]) * (20 << 20), NONE)
    producer.flush(LIMIT_S)
    assert [value[0] for value in values(take(log.reader(topic), 5))] == list(range(5))


def test_sending_to_a_partition_that_is_not_there_is_refused(log: Log) -> None:
    topic = log.topic(partitions=2)
    with pytest.raises(ValueError, match="partition"):
        log.producer().send(topic, b"x", NONE, partition=2)


def test_a_transaction_is_invisible_before_its_commit_and_whole_after_it(log: Log) -> None:
    one, two = log.topic("one"), log.topic("two")
    reader = log.reader(one)
    reader.add(two, 0, "earliest")
    producer = log.producer("t")
    producer.begin()
    producer.send(one, b"1", NONE)
    producer.send(two, b"2", NONE)
    producer.flush(LIMIT_S)
    assert reader.poll(300) == []
    assert reader.at_end()
    assert log.bus.end_offsets(one) == {0: 0}
    producer.commit(LIMIT_S)
    assert sorted(values(take(reader, 2))) == [b"1", b"2"]


def test_a_transaction_knows_its_offsets_before_the_commit(log: Log) -> None:
    topic = log.topic()
    log.write(topic, b"before")
    producer = log.producer("t")
    producer.begin()
    sent = producer.send(topic, b"x", NONE)
    assert sent.offset(LIMIT_S) == 1
    producer.commit(LIMIT_S)
    assert [r.offset for r in take(log.reader(topic), 2)] == [0, 1]


def test_an_aborted_transaction_leaves_nothing_and_the_next_one_works(log: Log) -> None:
    topic = log.topic()
    producer = log.producer("t")
    producer.begin()
    producer.send(topic, b"never", NONE)
    producer.flush(LIMIT_S)
    producer.abort()
    producer.begin()
    producer.send(topic, b"unsent", NONE)
    producer.abort()
    producer.begin()
    producer.send(topic, b"kept", NONE)
    producer.commit(LIMIT_S)
    reader = log.reader(topic)
    assert values(take(reader, 1)) == [b"kept"]
    assert reader.at_end()


def test_an_empty_transaction_commits(log: Log) -> None:
    producer = log.producer("t")
    producer.begin()
    producer.commit(LIMIT_S)
    producer.begin()
    producer.abort()


def test_what_others_write_waits_behind_an_open_transaction(log: Log) -> None:
    topic = log.topic()
    producer = log.producer("t")
    producer.begin()
    producer.send(topic, b"first", NONE)
    producer.flush(LIMIT_S)
    log.write(topic, b"second")
    reader = log.reader(topic)
    assert reader.poll(200) == []
    producer.commit(LIMIT_S)
    assert values(take(reader, 2)) == [b"first", b"second"]


def test_a_younger_producer_fences_the_older_and_ends_its_transaction(log: Log) -> None:
    topic = log.topic()
    older = log.producer("t")
    older.begin()
    older.send(topic, b"lost", NONE)
    older.flush(LIMIT_S)
    younger = log.producer("t")
    younger.begin()
    younger.send(topic, b"kept", NONE)
    younger.commit(LIMIT_S)
    with pytest.raises(Fenced):
        older.commit(LIMIT_S)
    older.abort()
    with pytest.raises(Fenced):
        older.begin()
    reader = log.reader(topic)
    assert values(take(reader, 1)) == [b"kept"]
    assert reader.at_end()


def test_an_idle_older_producer_is_fenced_when_it_commits_at_the_latest(log: Log) -> None:
    topic = log.topic()
    older = log.producer("t")
    log.producer("t")

    def write() -> None:
        older.begin()
        older.send(topic, b"lost", NONE)
        older.commit(LIMIT_S)

    with pytest.raises(Fenced):
        write()
    assert log.reader(topic).poll(200) == []


def test_closing_an_open_transaction_leaves_nothing(log: Log) -> None:
    topic = log.topic()
    producer = log.producer("t")
    producer.begin()
    producer.send(topic, b"never", NONE)
    producer.flush(LIMIT_S)
    producer.close()
    log.write(topic, b"after")
    assert values(take(log.reader(topic), 1)) == [b"after"]


def test_readers_start_where_they_are_told(log: Log) -> None:
    topic = log.topic()
    log.write(topic, b"0", b"1", b"2")
    latest, second, committed = log.reader(), log.reader(), log.reader(group="g")
    latest.add(topic, 0, "latest")
    second.add(topic, 0, 1)
    committed.add(topic, 0, "committed")
    assert [r.position(topic, 0) for r in (latest, second, committed)] == [3, 1, 0]
    assert latest.at_end()
    log.write(topic, b"3")
    assert values(take(latest, 1)) == [b"3"]
    assert values(take(second, 3)) == [b"1", b"2", b"3"]
    assert values(take(committed, 4)) == [b"0", b"1", b"2", b"3"]


def test_a_group_goes_on_behind_what_it_committed(log: Log) -> None:
    topic = log.topic(partitions=2)
    log.write(topic, b"0", b"1", b"2")
    first = log.reader(topic, group="g", start="committed")
    assert values(first.poll(5000, records_max=1)) == [b"0"]
    assert log.bus.committed(log.prefix + "g", topic) == {0: 0, 1: 0}
    first.commit()
    assert log.bus.committed(log.prefix + "g", topic) == {0: 1, 1: 0}
    take(first, 2)  # read, not committed
    first.close()
    assert values(take(log.reader(topic, group="g", start="committed"), 2)) == [b"1", b"2"]
    assert values(take(log.reader(topic, group="other", start="committed"), 3)) == [b"0", b"1", b"2"]


def test_a_group_that_has_read_all_has_committed_the_end_offsets(log: Log) -> None:
    topic = log.topic(partitions=2)
    producer = log.producer("t")
    producer.begin()
    producer.send(topic, b"x", NONE)
    producer.commit(LIMIT_S)
    reader = log.reader(topic, group="archive")
    take(reader, 1)
    assert reader.at_end()
    reader.commit()
    assert log.bus.end_offsets(topic)[0] == 2
    assert log.bus.committed(log.prefix + "archive", topic)[0] == 2


def test_poll_answers_at_once_when_a_record_comes(log: Log) -> None:
    topic = log.topic()
    reader = log.reader(topic)
    reader.poll(200)
    producer = log.producer()
    producer.flush(LIMIT_S)
    took: list[float] = []

    def wait() -> None:
        began = time.monotonic()
        assert values(reader.poll(15_000)) == [b"x"]
        took.append(time.monotonic() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    producer.send(topic, b"x", NONE)
    thread.join(LIMIT_S)
    assert took
    assert took[0] < 5.0, took


def test_poll_gives_at_most_what_is_asked_for_and_is_empty_after_its_time(log: Log) -> None:
    topic = log.topic()
    log.write(topic, *[b"x"] * 7)
    reader = log.reader(topic)
    counts = [len(reader.poll(5000, records_max=3)) for _ in range(3)]
    assert counts == [3, 3, 1]
    began = time.monotonic()
    assert reader.poll(300) == []
    assert 0.2 < time.monotonic() - began < 5.0


def test_a_reader_of_nothing_waits_and_is_at_its_end(log: Log) -> None:
    reader = log.reader()
    assert reader.poll(100) == []
    assert reader.at_end()


def test_partitions_are_added_and_removed_in_mid_stream(log: Log) -> None:
    one, two = log.topic("one"), log.topic("two")
    log.write(one, b"1")
    reader = log.reader(one)
    assert values(take(reader, 1)) == [b"1"]
    log.write(two, b"2")
    reader.add(two, 0, "earliest")
    assert values(take(reader, 1)) == [b"2"]
    reader.remove(one, 0)
    log.write(one, b"3")
    log.write(two, b"4")
    assert values(take(reader, 1)) == [b"4"]
    assert reader.poll(200) == []
    reader.remove(two, 0)
    assert reader.at_end()
    reader.add(one, 0, 1)
    assert values(take(reader, 1)) == [b"3"]


def test_position_is_behind_the_last_record_that_poll_returned(log: Log) -> None:
    topic = log.topic()
    log.write(topic, b"0", b"1", b"2")
    reader = log.reader(topic)
    assert reader.position(topic, 0) == 0
    assert not reader.at_end()
    assert reader.position(topic, 0) == 0
    reader.poll(5000, records_max=2)
    assert reader.position(topic, 0) == 2
    take(reader, 1)
    assert reader.position(topic, 0) == 3


def test_at_end_steps_over_markers_and_loses_no_record(log: Log) -> None:
    topic = log.topic()
    reader = log.reader(topic)
    producer = log.producer("t")
    for round_ in range(4):
        producer.begin()
        producer.send(topic, str(round_).encode(), NONE)
        producer.flush(LIMIT_S)
        producer.abort() if round_ % 2 else producer.commit(LIMIT_S)
    assert not reader.at_end()
    assert not reader.at_end()
    assert values(take(reader, 2)) == [b"0", b"2"]
    assert reader.at_end()
    assert reader.at_end()
    log.write(topic, b"new")
    assert not reader.at_end()
    assert values(take(reader, 1)) == [b"new"]
    fresh = log.reader(topic, start="latest")
    assert fresh.at_end()


def test_at_end_from_a_start_that_is_a_marker(log: Log) -> None:
    topic = log.topic()
    producer = log.producer("t")
    producer.begin()
    producer.send(topic, b"0", NONE)
    producer.commit(LIMIT_S)
    reader = log.reader()
    reader.add(topic, 0, 1)
    assert reader.at_end()


def test_a_deleted_topic_ends_nothing_for_who_reads_it(log: Log) -> None:
    gone, kept = log.topic("gone"), log.topic("kept")
    log.write(gone, b"1")
    reader = log.reader(gone)
    reader.add(kept, 0, "earliest")
    take(reader, 1)
    log.bus.delete_topics([gone])
    log.write(kept, b"2")
    assert values(take(reader, 1)) == [b"2"]
    assert reader.at_end()
    reader.remove(gone, 0)
    assert reader.at_end()


def test_two_members_share_the_partitions_and_one_takes_over(log: Log) -> None:
    topic = log.topic(partitions=4)
    for partition in range(4):
        log.write(topic, b"a%d" % partition, partition=partition)
    first = log.member("g", topic)
    assert sorted(values(take(first, 4))) == [b"a0", b"a1", b"a2", b"a3"]
    first.commit()
    second = log.member("g", topic)
    seen: dict[int, list[bytes]] = {1: [], 2: []}
    rounds = iter(range(10_000))

    def both_get_work() -> bool:
        number = next(rounds)
        for partition in range(4):
            log_producer.send(topic, b"b%d.%d" % (partition, number), NONE, partition=partition)
        log_producer.flush(LIMIT_S)
        for name, member in ((1, first), (2, second)):
            seen[name] += values(member.poll(100))
            member.commit()
        return bool(seen[1] and seen[2])

    log_producer = log.producer()
    until(both_get_work, "both members to get records")
    second.close()
    log.write(topic, *[b"last"], partition=0)
    log.write(topic, *[b"last"], partition=3)
    last: list[bytes] = []

    def one_gets_all() -> bool:
        last.extend(value for value in values(first.poll(200)) if value == b"last")
        return len(last) >= 2

    until(one_gets_all, "the first member to take over")
    assert first.at_end()


def test_a_member_that_dies_before_its_commit_gives_its_records_to_another(log: Log) -> None:
    topic = log.topic(partitions=2)
    log.write(topic, b"0", b"1")
    first = log.member("g", topic)
    take(first, 2)
    first.close()
    second = log.member("g", topic)
    assert values(take(second, 2)) == [b"0", b"1"]
    second.commit()
    assert log.bus.committed(log.prefix + "g", topic) == {0: 2, 1: 0}


def test_topics_are_made_once_listed_by_prefix_and_deleted(log: Log) -> None:
    log.topic("x.v000001", partitions=3)
    log.topic("y")
    log.write(log.prefix + "y", b"1")
    log.topic("y")  # again: it stays what it is
    assert log.bus.topics(log.prefix) == {log.prefix + "x.v000001": 3, log.prefix + "y": 1}
    assert log.bus.topics(log.prefix + "x") == {log.prefix + "x.v000001": 3}
    assert log.bus.end_offsets(log.prefix + "y") == {0: 1}
    log.bus.delete_topics([log.prefix + "y", log.prefix + "never"])
    assert log.bus.topics(log.prefix) == {log.prefix + "x.v000001": 3}
    assert log.bus.topics("dora.nobody.") == {}
    log.bus.make_topics([])
    log.bus.delete_topics([])


def test_all_topics_of_a_run_can_be_made(log: Log) -> None:
    topics = Topics(log.prefix.split(".")[1])
    log.bus.make_topics([*topics.specs(), topics.requests_spec(0, 3)])
    made = log.bus.topics(topics.prefix)
    assert made == {spec.name: spec.partitions for spec in topics.specs()} | {topics.requests(0): 3}


def test_a_fresh_topic_takes_its_first_record_without_delay(log: Log) -> None:
    producer = log.producer()
    producer.send(log.topic("warm"), b"x", NONE)
    producer.flush(LIMIT_S)
    topic = log.topic("fresh", partitions=3)
    began = time.monotonic()
    producer.send(topic, b"x", NONE, partition=1).offset(LIMIT_S)
    assert time.monotonic() - began < 2.0


def test_end_offsets_count_what_readers_can_see(log: Log) -> None:
    topic = log.topic(partitions=2)
    assert log.bus.end_offsets(topic) == {0: 0, 1: 0}
    log.write(topic, b"0", b"1", partition=1)
    assert log.bus.end_offsets(topic) == {0: 0, 1: 2}
    producer = log.producer("t")
    producer.begin()
    producer.send(topic, b"2", NONE, partition=1)
    producer.flush(LIMIT_S)
    assert log.bus.end_offsets(topic)[1] == 2
    producer.commit(LIMIT_S)
    assert log.bus.end_offsets(topic)[1] in (3, 4)


def test_exact_positions_are_read_in_any_order_over_partitions_and_topics(log: Log) -> None:
    one, two = log.topic("one", partitions=3), log.topic("two")
    producer = log.producer()
    for partition in range(3):
        for number in range(1000):
            producer.send(one, b"%d/%d" % (partition, number), NONE, partition=partition)
    producer.flush(LIMIT_S)
    log.write(two, b"only")
    places = [(2, 999), (0, 3), (0, 0), (1, 500), (2, 0), (2, 998), (0, 900), (0, 3)]
    wanted = [Position(one, partition, number) for partition, number in places] + [Position(two, 0, 0)]
    found = log.bus.read(wanted, LIMIT_S)
    assert found.keys() == set(wanted)
    for position in wanted[:-1]:
        assert found[position].value == b"%d/%d" % (position.partition, position.offset)
        assert found[position].position == position
    assert found[wanted[-1]].value == b"only"
    assert log.bus.read([Position(one, 0, 2)], LIMIT_S)[Position(one, 0, 2)].value == b"0/2"
    assert log.bus.read(wanted[:1], LIMIT_S)[wanted[0]].value == b"2/999"
    assert log.bus.read([]) == {}


def test_exact_positions_between_markers_are_read(log: Log) -> None:
    topic = log.topic()
    producer = log.producer("t")
    offsets = []
    for number in range(5):
        producer.begin()
        offsets.append(producer.send(topic, b"%d" % number, NONE).offset(LIMIT_S))
        producer.commit(LIMIT_S)
    found = log.bus.read([Position(topic, 0, offset) for offset in offsets], LIMIT_S)
    assert [found[Position(topic, 0, offset)].value for offset in offsets] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_position_that_is_written_a_moment_later_is_waited_for(log: Log) -> None:
    topic = log.topic()
    log.write(topic, b"0")
    producer = log.producer()
    timer = threading.Timer(0.3, lambda: producer.send(topic, b"1", NONE))
    timer.start()
    found = log.bus.read([Position(topic, 0, 1)], LIMIT_S)
    timer.join()
    assert found[Position(topic, 0, 1)].value == b"1"


def test_a_position_without_a_record_is_unavailable_and_no_deadlock(log: Log) -> None:
    topic = log.topic()
    producer = log.producer("t")
    producer.begin()
    producer.send(topic, b"0", NONE)
    producer.commit(LIMIT_S)
    for offset in (1, 2):  # the marker; not written yet
        with pytest.raises(BusUnavailable):
            log.bus.read([Position(topic, 0, offset)], 0.5)
    assert log.bus.read([Position(topic, 0, 0)], LIMIT_S)


def test_a_topic_that_does_not_exist_is_unavailable(log: Log) -> None:
    missing = log.prefix + "missing"
    for ask in (
        lambda: log.bus.end_offsets(missing),
        lambda: log.bus.committed("g", missing),
        lambda: log.bus.reader().add(missing, 0, "latest"),
    ):
        with pytest.raises(BusUnavailable):
            ask()
