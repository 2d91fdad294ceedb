"""`dora metrics RUN SINK FOLDER`: the figures of a run for people's own boards, from its log while it goes on, or from
its archive.

Rule 1: how far a sink is stands in its output and nowhere else (`Sink.position`): killed at any moment and started
   again, it goes on with the point after the last one that is there.
Rule 2: one process writes to an output: the others are refused.
"""

import importlib
import threading
from collections.abc import Iterator
from pathlib import Path

from pipelines import archived, tap_source
from pipelines.alone import alone
from pipelines.config_file import read_resolved
from pipelines.sinks.base import Point, Sink
from pipelines.tap import Ask, Stream
from pipelines.tap_source import OpenBus
from schemas.messages import MetricPoint
from workers.runtime.errors import BadInput

SINKS = {
    "jsonl": ("jsonl_sink", "JsonLines"),
    "tensorboard": ("tensorboard_sink", "TensorBoard"),
    "wandb": ("wandb_sink", "WeightsAndBiases"),
    "mlflow": ("mlflow_sink", "MlFlow"),
}
"""By name: where it is. A library is loaded when its sink is asked for."""


def send(
    run_dir: Path,
    sink: str,
    folder: Path,
    *,
    follow: bool = False,
    stopping: threading.Event | None = None,
    open_bus: OpenBus = tap_source.kafka,
) -> int:
    """Give the sink what it has not got yet; with `follow` until the run ends. How many points that was. BadInput,
    BusUnavailable (without `follow`)."""
    if sink not in SINKS:
        raise BadInput(f"sink {sink!r} is not known; there are {', '.join(SINKS)}")
    run = read_resolved(run_dir).name
    stream = Stream(run_dir, Ask("metrics", follow=follow), stopping, open_bus)
    refusal = f"{folder}: another `dora metrics` writes {sink} of run {run} there"
    with alone(folder / f".{run}.{sink}.lock", refusal):
        module, name = SINKS[sink]
        opened: Sink = getattr(importlib.import_module(f"pipelines.sinks.{module}"), name)(folder, run)
        try:
            return _pump(stream, opened)
        finally:
            opened.close()


def _pump(stream: Stream, sink: Sink) -> int:
    sent = 0
    for points in _points(stream):
        new = [point for point in points if point.offset >= sink.position()]
        if new:
            sink.write(new)
            sent += len(new)
    return sent


def _points(stream: Stream) -> Iterator[list[Point]]:
    """All of the topic, from its beginning: a point without a step of its own needs those before it. What cannot be
    read is left out."""
    step = 0
    for part in stream.parts():
        points = []
        for offset, said in archived.records("metrics", part.batch):
            if isinstance(said, MetricPoint):
                step = step if said.step is None else said.step
                values = {f"{said.source}/{name}": value for name, value in said.values.items()}
                points.append(Point(offset, said.at, step, values))
        yield points
