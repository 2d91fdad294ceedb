"""From the journal back to the mind: the same events again, and the same effects, byte for byte (I9).

Rule 1: the state of the orchestrator is the fold of its journal; nothing else is stored.
Rule 2: a replay that decides otherwise than the journal says stops: the code or the settings are not those of the run.
"""

from collections.abc import Iterable

from schemas.messages import JournalRecord
from schemas.settings import Settings
from workers.orchestrator.state import Mind


class JournalDiffers(Exception):
    """A replayed decision is not the one in the journal: effect `place` of journal record `sequence`."""

    def __init__(self, sequence: int, place: int, written: str, decided: str) -> None:
        super().__init__(f"journal record {sequence}, effect {place}: written {written}, decided {decided}")
        self.sequence, self.place, self.written, self.decided = sequence, place, written, decided


def replay(settings: Settings, records: Iterable[JournalRecord]) -> Mind:
    """The mind after these records, in order from the first. JournalDiffers."""
    mind = Mind(settings)
    for record in records:
        decided = [effect.model_dump_json() for event in record.events for effect in mind.on(event)]
        written = [effect.model_dump_json() for effect in record.effects]
        if decided != written:
            equal = [one == other for one, other in zip(written, decided, strict=False)]
            place = equal.index(False) if False in equal else len(equal)
            both = [texts[place] if place < len(texts) else "nothing" for texts in (written, decided)]
            raise JournalDiffers(record.sequence, place, *both)
    return mind


def inputs(records: Iterable[JournalRecord]) -> dict[str, int]:
    """`topic/partition` -> the next offset to read."""
    positions: dict[str, int] = {}
    for record in records:
        positions.update(record.inputs)
    return positions
