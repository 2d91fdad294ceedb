"""What a tap's rows look like: the archive's columns, and for JSON topics a typed column for each simple field.

Rule 1: a kind of topic has one schema, whatever its records hold: the fields of its messages say it.
Rule 2: a field that is not simple (nested, or of two types in two messages), or named like a column of the archive, is
in `value` only, the whole record as JSON text: `value->>'field'` in SQL.
"""

import json
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pyarrow as pa

from schemas import arrow, tables
from schemas import messages as m
from schemas.topics import KINDS
from workers.taps import archive
from workers.transport.records.bus import Record

WHAT: dict[str, str] = {
    "prompts": "rows of the datasets, tokenised, in the order the orchestrator takes them",
    "requests": "samples on their way to engines, a topic for each version",
    "partials": "samples that stopped on one engine to go on at another",
    "completions": "finished samples, not scored yet",
    "trajectories": "finished and scored samples: what the trainer reads",
    "evaluations": "scored samples of held-out rows: never trained",
    "weights": "published versions: where they lie, what they were trained on",
    "control": "what the orchestrator tells engines and the prompts process",
    "status": "what processes tell the orchestrator: heartbeats, starts, ends, scores",
    "batches": "the groups and rows of each training step",
    "journal": "each decision of the orchestrator with the events it was decided on",
    "metrics": "figures of all processes over time",
    "tables": "scored samples counted by version, task, difficulty and lag, said anew when they change (`dora eval`)",
    "dead-letters": "records that could not be read, with the reason",
}
"""A sentence for each kind of topic."""
assert set(WHAT) == set(KINDS)
_MESSAGES: dict[str, tuple[type[m.Message], ...]] = {
    "prompts": (m.PromptRecord,),
    "requests": (m.RequestRecord,),
    "partials": (m.PartialRecord,),
    "weights": (m.WeightsRecord,),
    "control": get_args(get_args(m.Control)[0]),
    "status": get_args(get_args(m.Status)[0]),
    "batches": (m.BatchRecord,),
    "journal": (m.JournalRecord,),
    "metrics": (m.MetricPoint,),
    "tables": get_args(get_args(tables.Table)[0]),
    "dead-letters": (m.DeadLetter,),
}
_PLAIN: dict[Any, pa.DataType] = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}


def is_tokens(kind: str) -> bool:
    """Its rows are token rows (Arrow), not JSON."""
    return kind in archive.TOKEN_KINDS


def schema_of(kind: str) -> pa.Schema:
    """Columns of a tap's batches."""
    if is_tokens(kind):
        return archive.schema_of(kind)
    *where, value = archive.schema_of(kind)
    return pa.schema([*where, *(pa.field(name, type_) for name, type_ in fields_of(kind).items()), value])


def fields_of(kind: str) -> dict[str, pa.DataType]:
    """The simple fields of a JSON topic's messages (rule 2)."""
    found: dict[str, set[pa.DataType | None]] = {}
    for message in _MESSAGES[kind]:
        for name, field in message.model_fields.items():
            found.setdefault(name, set()).add(_type(field.annotation))
    taken = set(archive.schema_of(kind).names)
    return {
        name: next(iter(types))
        for name, types in found.items()
        if name not in taken and len(types) == 1 and None not in types
    }


def _type(annotation: Any) -> pa.DataType | None:
    """None = not simple."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal and all(isinstance(part, str) for part in parts):
        return pa.string()
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis and parts[0] in _PLAIN:
        return pa.list_(_PLAIN[parts[0]])
    if origin in (dict, Mapping) and parts[0] is str and parts[1] in _PLAIN:
        return pa.map_(pa.string(), _PLAIN[parts[1]])
    others = [part for part in parts if part is not NoneType]
    if NoneType in parts and len(others) == 1:
        return _type(others[0])
    return None


def of_record(kind: str, record: Record) -> pa.Table:
    """The rows of a live record, in the archive's columns. ValueError, RecursionError if it cannot be read."""
    return archive.rows_of(kind, record)


def typed(kind: str, table: pa.Table) -> pa.Table:
    """The archive's columns -> ours."""
    if is_tokens(kind):
        return table
    values = [_object(text) for text in table.column("value").to_pylist()]
    columns = [_column([value.get(name) for value in values], type_) for name, type_ in fields_of(kind).items()]
    *where, value = table.columns
    return pa.Table.from_arrays([*where, *columns, value], schema=schema_of(kind))


def _object(text: str) -> dict[str, Any]:
    found = _value(text)
    return found if isinstance(found, dict) else {}


def _value(text: str) -> Any:
    """What the JSON says; the text itself if it is none (the archive had JSON only: it was damaged since)."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _column(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Null where a record holds something of another type."""
    try:
        return pa.array(_items(values, type_), type_)
    except (pa.ArrowInvalid, pa.ArrowTypeError, AttributeError, OverflowError):
        if len(values) == 1:
            return pa.nulls(1, type_)
        return pa.concat_arrays([_column([value], type_) for value in values])


def _items(values: Sequence[Any], type_: pa.DataType) -> list[Any]:
    if not pa.types.is_map(type_):
        return list(values)
    return [None if value is None else list(value.items()) for value in values]


def to_rows(kind: str, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as a line of JSON says them: times are microseconds since 1970; of a JSON topic `value` is the object."""
    table = pa.Table.from_batches([batch])
    if is_tokens(kind):
        return arrow.to_rows(table)
    extra = [name for name in table.column_names if name in ("prompt_text", "response_text")]
    kept = table.select(["partition", "offset", "timestamp", "key", "id", *extra, "value"])
    place = kept.column_names.index("timestamp")
    kept = kept.set_column(place, "timestamp", kept.column("timestamp").cast(pa.int64()))
    rows: list[dict[str, Any]] = kept.to_pylist()
    for row in rows:
        row["value"] = _value(row["value"])
    return rows
