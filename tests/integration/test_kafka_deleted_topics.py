"""A deleted topic is forgotten: nobody asks the broker for it any more (26 times a second, before)."""

import logging
from collections.abc import Iterable
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.admin import OffsetSpec

from schemas.topics import TopicSpec
from workers.runtime import clock
from workers.transport.records.bus import BusUnavailable
from workers.transport.records.kafka_bus import KafkaBus

pytestmark = pytest.mark.integration


def test_nobody_asks_for_a_deleted_topic(broker_address: str, caplog: pytest.LogCaptureFixture) -> None:
    bus = KafkaBus(broker_address, {}, 1, 30.0)
    names = ["dora.deleted.stays", "dora.deleted.goes"]
    bus.make_topics([TopicSpec(name, 2) for name in names])
    producer, reader = bus.producer(), bus.reader("deleted")
    for name in names:
        producer.send(name, b"x", {})
        for partition in (0, 1):
            reader.add(name, partition, "earliest")
    producer.flush(10)
    seen: list[str] = []
    while len(seen) < 2:
        records = reader.poll(10_000)
        assert records, "no record within 10 s"
        seen += [record.topic for record in records]
    reader.commit()
    bus.delete_topics(names[1:])
    assert reader.poll(1_500) == []  # it still reads what is gone, and so hears of it
    for partition in (0, 1):
        reader.remove(names[1], partition)
    caplog.clear()
    with caplog.at_level(logging.ERROR, logger="kafka.cluster"):
        bus.make_topics([TopicSpec("dora.deleted.new", 1)])  # the producer asks for all that it follows
        assert reader.poll(2_000) == []
        producer.send(names[0], b"y", {})
        producer.flush(10)
        assert [record.value for record in reader.poll(10_000)] == [b"y"]
    asked = [record for record in caplog.records if "not found" in record.getMessage()]
    assert len(asked) <= 2, f"asked {len(asked)} times for a topic that is gone"
    reader.commit()
    reader.close()
    producer.close()
    bus.close()


def test_a_producer_rests_after_a_topic_that_it_wrote_to_is_deleted(
    broker_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It looked for the leader of what is gone without a pause, which was half of a core, before."""
    bus = KafkaBus(broker_address, {}, 1, 30.0)
    names = ["dora.rests.stays", "dora.rests.goes"]
    bus.make_topics([TopicSpec(name, 1) for name in names])
    producer, reader = bus.producer(), bus.reader()
    reader.add(names[0], 0, "earliest")
    for name in names:
        producer.send(name, b"x", {})
    producer.flush(10)
    bus.delete_topics(names[1:])
    bus.make_topics([TopicSpec("dora.rests.new", 1)])  # the producer hears that the other is gone
    with caplog.at_level(logging.DEBUG, logger="kafka.producer.sender"):
        producer.send(names[0], b"y", {})
        producer.flush(10)
        while reader.poll(1_000):  # a second without a record, in which it might look
            pass
    looks = [record for record in caplog.records if "Unknown leaders" in record.getMessage()]
    assert len(looks) <= 2, f"looked {len(looks)} times for the leader of what is gone"
    reader.close()
    producer.close()
    bus.close()


def test_a_topic_deleted_between_two_questions_costs_no_commit(
    broker_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive commits while the orchestrator deletes what is archived: it ended with exit code 1, before."""
    bus = KafkaBus(broker_address, {}, 1, 30.0)
    names = ["dora.between.stays", "dora.between.goes"]
    bus.make_topics([TopicSpec(name, 1) for name in names])
    producer, reader = bus.producer(), bus.reader("between")
    for name in names:
        producer.send(name, b"x", {})
        reader.add(name, 0, "earliest")
    producer.flush(10)
    seen = 0
    while seen < 2:
        records = reader.poll(10_000)
        assert records, "no record within 10 s"
        seen += len(records)
    count, deleted = bus._counts, []

    def counts(asked: Iterable[str] | None) -> dict[str, int]:
        found = count(asked)
        if not deleted:
            deleted.append(names[1])
            bus.delete_topics(deleted)
        return found

    monkeypatch.setattr(bus, "_counts", counts)
    reader.commit()
    assert bus.committed("between", names[0]) == {0: 1}
    reader.close()
    producer.close()
    bus.close()


def test_a_reader_that_comes_too_late_for_a_topic_hears_so_at_once(broker_address: str) -> None:
    """A topic deleted after it was listed: the archive of a resumed run waited `broker.timeout_s` for it, before."""
    bus = KafkaBus(broker_address, {}, 1, 60.0)
    begun = clock.monotonic_s()
    with pytest.raises(BusUnavailable):
        bus._offsets([TopicPartition("dora.deleted.before", 0)], OffsetSpec.EARLIEST)
    assert clock.monotonic_s() - begun < 30.0
    bus.close()


def test_a_topic_without_its_leader_is_not_taken_for_one_that_is_gone(
    broker_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a broker comes back its topics have no leader: a reader was at its end with records unread, and the
    archive stopped reading the topic and later read the same records again, before."""
    bus = KafkaBus(broker_address, {}, 1, 30.0)
    name = "dora.leaderless.a"
    bus.make_topics([TopicSpec(name, 1)])
    producer, reader = bus.producer(), bus.reader()
    reader.add(name, 0, "earliest")
    producer.send(name, b"x", {})
    producer.flush(10)
    true, answers = bus._admin.describe_topics, 0

    def leaderless(topics: list[str] | None) -> list[dict[str, Any]]:
        nonlocal answers
        answers += 1
        found: list[dict[str, Any]] = true(topics)
        for part in [part for topic in found for part in topic["partitions"]]:
            part["leader_id"] = part["leader_id"] if answers > 3 else -1
        return found

    monkeypatch.setattr(bus._admin, "describe_topics", leaderless)
    assert bus.topics(name) == {name: 1}
    assert not reader.at_end()
    assert answers > 3
    assert [record.value for record in reader.poll(10_000)] == [b"x"]
    answers = -(10**9)
    monkeypatch.setattr(bus, "timeout_s", 0.2)
    with pytest.raises(BusUnavailable, match=f"waited 0.2 s for a leader of {name}"):
        bus.end_offsets(name)
    monkeypatch.undo()
    reader.close()
    producer.close()
    bus.close()
