"""The log that a test of the contract is given: once in memory, once on Apache Kafka."""

from collections.abc import Iterator

import pytest

from tests.contract.bus_log import LIMIT_S, Log
from workers.transport.records.bus import Bus
from workers.transport.records.kafka_bus import KafkaBus
from workers.transport.records.memory_bus import MemoryBus


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
