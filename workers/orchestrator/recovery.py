"""From the journal back to the mind: the same events again, and the same effects, byte for byte (I9).

Rule 1: the state of the orchestrator is the fold of its journal. A snapshot in it is that fold up to its place, so that
a restart need not begin at the first record.
Rule 2: a replay that decides otherwise than the journal says stops: the code or the settings are not those of the run.
"""

from collections.abc import Iterable, Sequence

from schemas.messages import JournalRecord
from schemas.settings import Settings
from workers.orchestrator.snapshot import Snapshot, restore, unpack
from workers.orchestrator.state import Mind


class JournalDiffers(Exception):
    """A replayed decision is not the one in the journal: effect `place` of journal record `sequence`."""

    def __init__(self, sequence: int, place: int, written: str, decided: str) -> None:
        super().__init__(f"journal record {sequence}, effect {place}: written {written}, decided {decided}")
        self.sequence, self.place, self.written, self.decided = sequence, place, written, decided


def replay(settings: Settings, records: Iterable[JournalRecord]) -> Mind:
    """The mind after these records, in order from the first. JournalDiffers."""
    mind = Mind(settings)
    _fold(mind, records)
    return mind


def recover(settings: Settings, records: Sequence[JournalRecord]) -> tuple[Mind, int]:
    """The same mind from the newest snapshot among them, and how many events it heard since. JournalDiffers.

    They are the journal's last records; without a snapshot that can be read they must be all.
    """
    place, snapshot = newest(records)
    assert snapshot is not None or not records or records[0].sequence == 0, "the journal's beginning is missing"
    mind = Mind(settings) if snapshot is None else restore(settings, snapshot)
    later = records[place:]
    _fold(mind, later)
    return mind, sum(len(record.events) for record in later)


def newest(records: Sequence[JournalRecord]) -> tuple[int, Snapshot | None]:
    """The newest snapshot that can be read, and the number of records up to it; 0, None if there is none."""
    for place in range(len(records), 0, -1):
        text = records[place - 1].snapshot
        snapshot = None if text is None else unpack(text)
        if snapshot is not None:
            return place, snapshot
    return 0, None


def _fold(mind: Mind, records: Iterable[JournalRecord]) -> None:
    for record in records:
        decided = [effect.model_dump_json() for event in record.events for effect in mind.on(event)]
        written = [effect.model_dump_json() for effect in record.effects]
        if decided != written:
            equal = [one == other for one, other in zip(written, decided, strict=False)]
            place = equal.index(False) if False in equal else len(equal)
            both = [texts[place] if place < len(texts) else "nothing" for texts in (written, decided)]
            raise JournalDiffers(record.sequence, place, *both)


def inputs(records: Iterable[JournalRecord]) -> dict[str, int]:
    """`topic/partition` -> the next offset to read."""
    positions: dict[str, int] = {}
    for record in records:
        positions.update(record.inputs)
    return positions
