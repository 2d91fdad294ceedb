"""What becomes of a record that cannot be read: it goes to `dead-letters` with the reason, and its reader goes on.

Every reader of a topic uses this, so no record of a stranger can end a process.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter

from schemas.codec import BadRecord, decode
from schemas.messages import DeadLetter
from workers.runtime.process import Process
from workers.transport.records.bus import Producer, Record, publish

BYTES_MAX = 16 << 20
"""Of the record's value; base64 makes a third more of them, and the letter must fit into a record."""
T = TypeVar("T")


def dead_letter(run: str, record: Record, reason: str) -> DeadLetter:
    """The record, and why it cannot be used."""
    value = record.value[:BYTES_MAX]
    if len(value) < len(record.value):
        reason += f" (only the first {len(value)} of {len(record.value)} bytes are kept here)"
    return DeadLetter(
        run=run,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=reason,
        value_base64=base64.b64encode(value).decode(),
    )


def bad_row(run: str, topic: str, partition: int, row: Mapping[str, Any], reason: str) -> DeadLetter:
    """A row that was not written to where it belongs, as JSON; it has no offset (-1)."""
    value = json.dumps(row, default=str).encode()[:BYTES_MAX]
    where = {"topic": topic, "partition": partition, "offset": -1}
    return DeadLetter(run=run, reason=reason, value_base64=base64.b64encode(value).decode(), **where)


def read_or_bury(process: Process, producer: Producer, kind: type[T] | TypeAdapter[T], record: Record) -> T | None:
    """The message in a record; None if it cannot be read (it is then a dead letter on its way)."""
    try:
        return decode(kind, record.value, record.headers)
    except BadRecord as error:
        process.log.warning("dead_letter", topic=record.topic, offset=record.offset, reason=error)
        publish(producer, process.topics.dead_letters, dead_letter(process.run, record, str(error)))
        return None
