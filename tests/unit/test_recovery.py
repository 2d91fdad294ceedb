"""From the journal back to the mind (I9)."""

import subprocess
import sys

import pytest

from schemas.messages import Issue, JournalRecord
from tests.unit.mind_driver import Driver, played, settings_of
from workers.orchestrator.recovery import JournalDiffers, inputs, replay
from workers.orchestrator.state import Mind


def journal(driver: Driver) -> list[JournalRecord]:
    """One record per event, through JSON as on the log."""
    mind, records = Mind(driver.settings), []
    for sequence, event in enumerate(driver.events):
        effects = tuple(mind.on(event))
        where = {"prompts/0": sequence, "status/0": 2 * sequence}
        record = JournalRecord(run="unit", sequence=sequence, inputs=where, events=(event,), effects=effects)
        records.append(JournalRecord.model_validate_json(record.model_dump_json()))
    return records


def test_a_replayed_mind_is_the_same_and_goes_on_alike() -> None:
    driver = played()
    mind = replay(driver.settings, journal(driver))
    assert mind.figures() == driver.mind.figures()
    driver.complete(3)
    for event in driver.events[-4:]:
        mind.on(event)
    assert mind.figures() == driver.mind.figures()


def test_an_empty_journal_is_a_new_mind() -> None:
    assert replay(settings_of(), []).figures() == Mind(settings_of()).figures()
    assert inputs([]) == {}


def test_input_positions_are_the_last_ones_written() -> None:
    records = journal(played())
    last = len(records) - 1
    assert inputs(records) == {"prompts/0": last, "status/0": 2 * last}


def test_a_journal_of_other_settings_is_refused_with_its_place() -> None:
    driver = played()
    with pytest.raises(JournalDiffers) as found:
        replay(settings_of(group_size=3), journal(driver))
    first = next(record.sequence for record in journal(driver) if any(isinstance(e, Issue) for e in record.effects))
    assert found.value.sequence >= first
    assert found.value.written != found.value.decided


def test_a_missing_effect_is_noticed() -> None:
    records = journal(played())
    place = next(place for place, record in enumerate(records) if len(record.effects) > 1)
    records[place] = records[place].model_copy(update={"effects": records[place].effects[:-1]})
    with pytest.raises(JournalDiffers, match="written nothing"):
        replay(settings_of(), records)


def test_decisions_do_not_depend_on_the_hash_seed_of_a_process() -> None:
    """Two processes with different string hashes tell the same story."""
    code = (
        "import hashlib; from tests.simulation.world import World; world = World(11); world.run(); "
        "print(hashlib.sha256(''.join(r.model_dump_json() for r in world.journal).encode()).hexdigest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1, said
