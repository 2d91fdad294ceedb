"""A whole run in one thread and virtual time, from one seed: the mind of the product, everything else simulated.

The orchestrator polls what has arrived, takes a Tick and the events, and its effects are carried out: one poll is one
transaction. It may crash between polls or inside one (nothing of the poll is then kept); it comes back by replaying
its journal. The world keeps its own truth; `checkers.py` judges the log of events and effects, and the truth. The
mind has a twin that is a snapshot of it, gone through JSON and made again at random events and at every restart: it
must say the same to every event.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schemas import messages as m
from schemas.ids import Position
from tests.simulation.actors import EngineActor, PromptsActor, RewardActor, TrainerActor, partial_position
from tests.simulation.checkers import Checker
from tests.simulation.draw import draw
from workers.orchestrator import recovery, snapshot, state

Sender = tuple[str, int, int]
EVENTS_MAX = 400_000
PEOPLE = ("status", -4, 0)


SNAPSHOT_SHARE = 0.02
"""At so many events the mind's twin is made anew from a snapshot; one is written after so many polls, and after every
other end of a run."""


@dataclass(frozen=True)
class Code:
    """The modules of the mind under test (a mutant test passes others)."""

    state: Any = state
    recovery: Any = recovery
    snapshot: Any = snapshot


class World:
    """`run()` returns at the end of the run; AssertionError if a rule is broken."""

    BEGAN_S = 1000

    def __init__(self, seed: int, code: Code | None = None) -> None:
        self.seed, self.code = seed, code or Code()
        self.drawn = draw(seed)
        self.settings = self.drawn.settings
        self.rng = random.Random(seed + 1_000_003)
        self.now = 0.0
        self.tickets = 0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.last_delivery: dict[Sender, float] = {}
        self.inbox: list[m.Event] = []
        self.checker = Checker(self.drawn)
        self.mind = self.code.state.Mind(self.settings)
        self.chance_of_twins = random.Random(seed + 2_000_003)
        self.twin: Any = None
        self.journal: list[m.JournalRecord] = []
        self.told: list[m.Event] = []
        """All that was heard, also in the poll that is not in the journal yet."""
        self.engines: dict[int, EngineActor] = {}
        self.restarting: set[int] = set()
        self.incarnations = 0
        self.trainer, self.reward, self.prompts = TrainerActor(self), RewardActor(self), PromptsActor(self)
        self.lengths: dict[tuple[int, int], int | None] = {}
        self.partials: dict[Position, tuple[m.Issue, int]] = {}
        self.outcomes: dict[int, float | None] = {}
        self.restarts_left = self.drawn.restarts
        self.done = False
        self.starting, self.grow = True, self.drawn.grow

    # --- the machinery ------------------------------------------------------------------------

    def at(self, delay: float, act: Callable[[], None]) -> None:
        self.tickets += 1
        heapq.heappush(self.heap, (self.now + delay, self.tickets, act))

    def chance(self, share: float) -> bool:
        """A fault; none after `quiet_at`."""
        return self.now < self.drawn.quiet_at and self.rng.random() < share * self.drawn.faults

    def say(self, sender: Sender, word: m.Event) -> None:
        """A word on its way to the orchestrator: in order within one sender, at times late, at times twice."""
        delay = self.rng.random() * (10.0 if self.chance(0.05) else 0.5)
        due = max(self.last_delivery.get(sender, 0.0), self.now + delay)
        self.last_delivery[sender] = due
        for _ in range(2 if self.chance(0.03) else 1):
            self.at(due - self.now, lambda: self.inbox.append(word))

    def run(self) -> None:
        for number in range(self.settings.engines.count):
            self.at(self.rng.random() * 3, lambda number=number: self.start_engine(number))  # type: ignore[misc]
        self.at(self.rng.random() * 3, self.trainer.begin)
        self.at(0.0, self.poll)
        self.at(self.drawn.stop_at, self.stop)
        if self.drawn.faults:
            self.at(5.0, self.trouble)
        for _ in range(EVENTS_MAX):
            if self.done:
                break
            self.now, _, act = heapq.heappop(self.heap)
            act()
        assert self.done, f"the run did not end by {self.now:.0f} s"
        if self.seed % 3 == 0:
            self.replay()

    # --- the orchestrator -----------------------------------------------------------------------

    def poll(self) -> None:
        if self.restarts_left and self.rng.random() < 0.02:
            self.restarts_left -= 1
            if self.rng.random() < 0.5:
                for event in [m.Tick(now=self.micros()), *self.inbox]:
                    self.mind.on(event)
            self.restart_orchestrator()
            return
        begin: list[m.Event] = [m.RunStarted(steps=self.settings.steps or None)] if self.starting else []
        events, self.inbox, self.starting = [m.Tick(now=self.micros()), *begin, *self.inbox], [], False
        effects: list[m.Effect] = []
        for event in events:
            self.told.append(event)
            self.checker.heard(event)
            said = self.think(event)
            self.checker.said(said)
            effects += said
        self.checker.settled(self.now)
        self.write(tuple(events), tuple(effects))
        if self.chance_of_twins.random() < (0.5 if self.mind.ended else SNAPSHOT_SHARE):
            self.write((), (), self.code.snapshot.pack(self.code.snapshot.take(self.mind)))
        for effect in effects:
            self.carry_out(effect)
        assert self.mind.ended == self.checker.ended, "mind.ended does not say what EndRun said"
        if self.mind.ended:
            self.after_the_end()
        else:
            self.at(self.drawn.poll_s * self.rng.uniform(0.5, 1.5), self.poll)

    def think(self, event: m.Event) -> list[m.Effect]:
        said: list[m.Effect] = self.mind.on(event)
        if self.twin is not None:
            other = self.twin.on(event)
            assert other == said, f"to {event} a restored mind says {other}, the one that was not {said} (I9)"
        if self.chance_of_twins.random() < SNAPSHOT_SHARE:
            code = self.code.snapshot
            text = code.pack(code.take(self.mind if self.twin is None else self.twin))
            self.twin = code.restore(self.settings, code.unpack(text))
        return said

    def write(self, events: tuple[m.Event, ...], effects: tuple[m.Effect, ...], text: str | None = None) -> None:
        """Made without validation: that would only copy what was valid already."""
        names: dict[str, Any] = {"run": "r", "sequence": len(self.journal), "inputs": {}, "snapshot": text}
        self.journal.append(m.JournalRecord.model_construct(**names, events=events, effects=effects))

    def after_the_end(self) -> None:
        """What was cancelled is resumed; what is done may be resumed with more steps."""
        assert self.checker.end is not None
        if self.checker.end.outcome == "done" and self.grow and self.settings.steps:
            self.settings = self.settings.model_copy(update={"steps": self.settings.steps + self.grow})
            self.grow = 0
        elif self.checker.end.outcome != "cancelled":
            self.done = True
            return
        self.restart_orchestrator()

    def restart_orchestrator(self) -> None:
        """It comes back by all of its journal, its twin by the newest snapshot and what follows."""
        self.mind, self.starting = self.replay(), True
        self.twin, _ = self.code.recovery.recover(self.settings, self.journal)
        self.at(self.rng.random() * 40, self.poll)

    def micros(self) -> int:
        return int((self.BEGAN_S + self.now) * 1e6)

    def replay(self) -> Any:
        """I9."""
        mind = self.code.recovery.replay(self.settings, self.journal)
        assert mind.figures() == self.mind.figures() or not self.done, "a replayed mind has other figures (I9)"
        return mind

    def carry_out(self, effect: m.Effect) -> None:
        match effect:
            case m.Issue():
                self.to_engine(effect, ("requests", effect.engine, effect.host_version))
            case m.Swap() | m.Stop():
                engine = self.engines.get(effect.engine)
                if isinstance(effect, m.Stop) and engine is not None and engine.incarnation == effect.incarnation:
                    engine.stops_coming.update(effect.requests)
                self.to_engine(effect, ("control", effect.engine, 0))
            case m.BatchRecord():
                self.checker.truth_rows(effect, self.reward.rows)
                self.trainer.batch(effect)
            case m.WantPrompts():
                self.at(self.rng.random() * 2, lambda: self.prompts.want(effect.rows))
            case m.EngineLost():
                self.at(self.rng.random() * 20, lambda: self.restart(effect.engine, effect.incarnation))
            case _:
                pass

    def to_engine(self, word: m.Issue | m.Swap | m.Stop, way: Sender) -> None:
        due = max(self.last_delivery.get(way, 0.0), self.now + self.rng.random() * (5.0 if self.chance(0.05) else 0.3))
        self.last_delivery[way] = due
        engine = self.engines.get(word.engine)
        if engine is None or engine.incarnation != word.incarnation:
            return
        if isinstance(word, m.Issue):
            self.at(due - self.now, lambda: engine.request(word))
        else:
            self.at(due - self.now, lambda: engine.command(word))

    # --- engines come and go ----------------------------------------------------------------------

    def start_engine(self, number: int) -> None:
        self.incarnations += 1
        self.restarting.discard(number)
        self.engines[number] = EngineActor(self, number, self.incarnations, self.drawn.speeds[number])
        self.engines[number].join()

    def restart(self, number: int, incarnation: int) -> None:
        """The supervisor's part: whatever the mind gave up is started again, once."""
        engine = self.engines.get(number)
        if engine is not None and engine.incarnation == incarnation and number not in self.restarting:
            # The old process may outlive its loss, and go on to speak.
            self.at(self.rng.random() * 60, lambda: self.die(engine))
            self.restarting.add(number)
            self.at(self.rng.random() * 10, lambda: self.start_engine(number))

    def die(self, engine: EngineActor) -> None:
        engine.alive = False

    def trouble(self) -> None:
        """Every now and then an engine is killed or freezes."""
        if self.now > self.drawn.quiet_at:
            return
        self.at(self.rng.uniform(10, 60) / self.drawn.faults, self.trouble)
        engine = self.engines.get(self.rng.randrange(self.settings.engines.count))
        if engine is None or engine.number in self.restarting:
            return
        if self.rng.random() < 0.5:
            engine.frozen_until = self.now + self.rng.uniform(1, 90)
            return
        if self.rng.random() < 0.3:
            engine.alive = False  # nobody sees it end: only its silence tells
            return
        self.kill(engine, ("status", engine.number, engine.incarnation) if self.rng.random() < 0.5 else None)

    def kill(self, engine: EngineActor, witness: Sender | None) -> None:
        """It is started again; the witness, if there is one, says that it ended."""
        engine.alive = False
        self.restarting.add(engine.number)
        if witness is not None:
            incarnation = engine.incarnation if self.rng.random() < 0.8 else None
            self.say(witness, m.EngineGone(engine=engine.number, incarnation=incarnation, reason="killed"))
        self.at(self.rng.uniform(2, 30), lambda: self.start_engine(engine.number))

    def stop(self) -> None:
        """People have had enough; an engine may end just then."""
        self.say(PEOPLE, m.StopRun(reason="enough"))
        engine = self.engines.get(0)
        if engine is not None and engine.alive and 0 not in self.restarting:
            self.kill(engine, PEOPLE)

    # --- truth ------------------------------------------------------------------------------------

    def row_of(self, issue: m.Issue) -> m.PromptArrived:
        return self.prompts.rows[issue.prompt_row]

    def length_of(self, issue: m.Issue) -> int | None:
        """Heavy-tailed, the same for every attempt; None = a poisoned row's sample, which never ends."""
        name = (issue.group, issue.index)
        if name not in self.lengths:
            times = self.drawn.eval_longer if issue.purpose == "eval" else 1
            length = int(times * self.rng.lognormvariate(2.5, self.drawn.sigma))
            length = max(1, min(self.row_of(issue).max_new_tokens, length))
            self.lengths[name] = None if self.rng.random() < self.drawn.poison_share else length
        return self.lengths[name]

    def outcome_of(self, issue: m.Issue) -> float:
        """Some groups have one outcome for all: 0.4, no signal though neither right nor wrong (F05)."""
        if issue.group not in self.outcomes:
            constant = self.rng.random() < self.drawn.constant_share
            self.outcomes[issue.group] = self.rng.choice([0.0, 0.4, 1.0]) if constant else None
        fixed = self.outcomes[issue.group]
        return float(self.rng.random() < 0.5) if fixed is None else fixed

    def keep_partial(self, issue: m.Issue, tokens: int) -> Position:
        at = partial_position(len(self.partials))
        self.partials[at] = (issue, tokens)
        return at

    def tokens_of(self, issue: m.Issue) -> int:
        """Tokens that a request brings along; its partial must be its own and of its version (I4, I10)."""
        if issue.partial is None:
            return 0
        before, tokens = self.partials[issue.partial]
        assert (before.group, before.index, before.version) == (issue.group, issue.index, issue.version), (
            f"{issue} goes on from a partial of {before}"
        )
        assert before.attempt < issue.attempt
        grows = self.settings.mode == "partial" and before.host_version < issue.host_version
        assert before.host_version == issue.host_version or grows, f"{issue} goes on under another version (I4)"
        return tokens
