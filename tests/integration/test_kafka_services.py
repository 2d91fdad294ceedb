"""The local services: an embedded Apache Kafka that starts, stops, is killed and goes on; a Prefect server."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipelines.faults import ServiceFailed
from pipelines.local_services import HomeInUse, Service, start_kafka, start_prefect
from schemas.settings import parse_settings
from schemas.topics import TopicSpec
from workers.runtime.errors import BadInput
from workers.transport.records.bus import BusUnavailable, Reader
from workers.transport.records.kafka_bus import KafkaBus, open_bus

pytestmark = pytest.mark.integration
LIMIT_S = 60.0
TOPIC = "dora.services.a"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "a home, für Kafka"


@contextlib.contextmanager
def running(service: Service) -> Iterator[Service]:
    try:
        yield service
    finally:
        service.stop()


def opened(address: str, timeout_s: float = LIMIT_S) -> contextlib.closing[KafkaBus]:
    return contextlib.closing(KafkaBus(address, {}, 1, timeout_s))


def take(reader: Reader, count: int) -> list[bytes]:
    values: list[bytes] = []
    limit = time.monotonic() + LIMIT_S
    while len(values) < count and time.monotonic() < limit:
        values += [record.value for record in reader.poll(500)]
    return values


def assert_ended(pids: list[int]) -> None:
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive, f"still running: {alive}, ended: {gone}"


def family(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def kill(service: Service) -> None:
    os.kill(service.pid, signal.SIGKILL)
    service.process.wait(LIMIT_S)


def test_a_home_keeps_its_data_and_address_from_start_to_start(home: Path) -> None:
    with running(start_kafka(home)) as first, opened(first.address) as bus:
        assert first.pid == first.process.pid
        assert first.log.parent == home
        with pytest.raises(HomeInUse, match=f"pid {first.pid}, {first.address}"):
            start_kafka(home)
        bus.make_topics([TopicSpec(TOPIC, 1)])
        producer, reader = bus.producer(), bus.reader("dora.services.g")
        for number in range(10):
            producer.send(TOPIC, b"%d" % number, {"id": str(number)})
        producer.flush(LIMIT_S)
        reader.add(TOPIC, 0, "committed")
        assert len(take(reader, 10)) == 10
        reader.commit()
        processes = family(first.pid)
        for one in (producer, reader):
            one.close()
    assert_ended(processes)
    first.stop()  # again: nothing
    with running(start_kafka(home)) as second, opened(second.address) as bus:
        assert second.address == first.address
        assert bus.topics("dora.services.") == {TOPIC: 1}
        assert bus.committed("dora.services.g", TOPIC) == {0: 10}
        reader = bus.reader()
        reader.add(TOPIC, 0, "earliest")
        assert take(reader, 10) == [b"%d" % number for number in range(10)]
        reader.close()
        address = second.address
    with pytest.raises(BusUnavailable, match=address):
        KafkaBus(address, {}, 1, 1.0)


def test_a_broker_killed_in_mid_write_goes_on_and_loses_nothing_that_it_acknowledged(home: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    count = 400 + seed % 200
    services = [start_kafka(home)]
    acknowledged: list[tuple[int, int]] = []
    half_way = threading.Event()

    def write(bus: KafkaBus) -> None:
        producer = bus.producer()
        for number in range(count):
            acknowledged.append((number, producer.send(TOPIC, b"%d" % number, {}).offset(LIMIT_S)))
            if number == count // 2:
                half_way.set()
        producer.close()

    with contextlib.ExitStack() as ending, opened(services[0].address) as bus:
        ending.callback(lambda: [service.stop() for service in services])
        bus.make_topics([TopicSpec(TOPIC, 1)])
        reader = bus.reader()
        reader.add(TOPIC, 0, "earliest")
        transactional = bus.producer("dora.services.t")
        writer = threading.Thread(target=write, args=(bus,))
        writer.start()
        assert half_way.wait(LIMIT_S)
        kill(services[0])
        assert reader.poll(0, records_max=1) is not None  # a reader only waits
        services.append(start_kafka(home))
        writer.join(LIMIT_S)
        assert [number for number, _ in acknowledged] == list(range(count))
        assert [offset for _, offset in acknowledged] == list(range(count))
        fresh = bus.reader()
        fresh.add(TOPIC, 0, "earliest")
        assert take(fresh, count) == [b"%d" % number for number in range(count)]
        transactional.begin()
        transactional.send(TOPIC, b"after", {})
        transactional.commit(LIMIT_S)
        reader.remove(TOPIC, 0)
        reader.add(TOPIC, 0, count)
        assert take(reader, 1) == [b"after"]
        for one in (fresh, reader, transactional):
            one.close()


def test_a_broker_that_stays_away_is_unavailable_within_the_limit(home: Path) -> None:
    with running(start_kafka(home)) as service, opened(service.address, 3.0) as bus:
        bus.make_topics([TopicSpec(TOPIC, 1)])
        producer, transactional, reader = bus.producer(), bus.producer("dora.services.t"), bus.reader()
        producer.send(TOPIC, b"x", {})
        producer.flush(LIMIT_S)
        reader.add(TOPIC, 0, "earliest")
        transactional.begin()
        transactional.send(TOPIC, b"x", {}).offset(LIMIT_S)
        kill(service)
        began = time.monotonic()
        delivery = producer.send(TOPIC, b"y", {})
        for ask in (
            lambda: transactional.commit(1.0),
            lambda: delivery.offset(1.0),
            lambda: producer.flush(1.0),
            lambda: bus.end_offsets(TOPIC),
            reader.at_end,
        ):
            with pytest.raises(BusUnavailable):
                ask()
        reader.poll(100)
        for one in (producer, transactional, reader):
            one.close()
        assert time.monotonic() - began < 45.0


def test_a_broker_ends_with_the_process_that_started_it(home: Path) -> None:
    code = (
        "import sys, pathlib; from pipelines.local_services import start_kafka;"
        "print(start_kafka(pathlib.Path(sys.argv[1])).pid, flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(home)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        broker = int(parent.stdout.readline())
        parent.kill()
    assert_ended([broker])


def test_a_broker_that_cannot_start_says_why(home: Path) -> None:
    (home / "kafka").mkdir(parents=True)
    (home / "kafka" / "data").write_text("a file where its folder should be")
    with pytest.raises(ServiceFailed, match=r"kafka\.log"):
        start_kafka(home)


def test_settings_of_the_kafka_table_reach_the_clients(broker_address: str) -> None:
    text = 'model = "m"\nsteps = 1\n[[dataset]]\npath = "p"\n[kafka]\n'
    with contextlib.closing(
        open_bus(parse_settings(text + 'client_id = "me"\nfetch_max_bytes = 1000000', "t"), broker_address)
    ):
        pass
    for key, why in (("fetch_max_byte", "no such setting"), ("acks", "relies on")):
        with pytest.raises(BadInput, match=why):
            open_bus(parse_settings(f"{text}{key} = 1", "t"), broker_address)


def test_a_prefect_server_starts_answers_and_leaves_nothing_behind(home: Path) -> None:
    with running(start_prefect(home)) as service:
        with pytest.raises(HomeInUse):
            start_prefect(home)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{service.address}/health", timeout=10) as answer:
            assert answer.status == 200
        assert (home / "prefect" / "prefect.db").exists()
        processes = family(service.pid)
    assert_ended(processes)
