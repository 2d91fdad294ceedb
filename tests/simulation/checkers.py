"""Judges a run by what was heard and said, and by the world's truth. Knows nothing of the mind's code.

`heard(event)` before the mind takes it (`ledger.py`), `said(effects)` after, `settled(now)` at the end of a poll
(`progress.py`). Every complaint is an AssertionError that names the invariant or the rule of the specification.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from schemas import messages as m
from schemas.ids import RequestKey
from schemas.invariants import consecutive, deadline, feasible, lag_allowed, within_capacity
from tests.simulation.ledger import Books, Life, S, Sample
from tests.simulation.progress import Progress


class Checker(Progress):
    """The rules."""

    # --- what the mind says ------------------------------------------------------------------------

    def said(self, effects: Sequence[m.Effect]) -> None:
        for effect in effects:
            assert self.end is None, f"{effect} after EndRun"
            getattr(self, f"_say_{effect.kind}")(effect)
        self._check_dropped([effect.group for effect in effects if isinstance(effect, m.VoidGroup)])
        if self.mode == "oversample" and any(isinstance(effect, m.BatchRecord) for effect in effects):
            assert not self.live, f"batch {self.step_next - 1} is chosen, groups {list(self.live)} live on (K = 0)"
        self._check_lost({(effect.group, effect.index) for effect in effects if isinstance(effect, m.SampleLost)})
        left = [number for number, life in self.live.items() if life.status == "to void"]
        assert self.ended or not left, f"groups without signal are not voided: {left} (I2)"

    def _check_dropped(self, voided: list[int]) -> None:
        """What is void does not run on: engines that do not stop everything anyway were told."""
        for number, books in self.books.items() if voided else ():
            for key in books.booked if books.loading is None else ():
                sample = self.groups[key.group].samples[key.index]
                runs = key.group in voided and sample.attempt == key.attempt and sample.place == "out"
                assert not runs, f"{key} runs on at engine {number}, its group is void"

    def _check_lost(self, lost: set[tuple[int, int]]) -> None:
        """An attempt before the last one has ended: only its engine's word may still be on its way."""
        for number, books in self.books.items() if lost else ():
            for key in books.booked if books.loading is None else ():
                last = self.groups[key.group].samples[key.index].attempt
                given_up = (key.group, key.index) in lost and key.attempt == last
                assert not given_up, f"{key} runs on at engine {number}, though given up"

    def _say_make_version(self, effect: m.MakeVersion) -> None:
        self.made.append(effect.version)
        assert consecutive(self.made), f"versions made: {self.made} (I5)"
        assert effect.version == self.published

    def _say_swap(self, effect: m.Swap) -> None:
        books = self.books.get(effect.engine)
        assert books is not None, "swap of an engine that is not up"
        assert books.incarnation == effect.incarnation, "swap of another incarnation"
        assert books.loading is None, "swap while loading"
        assert effect.version in self.made, "swap to a version that is not there"
        evaluates = bool(self.settings.evaluation.samples) and self._training_over()
        assert effect.version <= self.youngest or evaluates, f"swap to {effect.version}, {self.youngest} opens groups"
        assert effect.version not in self.deleted | self.retired, "swap to a version that is gone (I5)"
        assert effect.version != books.version, "swap to the version that is served"
        assert effect.after_sequence == books.issued, f"after_sequence {effect.after_sequence}, issued {books.issued}"
        self._check_mode_of_swap(effect.version)
        self._check_kept(books, effect.version)
        books.loading, books.loading_since = effect.version, self.now

    def _check_mode_of_swap(self, version: int) -> None:
        lives = [life for life in [*self.live.values(), *self.evaluating.values()] if life.version < version]
        if self.mode == "one_step":
            left = [life for life in lives if any(sample.place in ("wait", "out") for sample in life.samples)]
            assert not left, f"version {version} is loaded, requests of version {left[0].version} run (barrier)"
        assert self.mode != "partial" or version == self._host_of(version), f"version {version} is not to be hosted"

    def _check_kept(self, leaving: Books, version: int) -> None:
        """Policy `packed`: an old version keeps the seats of what runs, but for the newest's first engine."""
        hosts = [books for books in self.books.values() if books.loading is None]
        same = [books for books in hosts if books.version == leaving.version]
        has = any(version in (books.version, books.loading) for books in self.books.values())
        gains = version == self.youngest and has
        if self.mode == "partial" or self.settings.scheduling.partition != "packed" or not gains:
            return
        held = [self._sample(key.group, key.index, key.attempt) for books in same for key in books.booked]
        running = sum(sample is not None and sample.place == "out" for sample in held)
        assert running <= leaving.seats * (len(same) - 1), (
            f"version {leaving.version} gives an engine back, {running} requests run on {len(same)} engines"
        )

    def _say_stop(self, effect: m.Stop) -> None:
        books = self.books.get(effect.engine)
        assert books is not None, "stop on an engine that is not up"
        assert books.incarnation == effect.incarnation, "stop to another incarnation"
        for key in effect.requests:
            if key not in books.booked:
                assert self.resumed_at == self.now, f"stop of {key}, which is not there"
                continue  # decided after the end of the run, before its engine said that it is done
            if effect.keep:
                continue
            del books.booked[key]
            sample = self._sample(key.group, key.index, key.attempt)
            if sample is not None and sample.place != "lost":
                waited = self.now - sample.since
                assert waited >= self.settings.engines.request_timeout_s * S, f"{key} dropped after {waited / S} s"
                sample.place, sample.failures = "wait", sample.failures + 1

    def _say_engine_lost(self, effect: m.EngineLost) -> None:
        books = self.books.pop(effect.engine, None)
        assert books is not None, "an engine was lost twice"
        assert books.incarnation == effect.incarnation
        limits, who = self.settings.engines, (effect.engine, effect.incarnation)
        silent = self.awake - books.heard_at >= limits.timeout_s * S
        stuck = books.loading is not None and self.now - books.loading_since >= limits.start_timeout_s * S
        assert who in self.excused or silent or stuck, f"{who} was given up without reason: {effect.reason}"
        for key in books.booked:
            sample = self._sample(key.group, key.index, key.attempt)
            if sample is not None and sample.place == "out":
                sample.place, sample.failures = "wait", sample.failures + 1
        later = self.successors.get(effect.engine, [])
        if later:
            self.books[effect.engine] = later.pop(0)
        if not later:
            self.successors.pop(effect.engine, None)

    def _say_issue(self, effect: m.Issue) -> None:
        if effect.group not in self.groups:
            self._open(effect)
        life, books = self.groups[effect.group], self.books.get(effect.engine)
        assert life.status == "open", f"{effect} of a group that is {life.status} (I2)"
        assert (life.version, life.purpose, life.row) == (effect.version, effect.purpose, effect.prompt_row), "I4"
        assert books is not None, f"{effect} to an engine that is not up"
        assert books.incarnation == effect.incarnation, f"{effect} to another incarnation"
        assert books.loading is None, f"{effect} to an engine that loads"
        assert effect.host_version == self._host_of(effect.version), f"{effect} goes on under another version (I4)"
        assert books.version == effect.host_version, f"{effect} to an engine that hosts {books.version} (I4)"
        assert effect.host_version not in self.retired, f"{effect} of a retired version (I5)"
        sample = life.samples[effect.index]
        if self._late(sample):
            sample.failures += 1
        else:
            assert sample.place == "wait" or sample.stray, f"{effect}: the sample is {sample.place} (I3)"
        assert effect.attempt == sample.attempt + 1, f"{effect}: attempt after {sample.attempt}"
        assert sample.failures <= self.settings.scheduling.failures_max, f"{effect}: over failures_max"
        assert effect.partial == sample.partial, f"{effect} does not go on from {sample.partial} (I10)"
        sequence = self.sequences.get(effect.engine, -1) + 1
        assert effect.sequence == sequence, f"{effect}: sequence is to be {sequence}"
        self.sequences[effect.engine] = books.issued = sequence
        sample.place, sample.attempt, sample.since, sample.stray = "out", effect.attempt, self.now, False
        sample.engine = effect.engine
        row = self.rows[effect.prompt_row]
        books.booked[RequestKey(effect.group, effect.index, effect.attempt)] = row.prompt_tokens + row.max_new_tokens
        held = sum(books.booked.values())
        assert within_capacity(len(books.booked), books.seats, held, books.kv_tokens_max), (
            f"engine {effect.engine}: {len(books.booked)} of {books.seats} seats, "
            f"KV {held} of {books.kv_tokens_max} (I7, books)"
        )

    def _open(self, effect: m.Issue | m.VoidGroup) -> Life:
        """A group is heard of for the first time: by its first issue, or by its void if no engine can hold it."""
        evaluates = isinstance(effect, m.Issue) and effect.purpose == "eval"
        row = effect.prompt_row if isinstance(effect, m.Issue) else self.row_next
        purpose, size = ("eval", self.settings.evaluation.samples) if evaluates else ("train", self.size)
        life = Life(effect.version, purpose, row, [Sample() for _ in range(size)])
        self.groups[effect.group] = life
        assert self.rows[row].purpose == purpose, f"row {row} in a {purpose} group"
        if evaluates:
            self.evaluating[effect.group] = life
            self.youngest = max(self.youngest, effect.version)
            return life
        assert row == self.row_next, f"row {row} opened, {self.row_next} is next"
        self.row_next += 1
        filled = self.settings.scheduling.legacy_fill and self.step_next - self.K < effect.version < self.youngest
        assert filled or effect.version == self.youngest, f"group {effect.group} opened at version {effect.version}"
        same = [other for other in self.live.values() if self._host_of(other.version) == effect.version]
        passed = [other for other in same if any(sample.place == "wait" for sample in other.samples)]
        assert not passed, f"group {effect.group} is opened, requests of row {passed[0].row} wait"
        self.live[effect.group] = life
        assert len(self.live) <= self.settings.live_max, f"{len(self.live)} live groups of {self.settings.live_max}"
        if self.mode != "oversample":
            self._check_feasible("opening")
        assert effect.version >= self.step_next - self.K, f"group {effect.group} opened too old to train (I1)"
        first = min((number for number, other in self.groups.items() if other.purpose == "train"), default=0)
        if self.settings.evaluation.samples:
            assert first >= self.drawn.eval_rows, "a training group was opened before the first evaluation round"
        return life

    def _check_feasible(self, when: str) -> None:
        versions = [life.version for life in self.live.values()]
        assert feasible(versions, self.step_next, self.batch, self.K, self.steps), (
            f"after {when}: live {sorted(versions)}, next batch {self.step_next} of {self.batch}, K {self.K} (I6)"
        )

    def _say_void_group(self, effect: m.VoidGroup) -> None:
        unknown = effect.group not in self.groups
        life = self._open(effect) if unknown else self.groups[effect.group]
        ends = ("open", "complete") if effect.reason == "surplus" else ("open", "to void")
        assert life.status in ends, f"group {effect.group} is {life.status}, then voided (I2)"
        assert life.version == effect.version
        row = self.rows[life.row]
        if effect.reason == "no_signal":
            assert life.status == "to void", f"group {effect.group} has signal"
        elif effect.reason == "surplus":
            assert (self.mode, life.purpose) == ("oversample", "train"), f"{effect}: it is not surplus"
            assert self.chosen, f"{effect}: no batch is chosen"
            self.complete.pop(effect.group, None)
        else:
            assert effect.reason == "failed", effect
            left = [sample for sample in life.samples if sample.place != "lost"]
            too_long = row.prompt_tokens + row.max_new_tokens > self.drawn.tokens_per_request_max
            failed = any(self._failed(sample) for sample in left)
            assert too_long or failed, f"{effect}: no sample failed too often"
            assert too_long or len(left) <= 2 or not self._may_lose(life), f"{effect}: {len(left)} samples are left"
        life.status = "voided"
        self.live.pop(effect.group, None)
        self.evaluating.pop(effect.group, None)
        self.voids[effect.reason] += 1
        self.voids_in_row += life.purpose == "train" and effect.reason != "surplus"
        self.moved_at = self.now

    def _may_lose(self, life: Life) -> bool:
        return self.settings.scheduling.group_policy == "partial" and life.purpose == "train"

    def _failed(self, sample: Sample) -> bool:
        return sample.failures + sample.perhaps + self._late(sample) > self.settings.scheduling.failures_max

    def _say_sample_lost(self, effect: m.SampleLost) -> None:
        life = self.groups[effect.group]
        sample = life.samples[effect.index]
        assert self._may_lose(life), f"{effect}: the group is all or nothing"
        assert (life.status, life.version) == ("open", effect.version), f"{effect} of a group that is {life.status}"
        if self.resumed_at == self.now:
            self.unsure.add(effect.group)
        else:
            assert sample.place not in ("scored", "lost"), f"{effect}: the sample is {sample.place}"
        assert self._failed(sample), f"{effect}: failed {sample.failures} times only"
        sample.place = "lost"
        assert sum(other.place != "lost" for other in life.samples) >= 2, f"{effect}: one sample compares with nothing"
        self._judge(effect.group)

    def _say_batch(self, effect: m.BatchRecord) -> None:
        step = self.step_next
        assert effect.step == step, f"batch {effect.step}, {step} is next"
        assert self.published == step, f"batch {step} chosen before version {step} was announced"
        assert self.steps is None or step < self.steps, f"batch {step} of {self.steps} steps"
        assert effect.groups, "an empty batch"
        for number, version in effect.groups:
            life = self.groups[number]
            assert life.status == "complete", f"group {number} is {life.status} (I2, I3)"
            assert life.version == version, "I4"
            assert lag_allowed(step, version, self.K), f"group {number} of version {version} in step {step} (I1)"
        order = sorted(self.complete, key=lambda number: self._order(self.complete[number]))
        due, named = order[: self.batch], [number for number, _ in effect.groups]
        if self.unsure & self.complete.keys():
            due = [deadline(self.groups[number].version, self.K, self.steps) for number in due]
            named = [deadline(self.groups[number].version, self.K, self.steps) for number in named]
        assert named == due, f"{effect.groups}, due were {order}"
        self._check_members(effect)
        for number, _ in effect.groups:
            self.groups[number].status = "chosen"
            del self.live[number], self.complete[number]
        self.chosen = [number for number, _ in effect.groups]
        self.step_next, self.moved_at = step + 1, self.now
        if self.mode != "oversample":
            self._check_feasible("choosing")
        over = self._all_rows_opened() and (self.mode == "oversample" or not self.live)
        assert effect.exhausted == over, f"batch {step}: exhausted is {effect.exhausted}"
        assert len(effect.groups) == self.batch or effect.exhausted, f"batch {step} has {len(effect.groups)} groups"

    def _order(self, life: Life) -> tuple[int, int]:
        return deadline(life.version, self.K, self.steps), life.completed

    def _check_members(self, effect: m.BatchRecord) -> None:
        due = []
        for number, _ in effect.groups:
            for index, sample in enumerate(self.groups[number].samples):
                if sample.place == "lost":
                    continue
                score = sample.score
                assert score is not None
                place = {"partition": score.partition, "offset": score.offset, "row": score.row}
                due.append(m.Member(group=number, index=index, attempt=sample.attempt, **place))
                assert (number, index) not in self.trained_keys, f"{number}/{index} trains twice (I3)"
                self.trained_keys.add((number, index))
        assert list(effect.members) == due, f"batch {effect.step}: other members than were scored"

    def _say_retire_version(self, effect: m.RetireVersion) -> None:
        self._check_unused(effect.version)
        assert effect.version not in self.retired
        self.retired.add(effect.version)

    def _check_unused(self, version: int) -> None:
        assert version < min(self.step_next - self.K, self.published), f"version {version} is in the window (I5)"
        users = [n for n, life in [*self.live.items(), *self.evaluating.items()] if life.version == version]
        assert not users, f"version {version} is gone, but groups {users} live (I5)"
        for number, books in self.books.items():
            assert version not in (books.version, books.loading), f"version {version} is gone, engine {number} has it"

    def _say_delete_weights(self, effect: m.DeleteWeights) -> None:
        version = effect.version
        self._check_unused(version)
        assert version not in self.deleted
        assert version != self.published, "the newest version (I5)"
        assert version <= self.published - self.settings.scheduling.weights_keep, "weights_keep"
        assert not self._kept_for_good(version), "weights_keep_every"
        assert version not in (self.kept if self.kept is not None else (0,)), "a checkpoint needs it (I5)"
        assert all(self.groups[number].version != version for number in self.chosen), "chosen and untrained (I5)"
        self.deleted.add(version)

    def _say_want_prompts(self, effect: m.WantPrompts) -> None:
        assert effect.rows > self.wanted
        self.wanted = effect.rows

    def _say_end_run(self, effect: m.EndRun) -> None:
        self.end = effect
        if effect.outcome != "cancelled":
            self._check_the_end(effect)

    # --- at the end of the run -------------------------------------------------------------------------

    def _training_over(self) -> bool:
        over = self.step_next == self.steps or (self._all_rows_opened() and not self.live)
        return over and self.published == self.step_next

    def _check_the_end(self, end: m.EndRun) -> None:
        if end.outcome == "failed":
            in_row = self.voids_in_row >= self.settings.scheduling.voids_in_row_max
            assert in_row or (self.step_next == 0 and self._training_over()), f"failed without reason: {end}"
            return
        assert self._training_over(), f"done at step {self.step_next} of {self.steps}"
        open_ones = [n for n, life in self.groups.items() if life.status not in ("trained", "voided", "evaluated")]
        assert not open_ones, f"groups {open_ones} never ended (I2)"
        assert sorted(self.groups) == list(range(len(self.groups))), "group numbers have holes"
        if self.settings.evaluation.samples:
            rounds = Counter(life.version for life in self.groups.values() if life.purpose == "eval")
            self.ends.add(self.published)
            assert rounds == dict.fromkeys([0, *self.ends], self.drawn.eval_rows), f"rounds: {rounds}"
        hosted = {version for b in self.books.values() for version in (b.version, b.loading)}
        oldest = min(self.step_next - self.K, self.published)
        late = [v for v in self.made if v < oldest and v not in self.retired | hosted]
        assert not late, f"versions {late} were never retired"
        kept = {*(self.kept if self.kept is not None else (0,)), *hosted}
        lowest = min(self.step_next - self.K, self.published - self.settings.scheduling.weights_keep + 1)
        late = [v for v in self.made if v < lowest and v not in self.deleted | kept and not self._kept_for_good(v)]
        assert not late, f"weights of versions {late} were never deleted"

    def _kept_for_good(self, version: int) -> bool:
        every = self.settings.scheduling.weights_keep_every
        return every > 0 and version % every == 0

    # --- the world's truth ------------------------------------------------------------------------------

    def truth_holds(self, engine: int, held: Sequence[RequestKey], stops: Collection[RequestKey]) -> None:
        """What an engine really holds, but for what it is about to be told to stop (I7)."""
        mine = [key for key in held if key not in stops]
        tokens = 0
        for key in mine:
            row = self.rows[self.groups[key.group].row]
            tokens += row.prompt_tokens + row.max_new_tokens
        assert within_capacity(len(mine), self.settings.engines.seats, tokens, self.drawn.kv_tokens_max), (
            f"engine {engine} holds {len(mine)} requests, KV {tokens} (I7, truth)"
        )

    def truth_rows(
        self, batch: m.BatchRecord, rows: Mapping[tuple[int, int, int], tuple[RequestKey, int, int]]
    ) -> None:
        """The rows of a batch are what it says they are (I3, I4)."""
        versions = dict(batch.groups)
        for member in batch.members:
            key, version, _ = rows[member.partition, member.offset, member.row]
            assert key == RequestKey(member.group, member.index, member.attempt), f"{member} is the row of {key}"
            assert version == versions[member.group], f"{member} has version {version} (I4)"
