"""Where a tap stands and where it starts: positions, times, `beginning`, `now`.

    0:12,1:40.3            partition 0 is read up to offset 12, of partition 1 offset 40 the first 3 rows too
    v000012/0:5            the same in one of several topics of a kind (requests)

Rule 1: a position is of rows, not of records: a record may hold several. What is before it was shown, what is not was
not; a partition that it does not name is at its beginning.
"""

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pipelines.children import write_whole
from workers.runtime import clock
from workers.runtime.errors import BadInput

BEGINNING, NOW = "beginning", "now"
Place = tuple[str, int]
"""Topic without its prefix, partition."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ENTRY = re.compile(r"(?:(v\d+)/)?(\d+):(\d+)(?:\.(\d+))?")


@dataclass
class Positions:
    """`of[place]` is (next offset, rows of that record already shown)."""

    kind: str
    of: dict[Place, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(self._entry(place, at) for place, at in sorted(self.of.items()))

    def _entry(self, place: Place, at: tuple[int, int]) -> str:
        name, partition = place
        topic = name.removeprefix(self.kind).lstrip(".")
        rows = f".{at[1]}" if at[1] else ""
        return f"{topic + '/' if topic else ''}{partition}:{at[0]}{rows}"

    def copy(self) -> "Positions":
        return Positions(self.kind, dict(self.of))


def parse(kind: str, text: str) -> Positions:
    """ValueError if the text is no position."""
    found = Positions(kind)
    for part in text.split(",") if text else []:
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no position")
        name = f"{kind}.{match[1]}" if match[1] else kind
        found.of[name, int(match[2])] = int(match[3]), int(match[4] or 0)
    return found


@dataclass(frozen=True, slots=True)
class Since:
    """Where a tap starts: `positions`, and of what comes then only rows from `time_us` on; or `now`."""

    positions: Positions
    time_us: int | None = None
    now: bool = False


def since(kind: str, text: str, option: str = "--since") -> Since:
    """What a person says: `beginning`, `now`, a duration (`10m`), a time (ISO 8601), a position. BadInput names the
    `option`."""
    if text in (BEGINNING, NOW):
        return Since(Positions(kind), now=text == NOW)
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return Since(Positions(kind), clock.now_us() - int(float(match[1]) * _SECONDS[match[2]] * 1e6))
    try:
        return Since(parse(kind, text))
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(
            f"{option} {text}: write a duration (10m, 2h, 1d), a time (2026-01-31T12:00, UTC unless it says more), "
            "a position that a tap printed, beginning, or now"
        ) from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return Since(Positions(kind), int(at.timestamp() * 1e6))


class State:
    """A file that keeps a tap's position from one start to the next."""

    def __init__(self, file: Path, run: str, kind: str) -> None:
        self._file, self._run, self._kind = file, run, kind

    def read(self) -> Positions | None:
        """None if there is no file yet. BadInput if it is of another tap."""
        try:
            said = json.loads(self._file.read_text(encoding="utf-8"))
            run, kind, position = said["run"], said["topic"], said["position"]
            found = parse(self._kind, position)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise BadInput(f"--state {self._file}: not the state of a tap ({error}): name another file") from error
        if (run, kind) != (self._run, self._kind):
            raise BadInput(f"--state {self._file}: it is of topic {kind} of run {run}: name another file")
        return found

    def write(self, positions: Positions) -> None:
        said = {"run": self._run, "topic": self._kind, "position": str(positions)}
        write_whole(self._file, json.dumps(said))
