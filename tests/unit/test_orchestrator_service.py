"""The whole house on an in-memory log: what services say to each other fits, also after the orchestrator's restart."""

from pathlib import Path

import pytest

from pipelines.models import write_tiny
from schemas import messages as m
from schemas.topics import Topics
from tests.archive_checker import check
from tests.house import house, settings_of
from workers.orchestrator import recovery
from workers.orchestrator.service import Hands, read_journal
from workers.orchestrator.service import serve as serve_orchestrator
from workers.runtime import clock
from workers.runtime.process import Process
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(folder)
    return folder


def _effects(journal: list[m.JournalRecord], kind: type[m.Message]) -> list[m.Message]:
    return [effect for record in journal for effect in record.effects if isinstance(effect, kind)]


def test_a_run_from_prompt_to_last_version_passes_the_archive_checker(tmp_path: Path, tiny: Path) -> None:
    run_dir = tmp_path / "whole"
    settings = settings_of(run_dir, tiny)
    bus = MemoryBus()
    with house(settings, run_dir, bus) as running:
        running.wait_end()
        assert running.codes["orchestrator"] == 0
    assert set(running.codes.values()) == {0}, running.codes
    assert check(run_dir) == []
    journal = read_journal(bus, Topics(settings.name).journal)
    assert recovery.replay(settings, journal).ended
    assert [batch.step for batch in _effects(journal, m.BatchRecord)] == [0, 1, 2, 3]


def test_an_orchestrator_restarted_in_mid_run_goes_on_from_its_journal(tmp_path: Path, tiny: Path) -> None:
    run_dir = tmp_path / "restart"
    settings = settings_of(run_dir, tiny)
    bus = MemoryBus()
    topics = Topics(settings.name)
    with house(settings, run_dir, bus) as running:
        reader = bus.reader()
        reader.add(topics.batches, 0, "earliest")
        limit = clock.monotonic_s() + 60
        while not reader.poll(1000):
            assert clock.monotonic_s() < limit, "no batch within 60 s"
        running.stop("orchestrator")
        running.start("orchestrator", lambda process: serve_orchestrator(process, bus))
        running.wait_end()
        assert running.codes["orchestrator"] == 0
    assert check(run_dir) == []
    journal = read_journal(bus, topics.journal)
    assert [record.sequence for record in journal] == list(range(len(journal)))
    assert [batch.step for batch in _effects(journal, m.BatchRecord)] == [0, 1, 2, 3]


def test_an_unreadable_status_record_becomes_a_dead_letter_and_the_run_goes_on(tmp_path: Path, tiny: Path) -> None:
    run_dir = tmp_path / "letters"
    settings = settings_of(run_dir, tiny, steps=2)
    bus = MemoryBus()
    topics = Topics(settings.name)
    with house(settings, run_dir, bus) as running:
        producer = bus.producer()
        producer.send(topics.status, b"{not json", {"schema": "status/1", "id": "x"})
        producer.send(topics.status, b"{}", {"schema": "status/9", "id": "x"})
        producer.flush(5)
        running.wait_end()
    reader = bus.reader()
    reader.add(topics.dead_letters, 0, "earliest")
    letters = reader.poll(1000)
    assert len(letters) == 2
    assert check(run_dir) == []


NASTY = (b"\xff\xfe", b"{}", b"null", b'"text"', b"[1, 2]", b'{"kind": "bored"}', b"[" * 100_000, b"")


def test_records_of_strangers_on_every_topic_end_nothing(tmp_path: Path, tiny: Path) -> None:
    """One unreadable record used to end the trainer, the prompts, the archive: each now buries it and goes on."""
    run_dir = tmp_path / "nasty"
    settings = settings_of(run_dir, tiny, steps=3)
    bus = MemoryBus()
    topics = Topics(settings.name)
    bus.make_topics(topics.specs())
    producer = bus.producer()
    read_only_once = {topics.journal, topics.prompts}  # a journal with a hole is no history; prompts' offsets are rows
    for spec in topics.specs():
        for value in NASTY if spec.name not in read_only_once else ():
            kind = topics.kind(spec.name)
            for headers in ({}, {"schema": f"{kind.rstrip('s')}/1", "id": "x"}, {"schema": f"{kind}/1"}):
                producer.send(spec.name, value, headers, key=b"k")
    producer.flush(5)
    with house(settings, run_dir, bus) as running:
        running.wait_end()
    assert set(running.codes.values()) == {0}, running.codes
    assert check(run_dir) == []


def test_an_epoch_whose_last_row_cannot_be_read_ends_all_the_same(tmp_path: Path, tiny: Path) -> None:
    run_dir = tmp_path / "hole"
    settings = settings_of(run_dir, tiny, steps=0, epochs=1)
    bus = MemoryBus()
    topics = Topics(settings.name)
    bus.make_topics(topics.specs())
    process = Process("orchestrator", settings, run_dir)
    hands = Hands(process, bus)
    producer = bus.producer()
    producer.send(topics.prompts, b"{not json", {"schema": "prompt/1", "id": "x"})
    publish(producer, topics.status, m.PromptsEnded(rows=1))
    producer.flush(5)
    limit = clock.monotonic_s() + 30
    while not hands.mind.rows.exhausted:
        assert clock.monotonic_s() < limit, "the mind still waits for the row"
        hands.turn()
    hands.close()
