"""The orchestrator's mind: an event in, effects out. This file is the order of decisions only.

    event -> what it changes -> choose -> (end?) -> partition -> supplement -> tidy -> effects

Rule 1: no clock, network, tensor or log; time is what Ticks say. The same events give the same effects, byte for byte,
in every process, so recovery is a replay of the journal and a simulation is a test.
Rule 2: arithmetic of lag is in `window.py`, shares of engines in `partition.py`, books in `placement.py` and
`groups.py`, what words change in `hearing.py`.
"""

from schemas import messages as m
from workers.orchestrator import partition, window
from workers.orchestrator.groups import Group, Place, Request, Stage
from workers.orchestrator.hearing import Hearing
from workers.orchestrator.placement import Engine
from workers.orchestrator.rows import tokens_max


class Mind(Hearing):
    """One run: `on` is all there is to say to it."""

    def on(self, event: m.Event) -> list[m.Effect]:
        """Take one event; what is to be done about it.

        After `EndRun` words are still heard (they are read and will not come again), but nothing is said until the run
        is started again.
        """
        ended = self.ended
        self._take(event)
        if ended and self.ended:
            return []
        self.triggered |= self.groups.drained
        if self.changed or self.triggered:
            self.changed = self.groups.drained = False
            self._settle()
        effects, self.effects = self.effects, []
        return effects if self.last_word is None else [*effects, self.last_word]

    # --- what to do about it ---------------------------------------------------------------------------

    def _settle(self) -> None:
        tidy = False
        while not self.ended:
            self._choose()
            self._finish()
            if self.ended:
                break
            tidy |= self.triggered
            if self.triggered and self.published >= 0:
                self._partition()
            self.triggered = False
            self._supplement()
            if not self.triggered:
                break
        if tidy or self.ended:
            self._tidy()
        wanted = None if self.ended else self.rows.want()
        if wanted is not None:
            self.effects.append(m.WantPrompts(rows=wanted))

    def _choose(self) -> None:
        if self.published < self.step_next or (self.rules.steps is not None and self.step_next >= self.rules.steps):
            self.blocked = False
            return
        seen = (self.rules, self.groups.changes, self.step_next, self.rows.exhausted)
        if seen == self.judged:
            return
        self.judged = seen
        if not window.enough(self.rules, len(self.groups.complete), self.groups.live, self.rows.exhausted):
            self.blocked = False
            return
        live = self.groups.live_by_version()
        self.blocked = not window.leaves_room(self.rules, self.step_next, self.groups.complete_by_version(), live)
        if self.blocked:
            return
        complete = [window.Candidate(g.number, g.version, g.completed) for g in self.groups.complete.values()]
        choice = window.choose(self.rules, self.step_next, complete, live, self.rows.exhausted)
        self.chosen = [self.groups.table[number] for number in choice.groups]
        for group in self.chosen:
            self.groups.end(group, Stage.CHOSEN)
        self.effects.append(self._batch(choice.exhausted))
        self.step_next += 1
        self.triggered = True
        if self.rules.oversample:
            self._void_surplus()

    def _void_surplus(self) -> None:
        """K = 0: what is not in the batch that was just chosen could be in no later one."""
        others = [g for g in self.groups.table.values() if g.purpose == "train" and g.stage is not Stage.CHOSEN]
        for group in others:
            self._void(group, "surplus", f"step {self.step_next - 1} has its groups")

    def _batch(self, exhausted: bool) -> m.BatchRecord:
        members = []
        for request in (request for group in self.chosen for request in group.members):
            score = request.score
            assert score is not None, f"{request.key} was chosen without a score"
            place = {"partition": score.partition, "offset": score.offset, "row": score.row}
            members.append(m.Member(group=request.group, index=request.index, attempt=request.attempt, **place))
        return m.BatchRecord(
            run=self.settings.name,
            step=self.step_next,
            exhausted=exhausted,
            groups=tuple((group.number, group.version) for group in self.chosen),
            members=tuple(members),
        )

    def _finish(self) -> None:
        """The first and the last evaluation round, and the end of the run.

        The first round is opened as soon as its rows are known to be complete, before the first training row is.
        """
        if self.published < 0:
            return
        samples = self.settings.evaluation.samples
        last_step = self.rules.steps is not None and self.step_next >= self.rules.steps
        used_up = self.rows.exhausted and self.groups.live == 0
        over = self.published == self.step_next and (last_step or used_up)
        first = self.published == 0 and self.rows.eval_complete
        if samples and (first or over) and self.published not in self.evaluated:
            self.evaluated.append(self.published)
            for row in self.rows.evaluation:
                self._open(self.published, row, "eval", samples)
            self.triggered = True
        if over and self.groups.evaluating == 0:
            if self.step_next == 0:
                self._end("failed", "no group could be trained on: the datasets are used up")
            else:
                self._end("done", f"{self.step_next} steps trained")

    def _openable(self) -> int:
        """Groups that could be opened now, engines aside."""
        if self.published < 0:
            return 0
        count = window.openable(self.rules, self.youngest, self.step_next, self.groups.live)
        return min(count, len(self.rows.unread)) if self.rows.ended else count

    def _partition(self) -> None:
        engines = self.fleet.engines
        if not engines:
            return
        versions = [v for v, books in sorted(self.groups.versions.items()) if books.unsampled and v < self.youngest]
        for engine, version in self.fleet.switches(self._shares(versions)):
            if version == self.youngest and versions and self.settings.mode == "one_step":
                continue  # the barrier: all of the last version end first
            for key in engine.booked:
                found = self.groups.current(key)
                if found is not None and found[1].place is Place.ENGINE:
                    self.groups.move(found[1], Place.STOPPING)
            self.fleet.swap(engine, version, self.patience)
            names = {"engine": engine.number, "incarnation": engine.incarnation}
            self.effects.append(m.Swap(version=version, after_sequence=engine.issued, **names))

    def _shares(self, versions: list[int]) -> dict[int, int]:
        """How many engines each version is to have; `versions`: older ones that have requests which need an engine."""
        engines = len(self.fleet.engines)
        if self.settings.mixes_versions:
            return {self._host_of(self.published): engines}
        demands = [self._demand(version) for version in [*versions, self.youngest]]
        share = partition.packed if self.settings.scheduling.partition == "packed" else partition.proportional
        return share(engines, demands)

    def _host_of(self, version: int) -> int:
        """Under which version a request of a group of `version` is sampled: its own. In mode `partial` the newest, but
        no engine leaves a version that is being evaluated."""
        if not self.settings.mixes_versions:
            return version
        evaluated = [v for v, books in self.groups.versions.items() if books.evaluating]
        return min(evaluated, default=self.published)

    def _demand(self, version: int) -> partition.Demand:
        books, held = self.groups.of(version), self.fleet.held(version)
        live, (seats, kv_tokens) = books.unsampled > 0, self.fleet.smallest()
        if version == self.youngest:
            could = min(self._openable() * self.settings.group_size, self.fleet.free_seats())
            requests, longest = books.unsampled + could, self.fleet.request_limit()
            want = partition.engines_needed(requests, books.tokens + could * longest, longest, seats, kv_tokens)
            return partition.Demand(version, requests, live, want=want, held=held)
        running = self.fleet.of(version)
        keep = partition.engines_needed(running.requests, running.tokens, books.largest, seats, kv_tokens)
        want = partition.engines_needed(books.unsampled, books.tokens, books.largest, seats, kv_tokens)
        if want > held:
            want = held + (1 if books.unsampled > running.requests else 0)
        return partition.Demand(version, books.unsampled, live, min(keep, held), want, held)

    def _supplement(self) -> None:
        """Fill free seats: requests that wait, oldest version first, then new groups."""
        for version in sorted([v for v, books in self.groups.versions.items() if books.waiting]):
            self._place(version)
        while not self.ended and (at := self._opening()) is not None:
            self._open(at, self.rows.unread.popleft(), "train", self.settings.group_size)
            self._place(at)

    def _opening(self) -> int | None:
        """The version that has room for the next row and may open it: `youngest`, or with `legacy_fill` the newest of
        those whose idle seats only they can use. Asked again for every row: one that fits nowhere but at an old version
        may stand before one that the youngest has room for."""
        if self._openable() > 0 and self._has_room(self.youngest):
            return self.youngest
        if self.settings.scheduling.legacy_fill:
            for version in sorted(self.fleet.hosts, reverse=True):
                if version < self.youngest and self._has_room(version) and self._fillable(version):
                    return version
        return None

    def _fillable(self, version: int) -> bool:
        return window.fillable(self.rules, version, self.step_next, self.groups.live_by_version())

    def _has_room(self, version: int) -> bool:
        """A row is there, the version has a seat and KV for it, and nothing waits for that."""
        if not self.rows.unread or not self.fleet.has_free_seat(version):
            return False
        books = self.groups.versions.values() if self.settings.mixes_versions else [self.groups.of(version)]
        if any(book.waiting for book in books):
            return False
        tokens = tokens_max(self.rows.unread[0])
        too_long = tokens > self.fleet.request_limit()
        return too_long or self.fleet.pick(version, tokens, ()) is not None

    def _open(self, version: int, row: m.PromptArrived, purpose: m.Purpose, size: int) -> None:
        tokens = tokens_max(row)
        self.groups.open(version, purpose, row.row, size=size, tokens_max=tokens, queued_at=self.now)

    def _place(self, version: int) -> None:
        """Issue waiting requests in order until one finds no room; one that no engine can hold voids its group."""
        host = self._host_of(version)
        while not self.ended and self.fleet.has_free_seat(host):
            request = self.groups.waiting(version)
            if request is None:
                return
            group = self.groups.table[request.group]
            if request.tokens_max > self.fleet.request_limit():
                detail = f"row {group.prompt_row}: prompt and response may take {request.tokens_max} tokens, "
                self._void(group, "failed", detail + f"an engine holds {self.fleet.request_limit()}")
                continue
            siblings = (other.engine for other in group.requests if other.place is Place.ENGINE)
            engine = self.fleet.pick(host, request.tokens_max, siblings)
            if engine is None:
                return
            self._issue(group, request, engine, host)

    def _issue(self, group: Group, request: Request, engine: Engine, host: int) -> None:
        request.attempt += 1
        request.engine, request.since = engine.number, self.patience
        self.groups.move(request, Place.ENGINE)
        self.issued.append((self.patience, request, request.attempt))
        self.effects.append(
            m.Issue(
                group=group.number,
                index=request.index,
                attempt=request.attempt,
                version=group.version,
                engine=engine.number,
                incarnation=engine.incarnation,
                sequence=self.fleet.book(engine, request.key, request.tokens_max),
                purpose=group.purpose,
                prompt_row=group.prompt_row,
                queued_at=group.queued_at,
                partial=request.partial,
                under=None if host == group.version else host,
            )
        )

    def _tidy(self) -> None:
        """Topics and files that nothing needs any more."""
        oldest = min(window.oldest_live(self.rules, self.step_next), self.published)
        for version in [v for v in self.unretired if v < oldest and not self._in_use(v)]:
            self.unretired.remove(version)
            self.groups.forget(version)
            self.fleet.forget(version)
            self.effects.append(m.RetireVersion(version=version))
        keep, every = self.settings.scheduling.weights_keep, self.settings.scheduling.weights_keep_every
        lowest, kept = window.needed(self.rules, self.step_next, self.published, keep, self.checkpoints)
        chosen = [group.version for group in self.chosen]
        for version in [v for v in self.undeleted if v < lowest and v not in self.unretired]:
            if version not in kept and version not in chosen and not (every and version % every == 0):
                self.undeleted.remove(version)
                self.effects.append(m.DeleteWeights(version=version))

    def _in_use(self, version: int) -> bool:
        books = self.groups.of(version)
        return bool(books.live or books.evaluating or books.unsampled or self.fleet.in_use(version))

    def figures(self) -> dict[str, float]:
        """What `dora status` and the metrics show."""
        versions, complete = self.groups.versions.values(), self.groups.complete_by_version()
        return {
            "version": self.published,
            "step_next": self.step_next,
            "groups_opened": self.groups.opened,
            "groups_live": self.groups.live,
            "groups_complete": len(self.groups.complete),
            "groups_chosen": len(self.chosen),
            "groups_evaluating": self.groups.evaluating,
            "requests_running": self.fleet.booked,
            "requests_waiting": sum(books.waiting for books in versions),
            "engines": len(self.fleet.engines),
            "seats_free": self.fleet.free_seats(),
            "versions_live": sum(bool(books.live or books.unsampled) for books in versions),
            "versions_hosted": self.fleet.hosted_versions(),
            "lag_oldest": self.step_next - min((v for v, _ in self.groups.live_by_version()), default=self.step_next),
            "prompts_unread": len(self.rows.unread),
            "blocked_by_oldest_s": self.blocked_by_oldest_s,
            **{f"groups_live/lag_{self.step_next - version}": n for version, n in self.groups.live_by_version()},
            **{f"groups_complete/lag_{self.step_next - version}": n for version, n in complete},
        }
