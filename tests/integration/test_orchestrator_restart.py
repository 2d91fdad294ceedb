"""An orchestrator that comes back to a long journal on a real log decides again within seconds."""

import contextlib
import random
import time
import uuid
from pathlib import Path

import pytest

from schemas import messages as m
from schemas.settings import Settings
from schemas.topics import Topics
from tests.unit.mind_driver import Driver
from workers.orchestrator import recovery
from workers.orchestrator.service import Hands, read_journal, read_tail
from workers.runtime.process import Process
from workers.transport.records.bus import publish
from workers.transport.records.kafka_bus import KafkaBus

pytestmark = [pytest.mark.integration, pytest.mark.full]
EVENTS = 100_000
RESTART_S_MAX = 5.0
EVENTS_PER_POLL_MAX = 200
LIMIT_S = 60.0
CHANGES = {
    "steps": 1_000_000,
    "group_size": 16,
    "groups_per_batch": 32,
    "staleness_max": 2,
    "engines": {"count": 8, "seats": 64},
}


class Writer(Driver):
    """A mind whose every poll is written down by the hands, as in a run. Polls are of random size."""

    def __init__(self, settings: Settings, hands: Hands, seed: int) -> None:
        self.hands, self.rng = hands, random.Random(seed)
        self.poll_events: list[m.Event] = []
        self.poll_effects: list[m.Effect] = []
        self.poll_size, self.written = 1, 0
        super().__init__(settings)

    def say(self, event: m.Event) -> list[m.Effect]:
        said = super().say(event)
        self.poll_events.append(event)
        self.poll_effects += said
        if len(self.poll_events) >= self.poll_size:
            self.write()
            super().say(tick := m.Tick(now=self.now))
            self.poll_events.append(tick)
        return said

    def write(self) -> None:
        self.hands.mind = self.mind
        self.hands.producer.begin()
        self.hands._write_down(self.poll_events, self.poll_effects)
        self.hands.producer.commit(LIMIT_S)
        self.written += len(self.poll_events)
        self.poll_events, self.poll_effects = [], []
        self.poll_size = self.rng.randint(1, EVENTS_PER_POLL_MAX)

    def step(self) -> None:
        """Engines and trainer do their part of one step; some requests move on the way."""
        batches = len(self.said(m.BatchRecord))
        while len(self.said(m.BatchRecord)) == batches:
            self.tick(0.5)
            for engine in self.mind.fleet.engines.values():
                where = {"engine": engine.number, "incarnation": engine.incarnation, "version": engine.version}
                self.say(m.Heartbeat(**where, running=1, waiting=0, kv_tokens=1))
            self.host_all()
            for group in self.rng.sample(self.running(), 8):
                for key in [key for key in self.out if key.group == group]:
                    issue = self.out[key]
                    self.finish(key)
                    self.score(key, float(self.rng.random() < 0.5), issue.version)
        self.train()
        self.prompts(self.settings.groups_per_batch)
        self.effects = self.effects[-5_000:]


def settings_of(name: str) -> Settings:
    tree = {"name": name, "model": "builtin:tiny", "dataset": [{"path": "rows.jsonl"}], **CHANGES}
    return Settings.model_validate(tree)


def prompt(row: int, run: str) -> m.PromptRecord:
    text = {"run": run, "prompt": "7 * 8?", "answer": "56", "task": "t", "dataset": "rows.jsonl", "purpose": "train"}
    return m.PromptRecord.model_validate({**text, "prompt_ids": (1,) * 8, "epoch": 0, "row": row, "max_new_tokens": 12})


def write_run(bus: KafkaBus, process: Process, seed: int) -> Writer:
    """A journal of EVENTS events, its prompts, and the requests topics of versions that are not retired."""
    bus.make_topics(process.topics.specs())
    hands = Hands(process, bus)
    writer = Writer(process.settings, hands, seed)
    while writer.written < EVENTS:
        writer.step()
    writer.host_all()
    writer.write()
    hands.close()
    producer = bus.producer()
    for row in range(writer.rows):
        publish(producer, process.topics.prompts, prompt(row, process.run))
    producer.flush(LIMIT_S)
    producer.close()
    bus.make_topics(process.topics.requests_spec(version, 8) for version in writer.mind.unretired)
    return writer


def go_on_meanwhile(bus: KafkaBus, process: Process, writer: Writer) -> None:
    """While the orchestrator is away engines finish all they have, and it is scored."""
    producer = bus.producer()
    for key, issue in writer.out.items():
        word = m.Finished(**writer.about(issue), tokens=5, finish_reason="stop")
        publish(producer, process.topics.status, word)
        names = {"group": key.group, "index": key.index, "attempt": key.attempt, "version": issue.version}
        verdict = {"reward": 1.0, "outcome": 1.0, "error": None}
        where = {"partition": 0, "offset": writer.scores + key.group, "row": key.index}
        publish(producer, process.topics.status, m.Scored(**names, **verdict, **where, purpose="train"))
    producer.flush(LIMIT_S)
    producer.close()


def restarted_s(bus: KafkaBus, process: Process) -> float:
    """Seconds from the start of new hands until a batch or requests that they decided on are committed."""
    decided = [process.topics.requests(version) for version in bus_versions(bus, process.topics)]
    decided.append(process.topics.batches)
    began = time.monotonic()
    hands = Hands(process, bus)
    with contextlib.closing(hands):
        while not any(end for topic in decided for end in bus.end_offsets(topic).values()):
            assert time.monotonic() - began < LIMIT_S, "nothing was decided"
            hands.turn()
        return time.monotonic() - began


def bus_versions(bus: KafkaBus, topics: Topics) -> list[int]:
    prefix = topics.prefix + "requests.v"
    return [int(name.removeprefix(prefix)) for name in bus.topics(prefix)]


def test_a_journal_of_100_000_events_takes_at_most_5_s_to_the_first_decision(
    broker_address: str, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    process = Process("orchestrator", settings_of(f"restart-{uuid.uuid4().hex[:8]}"), tmp_path)
    with contextlib.closing(KafkaBus(broker_address, {}, 1, LIMIT_S)) as bus:
        writer = write_run(bus, process, seed)
        print(f"{writer.written} events, version {writer.mind.published}, {len(writer.out)} requests are running")
        tail = read_tail(bus, process.topics.journal)
        began = time.monotonic()
        journal = read_journal(bus, process.topics.journal)
        mind = recovery.replay(process.settings, journal)
        whole_s = time.monotonic() - began
        assert sum(len(record.events) for record in journal) == writer.written >= EVENTS
        assert [record.sequence for record in journal] == list(range(len(journal)))
        assert mind.figures() == recovery.recover(process.settings, tail)[0].figures() == writer.mind.figures()
        go_on_meanwhile(bus, process, writer)
        seconds = restarted_s(bus, process)
        sizes = [len(record.snapshot) for record in journal if record.snapshot is not None]
        print(f"first decision after {seconds:.2f} s: {len(tail)} of {len(journal)} records; {len(sizes)} snapshots")
        print(f"a snapshot takes {max(sizes)} bytes at most; without snapshots the journal alone takes {whole_s:.2f} s")
        bus.delete_topics(bus.topics(process.topics.prefix))
    assert len(tail) < len(journal) / 5
    assert seconds <= RESTART_S_MAX
