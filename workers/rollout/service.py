"""The hands of one rollout engine: read commands and requests, decode, say what came of it.

    control ------> commands (in order) --Swap--> [moved partials, flush, load] -> Hosting
    requests.vN --> waiting --seat free--> running --step--> completions, then Finished
                                             |--so many tokens--> partials (snapshot)
                                             `--Stop--> partials (keep) or nothing

Rule 1: words of another incarnation are ignored, and sequences that were seen: a topic read twice changes nothing.
Rule 2: a command waits for those before it. A swap waits for its version's announcement and for `after_sequence`, and
while requests run it waits until the version is prepared: they go on meanwhile.
Rule 3: a Stop may overtake its request (two topics). It is kept until the request comes, at the longest to the next
swap: by then everything issued before it was read.
Rule 4: A row that is not valid is never written to `completions`: it is a dead letter, its request has failed.
Rule 5: `Finished` is said once its row is acknowledged; `Hosting` once the partials of the swap are.
Rule 6: every `snapshot_tokens` tokens a running request is written to `partials` as it is, for the case that the engine
dies.
Rule 7: while requests run, the log is read by the clock, not by the step.
"""

from collections import deque
from typing import Literal

from schemas import messages as m
from schemas.arrow import COMPLETION, invalid_reason, to_bytes
from schemas.codec import BadRecord, arrow_headers, decode
from schemas.ids import RequestKey
from schemas.topics import score_partition, version_key
from workers.rollout.engines.base import Engine, Tokens
from workers.rollout.partials import Place, Running, begin, computed_again, counted, figures_of, to_partial, to_row
from workers.runtime import clock
from workers.runtime.errors import ProbeMismatch, WeightsUnavailable
from workers.runtime.process import Process
from workers.transport.records.bus import Bus, Record, publish
from workers.transport.records.letters import bad_row, dead_letter

POLL_S = 0.015
IDLE_POLL_MS = 50
HEARTBEAT_S = 1.0
HELD_FACTOR_MAX = 2
"""Requests held at most, in seats. The mind never issues more than the seats, but an issue may overtake the stop that
made room for it."""
_ENDS: dict[str | None, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}


def serve(process: Process, bus: Bus, engine: Engine, number: int, host: str) -> int:
    """Run the engine until told to stop. 1 if a version cannot be loaded (the supervisor starts it again)."""
    service = RolloutService(process, bus, engine, number, host)
    try:
        service.join()
        while not process.stopping.is_set():
            service.turn()
        service.finish()
    except (WeightsUnavailable, ProbeMismatch) as error:
        process.log.error("load_failed", error=f"{type(error).__name__}: {error}")
        return 1
    finally:
        service.close()
    return 0


class RolloutService:
    """One incarnation. `join` once, then `turn` again and again, then `finish`."""

    def __init__(
        self, process: Process, bus: Bus, engine: Engine, number: int, host: str, *, poll_s: float = POLL_S
    ) -> None:
        self.incarnation = clock.now_us()
        self._log, self._topics, self._run = process.log, process.topics, process.run
        self._figures = process.figures
        self._bus, self._engine, self._number, self._host = bus, engine, number, host
        self._flush_s, self._mixed = process.settings.broker.timeout_s, process.settings.mixes_versions
        self._vocabulary = process.vocabulary
        self._snapshot_tokens = process.settings.engines.snapshot_tokens
        self._producer, self._reader = bus.producer(), bus.reader()
        self._weights: dict[int, m.WeightsRecord] = {}
        self._commands: deque[m.Swap | m.Stop] = deque()
        self._early: dict[RequestKey, m.Stop] = {}
        self._seen = -1
        self._waiting: dict[RequestKey, m.RequestRecord] = {}
        self._running: dict[RequestKey, Running] = {}
        self._started: list[RequestKey] = []
        self._ended: list[m.Finished] = []
        self._tokens = 0
        self._moves = m.Moves()
        self._spent = dict.fromkeys(("decode_s", "prefill_s", "idle_s", "load_s", "migrate_s"), 0.0)
        self._poll_s = poll_s
        self._poll_at = self._talk_at = self._heartbeat_at = 0.0

    def join(self) -> None:
        """From here on commands are heard; then say that there is an engine."""
        control = self._topics.control
        self._reader.add(control, 0, self._bus.end_offsets(control)[0])
        self._reader.add(self._topics.weights, 0, "earliest")
        self._say(
            m.Joined(
                engine=self._number,
                incarnation=self.incarnation,
                host=self._host,
                seats=self._engine.seats,
                kv_tokens_max=self._engine.kv_tokens_max,
                tokens_per_request_max=self._engine.tokens_per_request_max,
            )
        )
        self._log.info("joined", incarnation=self.incarnation, seats=self._engine.seats)

    def turn(self) -> None:
        """One round: at most one poll and one engine step. WeightsUnavailable, ProbeMismatch, BusUnavailable."""
        self._listen()
        while self._commands and self._obey(self._commands[0]):
            self._commands.popleft()
        self._admit()
        self._decode()
        self._talk()

    def finish(self) -> None:
        """Say of what has ended that it has, and of what has not nothing: whoever asks will hear that we are gone."""
        self._say_ended()
        self._producer.flush(self._flush_s)

    def close(self) -> None:
        self._reader.close()
        self._producer.close()
        self._engine.close()

    # --- hearing ------------------------------------------------------------------------------

    def _listen(self) -> None:
        began = clock.monotonic_s()
        busy = bool(self._running or (self._waiting and not self._commands))
        if busy and began < self._poll_at:
            return
        for record in self._reader.poll(0 if busy else IDLE_POLL_MS):
            try:
                self._take(record)
            except BadRecord as error:
                self._bury(record, str(error))
        now = clock.monotonic_s()
        self._poll_at = now + self._poll_s
        if not busy:
            self._spent["idle_s"] += now - began

    def _take(self, record: Record) -> None:
        if record.topic == self._topics.weights:
            weights = decode(m.WeightsRecord, record.value, record.headers)
            self._weights[weights.version] = weights
        elif record.topic == self._topics.control:
            word = decode(m.CONTROL, record.value, record.headers)
            if isinstance(word, m.Swap | m.Stop) and self._is_mine(word.engine, word.incarnation):
                self._commands.append(word)
        else:
            self._accept(decode(m.RequestRecord, record.value, record.headers))

    def _is_mine(self, engine: int, incarnation: int) -> bool:
        return (engine, incarnation) == (self._number, self.incarnation)

    def _accept(self, request: m.RequestRecord) -> None:
        if not self._is_mine(request.engine, request.incarnation) or request.sequence <= self._seen:
            return
        self._seen = request.sequence
        early = self._early.pop(request.key, None)
        if early is not None:
            if early.keep:
                self._say_partial(begin(request, clock.now_us()), early.reason)
        elif request.host_version != self._engine.version:
            self._refuse(request, f"hosting {self._engine.version}, not {request.host_version}")
        elif len(self._running) + len(self._waiting) >= HELD_FACTOR_MAX * self._engine.seats:
            self._refuse(request, f"all {self._engine.seats} seats are taken and as many requests wait")
        else:
            assert request.key not in self._running, f"{request.key} was issued twice"
            self._waiting[request.key] = request

    # --- obeying ------------------------------------------------------------------------------

    def _obey(self, command: m.Swap | m.Stop) -> bool:
        """Carry it out; False if it cannot be yet."""
        if isinstance(command, m.Swap):
            return self._swap(command)
        held = tuple(key for key in command.requests if key in self._running or key in self._waiting)
        self._early.update((key, command) for key in command.requests if key not in held)
        self._take_out(held, command.reason if command.keep else None)
        return True

    def _swap(self, swap: m.Swap) -> bool:
        weights = self._weights.get(swap.version)
        if weights is None or self._seen < swap.after_sequence:
            return False
        if self._running and self._engine.version != swap.version and not self._engine.prepare(weights):
            return False
        self._early.clear()
        load_s = 0.0
        if self._engine.version != swap.version:
            self._take_out((*self._running, *self._waiting), "moved")
            self._say_ended()
            self._producer.flush(self._flush_s)
            if self._engine.version is not None:
                self._reader.remove(self._topics.requests(self._engine.version), self._number)
            began = clock.monotonic_s()
            self._engine.load(weights)
            load_s = clock.monotonic_s() - began
            self._spent["load_s"] += load_s
            self._reader.add(self._topics.requests(swap.version), self._number, "earliest")
        self._say(
            m.Hosting(
                engine=self._number,
                incarnation=self.incarnation,
                version=swap.version,
                fingerprint=self._engine.fingerprint,
                load_s=load_s,
            )
        )
        self._log.info("hosting", version=swap.version, load_s=round(load_s, 3))
        return True

    def _take_out(self, keys: tuple[RequestKey, ...], reason: m.StopReason | None) -> None:
        """Stop these; each becomes a partial, or nothing where `reason` is None. Their KV is offered, unless they go on
        under other weights."""
        began = clock.monotonic_s()
        handles: dict[RequestKey, m.KvHandle] = {}
        if inside := tuple(key for key in keys if key in self._running):
            handles = self._engine.stop(inside, offer=reason is not None and not self._mixed)
        for key in keys:
            one = self._running.pop(key, None) or begin(self._waiting.pop(key), clock.now_us())
            if reason is not None:
                self._say_partial(one, reason, handles.get(key))
        self._started = [key for key in self._started if key not in keys]
        if keys:
            self._producer.flush(self._flush_s)
        self._spent["migrate_s"] += clock.monotonic_s() - began

    # --- decoding -----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Fill free seats in order of arrival, but not those that a swap will empty."""
        while self._waiting and len(self._running) < self._engine.seats and not self._commands:
            request = self._waiting.pop(next(iter(self._waiting)))
            try:
                self._engine.add(request)
            except ValueError as error:
                self._fail(request, str(error))
                continue
            self._running[request.key] = begin(request, clock.now_us())
            self._started.append(request.key)

    def _decode(self) -> None:
        if not self._running:
            return
        began = clock.monotonic_s()
        work = "decode_s" if all(one.ids for one in self._running.values()) else "prefill_s"
        step = self._engine.step()
        again = computed_again((self._running[part.key], part) for part in step)
        for part in step:
            self._note(part)
        spent = clock.monotonic_s() - began
        self._spent[work] += spent
        if again:
            self._moves = self._moves.model_copy(update={"reprefill_s": self._moves.reprefill_s + again * spent})

    def _note(self, part: Tokens) -> None:
        one = self._running[part.key]
        if part.prefill is not None:
            one.prefill = part.prefill
            before, self._moves = self._moves, counted(self._moves, one, part.prefill)
            self._heartbeat_at = self._heartbeat_at if self._moves == before else 0.0
        one.ids.extend(part.ids)
        one.logprobs.extend(part.logprobs)
        one.kept.extend(part.kept or ())
        self._tokens += len(part.ids)
        if part.finish is None:
            self._keep(one)
            return
        del self._running[part.key]
        request, finish = one.request, _ENDS.get(part.finish)
        if finish is None:
            self._fail(request, f"the engine ended it: {part.finish}")
            return
        row = to_row(one, self._place(), finish, clock.now_us())
        if reason := invalid_reason(row, scored=False, mixed=self._mixed, vocabulary=self._vocabulary):
            letter = bad_row(self._run, self._topics.completions, score_partition(request.group), row, reason)
            publish(self._producer, self._topics.dead_letters, letter)
            self._fail(request, f"bad row: {reason}")
            return
        self._producer.send(
            self._topics.completions,
            to_bytes([row], COMPLETION),
            arrow_headers(*self._ids(request)),
            partition=score_partition(request.group),
            key=version_key(request.version),
        )
        group, index, attempt = self._ids(request)
        self._ended.append(
            m.Finished(
                engine=self._number,
                incarnation=self.incarnation,
                group=group,
                index=index,
                attempt=attempt,
                tokens=len(row["response_ids"]),
                finish_reason=finish,
            )
        )

    def _keep(self, one: Running) -> None:
        """What others go on from if this engine dies."""
        if self._snapshot_tokens and len(one.ids) - one.snapshot >= self._snapshot_tokens:
            one.snapshot = len(one.ids)
            self._say_partial(one, "snapshot")

    # --- saying -------------------------------------------------------------------------------

    def _talk(self) -> None:
        """What turns have gathered, at the pace of the polls; every second, and when a request has moved in, that the
        engine lives."""
        now = clock.monotonic_s()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_S
            self._engine.tend()
            self._say_alive()
        if (self._ended or self._started) and (now >= self._talk_at or not self._running):
            self._talk_at = now + self._poll_s
            self._say_ended()

    def _say_ended(self) -> None:
        if self._started:
            keys, self._started = tuple(self._started), []
            self._say(m.Started(engine=self._number, incarnation=self.incarnation, requests=keys))
        if self._ended:
            self._producer.flush(self._flush_s)
        for finished in self._ended:
            self._say(finished)
        self._ended = []

    def _say_alive(self) -> None:
        load = self._engine.load_now()
        heartbeat = m.Heartbeat(
            engine=self._number,
            incarnation=self.incarnation,
            version=self._engine.version,
            running=load.running,
            waiting=load.waiting + len(self._waiting),
            kv_tokens=load.kv_tokens,
            tokens=self._tokens,
            moves=self._moves,
            **self._spent,
        )
        self._say(heartbeat)
        self._figures.show(figures_of(heartbeat))

    def _say_partial(self, one: Running, reason: m.StopReason, kv: m.KvHandle | None = None) -> None:
        partial = to_partial(one, self._place(), reason, kv)
        publish(self._producer, self._topics.partials, partial, key=version_key(partial.version))

    def _refuse(self, request: m.RequestRecord, reason: str) -> None:
        self._turn_away(m.Refused, request, reason)

    def _fail(self, request: m.RequestRecord, reason: str) -> None:
        self._started = [key for key in self._started if key != request.key]
        self._turn_away(m.Failed, request, reason)

    def _turn_away(self, word: type[m.Refused | m.Failed], request: m.RequestRecord, reason: str) -> None:
        group, index, attempt = self._ids(request)
        whose = {"group": group, "index": index, "attempt": attempt}
        said = word(engine=self._number, incarnation=self.incarnation, reason=reason, **whose)
        self._say(said)
        self._log.warning(f"request_{said.kind}", **whose, version=request.version, reason=reason)

    def _bury(self, record: Record, reason: str) -> None:
        publish(self._producer, self._topics.dead_letters, dead_letter(self._run, record, reason))
        self._log.warning("bad_record", topic=record.topic, offset=record.offset, reason=reason)

    def _say(self, word: m.Message) -> None:
        publish(self._producer, self._topics.status, word)

    def _place(self) -> Place:
        return Place(self._number, self.incarnation, self._engine.fingerprint)

    @staticmethod
    def _ids(request: m.RequestRecord) -> tuple[int, int, int]:
        return request.group, request.index, request.attempt
