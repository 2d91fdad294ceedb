"""What the mind hears, and what each word changes. What is to be done about it is decided in `state.py`.

Rule 1: limits run on the patience clock: time between two Ticks counts as at most `PATIENCE_STEP_MAX_US`. A mind that
was away itself (a restart, a lost broker) must not call the engines late whose words it has not read yet.
Rule 2: a finish frees a seat, a score ends a request; they come in either order.
Rule 3: words of another incarnation, and about another attempt than the last one issued, change nothing.
Rule 4: `triggered` asks for a new partition, `changed` only for choosing and filling seats.
"""

from collections import deque
from dataclasses import replace

from schemas import messages as m
from schemas.ids import RequestKey
from schemas.invariants import MEMBERS_MIN
from schemas.settings import Engines, Settings
from workers.orchestrator import window
from workers.orchestrator.groups import UNSAMPLED, Group, Groups, Place, Request, Stage
from workers.orchestrator.placement import Engine, Fleet
from workers.orchestrator.rows import Rows

SECOND_US = 1_000_000
PATIENCE_STEP_MAX_US = 5 * SECOND_US
PARTIAL_GRACE_US = 2 * SECOND_US
"""`Hosting` and the partials it follows lie in different topics: wait this long for a partial before starting over."""


class Hearing:
    """The state of one run, and how words change it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        limits = (settings.groups_per_batch, settings.lag_max, settings.live_max)
        self.rules = window.Rules(*limits, settings.steps or None, oversample=settings.mode == "oversample")
        self.groups = Groups()
        self.fleet = Fleet()
        self.rows = Rows(settings.live_max)
        self.last_word: m.EndRun | None = None
        self.published = -1
        self.step_next = 0
        self.chosen: list[Group] = []
        self.evaluated: list[int] = []
        """Versions whose evaluation round was opened."""
        self.judged: tuple[window.Rules, int, int, bool] | None = None
        """What was so when a batch was last looked for: it is not looked for again before something changes."""
        self.blocked = False
        self.blocked_by_oldest_s = 0.0
        self.voids_in_row = 0
        self.now = -1
        self.patience = 0
        self.late_from = 0
        """No engine is late before this, on the patience clock."""
        self.rebalanced_at = 0
        self.issued: deque[tuple[int, Request, int]] = deque()
        """(since, request, attempt) in order of time: what `request_timeout_s` looks at."""
        self.strays: deque[tuple[int, RequestKey]] = deque()
        """(due, request): its engine hosts another version, its partial was not read yet."""
        self.checkpoints: tuple[int, ...] | None = None
        self.unretired: list[int] = []
        self.undeleted: list[int] = []
        self.triggered = False
        self.changed = False
        self.effects: list[m.Effect] = []

    @property
    def ended(self) -> bool:
        return self.last_word is not None

    @property
    def youngest(self) -> int:
        """The version under which groups are opened: the newest, or the last that `scheduling.open_every` lets open, or
        the last that was evaluated. It never falls, and is at most `open_every` steps behind the next batch."""
        opens = self.published - self.published % self.settings.scheduling.open_every
        return max(opens, self.evaluated[-1]) if self.evaluated else opens

    def _take(self, event: m.Event) -> None:
        match event:
            case m.Tick():
                self._on_tick(event)
            case m.Heartbeat() | m.Started():
                self._heard(event.engine, event.incarnation)
            case m.Finished():
                self._on_finished(event)
            case m.Scored():
                self._on_scored(event)
            case m.PartialArrived():
                self._on_partial(event)
            case m.Refused():
                self._on_refused(event)
            case m.Failed():
                self._on_failed(event)
            case m.PromptArrived():
                self.rows.arrived(event)
                self.changed = True
            case m.PromptSkipped():
                self.rows.skip(event.row)
                self.changed = True
            case m.PromptsEnded():
                self.rows.end(event.rows)
                self.changed = True
            case m.WeightsArrived():
                self._on_weights(event)
            case m.Joined():
                self._on_joined(event)
            case m.Hosting():
                self._on_hosting(event)
            case m.EngineGone():
                engine = self.fleet.engines.get(event.engine)
                if engine is not None and (event.incarnation is None or event.incarnation >= engine.incarnation):
                    self._lose(engine, event.reason, stopped=event.stopped)
            case m.CheckpointSaved():
                self.checkpoints = event.kept
                self.triggered = True
            case m.RunStarted():
                self.rules = replace(self.rules, steps=event.steps)
                self.last_word, self.voids_in_row = None, 0
                self.triggered = True
            case m.StopRun():
                self._end("cancelled", event.reason)

    # --- what engines say -----------------------------------------------------------------------

    def _heard(self, number: int, incarnation: int) -> Engine | None:
        engine = self.fleet.known(number, incarnation)
        if engine is not None:
            engine.heard = self.patience
        return engine

    def _on_joined(self, word: m.Joined) -> None:
        old = self.fleet.engines.get(word.engine)
        if word.incarnation <= (self.fleet.dead.get(word.engine, -1) if old is None else old.incarnation):
            return
        if old is not None:
            self._lose(old, "a newer incarnation joined")
        self.fleet.join(word, self.patience)
        self.triggered = True

    def _on_hosting(self, word: m.Hosting) -> None:
        engine = self._heard(word.engine, word.incarnation)
        if engine is None or engine.loading != word.version:
            return
        for key in self.fleet.hosted(engine):
            self.strays.append((self.patience + PARTIAL_GRACE_US, key))
        self.triggered = True

    def _on_finished(self, word: m.Finished) -> None:
        engine = self._heard(word.engine, word.incarnation)
        if engine is None:
            return
        key = RequestKey(word.group, word.index, word.attempt)
        if self.fleet.release(engine, key):
            self.changed = True
            version = engine.version
            if version is not None and version < self.youngest and not self.groups.of(version).waiting:
                self.triggered |= len(engine.booked) == 0 or self.groups.of(version).unsampled % engine.seats == 0
        found = self.groups.current(key)
        if found is None or found[1].place not in UNSAMPLED:
            return
        request = found[1]
        self.changed |= request.place is Place.WAITING
        self.groups.move(request, Place.FINISHED)
        request.since = self.patience
        self.issued.append((self.patience, request, request.attempt))

    def _on_partial(self, word: m.PartialArrived) -> None:
        engine = self._heard(word.engine, word.incarnation)
        key = RequestKey(word.group, word.index, word.attempt)
        if engine is not None and word.reason != "snapshot":
            self.changed |= self.fleet.release(engine, key)
        found = self.groups.current(key)
        if found is None or found[1].place not in UNSAMPLED:
            return
        request = found[1]
        assert word.version == request.version, f"partial of {key} has version {word.version}"
        request.partial = word.at
        if word.reason != "snapshot" and request.place is not Place.WAITING:
            self._requeue(request)

    def _on_refused(self, word: m.Refused) -> None:
        engine = self._heard(word.engine, word.incarnation)
        key = RequestKey(word.group, word.index, word.attempt)
        if engine is None or not self.fleet.release(engine, key):
            return
        self.changed = True
        found = self.groups.current(key)
        if found is not None and found[1].place in (Place.ENGINE, Place.STOPPING):
            self._requeue(found[1])

    def _on_failed(self, word: m.Failed) -> None:
        key = RequestKey(word.group, word.index, word.attempt)
        if word.engine is not None:
            engine = self._heard(word.engine, word.incarnation or 0)
            if engine is None or not self.fleet.release(engine, key):
                return
            self.changed = True
        found = self.groups.current(key)
        if found is not None and found[1].place in (Place.ENGINE, Place.STOPPING, Place.FINISHED):
            self._fail(*found, word.reason)

    # --- what the others say ----------------------------------------------------------------------

    def _on_scored(self, word: m.Scored) -> None:
        found = self.groups.find(word.group, word.index, word.attempt)
        if found is None or found[1].place in (Place.SCORED, Place.DROPPED):
            return
        group, request = found
        if word.version != group.version:
            if request.place is not Place.WAITING:
                self._fail(group, request, f"its row has version {word.version}, its group {group.version}")
            return
        if word.error is not None and group.purpose == "train":
            if request.place is not Place.WAITING:
                self._fail(group, request, f"not scored: {word.error}")
            return
        self.changed |= request.place is Place.WAITING
        if self.groups.scored(group, request, word):
            self.changed = True
            self._judge(group)

    def _judge(self, group: Group) -> None:
        """All samples that it still has are scored."""
        if group.purpose == "eval":
            self.groups.end(group, Stage.EVALUATED)
            self.triggered = True
        elif self.settings.scheduling.dynamic_sampling and not group.outcomes_vary:
            self._void(group, "no_signal", "all outcomes are equal")
        else:
            self.voids_in_row = 0
            self.groups.end(group, Stage.COMPLETE)

    def _on_weights(self, word: m.WeightsArrived) -> None:
        if word.version <= self.published:
            return
        assert word.version == self.published + 1 == self.step_next, f"version {word.version} after {self.published}"
        trained = tuple((group.number, group.version) for group in self.chosen)
        assert word.groups == trained, f"version {word.version} trained {word.groups}, chosen were {trained}"
        for group in self.chosen:
            self.groups.end(group, Stage.TRAINED)
        self.chosen = []
        self.published = word.version
        self.unretired.append(word.version)
        self.undeleted.append(word.version)
        self.effects.append(m.MakeVersion(version=word.version))
        self.triggered = True

    def _on_tick(self, tick: m.Tick) -> None:
        gap = 0 if self.now < 0 else max(0, tick.now - self.now)
        self.changed |= self.now < 0
        self.now = max(self.now, tick.now)
        self.patience += min(gap, PATIENCE_STEP_MAX_US)
        if self.blocked:
            self.blocked_by_oldest_s += gap / SECOND_US
        limits, period = self.settings.engines, self.settings.scheduling.rebalance_period_s

        if self.patience > self.late_from:
            self._late_engines(limits)
        self._late_requests(int(limits.request_timeout_s * SECOND_US))
        if self.now - self.rebalanced_at >= period * SECOND_US:
            self.rebalanced_at = self.now
            self.triggered = True

    def _late_engines(self, limits: Engines) -> None:
        """Give them up, and say when it is worth to look again."""
        silence, start = int(limits.timeout_s * SECOND_US), int(limits.start_timeout_s * SECOND_US)
        for engine in list(self.fleet.engines.values()):
            if engine.heard + silence < self.patience:
                self._lose(engine, f"said nothing for {limits.timeout_s:g} s")
            elif engine.loading is not None and engine.loading_since + start < self.patience:
                self._lose(engine, f"did not load version {engine.loading} in {limits.start_timeout_s:g} s")
        heard = (engine.heard for engine in self.fleet.engines.values())
        since = (engine.loading_since for engine in self.fleet.engines.values() if engine.loading is not None)
        now = self.patience
        self.late_from = min(min(heard, default=now) + silence, min(since, default=now) + start)

    def _late_requests(self, limit: int) -> None:
        while self.strays and self.strays[0][0] <= self.patience:
            found = self.groups.current(self.strays.popleft()[1])
            if found is not None and found[1].place is Place.STOPPING:
                self._requeue(found[1])
        while self.issued and self.issued[0][0] + limit < self.patience:
            since, request, attempt = self.issued.popleft()
            found = self.groups.find(request.group, request.index, attempt)
            if found is not None and request.since == since:
                if request.place in (Place.ENGINE, Place.STOPPING):
                    self._drop([request])
                    self._fail(*found, "took too long on an engine")
                elif request.place is Place.FINISHED:
                    self._fail(*found, "was not scored in time")

    # --- what can happen to requests and groups ------------------------------------------------------

    def _requeue(self, request: Request) -> None:
        """It waits to be issued again."""
        self.groups.move(request, Place.WAITING)
        self.triggered = True

    def _fail(self, group: Group, request: Request, reason: str) -> None:
        request.failures += 1
        if request.failures <= self.settings.scheduling.failures_max:
            self._requeue(request)
        elif self._may_lose_one(group):
            self._lose_sample(group, request, reason)
        else:
            self._void(group, "failed", f"sample {request.index}: {reason}")

    def _may_lose_one(self, group: Group) -> bool:
        """An advantage needs two samples to compare."""
        partial = self.settings.scheduling.group_policy == "partial" and group.purpose == "train"
        return partial and len(group.members) > MEMBERS_MIN

    def _lose_sample(self, group: Group, request: Request, reason: str) -> None:
        names = {"group": group.number, "index": request.index, "version": group.version}
        self.effects.append(m.SampleLost(**names, reason=reason))
        if request.place in (Place.ENGINE, Place.STOPPING):
            self._drop([request])
        self.triggered = True
        if self.groups.lost(group, request):
            self._judge(group)

    def _drop(self, requests: list[Request]) -> None:
        """Tell the engines to stop these and keep nothing. A loading engine stops them anyway."""
        stops: dict[int, list[RequestKey]] = {}
        for request in requests:
            engine = self.fleet.engines.get(request.engine)
            if engine is not None and engine.loading is None and self.fleet.release(engine, request.key):
                stops.setdefault(engine.number, []).append(request.key)
        for number, keys in stops.items():
            incarnation = self.fleet.engines[number].incarnation
            self.effects.append(m.Stop(engine=number, incarnation=incarnation, requests=tuple(keys), keep=False))

    def _void(self, group: Group, reason: m.VoidReason, detail: str) -> None:
        self.effects.append(m.VoidGroup(group=group.number, version=group.version, reason=reason, detail=detail))
        self._drop([request for request in group.requests if request.place in (Place.ENGINE, Place.STOPPING)])
        for request in group.members:
            self.groups.move(request, Place.DROPPED)
        self.groups.end(group, Stage.VOIDED)
        self.triggered = True
        if group.purpose == "train" and reason != "surplus":
            self.voids_in_row += 1
            if self.voids_in_row >= self.settings.scheduling.voids_in_row_max:
                self._end("failed", f"{self.voids_in_row} groups in a row were voided, the last one {reason}: {detail}")

    def _lose(self, engine: Engine, reason: str, *, stopped: bool = False) -> None:
        """Its requests go elsewhere: a failure of theirs, but for an engine that was stopped with the run."""
        names = {"engine": engine.number, "incarnation": engine.incarnation}
        self.effects.append(m.EngineLost(reason=reason, stopped=stopped, **names))
        self.fleet.lose(engine)
        self.triggered = True
        for key in engine.booked:
            found = self.groups.current(key)
            if found is None or found[1].place not in (Place.ENGINE, Place.STOPPING):
                continue
            if stopped:
                self._requeue(found[1])
            else:
                self._fail(*found, f"engine {engine.number} was lost")

    def _end(self, outcome: m.EndOutcome, reason: str) -> None:
        if self.last_word is None:
            self.last_word = m.EndRun(outcome=outcome, reason=reason)
