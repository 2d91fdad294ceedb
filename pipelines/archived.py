"""What the commands that look at a run read of its archive: whole messages, and what is said of damage.

Rule 1: of a damaged archive all that can be read is shown, then what could not is said, and the exit code is 2.
Rule 2: JSON that does not claim to be of the run (strangers may write to a topic) is nobody's damage.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from schemas.codec import BadRecord, decode_of_topic, headers_of_topic, is_ours
from workers.runtime.errors import BadInput
from workers.taps import archive

SAID_MAX = 10


def messages(run_dir: Path, kind: str, damage: list[str]) -> Iterator[dict[str, Any]]:
    """The messages of a JSON topic in order, with all their fields. What cannot be read is said in `damage`."""
    headers = headers_of_topic(kind, None)
    for topic, partition, table in archive.files(run_dir, kind, ("offset", "value"), damage):
        for offset, text in zip(table.column("offset").to_pylist(), table.column("value").to_pylist(), strict=True):
            value = text.encode()
            if not is_ours(value):
                continue
            try:
                yield decode_of_topic(kind, value, headers).model_dump(mode="json")
            except BadRecord as error:
                folder = run_dir / "archive" / topic
                damage.append(f"{folder}: record {partition}:{offset} cannot be read ({error}): it was left out")


def complain(damage: Sequence[str]) -> None:
    """BadInput if there is any."""
    said = list(dict.fromkeys(damage))
    if said:
        more = [f"and {len(said) - SAID_MAX} more"] if len(said) > SAID_MAX else []
        raise BadInput("\n".join(["not all of the archive could be read:", *said[:SAID_MAX], *more]))
