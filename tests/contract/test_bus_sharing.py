"""What `bus.py` promises of transactions, their markers, fencing and groups, asked of both implementations."""

import pytest

from schemas.ids import Position
from tests.contract.bus_log import LIMIT_S, NONE, Log, take, until, values
from workers.transport.records.bus import Fenced


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
