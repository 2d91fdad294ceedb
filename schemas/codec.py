"""From a message to a record's value and headers, and back. JSON for messages, Arrow for token rows; no pickle.

Every record has the headers `schema` (`name/number`) and `id`. A reader of schema n reads n - 1. What cannot be read
is a `BadRecord` with a reason that a person can act on; whoever reads puts it on `dead-letters`.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from schemas import messages as m
from schemas.ids import record_id
from schemas.tables import TABLES, Cell, Learned

SCHEMA_NUMBERS: dict[str, int] = {
    "prompt": 1,
    "request": 1,
    "partial": 1,
    "weights": 1,
    "control": 1,
    "status": 1,
    "batch": 1,
    "journal": 1,
    "metric": 1,
    "table": 1,
    "dead-letter": 1,
    "trajectory": 1,
}
T = TypeVar("T")
_NAMES: dict[Any, str] = {
    m.PromptRecord: "prompt",
    m.RequestRecord: "request",
    m.PartialRecord: "partial",
    m.WeightsRecord: "weights",
    m.BatchRecord: "batch",
    m.JournalRecord: "journal",
    m.MetricPoint: "metric",
    m.DeadLetter: "dead-letter",
    m.CONTROL: "control",
    m.STATUS: "status",
    TABLES: "table",
}
_READERS: dict[Any, tuple[str, TypeAdapter[Any]]] = {
    kind: (name, kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)) for kind, name in _NAMES.items()
}


class BadRecord(ValueError):
    """A record that this reader cannot read; the text says why."""


def _schema_and_id(message: m.Message) -> tuple[str, str]:
    match message:
        case m.PromptRecord():
            return "prompt", record_id("prompt", message.dataset, message.purpose, message.epoch, message.row)
        case m.RequestRecord():
            return "request", record_id("request", message.group, message.index, message.attempt)
        case m.PartialRecord():
            return "partial", record_id("partial", message.group, message.index, message.attempt, message.reason)
        case m.WeightsRecord():
            return "weights", record_id("weights", message.version)
        case m.BatchRecord():
            return "batch", record_id("batch", message.step)
        case m.JournalRecord():
            return "journal", record_id("journal", message.sequence)
        case m.MetricPoint():
            return "metric", record_id("metric", message.source, message.at)
        case m.DeadLetter():
            return "dead-letter", record_id("dead-letter", message.topic, message.partition, message.offset)
        case Cell():
            return "table", record_id("cell", message.version, message.task, message.difficulty, message.lag)
        case Learned():
            return "table", record_id("learned", message.version, message.lag)
        case m.Swap() | m.Stop() | m.WantPrompts() | m.EndRun():
            return "control", record_id(message.kind, *_who(message))
        case _:
            assert hasattr(message, "kind"), f"{type(message).__name__} is not a record"
            return "status", record_id(message.kind, *_who(message))


def _who(message: m.Message) -> list[object]:
    names = ("engine", "incarnation", "group", "index", "attempt", "version", "after_sequence", "rows")
    return [value for name in names if (value := getattr(message, name, None)) is not None]


def encode(message: m.Message) -> tuple[bytes, dict[str, str]]:
    """The record's value (JSON, UTF-8) and headers."""
    schema, identity = _schema_and_id(message)
    return message.model_dump_json().encode(), {"schema": f"{schema}/{SCHEMA_NUMBERS[schema]}", "id": identity}


def arrow_headers(group: int, index: int, attempt: int) -> dict[str, str]:
    """Headers of a record of token rows (`schemas/arrow.py` makes the value)."""
    return {
        "schema": f"trajectory/{SCHEMA_NUMBERS['trajectory']}",
        "id": record_id("trajectory", group, index, attempt),
    }


def check_schema(headers: Mapping[str, str], name: str) -> None:
    """BadRecord unless the header says `name/n` or `name/(n - 1)`."""
    said = headers.get("schema", "")
    number = SCHEMA_NUMBERS[name]
    if said not in (f"{name}/{number}", f"{name}/{number - 1}"):
        raise BadRecord(f"schema header is {said!r}, this reader reads {name}/{number} and {name}/{number - 1}")


def decode(kind: type[T] | TypeAdapter[T], value: bytes, headers: Mapping[str, str]) -> T:
    """The message in a record. `kind` is a message class, or `messages.CONTROL` / `messages.STATUS`."""
    name, adapter = _READERS[kind]
    check_schema(headers, name)
    try:
        message: T = adapter.validate_json(value)
        return message
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "value"
        raise BadRecord(f"{name}: {where}: {first['msg']}") from error


_OF_TOPIC: dict[str, Any] = {
    "prompts": m.PromptRecord,
    "requests": m.RequestRecord,
    "partials": m.PartialRecord,
    "weights": m.WeightsRecord,
    "control": m.CONTROL,
    "status": m.STATUS,
    "batches": m.BatchRecord,
    "journal": m.JournalRecord,
    "metrics": m.MetricPoint,
    "tables": TABLES,
    "dead-letters": m.DeadLetter,
}


def is_ours(value: bytes) -> bool:
    """A JSON record that claims to be of a run; strangers may write to a topic too. Each of our messages names its run,
    or its kind."""
    return b'"run"' in value or b'"kind"' in value


def schema_of_topic(topic_kind: str) -> tuple[str, int]:
    """Name and number of the schema of a kind of topic's records."""
    name = _READERS[_OF_TOPIC[topic_kind]][0] if topic_kind in _OF_TOPIC else "trajectory"
    return name, SCHEMA_NUMBERS[name]


def headers_of_topic(topic_kind: str, identity: str | None) -> dict[str, str]:
    """Headers of a record of this kind of topic (not one of token rows) whose `id` is known, but not its headers."""
    name, number = schema_of_topic(topic_kind)
    known = {} if identity is None else {"id": identity}
    return {"schema": f"{name}/{number}", **known}


def decode_of_topic(topic_kind: str, value: bytes, headers: Mapping[str, str]) -> m.Message:
    """The message in a record of a topic of this kind (`prompts`, `requests`, ...; not those of token rows)."""
    message: m.Message = decode(_OF_TOPIC[topic_kind], value, headers)
    return message
