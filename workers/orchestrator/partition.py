"""How many engines each version gets. Pure functions of plain numbers, in order of versions, the newest last.

Rule 1: the sum is the number of engines, and every version that needs an engine gets one while there are enough.
Rule 2: if there are not, each gets one in order of deadline, oldest first; the newest wait.
Rule 3 (`packed`): an old version keeps the engines that its running requests need, gains one only for requests that
wait, and gives one back when the rest fits on one fewer and the newest needs it; until then fewer requests on more
engines end sooner. The newest gets all others.
Rule 4 (`proportional`, the paper's): engines in proportion to requests; requests may have to wait.

Plain rounding starves old versions: 8 engines, R = (100, 10, 2) rounds to (7, 1, 0) and the window never slides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Demand:
    """What a version asks for.

    `requests`: running or waiting; the newest also counts what could be opened. `live`: it has running or waiting ones.
    `keep`: engines that its running requests need; `want`: those that its running and waiting requests are to have (of
    the newest: with what could be opened); `held`: those that serve or load it.
    """

    version: int
    requests: int
    live: bool = True
    keep: int = 1
    want: int = 1
    held: int = 0


def engines_needed(requests: int, tokens: int, largest: int, seats: int, kv_tokens: int) -> int:
    """Engines that hold these requests for certain, in whatever order they come.

    `tokens`: KV of all, `largest`: of the largest one, `kv_tokens`: capacity of one engine. Whoever holds fewer than
    `slots` has room for one more. And who turns one away has all seats taken, or at least `full` tokens: so with more
    engines than can be the one or the other there is room.
    """
    if tokens <= kv_tokens:
        return -(-requests // seats)
    slots = max(1, min(seats, kv_tokens // largest))
    full = max(1, kv_tokens - largest + 1)
    return min(-(-requests // slots), (requests - 1) // seats + (tokens - 1) // full + 1)


def proportional(engines: int, demands: Sequence[Demand]) -> dict[int, int]:
    """Quota = engines x R_w / sum R; who has less than 1 gets 1 and leaves; largest remainder, ties to the newest."""
    short = _one_each(engines, demands)
    if short is not None:
        return short
    asking = [demand for demand in demands if demand.requests > 0]
    given: dict[int, int] = {}
    left = engines
    while True:
        total = sum(demand.requests for demand in asking)
        poor = [demand for demand in asking if left * demand.requests < total]
        if not poor:
            break
        for demand in poor:
            given[demand.version] = 1
        left -= len(poor)
        asking = [demand for demand in asking if demand.version not in given]
    quotas = [(demand.version, Fraction(left * demand.requests, total)) for demand in asking]
    for version, quota in quotas:
        given[version] = int(quota)
    spare = engines - sum(given.values())
    by_remainder = sorted(quotas, key=lambda item: (item[1] - int(item[1]), item[0]), reverse=True)
    for version, _ in by_remainder[:spare]:
        given[version] += 1
    return _complete(engines, demands, given)


def packed(engines: int, demands: Sequence[Demand]) -> dict[int, int]:
    """Old versions get what they need, oldest first, then keep what the newest does not need; the newest gets the rest,
    at least 1 if something of it lives."""
    short = _one_each(engines, demands)
    if short is not None:
        return short
    newest = demands[-1]
    olds = [demand for demand in demands[:-1] if demand.requests > 0]
    given = {demand.version: 1 for demand in olds}
    floor = 1 if newest.live and newest.requests > 0 else 0
    left = engines - len(olds) - floor
    for limit in ("keep", "want", "held"):
        if limit == "held":
            left -= max(0, newest.want - floor)
        for demand in olds:
            more = max(0, min(left, getattr(demand, limit) - given[demand.version]))
            given[demand.version] += more
            left -= more
    return _complete(engines, demands, given)


def _one_each(engines: int, demands: Sequence[Demand]) -> dict[int, int] | None:
    """Rule 2, or None if there are engines enough. Whoever has nothing running or waiting stands back."""
    lives = [demand.version for demand in demands if demand.requests > 0 and demand.live]
    others = [demand.version for demand in demands if demand.requests > 0 and not demand.live]
    asking = lives + others
    if not asking:
        return _complete(engines, demands, {})
    if len(asking) <= engines:
        return None
    return _complete(engines, demands, dict.fromkeys(asking[:engines], 1))


def _complete(engines: int, demands: Sequence[Demand], given: dict[int, int]) -> dict[int, int]:
    """What is over goes to the newest; every version is named."""
    result = {demand.version: given.get(demand.version, 0) for demand in demands}
    if demands:
        result[demands[-1].version] += engines - sum(result.values())
    return result
