"""The books of the engines: who hosts what, what is taken, who takes a request, who switches.

Rule 1: an engine is told to run a request only if a seat and KV for prompt and whole response are free in the books
(I7). They stay booked until the engine answers for that request, or says that it hosts another version.
Rule 2: an engine that loads gets no requests and is not switched again.
Rule 3: a request goes to an engine of its version that holds siblings of it, else to the one with most free KV.
Rule 4: engines without a version switch first, then those with the least live KV among the over-allocated versions. An
engine that still loads such a version has the least: it is waited for, so no request moves to where nobody serves yet.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest

from schemas.ids import RequestKey
from schemas.invariants import within_capacity
from schemas.messages import Joined

HEAP_FACTOR = 8
"""A heap with so many outdated entries to each true one is built anew."""


@dataclass(slots=True, eq=False)
class Engine:
    """One incarnation. `version` is what it serves, or served until it `loading`s another. `heard` and `loading_since`
    are on the mind's patience clock, microseconds; `issued` is the sequence of the last request it got, -1 for none."""

    number: int
    incarnation: int
    seats: int
    kv_tokens_max: int
    tokens_per_request_max: int
    heard: int
    version: int | None = None
    loading: int | None = None
    loading_since: int = 0
    issued: int = -1
    tokens: int = 0
    booked: dict[RequestKey, int] = field(default_factory=dict)

    @property
    def target(self) -> int | None:
        return self.version if self.loading is None else self.loading

    @property
    def free_seats(self) -> int:
        return self.seats - len(self.booked)


@dataclass(slots=True)
class Hosts:
    """The engines of one version, and the sums over those that serve it."""

    serving: dict[int, Engine] = field(default_factory=dict)
    loading: int = 0
    leaving: int = 0
    """Engines that load another one, and may still read requests of this one."""
    requests: int = 0
    tokens: int = 0
    roomy: dict[int, Engine] = field(default_factory=dict)
    """Those of `serving` that have a free seat."""
    heap: list[tuple[int, int]] = field(default_factory=list)
    """(-free KV, engine) of the roomy ones; an entry that is no longer so is dropped when it is met."""


NOBODY = Hosts()


class Fleet:
    """All engines that are up. Sums are kept at each change, never recounted: an event costs what it touches."""

    def __init__(self) -> None:
        self.engines: dict[int, Engine] = {}
        self.dead: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self.hosts: dict[int, Hosts] = {}
        self.idle: dict[int, Engine] = {}
        """Engines that serve nothing and load nothing."""
        self.limits: Counter[tuple[int, int, int]] = Counter()
        """(seats, KV of the engine, KV of a request) -> engines."""
        self.seats = 0
        self.booked = 0

    def known(self, number: int | None, incarnation: int | None) -> Engine | None:
        """The engine, if this is the incarnation that the books are about."""
        engine = None if number is None else self.engines.get(number)
        return engine if engine is not None and engine.incarnation == incarnation else None

    def join(self, word: Joined, heard: int) -> None:
        assert word.engine not in self.engines, f"engine {word.engine} is up already"
        limits = (word.seats, word.kv_tokens_max, word.tokens_per_request_max)
        self.put(Engine(word.engine, word.incarnation, *limits, heard=heard))

    def put(self, engine: Engine) -> None:
        """Take an engine in, as it is: new, or out of a snapshot."""
        self.engines[engine.number] = engine
        self._count(engine, 1)

    def lose(self, engine: Engine) -> None:
        """Forget the engine; no later word of this incarnation or an older one is heard."""
        self._count(engine, -1)
        del self.engines[engine.number]
        self.dead[engine.number] = engine.incarnation

    def swap(self, engine: Engine, version: int, since: int) -> None:
        """The engine is told to load `version`."""
        assert engine.loading is None, f"engine {engine.number} loads {engine.loading} already"
        self._count(engine, -1)
        engine.loading, engine.loading_since = version, since
        self._count(engine, 1)

    def hosted(self, engine: Engine) -> list[RequestKey]:
        """The engine serves what it was told to load: all seats are free. Returns what it never answered for."""
        assert engine.loading is not None
        self._count(engine, -1)
        engine.version, engine.loading = engine.loading, None
        unanswered = list(engine.booked)
        engine.booked.clear()
        engine.tokens = 0
        self._count(engine, 1)
        return unanswered

    def book(self, engine: Engine, key: RequestKey, tokens: int) -> int:
        """Take a seat and KV; returns the sequence of this issue."""
        assert engine.loading is None, f"{key}: engine {engine.number} loads"
        assert key not in engine.booked, f"{key} is on engine {engine.number} already"
        engine.booked[key] = tokens
        self._change(engine, 1, tokens)
        assert within_capacity(len(engine.booked), engine.seats, engine.tokens, engine.kv_tokens_max), engine.number
        engine.issued = self.sequences[engine.number] = self.sequences.get(engine.number, -1) + 1
        return engine.issued

    def release(self, engine: Engine, key: RequestKey) -> bool:
        """Give the seat back; False if it was not taken."""
        tokens = engine.booked.pop(key, None)
        if tokens is None:
            return False
        self._change(engine, -1, -tokens)
        return True

    def _change(self, engine: Engine, requests: int, tokens: int) -> None:
        """A request was added, or taken away."""
        engine.tokens += tokens
        self.booked += requests
        if engine.version is not None and engine.loading is None:
            hosts = self.hosts[engine.version]
            hosts.requests += requests
            hosts.tokens += tokens
            self._see(hosts, engine)

    def _count(self, engine: Engine, sign: int) -> None:
        """Count the engine in, as it is, or out (-1)."""
        self.seats += sign * engine.seats
        self.booked += sign * len(engine.booked)
        limits = (engine.seats, engine.kv_tokens_max, engine.tokens_per_request_max)
        self.limits[limits] += sign
        if not self.limits[limits]:
            del self.limits[limits]
        if engine.loading is not None:
            self._of(engine.loading).loading += sign
            if engine.version is not None:
                self._of(engine.version).leaving += sign
        elif engine.version is None:
            _member(self.idle, engine, sign > 0)
        else:
            hosts = self._of(engine.version)
            _member(hosts.serving, engine, sign > 0)
            hosts.requests += sign * len(engine.booked)
            hosts.tokens += sign * engine.tokens
            self._see(hosts, engine, gone=sign < 0)

    def _see(self, hosts: Hosts, engine: Engine, gone: bool = False) -> None:
        """Keep `roomy` true."""
        if gone or len(engine.booked) == engine.seats:
            hosts.roomy.pop(engine.number, None)
            return
        hosts.roomy[engine.number] = engine
        heappush(hosts.heap, (engine.tokens - engine.kv_tokens_max, engine.number))
        if len(hosts.heap) > HEAP_FACTOR * (len(hosts.roomy) + HEAP_FACTOR):
            hosts.heap = sorted((e.tokens - e.kv_tokens_max, e.number) for e in hosts.roomy.values())

    def _of(self, version: int) -> Hosts:
        return self.hosts.setdefault(version, Hosts())

    def forget(self, version: int) -> None:
        """Nothing of the version will be asked for again."""
        self.hosts.pop(version, None)

    # --- questions ----------------------------------------------------------------------------

    def of(self, version: int) -> Hosts:
        """To look at, not to change."""
        return self.hosts.get(version, NOBODY)

    def has_free_seat(self, version: int) -> bool:
        return bool(self.of(version).roomy)

    def in_use(self, version: int) -> bool:
        """An engine serves, loads, or still reads requests of the version."""
        hosts = self.of(version)
        return bool(hosts.serving or hosts.loading or hosts.leaving)

    def free_seats(self) -> int:
        return self.seats - self.booked

    def hosted_versions(self) -> int:
        """Versions that an engine serves, or did until it loaded another."""
        return sum(bool(hosts.serving or hosts.leaving) for hosts in self.hosts.values())

    def smallest(self) -> tuple[int, int]:
        """Seats and KV that every engine has; there must be one."""
        return min(seats for seats, _, _ in self.limits), min(kv_tokens for _, kv_tokens, _ in self.limits)

    def request_limit(self) -> int:
        """Tokens of the longest request that every engine can hold; 0 without engines."""
        return min((min(limits[1:]) for limits in self.limits), default=0)

    def held(self, version: int) -> int:
        """Engines that serve or load the version."""
        hosts = self.of(version)
        return len(hosts.serving) + hosts.loading

    def pick(self, version: int, tokens: int, siblings: Iterable[int]) -> Engine | None:
        """Rule 3, or None if nobody has room. `siblings` = numbers of engines that hold requests of the group."""
        roomy, heap = self.of(version).roomy, self.of(version).heap
        for number in siblings:
            engine = roomy.get(number)
            if engine is not None and engine.kv_tokens_max - engine.tokens >= tokens:
                return engine
        while heap:
            full, number = heap[0]
            best = roomy.get(number)
            if best is not None and best.tokens - best.kv_tokens_max == full:
                return best if -full >= tokens else None
            heappop(heap)
        return None

    def switches(self, targets: Mapping[int, int]) -> list[tuple[Engine, int]]:
        """Who switches to which version so that each gets its number of engines. Oldest versions are served first."""
        wanted = [v for v in sorted(targets) for _ in range(targets[v] - self.held(v))]
        if not wanted:
            return []
        givers = sorted(self.idle.values(), key=lambda e: e.number)
        spare: list[Engine] = []
        for version, hosts in self.hosts.items():
            over = len(hosts.serving) - targets.get(version, 0)
            spare += nsmallest(over, hosts.serving.values(), key=_weight)
        givers += sorted(spare, key=_weight)
        return list(zip(givers, wanted, strict=False))


def _weight(engine: Engine) -> tuple[int, int]:
    """Who has the least live KV switches first."""
    return engine.tokens, engine.number


def _member(engines: dict[int, Engine], engine: Engine, is_in: bool) -> None:
    if is_in:
        engines[engine.number] = engine
    else:
        del engines[engine.number]
