"""Records that can be read, and those that cannot, with the reason."""

import math

import pytest

from schemas import messages as m
from schemas.codec import SCHEMA_NUMBERS, BadRecord, arrow_headers, check_schema, decode, encode
from tests.golden.records import CONTROL, MESSAGES, STATUS

BATCH = MESSAGES["batch"][1][0]


def test_value_that_is_no_json_is_a_bad_record_with_the_reason() -> None:
    _, headers = encode(BATCH)
    with pytest.raises(BadRecord, match=r"^batch: value: Invalid JSON"):
        decode(m.BatchRecord, b"{", headers)


def test_missing_field_is_named() -> None:
    _, headers = encode(BATCH)
    with pytest.raises(BadRecord, match=r"^batch: run: Field required"):
        decode(m.BatchRecord, b"{}", headers)


def test_word_of_an_unknown_kind_is_a_bad_record() -> None:
    _, headers = encode(CONTROL[0])
    with pytest.raises(BadRecord, match=r"^control: value: Input tag 'dance'"):
        decode(m.CONTROL, b'{"kind":"dance"}', headers)


def test_word_of_status_is_no_word_of_control() -> None:
    value, headers = encode(STATUS[0])
    with pytest.raises(BadRecord, match="schema header is 'status/1', this reader reads control/1 and control/0"):
        decode(m.CONTROL, value, headers)


@pytest.mark.parametrize("said", ["", "batch", "batch/2", "batch/-1", "batch/1 ", "prompt/1"])
def test_header_that_says_something_else_is_refused(said: str) -> None:
    value, _ = encode(BATCH)
    with pytest.raises(BadRecord, match="schema header is"):
        decode(m.BatchRecord, value, {"schema": said} if said else {})


@pytest.mark.parametrize("name", SCHEMA_NUMBERS)
def test_reader_of_schema_n_reads_n_and_n_minus_1(name: str) -> None:
    number = SCHEMA_NUMBERS[name]
    for readable in (number, number - 1):
        check_schema({"schema": f"{name}/{readable}"}, name)
    for other in (number - 2, number + 1):
        with pytest.raises(BadRecord):
            check_schema({"schema": f"{name}/{other}"}, name)


def test_field_of_a_later_writer_is_ignored() -> None:
    value, headers = encode(m.PromptsEnded(rows=3))
    later = value[:-1] + b',"new":1}'
    assert decode(m.STATUS, later, headers) == m.PromptsEnded(rows=3)


def test_field_that_an_earlier_writer_did_not_know_has_its_default() -> None:
    value = b'{"kind":"heartbeat","engine":1,"incarnation":2,"version":3,"running":0,"waiting":0,"kv_tokens":0}'
    beat = decode(m.STATUS, value, {"schema": "status/1"})
    assert isinstance(beat, m.Heartbeat)
    assert (beat.tokens, beat.decode_s) == (0, 0.0)


def test_figure_that_is_no_number_reaches_the_reader_as_such() -> None:
    """D04: a NaN is reported, not hidden; the value is JSON all the same."""
    value, headers = encode(m.MetricPoint(run="r", source="trainer", at=1, values={"a": math.nan, "b": -math.inf}))
    assert b'"NaN"' in value
    read = decode(m.MetricPoint, value, headers)
    assert math.isnan(read.values["a"])
    assert read.values["b"] == -math.inf


def test_same_word_said_again_has_the_same_id_and_another_attempt_another() -> None:
    request = MESSAGES["request"][1][0]
    again = request.model_copy(update={"engine": 5, "sequence": 99})
    later = request.model_copy(update={"attempt": 2})
    assert encode(request)[1]["id"] == encode(again)[1]["id"] == "request/4711.3.1"
    assert encode(later)[1]["id"] == "request/4711.3.2"
    assert arrow_headers(4711, 3, 1) == {"schema": "trajectory/1", "id": "trajectory/4711.3.1"}


def test_what_only_the_mind_says_cannot_be_sent_as_it_is() -> None:
    with pytest.raises(AssertionError, match="Stay is not a record"):
        encode(m.Stay(engine="0", version=0, fingerprint="", tokens=0))
