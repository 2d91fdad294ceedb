"""Two orchestrators on one log: the younger takes over, the older is fenced, the journal stays one history."""

from pathlib import Path

import pytest
from kafka.errors import KafkaError

from schemas.codec import decode
from schemas.messages import JournalRecord
from schemas.settings import Settings
from tests.contract.bus_log import Log
from workers.orchestrator.service import Hands
from workers.runtime import clock
from workers.runtime.process import Process
from workers.transport.records.bus import Fenced
from workers.transport.records.kafka_clients import kafka_errors_of

LIMIT_S = 30.0


def _process(log: Log, folder: Path) -> Process:
    tree = {
        "name": log.prefix.split(".")[1],
        "model": str(folder),
        "steps": 1,
        "dataset": [{"path": "rows.jsonl"}],
        "prefect": {"enabled": False},
    }
    process = Process("orchestrator", Settings.model_validate(tree), folder)
    log.bus.make_topics(process.topics.specs())
    return process


def _sequences(log: Log, process: Process) -> list[int]:
    reader = log.reader(process.topics.journal)
    found: list[int] = []
    while not reader.at_end():
        found += [decode(JournalRecord, one.value, one.headers).sequence for one in reader.poll(200)]
    return found


def _turns(hands: Hands, wanted: int) -> None:
    """Turn until so many journal records are written (a tick makes one every half second)."""
    limit, aim = clock.monotonic_s() + LIMIT_S, hands.sequence + wanted
    while hands.sequence < aim:
        assert clock.monotonic_s() < limit, f"not {wanted} decisions within {LIMIT_S} s"
        hands.turn()


def test_the_older_is_fenced_at_its_next_word_and_the_journal_has_no_hole_and_no_double(
    log: Log, tmp_path: Path
) -> None:
    process = _process(log, tmp_path)
    first = Hands(process, log.bus)
    _turns(first, 2)
    second = Hands(process, log.bus)
    with pytest.raises(Fenced):
        _turns(first, 1)
    first.close()
    _turns(second, 2)
    third = Hands(process, log.bus)
    with pytest.raises(Fenced):
        _turns(second, 1)
    second.close()
    _turns(third, 1)
    third.close()
    assert _sequences(log, process) == [0, 1, 2, 3, 4]


def test_a_commit_in_the_very_moment_of_fencing_is_fenced_and_not_a_log_that_is_away() -> None:
    with pytest.raises(Fenced), kafka_errors_of("127.0.0.1:9092"):
        raise KafkaError("Unhandled error in EndTxnResponse: [Error -1] UnknownError")
