"""Rules of the records."""

import inspect

import pytest
from pydantic import ValidationError

from schemas import messages as m
from schemas import records
from tests.golden.records import BATCH, CONTROL, JOURNAL, MESSAGES, REQUEST, STATUS

KINDS = [
    kind
    for module in (records, m)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, m.Message) and kind.__module__ == module.__name__
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_record_is_frozen_and_says_what_it_is(kind: type[m.Message]) -> None:
    assert kind.model_config["frozen"]
    assert kind.__doc__


def test_a_record_that_was_said_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        REQUEST.attempt = 2  # type: ignore[misc]


def _members(union: object) -> list[type[m.Message]]:
    """The messages of a union, of unions inside it too."""
    parts = union.__args__[0].__args__  # type: ignore[attr-defined]
    return [member for part in parts for member in (_members(part) if hasattr(part, "__args__") else [part])]


@pytest.mark.parametrize("union", [m.Control, m.Status, m.Event, m.Effect])
def test_words_of_a_union_are_told_apart_by_kind(union: object) -> None:
    kinds = [member.model_fields["kind"].default for member in _members(union)]
    assert len(set(kinds)) == len(kinds)


def test_the_mind_hears_every_word_of_status() -> None:
    assert set(_members(m.Status)) <= set(_members(m.Event))


def test_every_command_is_an_effect_of_the_mind() -> None:
    assert set(_members(m.Control)) <= set(_members(m.Effect))


def test_journal_reads_back_as_the_same_events_and_effects() -> None:
    """I9: the journal is these records and nothing else."""
    read = m.JournalRecord.model_validate_json(JOURNAL.model_dump_json())
    assert read == JOURNAL
    assert [type(event) for event in read.events] == [type(event) for event in JOURNAL.events]
    assert BATCH in read.effects


def test_key_of_a_request_is_group_index_and_attempt() -> None:
    key = REQUEST.key
    assert (key.group, key.index, key.attempt) == (4711, 3, 1)


def test_reasons_are_a_closed_list() -> None:
    with pytest.raises(ValidationError):
        m.VoidGroup(group=0, version=0, reason="bored")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        m.Stop(engine=0, incarnation=0, requests=(), keep=True, reason="bored")  # type: ignore[arg-type]


def test_request_goes_through_json_with_every_bit_of_its_seed_and_log_probs() -> None:
    exact = REQUEST.model_copy(update={"seed": 2**63 - 1, "logprobs": (-0.1, -1e-30)})
    assert m.RequestRecord.model_validate_json(exact.model_dump_json()) == exact


def test_golden_records_leave_no_field_without_a_value_of_its_own() -> None:
    words = {type(message) for _, messages in MESSAGES.values() for message in messages}
    assert words >= {type(message) for message in (*CONTROL, *STATUS)}
