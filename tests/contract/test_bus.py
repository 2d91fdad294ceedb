"""What `bus.py` promises of records, readers, topics and positions, asked of both implementations."""

import threading
import time
import uuid

import pytest

from schemas.codec import decode
from schemas.ids import Position
from schemas.messages import CONTROL, WantPrompts
from schemas.topics import RECORD_BYTES_MAX, Topics
from tests.contract.bus_log import LIMIT_S, NONE, Log, take, until, values
from workers.transport.records.bus import BusUnavailable, publish


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
    until(lambda: log.bus.end_offsets(topic)[1] in (3, 4), "the commit to be seen")


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
