"""`dora status`: where a run stands, from its folder alone (the supervisor renews `status.json` every second).

Rule 1: no library that takes long to import: the answer comes within half a second.
Rule 2: what is said of a run is never older than its last supervisor: neither a former end nor a former state.
Rule 3: of a run that nobody supervises nothing is said to host or to run.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipelines import children, pictures, runs, snapshot
from pipelines.progress import Redrawn
from pipelines.snapshot import Snapshot
from workers.runtime import clock

WATCH_PERIOD_S = 1.0
QUIET_S_MAX = 5.0
"""A supervisor that said nothing for this long is said to be late."""
State = Literal["starting", "running", "ending", "lost", "ended", "unborn"]
"""`ending`: the outcome is known, the report is made. `lost`: its supervisor died. `unborn`: it never said a word."""


@dataclass(frozen=True, slots=True)
class Status:
    """A run as its folder tells it. `said_at` is when `now` was written, `read_at` when it was read."""

    folder: Path
    state: State
    read_at: int
    said_at: int | None = None
    now: Snapshot | None = None
    outcome: dict[str, str] | None = None
    summary: dict[str, Any] | None = None
    addresses: dict[str, str] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """A supervisor works on it."""
        return self.state in ("starting", "running", "ending")

    @property
    def age_s(self) -> float | None:
        return None if self.said_at is None else max(0.0, (self.read_at - self.said_at) / 1e6)

    @property
    def resume(self) -> str:
        return f"dora run {self.folder / runs.RESOLVED} --resume"


def status_of(run_dir: Path) -> Status:
    """What the folder says now."""
    lock = children.read_lock(run_dir)
    live = lock is not None and children.is_alive(lock["supervisor"])
    said = _read(run_dir / runs.STATUS)
    if lock is not None and said is not None and said["at"] < lock["supervisor"]["created"] * 1e6:
        said = None
    outcome = None if said is None else said["outcome"]
    state: State
    if live:
        state = "starting" if said is None else "running" if outcome is None else "ending"
    elif lock is not None:
        state, outcome = "lost", None
    else:
        state = "ended" if outcome else "unborn"
    now = None if said is None else snapshot.read(said)
    return Status(
        folder=run_dir,
        state=state,
        read_at=clock.now_us(),
        said_at=None if said is None else said["at"],
        now=now if live or now is None else now.at_rest(),
        outcome=outcome,
        summary=_read(run_dir / runs.SUMMARY) if state == "ended" else None,
        addresses={name: lock[name] for name in ("broker", "prefect") if name in lock} if live and lock else {},
    )


def _read(file: Path) -> dict[str, Any] | None:
    try:
        said: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    return said


# --- for people and for programs --------------------------------------------------------------


def as_json(status: Status) -> str:
    """Everything, in one line."""
    said: dict[str, Any] = {
        "folder": str(status.folder),
        "state": status.state,
        "live": status.live,
        "said_s_ago": None if status.age_s is None else round(status.age_s, 1),
        "outcome": status.outcome,
        "now": None if status.now is None else asdict(status.now),
        "summary": status.summary,
        **status.addresses,
    }
    if not status.live and not _is_done(status):
        said["resume"] = status.resume
    return json.dumps(said)


def as_line(status: Status) -> str:
    """One line for logs."""
    if status.state == "running" and status.now is not None:
        return pictures.line(status.now)
    return f"{status.folder.name}: {headline(status)}"


def as_text(status: Status) -> str:
    """The whole picture."""
    return "\n".join([f"{status.folder.name}  {headline(status)}", *pictures.aligned(rows(status))])


def headline(status: Status) -> str:
    """What people ask first."""
    ago = "" if status.age_s is None else f"last word {pictures.duration(status.age_s)} ago"
    match status.state:
        case "starting":
            return "starting: services and models are loading"
        case "running":
            late = f" ({ago})" if status.age_s is not None and status.age_s > QUIET_S_MAX else ""
            loading = status.now is not None and status.now.version is None
            return ("starting: models are loading" if loading else "running") + late
        case "ending" if status.outcome is not None:
            return f"ending: {_outcome(status.outcome)}"
        case "lost":
            return f"no supervisor: {ago or 'it died before its first word'}; go on with {status.resume}"
        case "ended" if status.outcome is not None:
            return _outcome(status.outcome) + ("" if _is_done(status) else f"; go on with {status.resume}")
        case _:
            return f"not running: it ended before its first word; go on with {status.resume}"


def _outcome(outcome: dict[str, str]) -> str:
    return f"{outcome['kind']}: {outcome['reason']}"


def _is_done(status: Status) -> bool:
    return status.outcome is not None and status.outcome["kind"] == "done"


def rows(status: Status) -> Iterator[tuple[str, str]]:
    """(label, text) of each line; a label stands once for the lines that follow it."""
    if status.summary is not None:
        yield from pictures.summary_rows(status.summary)
    elif status.now is not None:
        yield from pictures.snapshot_rows(status.now, live=status.live)
    yield "folder", str(status.folder)
    yield from status.addresses.items()


# --- watching ---------------------------------------------------------------------------------


def watch(run_dir: Path, as_json_lines: bool, wait: Callable[[float], object]) -> None:
    """Say it every WATCH_PERIOD_S until nobody supervises the run or people have seen enough (Ctrl-C): drawn in place
    on a terminal, else a line each time."""
    try:
        if as_json_lines or not sys.stdout.isatty():
            for status in _until_over(run_dir, wait):
                print(as_json(status) if as_json_lines else as_line(status), flush=True)
        else:
            with Redrawn() as drawn:
                for status in _until_over(run_dir, wait):
                    drawn.show(f"{status.folder.name}  {headline(status)}", list(rows(status)))
    except KeyboardInterrupt:
        pass


def _until_over(run_dir: Path, wait: Callable[[float], object]) -> Iterator[Status]:
    status = status_of(run_dir)
    while status.live:
        yield status
        wait(WATCH_PERIOD_S)
        status = status_of(run_dir)
    yield status
