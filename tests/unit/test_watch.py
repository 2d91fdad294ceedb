"""The supervisor's ear: what is said on the log is kept, whoever says it and in whichever order."""

import json
import threading
from pathlib import Path

import pyarrow.parquet as pq

from pipelines import report
from pipelines.watch import Watcher
from schemas.messages import MetricPoint
from schemas.topics import Topics
from tests.unit.pipeline_parts import some_settings
from workers.runtime import clock
from workers.runtime.process import Process
from workers.taps import archive
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus

LIMIT_S = 20.0


def test_a_second_writer_that_says_step_3_after_step_10_loses_no_row_of_metrics(tmp_path: Path) -> None:
    """H05."""
    settings = some_settings(tmp_path)
    run_dir, bus, topics = tmp_path / "r", MemoryBus(), Topics("r")
    run_dir.mkdir()
    bus.make_topics(topics.specs())
    watcher = Watcher(bus, settings, run_dir)
    watcher.start()
    said = [("trainer", 9), ("trainer", 10), ("evaluator", 3), ("trainer", 11), ("evaluator", 10)]
    producer = bus.producer()
    for at, (source, step) in enumerate(said):
        publish(producer, topics.metrics, MetricPoint(run="r", source=source, at=at, step=step, values={"x": step}))
    producer.flush(LIMIT_S)
    limit, live = clock.monotonic_s() + LIMIT_S, run_dir / "metrics.jsonl"
    while not live.exists() or live.read_text().count("\n") < len(said):
        assert clock.monotonic_s() < limit, live.read_text()
        threading.Event().wait(0.02)
    watcher.close(LIMIT_S)
    lines = [json.loads(line) for line in live.read_text().splitlines()]
    assert [(line["source"], line["step"]) for line in lines] == said
    taker = archive.Archive(Process("archive", settings, run_dir), bus)
    taker.turn()
    taker.finish()
    taker.close()
    report.write(settings, run_dir)
    rows = pq.read_table(run_dir / "metrics.parquet").to_pylist()
    assert [(row["source"], row["step"], row["value"]) for row in rows] == [(*one, float(one[1])) for one in said]
