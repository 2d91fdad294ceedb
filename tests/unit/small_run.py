"""A small correct run on the log, scored and archived by the real reward and archive.

K = 1, B = 2, G = 2; group: version -> ends in

    0: 0 -> step 0    1: 0 -> step 0    2: 0 -> step 1 (lag 1)    3: 1 -> step 1
    4: 1 -> step 2 (lag 1, alone: exhausted)    5: 2 -> voided no_signal    6: 0 -> held out
"""

import threading
from pathlib import Path

from schemas import messages as m
from schemas.codec import decode
from schemas.messages import STATUS, Scored
from schemas.topics import Topics, version_key
from tests.unit.reward_rows import Deadline, a_bus, a_process, a_row, complete, records
from workers.reward import service as reward
from workers.taps import archive
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus

TOPICS = Topics("r")
VERSION_OF = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 0}
BATCHES = ((0, 1), (2, 3), (4,))
VOIDED, HELD_OUT = 5, 6
CONFIG = """
name = "r"
model = "a folder"
steps = 3
group_size = 2
groups_per_batch = 2
staleness_max = 1
[[dataset]]
path = "rows.jsonl"
"""


def write_run(folder: Path) -> None:
    """config.toml and archive/ of the run."""
    (folder / "config.toml").write_text(CONFIG)
    bus = a_bus()
    bus.make_topics([TOPICS.requests_spec(0, 1)])
    for group, version in VERSION_OF.items():
        held = {"task": "held", "purpose": "eval"} if group == HELD_OUT else {}
        for index in range(2):
            complete(bus, [a_row(group, index, str(index), version=version, **held)])
    scored = _score(folder, bus)
    _decide(bus, scored)
    process = a_process(folder, "archive")
    process.stopping.set()
    assert archive.serve(process, bus) == 0


def _score(folder: Path, bus: MemoryBus) -> list[Scored]:
    process = a_process(folder)
    thread = threading.Thread(target=reward.serve, args=(process, bus, 0))
    thread.start()
    deadline = Deadline()
    while len(words := records(bus, TOPICS.status)) < 2 * len(VERSION_OF):
        deadline.check(words)
        process.stopping.wait(0.05)
    process.stopping.set()
    thread.join(30)
    assert not thread.is_alive()
    return [decode(STATUS, word.value, word.headers) for word in words]  # type: ignore[misc]


def _decide(bus: MemoryBus, scored: list[Scored]) -> None:
    """The orchestrator's and the trainer's part: journal, batches, weights."""
    issues = [_issue(group, index) for group in VERSION_OF for index in range(2)]
    batches = [_batch(step, groups, scored) for step, groups in enumerate(BATCHES)]
    ends: list[m.Effect] = [m.VoidGroup(group=VOIDED, version=2, reason="no_signal")]
    ends.append(m.EndRun(outcome="done", reason="3 steps"))
    producer = bus.producer(TOPICS.transactional_id)
    effects: list[tuple[m.Effect, ...]] = [tuple(issues), *((batch,) for batch in batches), tuple(ends)]
    for sequence, now in enumerate(effects):
        producer.begin()
        publish(
            producer, TOPICS.journal, m.JournalRecord(run="r", sequence=sequence, inputs={}, events=(), effects=now)
        )
        for effect in now:
            if isinstance(effect, m.BatchRecord):
                publish(producer, TOPICS.batches, effect, key=version_key(effect.step))
        producer.commit(10)
    trainer = bus.producer()
    for version in range(len(batches) + 1):
        publish(trainer, TOPICS.weights, _weights(version, batches), key=version_key(version))
    hosting = m.Hosting(engine=0, incarnation=1, version=1, fingerprint="weights-1", load_s=0.1)
    publish(trainer, TOPICS.status, hosting)
    publish(trainer, TOPICS.metrics, m.MetricPoint(run="r", source="trainer", at=1, step=0, values={"loss": 0.5}))


def _issue(group: int, index: int) -> m.Issue:
    return m.Issue(
        group=group,
        index=index,
        attempt=0,
        version=VERSION_OF[group],
        engine=0,
        incarnation=1,
        sequence=2 * group + index,
        purpose="eval" if group == HELD_OUT else "train",
        prompt_row=group,
        queued_at=1,
    )


def _batch(step: int, groups: tuple[int, ...], scored: list[Scored]) -> m.BatchRecord:
    members = [
        m.Member(group=w.group, index=w.index, attempt=w.attempt, partition=w.partition, offset=w.offset, row=w.row)
        for w in sorted(scored, key=lambda word: (word.group, word.index))
        if w.group in groups
    ]
    versions = tuple((group, VERSION_OF[group]) for group in groups)
    return m.BatchRecord(run="r", step=step, exhausted=len(groups) < 2, groups=versions, members=tuple(members))


def _weights(version: int, batches: list[m.BatchRecord]) -> m.WeightsRecord:
    batch = batches[version - 1] if version else None
    return m.WeightsRecord(
        run="r",
        version=version,
        step=version - 1 if batch else None,
        groups=batch.groups if batch else (),
        trajectories=len(batch.members) if batch else 0,
        location=f"version-{version}",
        manifest_sha256="0",
        fingerprint=f"weights-{version}",
        created_at=1,
    )
