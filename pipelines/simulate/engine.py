"""One engine in virtual time: seats, decoding, prefill, loading.

Rule 1: all running requests go at one pace, so the engine counts the tokens that each of them got (`progress`); a
request is done when `progress` reaches its own mark. Whatever changes the pace settles `progress` first.
Rule 2: while the engine prefills or takes KV in, nobody decodes.
Rule 3: a prompt is computed once for all samples of its group that come to this engine under one version.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from pipelines.simulate.cost import CostModel
from schemas import messages as m
from schemas.ids import RequestKey


@dataclass(slots=True, eq=False)
class Run:
    """A request inside: it came with `had` response tokens when `progress` stood at `base`; done at `mark`."""

    issue: m.Issue
    key: RequestKey
    length: int
    had: int
    base: float
    mark: float
    inside: bool = True


@dataclass(slots=True, eq=False)
class Engine:
    """One incarnation. Times in seconds; `at` is how far the books are settled, `stall` what prefill still takes."""

    cost: CostModel
    number: int
    incarnation: int
    at: float
    version: int | None = None
    loading: bool = False
    alive: bool = True
    busy: bool = False
    """The trainer trains."""
    progress: float = 0.0
    stall: float = 0.0
    decode_s: float = 0.0
    seat_s: float = 0.0
    stall_s: float = 0.0
    load_s: float = 0.0
    wake: int = 0
    """Counts plans; a planned waking of an older count is void."""
    running: dict[RequestKey, Run] = field(default_factory=dict)
    marks: list[tuple[float, int, Run]] = field(default_factory=list)
    came: int = 0
    prompts: set[int] = field(default_factory=set)

    def settle(self, now: float) -> None:
        """Bring `progress` to `now`."""
        spent, self.at = now - self.at, now
        if not spent or not self.running:
            return
        waited = min(spent, self.stall)
        self.stall -= waited
        self.stall_s += waited
        decoded = spent - waited
        self.decode_s += decoded
        self.seat_s += decoded * len(self.running)
        self.progress += decoded / self.cost.token_s(len(self.running), self.busy)

    def add(self, now: float, issue: m.Issue, *, prompt: int, length: int, had: int, carried: bool) -> None:
        """Take a request of `prompt` and in the end `length` response tokens; `had` of these came with it, `carried`:
        with their KV."""
        assert not self.loading, f"{issue} came while engine {self.number} loads"
        assert issue.host_version == self.version, f"{issue} on engine {self.number} of version {self.version}"
        self.settle(now)
        if carried:
            self.stall += self.cost.carry_s(prompt + had)
        else:
            known = issue.group in self.prompts
            self.stall += self.cost.prefill_s(had if known else prompt + had)
        self.prompts.add(issue.group)
        key = RequestKey(issue.group, issue.index, issue.attempt)
        run = Run(issue, key, length, had, self.progress, self.progress + length - had)
        self.running[key] = run
        self.came += 1
        heappush(self.marks, (run.mark, self.came, run))

    def due(self) -> float | None:
        """Seconds from `at` until the next request is done."""
        while self.marks and not self.marks[0][2].inside:
            heappop(self.marks)
        if not self.marks:
            return None
        left = max(0.0, self.marks[0][0] - self.progress)
        return self.stall + left * self.cost.token_s(len(self.running), self.busy)

    def done(self, now: float) -> list[Run]:
        """Requests that are done by `now`; they leave."""
        self.settle(now)
        ended = []
        while self.marks and self.marks[0][0] <= self.progress + 1e-6:
            run = heappop(self.marks)[2]
            if run.inside:
                ended.append(run)
                self._leave(run)
        return ended

    def take_out(self, now: float, key: RequestKey) -> Run | None:
        self.settle(now)
        run = self.running.get(key)
        if run is not None:
            self._leave(run)
        return run

    def tokens(self, run: Run) -> int:
        """Response tokens that a request has now, the last one still to come."""
        return min(run.length - 1, run.had + int(self.progress - run.base + 1e-6))

    def empty(self, now: float) -> list[Run]:
        """All requests leave, in the order in which they came; prompts are forgotten."""
        self.settle(now)
        left = list(self.running.values())
        self.running.clear()
        self.marks.clear()
        self.prompts.clear()
        self.stall = 0.0
        return left

    def _leave(self, run: Run) -> None:
        del self.running[run.key]
        run.inside = False
