"""A whole run in virtual time: the orchestrator's own mind, and a cost model instead of engines, trainer and reward.

    words of engines, reward, trainer -> inbox -> (a poll) -> mind -> effects -> engines, trainer -> words ...

Rule 1: everything is a function of settings, cost model, split and seed.
Rule 2: the mind is `workers/orchestrator`; nothing of what it decides is decided here.
Rule 3: a poll comes `poll_s` after the first word that waits, and without words every `TICK_MAX_S`.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from functools import partial as later

from pipelines.simulate.cost import CostModel, Split, Work
from pipelines.simulate.engine import Engine, Run
from pipelines.simulate.record import Tape
from schemas import messages as m
from schemas.ids import Position
from schemas.settings import Settings
from workers.orchestrator.state import Mind
from workers.runtime.errors import DoraError

TICK_MAX_S = 2.0
BEATS = 3
"""Heartbeats within `engines.timeout_s`."""
QUIET_MAX_S = 1e6
"""Without any step for so long the run stands still."""
SECOND_US = 1_000_000


class StandsStill(DoraError):
    """The simulated run came to no further step, or ended with a failure."""


class World:
    """`run(versions)` goes on until that many versions were announced after the first."""

    def __init__(self, settings: Settings, cost: CostModel, split: Split, work: Work, seed: int) -> None:
        self.settings, self.cost, self.split, self.work, self.seed = settings, cost, split, work, seed
        self.new_max = settings.sampling.max_new_tokens
        self.rng = random.Random(f"faults/{seed}")
        self.mind = Mind(settings)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.tickets = 0
        self.inbox: list[m.Event] = []
        self.scores: deque[tuple[float, m.Scored]] = deque()
        self.polled_at = 0.0
        self.poll_due = False
        self.engines: dict[int, Engine] = {}
        self.lengths: dict[int, list[int]] = {}
        self.partials: list[tuple[int, int]] = []
        """(tokens, version under which they were sampled) of partial `offset`."""
        self.rows = 0
        self.rows_max: int | None = None
        self.training = False
        self.tape = Tape()
        self.over = False

    def run(self, versions: int) -> Tape:
        """StandsStill if it does not get there."""
        self.inbox.append(m.RunStarted(steps=self.settings.steps or None))
        for number in range(self.split.rollout):
            self._start_engine(number, 0)
        self._announce(0, ())
        self._poll()
        quiet, seen = 0.0, 0
        while len(self.tape.steps) < versions and not self.over:
            if len(self.tape.steps) > seen:
                quiet, seen = self.now, len(self.tape.steps)
            if self.now - quiet > QUIET_MAX_S:
                raise StandsStill(f"no step after {seen} within {QUIET_MAX_S:.0f} s of virtual time (seed {self.seed})")
            self.now, _, act = heapq.heappop(self.heap)
            act()
        self.heap.clear()
        self.tape.close(self.now)
        return self.tape

    # --- time -----------------------------------------------------------------------------------

    def _at(self, due: float, act: Callable[[], None]) -> None:
        self.tickets += 1
        heapq.heappush(self.heap, (due, self.tickets, act))

    def _say(self, word: m.Event) -> None:
        self.inbox.append(word)
        if not self.poll_due:
            self.poll_due = True
            self._at(self.now + self.cost.poll_s, self._poll)

    # --- the orchestrator -------------------------------------------------------------------------

    def _poll(self) -> None:
        """One turn of `workers/orchestrator/service.py`: a Tick, then what was read."""
        self.poll_due = False
        self.polled_at = self.now
        events: list[m.Event] = [m.Tick(now=int(self.now * SECOND_US)), *self.inbox]
        self.inbox = []
        while self.scores and self.scores[0][0] <= self.now:
            events.append(self.scores.popleft()[1])
        touched: dict[int, Engine] = {}
        for event in events:
            for effect in self.mind.on(event):
                self._carry_out(effect, touched)
        for engine in touched.values():
            self._plan(engine)
        self._at(self.now + TICK_MAX_S, later(self._idle, self.now))
        if self.scores:
            self._at(max(self.scores[0][0], self.now + self.cost.poll_s), self._wake_for_scores)

    def _idle(self, since: float) -> None:
        if self.polled_at == since and not self.poll_due and not self.over:
            self._poll()

    def _wake_for_scores(self) -> None:
        if self.scores and self.scores[0][0] <= self.now and not self.poll_due:
            self._poll()

    def _carry_out(self, effect: m.Effect, touched: dict[int, Engine]) -> None:
        match effect:
            case m.Issue():
                engine = self._engine(effect.engine, effect.incarnation)
                if engine is not None:
                    self._issue(engine, effect)
                    touched[engine.number] = engine
            case m.Swap():
                engine = self._engine(effect.engine, effect.incarnation)
                if engine is not None:
                    self._swap(engine, effect)
                    touched[engine.number] = engine
            case m.Stop():
                engine = self._engine(effect.engine, effect.incarnation)
                if engine is not None:
                    self._stop(engine, effect)
                    touched[engine.number] = engine
            case m.BatchRecord():
                self._train(effect)
            case m.WantPrompts():
                self._write_prompts(effect.rows)
            case m.EngineLost():
                self._lost(effect)
            case m.VoidGroup():
                self.lengths.pop(effect.group, None)
            case m.EndRun():
                self._ended(effect)
            case _:
                pass

    def _ended(self, word: m.EndRun) -> None:
        if word.outcome != "done":
            raise StandsStill(f"the simulated run {word.outcome}: {word.reason} (seed {self.seed})")
        self.over = True

    # --- engines ----------------------------------------------------------------------------------

    def _engine(self, number: int, incarnation: int) -> Engine | None:
        engine = self.engines.get(number)
        return engine if engine is not None and engine.incarnation == incarnation else None

    def _start_engine(self, number: int, incarnation: int) -> None:
        settings = self.settings.engines
        engine = Engine(self.cost, number, incarnation, self.now)
        engine.busy = self.training
        self.engines[number] = engine
        limits = {"seats": settings.seats, "tokens_per_request_max": settings.tokens_per_request_max}
        self._say(
            m.Joined(
                engine=number, incarnation=incarnation, host="simulated", kv_tokens_max=self.work.kv_tokens, **limits
            )
        )
        self._at(self.now + settings.timeout_s / BEATS, later(self._beat, engine))
        if self.cost.engine_mtbf_s:
            self._at(self.now + self.rng.expovariate(1 / self.cost.engine_mtbf_s), later(self._die, engine))

    def _beat(self, engine: Engine) -> None:
        if engine.alive:
            names = {"engine": engine.number, "incarnation": engine.incarnation, "version": engine.version}
            self._say(m.Heartbeat(**names, running=len(engine.running), waiting=0, kv_tokens=0))
            self._at(self.now + self.settings.engines.timeout_s / BEATS, later(self._beat, engine))

    def _die(self, engine: Engine) -> None:
        if engine.alive:
            self._gone(engine)
            self._say(m.EngineGone(engine=engine.number, incarnation=engine.incarnation, reason="killed"))
            again = later(self._start_engine, engine.number, engine.incarnation + 1)
            self._at(self.now + self.cost.engine_restart_s, again)

    def _lost(self, word: m.EngineLost) -> None:
        """The mind gave it up (the supervisor's part: it is started again)."""
        engine = self._engine(word.engine, word.incarnation)
        if engine is not None and engine.alive:
            self._gone(engine)
            again = later(self._start_engine, engine.number, engine.incarnation + 1)
            self._at(self.now + self.cost.engine_restart_s, again)

    def _gone(self, engine: Engine) -> None:
        engine.empty(self.now)
        engine.alive = False
        engine.wake += 1
        self.tape.gone.append(engine)
        self.tape.hosts(self.now, engine.number, None)
        del self.engines[engine.number]

    def _plan(self, engine: Engine) -> None:
        """Wake it when its next request is done."""
        engine.wake += 1
        due = engine.due()
        if due is not None and engine.alive:
            self._at(engine.at + due, later(self._wake, engine, engine.wake))

    def _wake(self, engine: Engine, plan: int) -> None:
        if engine.wake == plan:
            for run in engine.done(self.now):
                self._finished(engine, run)
            self._plan(engine)

    def _finished(self, engine: Engine, run: Run) -> None:
        issue = run.issue
        group, index, attempt = run.key
        where = {"engine": engine.number, "incarnation": engine.incarnation}
        if self.cost.failure_share and self.rng.random() < self.cost.failure_share:
            self._say(m.Failed(**where, group=group, index=index, attempt=attempt, reason="a simulated failure"))
            return
        end = "length" if run.length >= self.new_max else "stop"
        names = {"group": group, "index": index, "attempt": attempt}
        self._say(m.Finished(**where, **names, tokens=run.length, finish_reason=end))
        outcome = float((group + index) % 2)
        score = m.Scored(
            group=group,
            index=index,
            attempt=attempt,
            version=issue.version,
            purpose=issue.purpose,
            reward=outcome,
            outcome=outcome,
            error=None,
            partition=0,
            offset=0,
            row=0,
        )
        self.scores.append((self.now + self.cost.score_s, score))

    def _issue(self, engine: Engine, issue: m.Issue) -> None:
        had, carried = 0, False
        if issue.partial is not None:
            had, version = self.partials[issue.partial.offset]
            carried = version == engine.version and had > 0
        engine.add(self.now, issue, prompt=self.work.prompt, length=self._length(issue), had=had, carried=carried)

    def _length(self, issue: m.Issue) -> int:
        lengths = self.lengths.get(issue.group)
        if lengths is None:
            lengths = self.work.lengths.draw(self.seed, issue.group, self.settings.group_size, self.new_max)
            self.lengths[issue.group] = lengths
        return lengths[issue.index]

    def _swap(self, engine: Engine, word: m.Swap) -> None:
        before = engine.version
        for run in engine.empty(self.now):
            self._hand_back(engine, run, before, "moved")
        engine.loading, engine.version = True, None
        self.tape.hosts(self.now, engine.number, None)
        engine.load_s += self.cost.load_s
        self._at(self.now + self.cost.load_s, later(self._loaded, engine, word.version))

    def _loaded(self, engine: Engine, version: int) -> None:
        if engine.alive:
            engine.settle(self.now)
            engine.loading, engine.version = False, version
            names = {"engine": engine.number, "incarnation": engine.incarnation, "version": version}
            self._say(m.Hosting(**names, fingerprint=f"simulated-{version}", load_s=self.cost.load_s))
            self.tape.hosts(self.now, engine.number, version)

    def _stop(self, engine: Engine, word: m.Stop) -> None:
        for key in word.requests:
            run = engine.take_out(self.now, key)
            if run is not None and word.keep:
                self._hand_back(engine, run, engine.version, word.reason)

    def _hand_back(self, engine: Engine, run: Run, version: int | None, reason: m.StopReason) -> None:
        assert version is not None
        issue, tokens = run.issue, engine.tokens(run)
        at = Position("partials", 0, len(self.partials))
        self.partials.append((tokens, version))
        self.tape.moves += 1
        names = {"group": issue.group, "index": issue.index, "attempt": issue.attempt, "version": issue.version}
        where = {"engine": engine.number, "incarnation": engine.incarnation}
        self._say(m.PartialArrived(**names, **where, reason=reason, tokens=tokens, at=at))

    # --- trainer and prompts ----------------------------------------------------------------------

    def _train(self, batch: m.BatchRecord) -> None:
        self.tape.chosen(batch, self._tokens_of(batch))
        self._trainer(True)
        seconds = self.split.train_s(self.cost)
        self._at(self.now + seconds, later(self._trainer, False))
        self._at(self.now + seconds + self.cost.publish_s, later(self._trained, batch))

    def _tokens_of(self, batch: m.BatchRecord) -> int:
        tokens = 0
        for member in batch.members:
            tokens += self.lengths[member.group][member.index]
        for group, _ in batch.groups:
            del self.lengths[group]
        return tokens

    def _trainer(self, busy: bool) -> None:
        self.training = busy
        if self.cost.t0_busy_s is None and self.cost.t1_busy_s is None:
            return
        for engine in self.engines.values():
            engine.settle(self.now)
            engine.busy = busy
            self._plan(engine)

    def _trained(self, batch: m.BatchRecord) -> None:
        self.tape.trained(self.now, self.split.train_s(self.cost), self.engines.values(), self.mind.blocked_by_oldest_s)
        self._announce(batch.step + 1, batch.groups)

    def _announce(self, version: int, groups: tuple[tuple[int, int], ...]) -> None:
        self._say(m.WeightsArrived(version=version, groups=groups, fingerprint=f"simulated-{version}"))

    def _write_prompts(self, rows: int) -> None:
        names = {"purpose": "train", "prompt_tokens": self.work.prompt, "max_new_tokens": self.new_max}
        while self.rows < rows and (self.rows_max is None or self.rows < self.rows_max):
            self._say(m.PromptArrived(row=self.rows, **names))
            self.rows += 1
        if self.rows_max is not None and self.rows >= self.rows_max:
            self._say(m.PromptsEnded(rows=self.rows_max))
