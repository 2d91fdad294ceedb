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
from heapq import heappop, heappush

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


class Fleet:
    """All engines that are up."""

    def __init__(self) -> None:
        self.engines: dict[int, Engine] = {}
        self.dead: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self.roomy: dict[int, dict[int, Engine]] = {}
        """version -> engines that serve it and have a free seat."""
        self.heaps: dict[int, list[tuple[int, int]]] = {}
        """version -> heap of (-free KV, engine); an entry that is no longer so is dropped when it is met."""
        self.limit = 0

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
        self._see_limit()
        self._see(engine)

    def lose(self, engine: Engine) -> None:
        """Forget the engine; no later word of this incarnation or an older one is heard."""
        del self.engines[engine.number]
        self.dead[engine.number] = engine.incarnation
        self._see_limit()
        self._see(engine, gone=True)

    def swap(self, engine: Engine, version: int, since: int) -> None:
        """The engine is told to load `version`."""
        assert engine.loading is None, f"engine {engine.number} loads {engine.loading} already"
        engine.loading, engine.loading_since = version, since
        self._see(engine)

    def hosted(self, engine: Engine) -> list[RequestKey]:
        """The engine serves what it was told to load: all seats are free. Returns what it never answered for."""
        assert engine.loading is not None
        self._see(engine, gone=True)
        engine.version, engine.loading = engine.loading, None
        unanswered = list(engine.booked)
        engine.booked.clear()
        engine.tokens = 0
        self._see(engine)
        return unanswered

    def book(self, engine: Engine, key: RequestKey, tokens: int) -> int:
        """Take a seat and KV; returns the sequence of this issue."""
        assert engine.loading is None, f"{key}: engine {engine.number} loads"
        assert key not in engine.booked, f"{key} is on engine {engine.number} already"
        engine.booked[key] = tokens
        engine.tokens += tokens
        assert within_capacity(len(engine.booked), engine.seats, engine.tokens, engine.kv_tokens_max), engine.number
        engine.issued = self.sequences[engine.number] = self.sequences.get(engine.number, -1) + 1
        self._see(engine)
        return engine.issued

    def release(self, engine: Engine, key: RequestKey) -> bool:
        """Give the seat back; False if it was not taken."""
        tokens = engine.booked.pop(key, None)
        if tokens is None:
            return False
        engine.tokens -= tokens
        self._see(engine)
        return True

    def _see(self, engine: Engine, gone: bool = False) -> None:
        """Keep `roomy` true."""
        if engine.version is None:
            return
        there = self.roomy.setdefault(engine.version, {})
        if gone or engine.loading is not None or len(engine.booked) == engine.seats:
            there.pop(engine.number, None)
        else:
            there[engine.number] = engine
            heap = self.heaps.setdefault(engine.version, [])
            heappush(heap, (engine.tokens - engine.kv_tokens_max, engine.number))
            if len(heap) > HEAP_FACTOR * (len(there) + HEAP_FACTOR):
                heap[:] = sorted((e.tokens - e.kv_tokens_max, e.number) for e in there.values())

    def _see_limit(self) -> None:
        limits = (min(engine.kv_tokens_max, engine.tokens_per_request_max) for engine in self.engines.values())
        self.limit = min(limits, default=0)

    def forget(self, version: int) -> None:
        """Nothing of the version will be asked for again."""
        self.roomy.pop(version, None)
        self.heaps.pop(version, None)

    # --- questions ----------------------------------------------------------------------------

    def serves(self, version: int) -> bool:
        return any(engine.version == version and engine.loading is None for engine in self.engines.values())

    def has_free_seat(self, version: int) -> bool:
        return bool(self.roomy.get(version))

    def in_use(self, version: int) -> bool:
        """An engine serves, loads, or still reads requests of the version."""
        return any(version in (engine.version, engine.loading) for engine in self.engines.values())

    def free_seats(self) -> int:
        return sum(engine.free_seats for engine in self.engines.values())

    def booked(self) -> int:
        return sum(len(engine.booked) for engine in self.engines.values())

    def hosted_versions(self) -> int:
        return len({engine.version for engine in self.engines.values() if engine.version is not None})

    def request_limit(self) -> int:
        """Tokens of the longest request that every engine can hold; 0 without engines."""
        return self.limit

    def held(self, version: int) -> list[Engine]:
        """Engines that serve or load the version."""
        return [engine for engine in self.engines.values() if engine.target == version]

    def pick(self, version: int, tokens: int, siblings: Iterable[int]) -> Engine | None:
        """Rule 3, or None if nobody has room. `siblings` = numbers of engines that hold requests of the group."""
        roomy = self.roomy.get(version, {})
        for number in siblings:
            engine = roomy.get(number)
            if engine is not None and engine.kv_tokens_max - engine.tokens >= tokens:
                return engine
        heap = self.heaps.get(version, [])
        while heap:
            full, number = heap[0]
            best = roomy.get(number)
            if best is not None and best.tokens - best.kv_tokens_max == full:
                return best if -full >= tokens else None
            heappop(heap)
        return None

    def switches(self, targets: Mapping[int, int]) -> list[tuple[Engine, int]]:
        """Who switches to which version so that each gets its number of engines. Oldest versions are served first."""
        have: dict[int | None, int] = {}
        for engine in self.engines.values():
            have[engine.target] = have.get(engine.target, 0) + 1
        loading = Counter(engine.loading for engine in self.engines.values())
        over = {v: count - loading[v] - targets.get(v, 0) for v, count in have.items() if v is not None}
        idle = [e for e in self.engines.values() if e.target is None]
        busy = [e for e in self.engines.values() if e.loading is None and over.get(e.version or 0, 0) > 0]
        givers = sorted(idle, key=lambda e: e.number)
        for engine in sorted((e for e in busy if e.version is not None), key=lambda e: (e.tokens, e.number)):
            assert engine.version is not None
            if over[engine.version] > 0:
                over[engine.version] -= 1
                givers.append(engine)
        wanted = [v for v in sorted(targets) for _ in range(targets[v] - have.get(v, 0))]
        return list(zip(givers, wanted, strict=False))
