"""Which records of a run are meant: by training step, by time, or by offset.

Rule 1: steps choose their batches, the rows that these train, the versions that they begin on and make, their metrics.
Rule 2: a time chooses from all topics; a position from the first that is named, of the others only what that one names.
Rule 3: prompts begin with the first: a prompt's offset is its number in every request.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.tap_positions import Since, since
from schemas.topics import KINDS
from workers.runtime.errors import BadInput

OF_A_STEP = ("trajectories", "batches", "weights", "metrics")
_NAMES_ROWS = {"batches": ("trajectories",), "status": ("trajectories", "evaluations")}


@dataclass(frozen=True, slots=True)
class Range:
    """Records of `topics` (kinds). `steps`: first and last, None = any; `since`, `until` (exclusive): None = open."""

    topics: tuple[str, ...]
    steps: tuple[int, int] | None = None
    since: Since | None = None
    until: Since | None = None

    def holds(self, kind: str, place: tuple[str, int], offset: int, at: int, value: bytes = b"") -> bool:
        """Whether a record is in it (of token rows without `value`: those that another record names are not known)."""
        if self.steps is not None:
            return self._of_steps(kind, value)
        start = None if kind == "prompts" else self.since
        after = start is None or self._is_after(start, kind, place, offset, at, unnamed=True)
        return after and (self.until is None or not self._is_after(self.until, kind, place, offset, at, unnamed=False))

    def _is_after(
        self, bound: Since, kind: str, place: tuple[str, int], offset: int, at: int, *, unnamed: bool
    ) -> bool:
        """At the bound or later. `unnamed`: what holds for a partition that a position does not name."""
        if bound.time_us is not None:
            return at >= bound.time_us
        if not bound.positions.of:
            return not bound.now
        if kind != self.topics[0]:
            return not unnamed
        named = bound.positions.of.get(place)
        return unnamed if named is None else offset >= named[0]

    def _of_steps(self, kind: str, value: bytes) -> bool:
        assert self.steps is not None
        first, last = self.steps
        if kind == "weights":
            return number_in(value, "version") in range(first, last + 2)
        return kind in ("batches", "metrics") and number_in(value, "step") in range(first, last + 1)


def number_in(value: bytes, name: str) -> int | None:
    """A field of a JSON record; None if it is not there, or no number."""
    said = json.loads(value)
    found = said.get(name) if isinstance(said, dict) else None
    return found if isinstance(found, int) else None


def range_of(step: str | None, since_text: str, until_text: str, topics: Sequence[str]) -> Range:
    """What a person says. `topics`: kinds, none = all that the range can choose from. BadInput."""
    steps = _steps(step)
    if steps is not None and (since_text or until_text):
        raise BadInput("--step, or --since and --until: a range is of steps, or of time and offsets")
    default = OF_A_STEP if steps is not None else [kind for kind in KINDS if kind != "journal"]
    chosen = tuple(dict.fromkeys(topics or default))
    if "journal" in chosen:
        raise BadInput("--topic journal: it is of that run's own orchestrator; `dora replay RUN --decisions` reads it")
    for kind in chosen:
        if steps is not None and kind not in OF_A_STEP:
            raise BadInput(f"--step with --topic {kind}: steps choose from {', '.join(OF_A_STEP)}; others have --since")
        for rows in _NAMES_ROWS.get(kind, ()):
            if rows not in chosen:
                raise BadInput(f"--topic {kind}: it names rows of {rows}: give --topic {rows} too")
    if steps is not None and "batches" not in chosen:
        raise BadInput("--step: which rows belong to a step is in batches: give --topic batches too")
    bounds = [_bound(text, option, topics) for text, option in ((since_text, "--since"), (until_text, "--until"))]
    return Range(chosen, steps, *bounds)


def _bound(text: str, option: str, topics: Sequence[str]) -> Since | None:
    if not text:
        return None
    bound = since(topics[0] if topics else "", text, option)
    if bound.positions.of and not topics:
        raise BadInput(f"{option} {text}: a position is of one topic: name it by --topic")
    return bound


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None or text == "all":
        return None
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise BadInput(f"--step {text}: with --to a step (3), steps (3-7) or `all`")
    return first, last
