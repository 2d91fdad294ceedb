"""A broker that is killed in a commit may come back and call it complete without a marker in some partitions. What was
committed there is shown all the same: one engine waited for its requests, and a run with it, for ten minutes."""

from collections.abc import Iterator

import pytest
from kafka.producer.transaction_manager import TransactionState

from schemas.topics import TopicSpec
from workers.transport.records import kafka_clients
from workers.transport.records.bus import Reader
from workers.transport.records.kafka_bus import KafkaBus
from workers.transport.records.kafka_clients import KafkaSender

pytestmark = pytest.mark.integration
TOPICS = ["dora.markers.requests", "dora.markers.control"]


@pytest.fixture
def bus(broker_address: str) -> Iterator[KafkaBus]:
    opened = KafkaBus(broker_address, {}, 1, 30.0)
    opened.make_topics([TopicSpec(name, 2) for name in TOPICS])
    yield opened
    opened.delete_topics(TOPICS)
    opened.close()


def _wrote(sender: KafkaSender, topic: str, value: bytes) -> None:
    sender.begin()
    sender.send(topic, value, {}, partition=1)
    sender.send(topic, value, {}, partition=0)


def _commit_without_markers(sender: KafkaSender, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the producer it is complete; in the broker it stays as it was."""
    manager = sender._client._transaction_manager

    def lost() -> None:
        manager._current_state = TransactionState.COMMITTING_TRANSACTION
        manager._complete_transaction()
        monkeypatch.undo()

    monkeypatch.setattr(sender._client, "commit_transaction", lost)
    sender.commit(30)


def _values(reader: Reader, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        records = reader.poll(10_000)
        assert records, f"{found} and then no record within 10 s"
        found += [record.value for record in records]
    return sorted(found)


def test_what_a_slow_commit_left_hidden_is_shown(bus: KafkaBus, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, reader = bus.producer("dora.markers.slow"), bus.reader()
    for partition in (0, 1):
        reader.add(TOPICS[0], partition, "earliest")
    _wrote(sender, TOPICS[0], b"x")
    sender._began -= kafka_clients.COMMIT_S_USUAL
    _commit_without_markers(sender, monkeypatch)
    assert _values(reader, 2) == [b"x", b"x"]
    reader.close()
    sender.close()


def test_after_a_slow_transaction_the_one_before_is_looked_at_too(
    bus: KafkaBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit was answered in time, and the broker died then."""
    sender = bus.producer("dora.markers.before")
    looked: list[set[tuple[str, int]]] = []
    monkeypatch.setattr(sender, "_show", lambda written, _: looked.append({(p.topic, p.partition) for p in written}))
    for topic, slow in ((TOPICS[0], False), (TOPICS[1], True), (TOPICS[1], False)):
        _wrote(sender, topic, b"x")
        sender._began += -kafka_clients.COMMIT_S_USUAL if slow else 60.0
        sender.commit(30)
    assert looked == [{(topic, partition) for topic in TOPICS for partition in (0, 1)}]
    sender.close()
