"""From a world that broke a rule to few events that break the same rule: what a person wants to read.

The events that the mind had heard are told again to a fresh mind and a fresh checker, without any world; then pieces of
them are left out, halves first and single ones last, as long as the same line still complains.
"""

from collections.abc import Callable, Sequence

from schemas import messages as m
from tests.simulation.checkers import Checker
from tests.simulation.draw import Drawn
from tests.simulation.world import Code, World

RETELLINGS_MAX = 2_000
Line = tuple[str, int]


def line_of(error: BaseException) -> Line:
    """Where it was raised: the same line is the same complaint, whatever its numbers are."""
    place = error.__traceback__
    assert place is not None
    while place.tb_next is not None:
        place = place.tb_next
    return place.tb_frame.f_code.co_filename, place.tb_lineno


def retold(drawn: Drawn, events: Sequence[m.Event], code: Code) -> Line | None:
    """The line that complains when a mind hears just these events; None if nothing does."""
    mind, checker = code.state.Mind(drawn.settings), Checker(drawn)
    try:
        for event, after in zip(events, [*events[1:], None], strict=True):
            checker.heard(event)
            checker.said(mind.on(event))
            if after is None or isinstance(after, m.Tick):
                checker.settled(checker.now / 1e6 - World.BEGAN_S)
    except (AssertionError, KeyError) as error:
        return line_of(error)
    return None


def shrunk(events: list[m.Event], fails: Callable[[list[m.Event]], bool]) -> list[m.Event]:
    """Fewer events that fail as well. `fails(events)` must be so."""
    size, left = max(1, len(events) // 2), RETELLINGS_MAX
    while left > 0:
        place, before = 0, len(events)
        while place < len(events) and left > 0:
            shorter = events[:place] + events[place + size :]
            left -= 1
            if fails(shorter):
                events = shorter
            else:
                place += size
        if size == 1 and len(events) == before:
            break
        size = max(1, size // 2)
    return events


def explained(world: World, error: BaseException) -> str:
    """The complaint, the world's settings, and the shortest story found that ends in it."""
    said = f"seed {world.seed}, mode {world.settings.mode}: {error}"
    due = line_of(error)

    def fails(events: list[m.Event]) -> bool:
        return retold(world.drawn, events, world.code) == due

    if not fails(world.told):
        return f"{said}\n(what the mind heard does not show it: the world's truth, or a restart, is part of it)"
    story = shrunk(world.told, fails)
    lines = "\n".join(f"  {event!r}" for event in story)
    return f"{said}\n{len(story)} of {len(world.told)} events show it; settings: {world.settings!r}\n{lines}"
