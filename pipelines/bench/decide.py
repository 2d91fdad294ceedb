"""How long the orchestrator's mind thinks: up to 4,096 engines and 400,000 live requests, steady churn, publications.

Each row is one mind. It is filled, then requests end one by one and are scored (samples of a group live about as long
as each other), batches are chosen and trained, versions are published, engines swap and hand requests back; every event
is timed alone, in CPU seconds (the mind only computes; who else runs on the machine does not count). No log, no
process. After a publication engines load, hand requests back and fill up: what all those events take together is
`burst_ms_worst`. The garbage collector is set as in the orchestrator: a full collection in the middle of an event was
its worst time by far. Memory is that of the mind's own objects (tracemalloc), in a run of its own that is not timed.
"""

import gc
import heapq
import random
import statistics
import tracemalloc
from collections import deque
from typing import Any

from pipelines.bench.benchmarks import Bench
from schemas import messages as m
from schemas.ids import Position
from schemas.settings import Settings
from workers.orchestrator.state import Mind
from workers.runtime import clock
from workers.runtime.collector import no_full_collections

ENGINES = (64, 256, 1024, 4096)
REQUESTS = (10_000, 100_000, 400_000)
GROUP_SIZE = 16
LIVE_FACTOR = 16
"""Batches that are live at once; K as large, so that many versions share the engines."""
GROUPS_PER_SEATS = 1.5
"""Groups may be live for so many times the seats: seats stay full while groups wait for their last samples."""
PUBLICATIONS = 3
EVENTS_PER_POLL = 50
POLL_US = 100_000
PROMPT, NEW_MAX = 200, 2_000
MEMORY_AT = (256, 50_000)
SEED = 0


def measure() -> Bench:
    rows = [row(engines, requests) for requests in REQUESTS for engines in ENGINES]
    by = {(one["engines"], one["requests"]): one for one in rows}
    most, few, many = by[1024, 100_000], by[256, 100_000], by[4096, 100_000]
    figures = {
        "p99_ms_1024_engines_100k_requests": most["p99_ms"],
        "publication_ms_worst_1024_engines_100k_requests": most["publication_ms_worst"],
        "publication_ms_worst": max(one["publication_ms_worst"] for one in rows),
        "p99_growth_256_to_4096_engines": round(many["p99_ms"] / few["p99_ms"], 2),
        "mean_growth_256_to_4096_engines": round(many["mean_ms"] / few["mean_ms"], 2),
        "publication_growth_256_to_4096_engines": round(many["publication_ms_worst"] / few["publication_ms_worst"], 2),
        "bytes_per_live_request": bytes_per_request(*MEMORY_AT),
    }
    return Bench(rows, figures)


def row(engines: int, requests: int) -> dict[str, Any]:
    """Milliseconds of one event (mean, p99, worst) between the publications, and of one publication (worst)."""
    life = _Life(engines, requests)
    life.fill()
    gc.collect()
    gc.freeze()
    life.timed = True
    with no_full_collections():
        life.go_on(PUBLICATIONS)
    gc.unfreeze()
    times = sorted(life.events_s)
    return {
        "engines": engines,
        "requests": requests,
        "running": life.mind.fleet.booked,
        "versions_live": int(life.mind.figures()["versions_live"]),
        "events": len(times),
        "mean_ms": round(1e3 * statistics.fmean(times), 4),
        "p99_ms": round(1e3 * times[int(0.99 * len(times))], 4),
        "worst_ms": round(1e3 * times[-1], 2),
        "publication_ms_worst": round(1e3 * max(life.publications_s), 2),
        "burst_ms_worst": round(1e3 * max(life.bursts_s), 1),
    }


def bytes_per_request(engines: int, requests: int) -> int:
    """Of the whole mind, engines included, over its live requests."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    life = _Life(engines, requests)
    life.fill()
    life.running.clear()
    life.ends.clear()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round((after - before) / life.mind.fleet.booked)


class _Life:
    """A mind and just enough of a world: what it says is answered at once, in order."""

    def __init__(self, engines: int, requests: int) -> None:
        groups = requests // GROUP_SIZE
        seats = -(-requests // engines)
        self.mind = Mind(_settings(engines, seats, max(1, int(groups * GROUPS_PER_SEATS / LIVE_FACTOR))))
        self.engines, self.seats = engines, seats
        self.rng = random.Random(SEED)
        self.ends: list[tuple[float, int, int, int]] = []
        """Heap of (end, group, index, attempt), counted in requests that ended; one of an older attempt is void."""
        self.running: dict[tuple[int, int], m.Issue] = {}
        self.lives: dict[int, float] = {}
        """Of a group, in mean lives."""
        self.ended = 0
        self.on_engine: dict[int, set[tuple[int, int]]] = {number: set() for number in range(engines)}
        self.coming: deque[m.Event] = deque()
        self.batches: deque[m.BatchRecord] = deque()
        self.rows = 0
        self.now = 0
        self.timed = False
        self.events_s: list[float] = []
        self.publications_s: list[float] = []
        self.bursts_s: list[float] = []

    def fill(self) -> None:
        """Version 0, all engines, and as many requests as may live."""
        self._hear(m.Tick(now=0))
        self._hear(m.RunStarted(steps=1_000_000))
        self._hear(m.WeightsArrived(version=0, groups=(), fingerprint="0"))
        kv_tokens = self.seats * (PROMPT + NEW_MAX)
        limits = {"seats": self.seats, "kv_tokens_max": kv_tokens, "tokens_per_request_max": PROMPT + NEW_MAX}
        for number in range(self.engines):
            self._hear(m.Joined(engine=number, incarnation=0, host="here", **limits))
        self._drain()

    def go_on(self, publications: int) -> None:
        """Requests end until so many versions were published; each as soon as its batch is there."""
        published = 0
        while published < publications:
            for _ in range(EVENTS_PER_POLL):
                self._end_one()
            self.now += POLL_US
            self._hear(m.Tick(now=self.now))
            if self.batches:
                batch = self.batches.popleft()
                word = m.WeightsArrived(version=batch.step + 1, groups=batch.groups, fingerprint="1")
                self.publications_s.append(self._hear(word))
                self.bursts_s.append(self.publications_s[-1] + self._drain())
                published += 1
            self._drain()

    def _end_one(self) -> None:
        _, *key, attempt = heapq.heappop(self.ends)
        issue = self.running.get((key[0], key[1]))
        if issue is None or issue.attempt != attempt:
            return
        self._take(issue)
        self.ended += 1
        names = {"group": issue.group, "index": issue.index, "attempt": issue.attempt}
        where = {"engine": issue.engine, "incarnation": 0}
        self._hear(m.Finished(**where, **names, tokens=NEW_MAX, finish_reason="stop"))
        verdict = {"reward": 1.0, "outcome": 1.0, "error": None, "partition": 0, "offset": 0, "row": 0}
        self._hear(m.Scored(**names, **verdict, version=issue.version, purpose="train"))

    def _begin(self, issue: m.Issue) -> None:
        """It runs; what was running when all began, or moved, has already had a part of its life."""
        self.running[issue.group, issue.index] = issue
        self.on_engine[issue.engine].add((issue.group, issue.index))
        life = self.lives.setdefault(issue.group, 2 * self.rng.random()) * self.rng.uniform(0.8, 1.2)
        if issue.attempt or not self.timed:
            life *= self.rng.random()
        end = self.ended + life * self.engines * self.seats
        heapq.heappush(self.ends, (end, issue.group, issue.index, issue.attempt))

    def _take(self, issue: m.Issue) -> None:
        del self.running[issue.group, issue.index]
        self.on_engine[issue.engine].discard((issue.group, issue.index))

    def _drain(self) -> float:
        """Seconds of all answers that wait, and of the answers to what they bring."""
        spent = 0.0
        while self.coming:
            spent += self._hear(self.coming.popleft())
        return spent

    def _hear(self, event: m.Event) -> float:
        began = clock.cpu_s()
        effects = self.mind.on(event)
        spent = clock.cpu_s() - began
        if self.timed and not isinstance(event, m.WeightsArrived):
            self.events_s.append(spent)
        for effect in effects:
            self._answer(effect)
        return spent

    def _answer(self, effect: m.Effect) -> None:
        match effect:
            case m.Issue():
                self._begin(effect)
            case m.Swap():
                for key in sorted(self.on_engine[effect.engine]):
                    self._hand_back(self.running[key])
                names = {"engine": effect.engine, "incarnation": 0, "version": effect.version}
                self.coming.append(m.Hosting(**names, fingerprint="1", load_s=0.0))
            case m.BatchRecord():
                self.batches.append(effect)
            case m.WantPrompts():
                limits = {"prompt_tokens": PROMPT, "max_new_tokens": NEW_MAX}
                for number in range(self.rows, effect.rows):
                    self.coming.append(m.PromptArrived(row=number, purpose="train", **limits))
                self.rows = max(self.rows, effect.rows)
            case _:
                pass

    def _hand_back(self, issue: m.Issue) -> None:
        self._take(issue)
        names = {"group": issue.group, "index": issue.index, "attempt": issue.attempt, "version": issue.version}
        where = {"engine": issue.engine, "incarnation": 0, "reason": "moved"}
        self.coming.append(m.PartialArrived(**names, **where, tokens=1, at=Position("partials", 0, 0)))


def _settings(engines: int, seats: int, groups: int) -> Settings:
    return Settings.model_validate(
        {
            "name": "decide",
            "model": "none",
            "steps": 1_000_000,
            "group_size": GROUP_SIZE,
            "groups_per_batch": groups,
            "staleness_max": LIVE_FACTOR,
            "engines": {"count": engines, "seats": seats, "timeout_s": 1e9, "request_timeout_s": 1e9},
            "scheduling": {"live_factor": LIVE_FACTOR},
            "dataset": [{"path": "none.jsonl"}],
        }
    )
