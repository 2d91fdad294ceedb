"""The whole house on an in-memory log: what services say to each other fits, also after the orchestrator's restart."""

import gc
from collections import Counter
from pathlib import Path

import pytest

from pipelines.models import write_tiny
from schemas import messages as m
from schemas.settings import Settings
from schemas.topics import Topics
from tests.archive_checker import Run, check
from tests.house import house, settings_of
from workers.orchestrator import recovery
from workers.orchestrator import service as orchestrator_service
from workers.orchestrator.service import Hands, read_journal, read_tail
from workers.orchestrator.service import serve as serve_orchestrator
from workers.runtime import clock
from workers.runtime.collector import NEVER
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


def test_a_run_from_prompt_to_last_version_passes_the_archive_checker(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: set[int] = set()
    turn = Hands.turn

    def looking(hands: Hands) -> None:
        limits.add(gc.get_threshold()[2])
        turn(hands)

    monkeypatch.setattr(Hands, "turn", looking)
    run_dir = tmp_path / "whole"
    settings = settings_of(run_dir, tiny)
    bus = MemoryBus()
    with house(settings, run_dir, bus) as running:
        running.wait_end()
        assert running.codes["orchestrator"] == 0
    assert set(running.codes.values()) == {0}, running.codes
    assert check(run_dir) == []
    assert limits == {NEVER}, "no full collection delays a decision"
    journal = read_journal(bus, Topics(settings.name).journal)
    assert recovery.replay(settings, journal).ended
    assert [batch.step for batch in _effects(journal, m.BatchRecord)] == [0, 1, 2, 3]


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.full), "one_step", "partial", "oversample"])
def test_a_run_in_every_mode_passes_the_archive_checker(tmp_path: Path, tiny: Path, mode: str) -> None:
    """Every third row has long answers: steps pass while they are sampled."""
    run_dir = tmp_path / "mode"
    long = 900 if mode == "partial" else 150
    settings = settings_of(run_dir, tiny, mode=mode, sampling={"max_new_tokens": long, "ignore_eos": True})
    lengths = [long if number % 3 == 0 else 6 for number in range(30)]
    lines = [f'{{"prompt": "row {i}", "answer": "{i}", "max_new_tokens": {n}}}\n' for i, n in enumerate(lengths)]
    (run_dir / "rows.jsonl").write_text("".join(lines))
    with house(settings, run_dir, MemoryBus()) as running:
        running.wait_end()
    assert set(running.codes.values()) == {0}, running.codes
    assert check(run_dir) == []
    run = Run(run_dir)
    lags = {batch["step"] - version for batch in run.batches for _, version in batch["groups"]}
    assert max(lags) <= {"sync": 0, "oversample": 0, "one_step": 1, "partial": 2}[mode]
    mixed = [row for _, row in run.token_rows() if len({stay["version"] for stay in row["engine_path"]}) > 1]
    assert bool(mixed) == (mode == "partial")
    voided = Counter(effect["reason"] for effect in run.effects("void_group"))
    assert bool(voided["surplus"]) == (mode == "oversample")


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


def test_a_restart_reads_the_journal_back_to_a_snapshot_and_not_to_its_beginning(tmp_path: Path, tiny: Path) -> None:
    """Snapshots come every 40 events; the run is stopped after its first batch and goes on to a clean end."""
    run_dir = tmp_path / "snapshots"
    settings = settings_of(run_dir, tiny)
    bus = MemoryBus()
    topics = Topics(settings.name)
    with house(settings, run_dir, bus, snapshot_events=40) as running:
        reader = bus.reader()
        reader.add(topics.batches, 0, "earliest")
        limit = clock.monotonic_s() + 60
        while not reader.poll(1000):
            assert clock.monotonic_s() < limit, "no batch within 60 s"
        running.stop("orchestrator")
        records, tail = read_journal(bus, topics.journal), read_tail(bus, topics.journal)
        assert tail == records[-len(tail) :]
        mind, events = recovery.recover(settings, tail)
        assert mind.figures() == recovery.replay(settings, records).figures()
        assert events < 40 + max(len(record.events) for record in records)
        running.start("orchestrator", lambda process: serve_orchestrator(process, bus, 40))
        running.wait_end()
        assert running.codes["orchestrator"] == 0
    assert check(run_dir) == []
    journal = read_journal(bus, topics.journal)
    assert [record.sequence for record in journal] == list(range(len(journal)))
    assert sum(record.snapshot is not None for record in journal) > 1
    assert [batch.step for batch in _effects(journal, m.BatchRecord)] == [0, 1, 2, 3]
    assert recovery.replay(settings, journal).ended


def test_a_tail_longer_than_its_first_piece_is_read_back_piece_by_piece(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transactions leave holes between the records; pieces of every length meet without loss."""
    settings = settings_of(tmp_path / "pieces", tiny)
    bus = MemoryBus()
    process = _process_on(settings, tmp_path, bus)
    hands = Hands(process, bus, snapshot_events=23)
    for _ in range(40):
        _idle_turn(hands)
    hands.close()
    records = read_journal(bus, process.topics.journal)
    place = max(number for number, record in enumerate(records) if record.snapshot is not None)
    for length in (1, 2, 3, 5, 8, 200):
        monkeypatch.setattr(orchestrator_service, "TAIL_OFFSETS", length)
        tail = read_tail(bus, process.topics.journal)
        assert tail == records[-len(tail) :]
        assert len(tail) >= len(records) - place
        again = Hands(process, bus)
        assert again.sequence == len(records)
        assert again.mind.figures() == hands.mind.figures()
        again.close()


def test_a_snapshot_too_large_for_the_log_is_left_out_and_the_run_goes_on(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(orchestrator_service, "SNAPSHOT_BYTES_MAX", 10)
    settings = settings_of(tmp_path / "large", tiny)
    bus = MemoryBus()
    process = _process_on(settings, tmp_path, bus)
    hands = Hands(process, bus, snapshot_events=5)
    for _ in range(12):
        _idle_turn(hands)
    hands.close()
    journal = read_journal(bus, process.topics.journal)
    assert all(record.snapshot is None for record in journal)
    assert [record.sequence for record in journal] == list(range(len(journal)))
    assert "snapshot_too_large" in caplog.text
    assert len(read_tail(bus, process.topics.journal)) == len(journal)


def test_topics_and_weights_that_a_crash_left_behind_are_deleted_at_the_next_start(tmp_path: Path, tiny: Path) -> None:
    run_dir = tmp_path / "left"
    settings = settings_of(run_dir, tiny)
    bus = MemoryBus()
    topics = Topics(settings.name)
    with house(settings, run_dir, bus, snapshot_events=40) as running:
        running.wait_end()
    process = Process("orchestrator", settings, run_dir)
    mind = recovery.replay(settings, read_journal(bus, topics.journal))
    gone = [version for version in range(mind.published + 1) if version not in mind.undeleted]
    assert gone, "the run deleted no weights"
    for version in (*gone, mind.published + 1):
        (process.weights_dir / f"v{version:06d}").mkdir(exist_ok=True)
    retired = [version for version in range(mind.published + 1) if version not in mind.unretired]
    bus.make_topics(topics.requests_spec(version, 2) for version in (*retired, mind.published + 1))
    hands = Hands(process, bus)
    assert hands.retired == set(retired)
    assert hands.store.versions() == [*mind.undeleted, mind.published + 1], "what is not announced yet is not its own"
    hands._retire()
    left = bus.topics(topics.prefix + "requests.")
    assert sorted(left) == sorted(topics.requests(v) for v in (*mind.unretired, mind.published + 1))
    hands.close()


def _process_on(settings: Settings, run_dir: Path, bus: MemoryBus) -> Process:
    process = Process("orchestrator", settings, run_dir)
    bus.make_topics(process.topics.specs())
    return process


def _idle_turn(hands: Hands) -> None:
    """One poll in which something was said: a record is written."""
    producer = hands.bus.producer()
    publish(producer, hands.topics.status, m.EngineGone(engine=9, incarnation=None, reason="nobody"))
    publish(producer, hands.topics.status, m.EngineGone(engine=9, incarnation=None, reason="nobody"))
    hands.turn()


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
