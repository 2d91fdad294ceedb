"""What the commands that look at a run read of its JSON topics: whole messages, and what is said of damage.

Rule 1: of a damaged archive all that can be read is shown, then what could not is said, and the exit code is 2.
Rule 2: JSON that does not claim to be of the run (strangers may write to a topic) is nobody's damage.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.codec import BadRecord, decode_of_topic, headers_of_topic, is_ours
from schemas.messages import Message
from workers.runtime.errors import BadInput
from workers.taps import archive

SAID_MAX = 10


def records(kind: str, rows: pa.Table | pa.RecordBatch) -> Iterator[tuple[int, Message | BadRecord]]:
    """Of rows of a JSON topic: offset, and the message or why it cannot be read."""
    headers = headers_of_topic(kind, None)
    for offset, text in zip(rows.column("offset").to_pylist(), rows.column("value").to_pylist(), strict=True):
        value = text.encode()
        if is_ours(value):
            try:
                yield offset, decode_of_topic(kind, value, headers)
            except BadRecord as error:
                yield offset, error


def of_archive(run_dir: Path, kind: str, damage: list[str]) -> Iterator[Message]:
    """The messages of a JSON topic in order. What cannot be read is said in `damage`."""
    for topic, partition, table in archive.files(run_dir, kind, ("offset", "value"), damage):
        for offset, said in records(kind, table):
            if isinstance(said, BadRecord):
                folder = run_dir / "archive" / topic
                damage.append(f"{folder}: record {partition}:{offset} cannot be read ({said}): it was left out")
            else:
                yield said


def messages(run_dir: Path, kind: str, damage: list[str]) -> Iterator[dict[str, Any]]:
    """`of_archive`, with all their fields as in JSON."""
    for message in of_archive(run_dir, kind, damage):
        yield message.model_dump(mode="json")


def complain(damage: Sequence[str]) -> None:
    """BadInput if there is any."""
    said = list(dict.fromkeys(damage))
    if said:
        more = [f"and {len(said) - SAID_MAX} more"] if len(said) > SAID_MAX else []
        raise BadInput("\n".join(["not all of the archive could be read:", *said[:SAID_MAX], *more]))
