"""What is on the log today reads the same tomorrow: bytes of every kind of record, kept in `tests/golden`."""

import pyarrow as pa
import pytest

from schemas import messages as m
from schemas.arrow import COMPLETION, TRAJECTORY, to_bytes, to_rows, to_table
from schemas.codec import SCHEMA_NUMBERS, arrow_headers, decode
from tests.golden.records import CONTROL, HERE, MESSAGES, ROW, STATUS, lines


def test_there_are_golden_bytes_of_every_kind_and_no_others() -> None:
    assert set(MESSAGES) | {"trajectory"} == set(SCHEMA_NUMBERS)
    assert {path.stem for path in HERE.glob("*.json")} == set(MESSAGES)


def test_every_word_of_control_and_status_is_among_them() -> None:
    for union, messages in ((m.Control, CONTROL), (m.Status, STATUS)):
        assert {type(message) for message in messages} == set(union.__args__[0].__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MESSAGES)
def test_records_are_written_byte_for_byte_as_before(name: str) -> None:
    assert lines(MESSAGES[name][1]) == (HERE / f"{name}.json").read_bytes()


@pytest.mark.parametrize("name", MESSAGES)
def test_old_bytes_are_read_as_what_they_were(name: str) -> None:
    kind, messages = MESSAGES[name]
    kept = (HERE / f"{name}.json").read_bytes().splitlines()
    assert len(kept) == len(messages)
    for line, message in zip(kept, messages, strict=True):
        schema, identity, value = line.split(b"\t", 2)
        assert decode(kind, value, {"schema": schema.decode(), "id": identity.decode()}) == message


def test_old_token_rows_are_read_as_what_they_were() -> None:
    """Compressed bytes may differ between Arrow versions; columns, types and values may not."""
    kept = (HERE / "trajectory.arrow").read_bytes()
    for value in (kept, to_bytes([ROW])):
        assert pa.ipc.open_stream(value).schema.equals(TRAJECTORY)
    assert to_rows(to_table(kept)) == [ROW]
    assert to_rows(to_table(to_bytes([ROW]))) == [ROW]
    said = dict(line.split("=", 1) for line in (HERE / "trajectory.headers").read_text().splitlines())
    assert said == arrow_headers(4711, 3, 1)


def test_columns_of_token_rows_are_the_interface_that_people_query() -> None:
    kept = (HERE / "columns.txt").read_text().splitlines()
    assert [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in TRAJECTORY] == kept


def test_unscored_rows_differ_only_in_the_time_of_scoring() -> None:
    other = [f.name for f in COMPLETION if f.nullable != TRAJECTORY.field(f.name).nullable]
    assert other == ["scored_at"]
    assert pa.schema([f.with_nullable(True) for f in COMPLETION]) == pa.schema(
        [f.with_nullable(True) for f in TRAJECTORY]
    )
