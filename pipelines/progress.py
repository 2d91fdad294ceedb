"""A run's progress for whoever started it: a live panel on a terminal, a line per period otherwise (stderr)."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from pipelines import pictures
from pipelines.snapshot import Snapshot
from workers.runtime import clock

LINE_PERIOD_S = 10.0


class ProgressView(AbstractContextManager["ProgressView"]):
    """Call `show` as often as you like. Without `shows` it only says what stays: someone else shows the progress."""

    def __init__(self, *, shows: bool = True) -> None:
        self._shows = shows
        self._live: Any = None
        self._said_at = 0.0
        self._said = ""

    def __enter__(self) -> "ProgressView":
        if self._shows and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, snapshot: Snapshot) -> None:
        if self._live is not None:
            self._live.update(_panel(snapshot))
            return
        if not self._shows:
            return
        now = clock.monotonic_s()
        text = pictures.line(snapshot)
        if text != self._said and now - self._said_at >= LINE_PERIOD_S:
            self.say(text)
            self._said, self._said_at = text, now

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)


def _panel(snapshot: Snapshot) -> Any:
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    goal = snapshot.steps or max(1, snapshot.step)
    table.add_row(
        f"step {snapshot.step}" + (f" of {snapshot.steps}" if snapshot.steps else ""), ProgressBar(goal, snapshot.step)
    )
    queues = snapshot.queues
    engines = " ".join(view.label for view in snapshot.engines.values())
    table.add_row("newest version", "-" if snapshot.version is None else str(snapshot.version))
    table.add_row("engines host", engines or "models are loading")
    table.add_row("reward", pictures.number(snapshot.reward))
    table.add_row("tokens per second", f"{snapshot.tokens_per_second:.0f}")
    voided = sum(snapshot.voided.values())
    table.add_row("groups", f"{queues.groups_live} live, {queues.groups_complete} complete, {voided} voided")
    table.add_row("lag", pictures.counts(snapshot.lag))
    if snapshot.restarts or snapshot.engines_lost:
        table.add_row("faults", f"{snapshot.engines_lost} engines lost, {snapshot.restarts} restarts")
    return Panel(table, title=snapshot.run)


class Redrawn(AbstractContextManager["Redrawn"]):
    """Lines with labels, drawn in place on a terminal (stdout)."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(), auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> "Redrawn":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, headline: str, rows: Sequence[tuple[str, str]]) -> None:
        self._live.update(labelled(headline, rows), refresh=True)


def labelled(headline: str, rows: Sequence[tuple[str, str]]) -> Any:
    """Labels in one column, texts in the other; a text that is too long goes on below itself."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, text in rows:
        table.add_row(Text(f"  {label}", "bold cyan"), Text(text))
    return Group(Text(headline, "bold"), table)


def print_labelled(headline: str, rows: Sequence[tuple[str, str]]) -> None:
    """Labels with texts on stdout: drawn on a terminal, plain lines otherwise."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(labelled(headline, rows))
        return
    print(headline)
    for label, text in rows:
        first, *others = text.splitlines() or [""]
        print("\n".join([f"  {label:<9}{first}", *(f"  {'':<9}{line}" for line in others)]))
