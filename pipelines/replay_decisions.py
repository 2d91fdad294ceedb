"""`dora replay RUN --decisions`: the orchestrator's mind is driven again with the journal's events, and must decide the
same, byte for byte (I9). With changed settings: the first decision that would have been another one. Or up to an event:
what was decided on it, and how things stood then.

Rule 1: it ends at the first difference. What was heard after it was the answer to decisions that were not taken.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelines.config_file import read_resolved
from pipelines.runs import RESOLVED
from schemas.messages import JournalRecord
from schemas.settings import Settings, SettingsError, parse_settings
from workers.orchestrator import recovery
from workers.runtime.errors import BadInput
from workers.taps import archive


@dataclass(frozen=True, slots=True)
class Difference:
    """Effect `effect` (from 0) of journal record `record` at `at` (microseconds since 1970): what is written there, and
    what the mind decides; empty: nothing."""

    record: int
    effect: int
    at: int
    written: str
    decided: str


@dataclass(frozen=True, slots=True)
class Stood:
    """The last event, what was decided on it, and figures of the mind then (those of `dora status`)."""

    event: str
    decided: list[str]
    figures: dict[str, float]


@dataclass
class Decisions:
    """How much was decided again as it is written, by kind of effect. `stood`: if it ended at the event asked for."""

    run: str
    what_if: list[str]
    records: int = 0
    records_all: int = 0
    events: int = 0
    effects: Counter[str] = field(default_factory=Counter)
    difference: Difference | None = None
    stood: Stood | None = None

    @property
    def same(self) -> bool:
        return self.difference is None


def decide_again(run_dir: Path, what_if: Sequence[str] = (), until: int | None = None) -> Decisions:
    """All of the archived journal, or up to event `until` (from 1), or up to the first difference. `what_if`: other
    settings, `a.b=c`. BadInput."""
    settings = _settings(run_dir, what_if)
    records = journal(run_dir)
    said = Decisions(settings.name, list(what_if), records_all=len(records))
    mind = recovery.replay(settings, [])
    for at, record in records:
        decided: list[str] = []
        written = [effect.model_dump_json() for effect in record.effects]
        for event in record.events:
            effects = [effect.model_dump_json() for effect in mind.on(event)]
            decided += effects
            said.events += 1
            if decided != written[: len(decided)]:
                break
            if said.events == until:
                said.stood = Stood(event.model_dump_json(), effects, mind.figures())
                return said
        if decided != written:
            said.difference = _difference(record.sequence, at, written, decided)
            return said
        said.records += 1
        said.effects.update(effect.kind for effect in record.effects)
    if until is not None:
        raise BadInput(f"--until {until}: an event from 1 to {said.events}, the journal's last")
    return said


def _settings(run_dir: Path, what_if: Sequence[str]) -> Settings:
    before, file = read_resolved(run_dir), run_dir / RESOLVED
    try:
        settings = parse_settings(file.read_text(encoding="utf-8"), str(file), what_if)
    except SettingsError as error:
        raise BadInput(f"--what-if: {error}") from error
    if what_if and settings == before:
        raise BadInput(f"--what-if {' '.join(what_if)}: the run had that already")
    return settings


def journal(run_dir: Path) -> list[tuple[int, JournalRecord]]:
    """(microseconds since 1970, record), without a gap from the first on. BadInput."""
    archive.check(run_dir, "journal")
    folder, table = run_dir / "archive" / "journal", archive.read(run_dir, "journal")
    found: list[tuple[int, JournalRecord]] = []
    times = table.column("timestamp").cast("int64").to_pylist()
    for at, text in zip(times, table.column("value").to_pylist(), strict=True):
        try:
            found.append((at, JournalRecord.model_validate_json(text)))
        except ValidationError as error:
            raise BadInput(f"{folder}: a record after {len(found)} others is no journal record: {error}") from error
    if not found:
        raise BadInput(f"{folder}: there is no journal: nothing was decided yet, or the archive was cut short")
    for place, (_, record) in enumerate(found):
        if record.sequence != place:
            raise BadInput(f"{folder}: record {place} is missing: a file is gone; restore it from a copy")
    return found


def _difference(sequence: int, at: int, written: list[str], decided: list[str]) -> Difference:
    equal = [one == other for one, other in zip(written, decided, strict=False)]
    place = equal.index(False) if False in equal else len(equal)
    before, now = (texts[place] if place < len(texts) else "" for texts in (written, decided))
    return Difference(sequence, place, at, before, now)


def as_dict(said: Decisions) -> dict[str, Any]:
    """What `--json` prints."""
    return asdict(said) | {"same": said.same, "effects": dict(said.effects)}


def as_text(said: Decisions) -> str:
    """For people."""
    effects = ", ".join(f"{count:,} {kind}" for kind, count in said.effects.most_common())
    changed = f" with {' '.join(said.what_if)}" if said.what_if else ""
    read = f"{said.records:,} of {said.records_all:,} journal records ({said.events:,} events){changed}"
    texts = [f"{read}: {effects or 'nothing decided'}"]
    if said.difference is None:
        texts.append("decided again as written, byte for byte")
    else:
        one = said.difference
        texts.append(f"record {one.record}, effect {one.effect} is the first that differs:")
        texts += [f"  written  {one.written or 'nothing'}", f"  decided  {one.decided or 'nothing'}"]
    if said.stood is not None:
        texts.append(f"event {said.events:,}  {said.stood.event}")
        texts += [f"  decided  {effect}" for effect in said.stood.decided or ["nothing"]]
        texts += [f"  {name:<28} {value:g}" for name, value in said.stood.figures.items()]
    return "\n".join(texts)
