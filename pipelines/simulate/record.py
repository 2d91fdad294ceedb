"""What a simulated run leaves behind: one entry per step, with running totals, and who hosted what when.

Rule 1: an entry is made when a step's version is announced; figures of a stretch of steps are differences of two.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from pipelines.simulate.engine import Engine
from schemas import messages as m


@dataclass(frozen=True, slots=True)
class Step:
    """Totals since the start when the version of a step was announced, `at` seconds. `lag`: groups by lag, this step's
    alone. `seat_s`: seconds of seats with a request that decodes."""

    at: float
    tokens: int
    lag: Counter[int]
    train_s: float
    decode_s: float
    seat_s: float
    stall_s: float
    load_s: float
    blocked_s: float
    moves: int


@dataclass(frozen=True, slots=True)
class Stay:
    """An engine served a version, seconds."""

    engine: int
    version: int
    began: float
    ended: float


@dataclass(slots=True)
class Tape:
    """The record of one run."""

    steps: list[Step] = field(default_factory=list)
    moves: int = 0
    tokens: int = 0
    train_s: float = 0.0
    lag: Counter[int] = field(default_factory=Counter)
    stays: list[Stay] = field(default_factory=list)
    serving: dict[int, tuple[int, float]] = field(default_factory=dict)
    """engine -> (version, since)."""
    gone: list[Engine] = field(default_factory=list)
    """Engines that were lost: what they did counts."""

    def chosen(self, batch: m.BatchRecord, tokens: int) -> None:
        """`tokens` = response tokens of the batch."""
        self.tokens += tokens
        self.lag = Counter(batch.step - version for _, version in batch.groups)

    def trained(self, at: float, train_s: float, engines: Iterable[Engine], blocked_s: float) -> None:
        """A step's version is announced. `engines`: those that are up; `blocked_s` since the start."""
        self.train_s += train_s
        there = [*engines, *self.gone]
        for engine in there:
            if engine.alive:
                engine.settle(at)
        self.steps.append(
            Step(
                at=at,
                tokens=self.tokens,
                lag=self.lag,
                train_s=self.train_s,
                decode_s=sum(engine.decode_s for engine in there),
                seat_s=sum(engine.seat_s for engine in there),
                stall_s=sum(engine.stall_s for engine in there),
                load_s=sum(engine.load_s for engine in there),
                blocked_s=blocked_s,
                moves=self.moves,
            )
        )

    def hosts(self, now: float, engine: int, version: int | None) -> None:
        """From now on; None: it loads, or is gone."""
        before = self.serving.pop(engine, None)
        if before is not None:
            self.stays.append(Stay(engine, before[0], before[1], now))
        if version is not None:
            self.serving[engine] = (version, now)

    def close(self, now: float) -> None:
        for engine in list(self.serving):
            self.hosts(now, engine, None)
        self.gone.clear()

    def since(self, first: int) -> Step:
        """What the steps from `first` on took together: `at` is then their seconds, `lag` that of all of them."""
        last, lag = self.steps[-1], Counter[int]()
        for step in self.steps[first:]:
            lag.update(step.lag)
        if not first:
            return replace(last, lag=lag)
        before = self.steps[first - 1]
        sums = {f.name: getattr(last, f.name) - getattr(before, f.name) for f in fields(Step) if f.name != "lag"}
        return Step(lag=lag, **sums)
