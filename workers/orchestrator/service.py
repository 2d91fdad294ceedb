"""The orchestrator's hands: poll the log, let the mind think, carry out what it says.

Rule 1: the mind decides everything; this file only turns records into events and effects into records.
Rule 2: one poll = one transaction: the journal record (input positions, events, effects) and all records that carry
the effects out. A crash leaves nothing half done; a second orchestrator is fenced by the log.
Rule 3: what is not a record (topics, files) is made before the transaction and deleted after it; both are idempotent
and done again after a restart: what is there is compared with what the mind still needs.
Rule 4: every so many events a snapshot of the mind follows in the journal, in the same transaction. A restart reads the
journal back to the newest one.
"""

from collections import OrderedDict

from schemas import messages as m
from schemas.codec import BadRecord, decode
from schemas.ids import Position, sampling_seed
from schemas.topics import RECORD_BYTES_MAX, version_key
from workers.orchestrator import snapshot
from workers.orchestrator.recovery import inputs, newest, recover
from workers.runtime import clock
from workers.runtime.collector import no_full_collections
from workers.runtime.process import Process
from workers.transport.records.bus import Bus, Record, publish
from workers.transport.records.letters import dead_letter
from workers.transport.weights.store import Store

POLL_MS = 100
IDLE_TICK_S = 0.5
"""Without records the mind hears of time this often."""
METRICS_PERIOD_S = 2.0
RETIRE_PERIOD_S = 2.0
COMMIT_TIMEOUT_S = 60.0
PAYLOADS_MAX = 20_000
"""Prompts and partials kept at hand; what was dropped is read from the log again."""
RECORDS_PER_POLL_MAX = 2_000
SNAPSHOT_EVENTS = 5_000
"""Events between two snapshots of the mind: a restart hears again so many and those of one poll at most."""
SNAPSHOT_BYTES_MAX = RECORD_BYTES_MAX - (1 << 20)
TAIL_OFFSETS = 256
"""The journal is read backwards in pieces; this is the first one, each further one is twice as long."""


def serve(process: Process, bus: Bus, snapshot_events: int = SNAPSHOT_EVENTS) -> int:
    """Run until the mind ends the run (0) or the process is told to stop (0)."""
    with no_full_collections():
        hands = Hands(process, bus, snapshot_events)
        try:
            while not (hands.started and hands.mind.ended) and not process.stopping.is_set():
                hands.turn()
        finally:
            hands.close()
    return 0


class Hands:
    """One orchestrator on one log."""

    def __init__(self, process: Process, bus: Bus, snapshot_events: int = SNAPSHOT_EVENTS) -> None:
        self.process, self.bus, self.topics = process, bus, process.topics
        self.store = Store(process.weights_dir)
        self.producer = bus.producer(self.topics.transactional_id)
        self.snapshot_events = snapshot_events
        journal = read_tail(bus, self.topics.journal)
        self.mind, self.unsaved = recover(process.settings, journal)
        self.sequence = journal[-1].sequence + 1 if journal else 0
        self.inputs = {self._input(kind): 0 for kind in ("prompts", "partials", "weights", "status")}
        self.inputs.update(inputs(journal))
        self.retired: set[int] = set()
        self._do_again()
        self.reader = bus.reader()
        for name, offset in self.inputs.items():
            topic, partition = name.rsplit("/", 1)
            self.reader.add(topic, int(partition), offset)
        self.payloads: OrderedDict[Position, m.PromptRecord | m.PartialRecord] = OrderedDict()
        self.tick_at = self.metrics_at = self.retire_at = clock.monotonic_s() - IDLE_TICK_S
        self.decide_s = 0.0
        self.started = False
        self.letters: list[m.DeadLetter] = []
        told = {"records": self.sequence, "read": len(journal), "events": self.unsaved}
        process.log.info("journal_replayed", **told, ended=self.mind.ended)

    def close(self) -> None:
        self.reader.close()
        self.producer.close()

    def turn(self) -> None:
        """One poll: read, think, write."""
        records = self.reader.poll(POLL_MS, RECORDS_PER_POLL_MAX)
        now = clock.monotonic_s()
        if records or now - self.tick_at >= IDLE_TICK_S:
            self.tick_at = now
            events: list[m.Event] = [m.Tick(now=clock.now_us())]
            if not self.started:
                self.started = True
                events.append(m.RunStarted(steps=self.process.settings.steps or None))
            events += [event for record in records if (event := self._event(record)) is not None]
            effects = [effect for event in events for effect in self.mind.on(event)]
            self.decide_s += clock.monotonic_s() - now
            for record in records:
                name = f"{record.topic}/{record.partition}"
                self.inputs[name] = max(self.inputs[name], record.offset + 1)
            self._carry_out(events, effects)
        if now - self.retire_at >= RETIRE_PERIOD_S:
            self.retire_at = now
            self._retire()

    # --- records to events ------------------------------------------------------------------

    def _event(self, record: Record) -> m.Event | None:
        """What the mind needs to know of a record; an unreadable one becomes a dead letter."""
        try:
            return self._read(record)
        except BadRecord as error:
            self.process.log.warning("dead_letter", topic=record.topic, offset=record.offset, reason=error)
            self.letters.append(dead_letter(self.process.run, record, str(error)))
            return m.PromptSkipped(row=record.offset) if record.topic == self.topics.prompts else None

    def _read(self, record: Record) -> m.Event:
        match self.topics.kind(record.topic):
            case "prompts":
                prompt = decode(m.PromptRecord, record.value, record.headers)
                self._keep(record.position, prompt)
                return m.PromptArrived(
                    row=record.offset,
                    purpose=prompt.purpose,
                    prompt_tokens=len(prompt.prompt_ids),
                    max_new_tokens=prompt.max_new_tokens,
                )
            case "partials":
                partial = decode(m.PartialRecord, record.value, record.headers)
                self._keep(record.position, partial)
                names = ("group", "index", "attempt", "version", "engine", "incarnation", "reason")
                known = {name: getattr(partial, name) for name in names}
                return m.PartialArrived(tokens=len(partial.response_ids), at=record.position, **known)
            case "weights":
                weights = decode(m.WeightsRecord, record.value, record.headers)
                return m.WeightsArrived(version=weights.version, groups=weights.groups, fingerprint=weights.fingerprint)
            case _:
                return decode(m.STATUS, record.value, record.headers)

    def _keep(self, position: Position, payload: m.PromptRecord | m.PartialRecord) -> None:
        self.payloads[position] = payload
        while len(self.payloads) > PAYLOADS_MAX:
            self.payloads.popitem(last=False)

    # --- effects to records -----------------------------------------------------------------

    def _carry_out(self, events: list[m.Event], effects: list[m.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, m.MakeVersion):
                self._make_version(effect.version)
        self._fetch_payloads([effect for effect in effects if isinstance(effect, m.Issue)])
        self.producer.begin()
        self._write_down(events, effects)
        for effect in effects:
            self._send(effect)
        for letter in self.letters:
            publish(self.producer, self.topics.dead_letters, letter)
        self._send_metrics(stepped=any(isinstance(effect, m.BatchRecord | m.EndRun) for effect in effects))
        self.producer.commit(COMMIT_TIMEOUT_S)
        self.letters.clear()
        self._afterwards(effects)

    def _write_down(self, events: list[m.Event], effects: list[m.Effect]) -> None:
        """The poll's journal record, and a snapshot behind it when enough was heard since the last one."""
        about = {"run": self.process.run, "inputs": dict(self.inputs)}
        record = m.JournalRecord(**about, sequence=self.sequence, events=tuple(events), effects=tuple(effects))
        publish(self.producer, self.topics.journal, record)
        self.sequence += 1
        self.unsaved += len(events)
        if self.unsaved < self.snapshot_events:
            return
        self.unsaved = 0
        text = snapshot.pack(snapshot.take(self.mind))
        if len(text) > SNAPSHOT_BYTES_MAX:
            self.process.log.warning("snapshot_too_large", bytes=len(text), limit=SNAPSHOT_BYTES_MAX)
            return
        record = m.JournalRecord(**about, sequence=self.sequence, events=(), effects=(), snapshot=text)
        publish(self.producer, self.topics.journal, record)
        self.sequence += 1

    def _send(self, effect: m.Effect) -> None:
        match effect:
            case m.Issue():
                topic, key = self.topics.requests(effect.host_version), version_key(effect.host_version)
                publish(self.producer, topic, self._request(effect), partition=effect.engine, key=key)
            case m.BatchRecord():
                publish(self.producer, self.topics.batches, effect)
            case m.Swap() | m.Stop() | m.WantPrompts() | m.EndRun():
                publish(self.producer, self.topics.control, effect)
            case _:
                pass

    def _afterwards(self, effects: list[m.Effect]) -> None:
        for effect in effects:
            match effect:
                case m.RetireVersion():
                    self.retired.add(effect.version)
                case m.DeleteWeights():
                    self.store.delete(effect.version)
                case m.EngineLost():
                    self.process.log.warning("engine_lost", engine=effect.engine, reason=effect.reason)
                case m.VoidGroup():
                    about = {"group": effect.group, "version": effect.version}
                    self.process.log.info("void", **about, reason=effect.reason, detail=effect.detail)
                case m.BatchRecord():
                    groups = [group for group, _ in effect.groups]
                    versions = sorted({version for _, version in effect.groups})
                    self.process.log.info("chosen", step=effect.step, group=groups, version=versions)
                case m.EndRun():
                    self.process.log.info("end_run", outcome=effect.outcome, reason=effect.reason)
                case _:
                    pass

    def _request(self, issue: m.Issue) -> m.RequestRecord:
        prompt = self.payloads[Position(self.topics.prompts, 0, issue.prompt_row)]
        assert isinstance(prompt, m.PromptRecord)
        settings = self.process.settings
        sampling = settings.sampling
        temperature = sampling.temperature if issue.purpose == "train" else settings.evaluation.temperature
        so_far: dict[str, object] = {}
        if issue.partial is not None:
            partial = self.payloads[issue.partial]
            assert isinstance(partial, m.PartialRecord)
            names = ("response_ids", "logprobs", "kept_logmass", "loss_mask", "engine_path", "started_at", "kv")
            so_far = {name: getattr(partial, name) for name in names}
        return m.RequestRecord.model_validate(
            {
                **issue.model_dump(exclude={"kind", "partial"}),
                **so_far,
                "run": self.process.run,
                "task": prompt.task,
                "prompt_ids": prompt.prompt_ids,
                "answer": prompt.answer,
                "seed": sampling_seed(settings.seed, issue.group, issue.index),
                "temperature": temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": prompt.max_new_tokens,
                "metadata": prompt.metadata,
            }
        )

    def _fetch_payloads(self, issues: list[m.Issue]) -> None:
        """Read from the log what is needed and no longer at hand."""
        wanted = {Position(self.topics.prompts, 0, issue.prompt_row) for issue in issues}
        wanted |= {issue.partial for issue in issues if issue.partial is not None}
        missing = sorted(wanted - self.payloads.keys())
        if not missing:
            return
        for position, record in self.bus.read(missing).items():
            prompt = position.topic == self.topics.prompts
            self.payloads[position] = (
                decode(m.PromptRecord, record.value, record.headers)
                if prompt
                else decode(m.PartialRecord, record.value, record.headers)
            )

    def _send_metrics(self, *, stepped: bool) -> None:
        now = clock.monotonic_s()
        if not stepped and now - self.metrics_at < METRICS_PERIOD_S:
            return
        self.metrics_at = now
        values = {**self.mind.figures(), "decide_s": self.decide_s}
        point = m.MetricPoint(run=self.process.run, source="orchestrator", at=clock.now_us(), values=values)
        publish(self.producer, self.topics.metrics, point)
        self.process.figures.show(values)

    # --- what is no record ------------------------------------------------------------------

    def _make_version(self, version: int) -> None:
        self.bus.make_topics([self.topics.requests_spec(version, self.process.settings.engines.count)])

    def _do_again(self) -> None:
        """After a restart: topics and files that a crash may have left behind. A version that was written but is not
        announced yet is not the mind's business."""
        mind, prefix = self.mind, self.topics.prefix + "requests.v"
        there = [int(name.removeprefix(prefix)) for name in self.bus.topics(prefix)]
        self.retired = {v for v in there if v <= mind.published and v not in mind.unretired}
        for version in self.store.versions():
            if version <= mind.published and version not in mind.undeleted:
                self.store.delete(version)

    def _retire(self) -> None:
        """Delete the requests topics of retired versions that the archive has read to their end."""
        if not self.retired:
            return
        there = self.bus.topics(self.topics.prefix + "requests.")
        group = self.topics.group("archive")
        for version in sorted(self.retired):
            topic = self.topics.requests(version)
            if topic in there:
                read = self.bus.committed(group, topic)
                if any(read.get(partition, 0) < end for partition, end in self.bus.end_offsets(topic).items()):
                    continue
                self.bus.delete_topics([topic])
                self.process.log.info("topic_deleted", topic=topic, version=version)
            self.retired.discard(version)

    def _input(self, kind: str) -> str:
        return f"{self.topics.of(kind)}/0"


def read_journal(bus: Bus, topic: str) -> list[m.JournalRecord]:
    """All records of the journal so far. BadRecord stops the process: a journal with a hole is no history."""
    return _read(bus, topic, 0, bus.end_offsets(topic)[0])


def read_tail(bus: Bus, topic: str) -> list[m.JournalRecord]:
    """The last records of the journal, back to a snapshot that can be read; all, if there is none. BadRecord."""
    start, length = bus.end_offsets(topic)[0], TAIL_OFFSETS
    records: list[m.JournalRecord] = []
    while start > 0 and newest(records)[1] is None:
        stop, start, length = start, max(0, start - length), 2 * length
        records = _read(bus, topic, start, stop) + records
    return records


def _read(bus: Bus, topic: str, start: int, stop: int) -> list[m.JournalRecord]:
    """The records from offset `start` up to `stop`; transactions leave offsets without a record."""
    reader = bus.reader()
    reader.add(topic, 0, start)
    records: list[m.JournalRecord] = []
    while reader.position(topic, 0) < stop and not reader.at_end():
        for record in reader.poll(POLL_MS):
            if record.offset < stop:
                records.append(decode(m.JournalRecord, record.value, record.headers))
    reader.close()
    return records
