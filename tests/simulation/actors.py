"""Who lives in the simulated world beside the orchestrator: engines, trainer, reward, prompts.

They are slow, they die, freeze, wake up again and repeat themselves. Commands and requests reach an engine on
two ways of different speed; so do its partials and its other words on their way back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schemas import messages as m
from schemas.ids import Position, RequestKey

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(eq=False)
class Run:
    """A request in an engine: `had` tokens when it came, `length` when it will be done; None = never."""

    issue: m.Issue
    had: int
    length: int | None
    started: float


@dataclass(eq=False)
class EngineActor:
    """One incarnation of one engine."""

    world: World
    number: int
    incarnation: int
    speed: float
    alive: bool = True
    frozen_until: float = 0.0
    version: int | None = None
    loading: bool = False
    seen: int = -1
    skip: int = -1
    running: dict[RequestKey, Run] = field(default_factory=dict)
    queued: list[m.Issue] = field(default_factory=list)
    mail: dict[int, list[m.Issue]] = field(default_factory=dict)
    commands: deque[m.Swap | m.Stop] = field(default_factory=deque)
    early: dict[RequestKey, bool] = field(default_factory=dict)
    stops_coming: set[RequestKey] = field(default_factory=set)

    def join(self) -> None:
        settings, drawn = self.world.settings, self.world.drawn
        self.say(
            m.Joined(
                engine=self.number,
                incarnation=self.incarnation,
                host="here",
                seats=settings.engines.seats,
                kv_tokens_max=drawn.kv_tokens_max,
                tokens_per_request_max=drawn.tokens_per_request_max,
            )
        )
        self.beat()

    def beat(self) -> None:
        if not self.alive:
            return
        if not self.wait_if_frozen(self.beat):
            where = {"engine": self.number, "incarnation": self.incarnation, "version": self.version}
            self.say(m.Heartbeat(**where, running=len(self.running), waiting=len(self.queued), kv_tokens=0))
            self.world.at(self.world.settings.engines.timeout_s / 3, self.beat)

    def say(self, word: m.Event) -> None:
        self.world.say(("status", self.number, self.incarnation), word)

    def wait_if_frozen(self, again: object) -> bool:
        """True if the engine is frozen; `again` is then called when it wakes."""
        if self.frozen_until <= self.world.now:
            return False
        self.world.at(self.frozen_until - self.world.now, again)  # type: ignore[arg-type]
        return True

    # --- what it is told ---------------------------------------------------------------------

    def command(self, word: m.Swap | m.Stop) -> None:
        if self.alive and not self.wait_if_frozen(lambda: self.command(word)):
            self.commands.append(word)
            self.pump()

    def request(self, issue: m.Issue) -> None:
        if not self.alive or self.wait_if_frozen(lambda: self.request(issue)):
            return
        self.seen = max(self.seen, issue.sequence)
        self.mail.setdefault(issue.host_version, []).append(issue)
        self.pump()

    def pump(self) -> None:
        while not self.loading:
            self.take_mail()
            if not self.commands:
                return
            word = self.commands[0]
            if isinstance(word, m.Stop):
                self.commands.popleft()
                for key in word.requests:
                    self.stops_coming.discard(key)
                    if not self.take_out(key, word.keep):
                        self.early[key] = word.keep
            elif self.seen >= word.after_sequence:
                self.commands.popleft()
                self.swap(word)
            else:
                return

    def take_mail(self) -> None:
        for issue in self.mail.pop(self.version, []) if self.version is not None else []:
            if issue.sequence <= self.skip:
                continue
            key = RequestKey(issue.group, issue.index, issue.attempt)
            if key in self.early:
                if self.early.pop(key):
                    self.hand_back(issue, self.world.tokens_of(issue))
                continue
            self.queued.append(issue)
            self.world.checker.truth_holds(self.number, self.holds(), self.stops_coming)
            self.fill()

    def holds(self) -> list[RequestKey]:
        return [*self.running, *(RequestKey(i.group, i.index, i.attempt) for i in self.queued)]

    def fill(self) -> None:
        while self.queued and len(self.running) < self.world.settings.engines.seats:
            self.start(self.queued.pop(0))

    def start(self, issue: m.Issue) -> None:
        world, key = self.world, RequestKey(issue.group, issue.index, issue.attempt)
        assert issue.host_version == self.version, f"{key} for {issue.host_version} on {self.version} (I4)"
        if world.chance(0.01):
            world.say(("status", self.number, self.incarnation), m.Refused(**self.about(issue), reason="not hosted"))
            return
        had = world.tokens_of(issue)
        run = Run(issue, had, world.length_of(issue), world.now)
        self.running[key] = run
        self.say(m.Started(engine=self.number, incarnation=self.incarnation, requests=(key,)))
        if world.chance(0.02):
            world.at(world.rng.random() * 5, lambda: self.fail(key, run))
        elif world.chance(0.02):
            world.at(world.rng.random() * 5, lambda: self.snapshot(key, run))
        if run.length is not None:
            world.at((run.length - had) / self.speed, lambda: self.finish(key, run))

    def about(self, issue: m.Issue) -> dict[str, int]:
        place = {"engine": self.number, "incarnation": self.incarnation}
        return {**place, "group": issue.group, "index": issue.index, "attempt": issue.attempt}

    # --- what becomes of a request --------------------------------------------------------------

    def runs(self, key: RequestKey, run: Run) -> bool:
        return self.alive and self.running.get(key) is run

    def finish(self, key: RequestKey, run: Run) -> None:
        if not self.runs(key, run) or self.wait_if_frozen(lambda: self.finish(key, run)):
            return
        del self.running[key]
        assert run.length is not None
        self.world.reward.completed(run.issue, run.length)
        self.say(m.Finished(**self.about(run.issue), tokens=run.length, finish_reason="stop"))
        self.fill()

    def fail(self, key: RequestKey, run: Run) -> None:
        if self.runs(key, run) and not self.wait_if_frozen(lambda: self.fail(key, run)):
            del self.running[key]
            self.say(m.Failed(**self.about(run.issue), reason="the engine says no"))
            self.fill()

    def snapshot(self, key: RequestKey, run: Run) -> None:
        if self.runs(key, run) and not self.wait_if_frozen(lambda: self.snapshot(key, run)):
            self.hand_back(run.issue, self.tokens(run), "snapshot")

    def tokens(self, run: Run) -> int:
        grown = run.had + int((self.world.now - run.started) * self.speed)
        limit = self.world.row_of(run.issue).max_new_tokens if run.length is None else run.length
        return max(run.had, min(grown, limit - 1))

    def take_out(self, key: RequestKey, keep: bool) -> bool:
        run = self.running.pop(key, None)
        if run is not None:
            if keep:
                self.hand_back(run.issue, self.tokens(run))
            self.fill()
            return True
        for issue in self.queued:
            if RequestKey(issue.group, issue.index, issue.attempt) == key:
                self.queued.remove(issue)
                if keep:
                    self.hand_back(issue, self.world.tokens_of(issue))
                return True
        return False

    def hand_back(self, issue: m.Issue, tokens: int, reason: m.StopReason = "moved") -> None:
        at = self.world.keep_partial(issue, tokens)
        word = m.PartialArrived(**self.about(issue), version=issue.version, reason=reason, tokens=tokens, at=at)
        self.world.say(("partials", self.number, self.incarnation), word)

    def swap(self, word: m.Swap) -> None:
        queued, self.queued = self.queued, []
        for issue in queued:
            self.hand_back(issue, self.world.tokens_of(issue))
        for run in list(self.running.values()):
            self.hand_back(run.issue, self.tokens(run))
        self.running.clear()
        self.loading, self.version, self.skip = True, None, word.after_sequence
        stuck = 1000.0 if self.world.chance(0.03) else 0.0
        self.world.at(self.world.drawn.load_s * self.world.rng.uniform(0.5, 2.0) + stuck, lambda: self.loaded(word))

    def loaded(self, word: m.Swap) -> None:
        if self.alive and not self.wait_if_frozen(lambda: self.loaded(word)):
            self.loading, self.version = False, word.version
            where = {"engine": self.number, "incarnation": self.incarnation}
            self.say(m.Hosting(**where, version=word.version, fingerprint=f"f{word.version}", load_s=1.0))
            self.pump()


class TrainerActor:
    """One step at a time; sometimes it starts again and is late; it may say a version twice."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kept: list[int] = []

    def begin(self) -> None:
        self.publish(0, ())

    def batch(self, batch: m.BatchRecord) -> None:
        late = 60.0 if self.world.chance(0.1) else 0.0
        seconds = self.world.drawn.step_s * self.world.rng.uniform(0.5, 1.5) + late
        self.world.at(seconds, lambda: self.publish(batch.step + 1, batch.groups))

    def publish(self, version: int, groups: tuple[tuple[int, int], ...]) -> None:
        self.world.say(("weights", 0, 0), m.WeightsArrived(version=version, groups=groups, fingerprint=f"f{version}"))
        if version and self.world.rng.random() < 0.5:
            self.kept = [*self.kept, version][-2:]
            self.world.say(("status", -1, 0), m.CheckpointSaved(version=version, kept=tuple(self.kept)))


class RewardActor:
    """Scores rows; a row may be scored twice (at least once), then the second one lies elsewhere."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows: dict[tuple[int, int, int], tuple[RequestKey, int, int]] = {}
        self.late_until = 0.0

    def completed(self, issue: m.Issue, tokens: int) -> None:
        world = self.world
        if world.chance(0.02):
            self.late_until = world.now + 20.0
        delay = max(0.0, self.late_until - world.now) + world.rng.random() * 3
        for _ in range(2 if world.chance(0.1) else 1):
            world.at(delay, lambda: self.score(issue, tokens))

    def score(self, issue: m.Issue, tokens: int) -> None:
        world, key = self.world, RequestKey(issue.group, issue.index, issue.attempt)
        sender = ("status", -2, issue.group % 4)
        names = {"group": key.group, "index": key.index, "attempt": key.attempt}
        if world.chance(0.01):
            world.say(sender, m.Failed(engine=None, incarnation=None, **names, reason="bad row"))
            return
        place = (issue.group % 4, len(self.rows), 0)
        self.rows[place] = (key, issue.version, tokens)
        error = "the grader was killed" if world.chance(0.02) else None
        outcome = None if error else world.outcome_of(issue)
        where = {"version": issue.version, "purpose": issue.purpose, "error": error}
        there = {"partition": place[0], "offset": place[1], "row": place[2]}
        world.say(sender, m.Scored(**names, **where, **there, reward=outcome, outcome=outcome))


class PromptsActor:
    """Writes rows up to what is wanted, then says that there are no more."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows: list[m.PromptArrived] = []

    def want(self, rows: int) -> None:
        drawn = self.world.drawn
        while len(self.rows) < min(rows, drawn.rows_max):
            number, training = len(self.rows), len(drawn.rows) - drawn.eval_rows
            row = drawn.rows[number if number < len(drawn.rows) else drawn.eval_rows + number % training]
            self.rows.append(row.model_copy(update={"row": number}))
            self.world.say(("prompts", 0, 0), self.rows[-1])
        if rows >= drawn.rows_max:
            self.world.say(("status", -3, 0), m.PromptsEnded(rows=drawn.rows_max))


def partial_position(number: int) -> Position:
    return Position("partials", 0, number)
