"""`dora metrics`: whenever a sink is killed and started again, each point of the run is in its output once.

Lines of JSON always; TensorBoard, W&B and MLflow where their libraries are (`pip install 'dora-rl[sinks]'`).
"""

import json
import math
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.metrics import SINKS, send
from schemas.messages import MetricPoint
from schemas.topics import Topics
from tests.unit.pipeline_parts import supervised
from tests.unit.reward_rows import a_process
from tests.unit.small_run import CONFIG
from workers.runtime.errors import BadInput
from workers.taps import archive
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus

TOPICS = Topics("r")
LIBRARIES = {"tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy")}
Written = list[tuple[int, dict[str, float]]]
"""Step and values of each point, by offset."""


def said(number: int) -> MetricPoint:
    """Of the trainer every third; the others belong to no step."""
    own = {"source": "trainer", "step": number // 3} if number % 3 == 0 else {"source": "reward-0"}
    values = {"loss": 0.5 * number, "late": float(number)}
    return MetricPoint(run="r", at=1_800_000_000_000_000 + number * 1_000_000, values=values, **own)


def expected(count: int) -> Written:
    return [
        (number // 3, {f"{said(number).source}/{name}": value for name, value in said(number).values.items()})
        for number in range(count)
    ]


class Live:
    """A run that goes on: points on its log, some of them archived."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.toml").write_text(CONFIG)
        self.folder, self.bus = folder, MemoryBus()
        self.bus.make_topics(TOPICS.specs())
        self.producer, self.points = self.bus.producer(), 0

    def say(self, count: int) -> None:
        for _ in range(count):
            publish(self.producer, TOPICS.metrics, said(self.points))
            self.points += 1

    def archive(self) -> None:
        process = a_process(self.folder, "archive")
        process.stopping.set()
        assert archive.serve(process, self.bus) == 0

    def send(self, sink: str, out: Path, **more: Any) -> int:
        return send(self.folder, sink, out, open_bus=lambda *_: nullcontext(self.bus), **more)


def ended(folder: Path, count: int) -> Live:
    """A run that has ended, with so many points."""
    run = Live(folder)
    run.say(count)
    run.archive()
    return run


def ascending(offsets: list[int]) -> None:
    """Each once and in order; other offsets of the topic are no records."""
    assert offsets == sorted(set(offsets))


def in_lines(out: Path) -> Written:
    rows = [json.loads(line) for line in (out / "r.jsonl").read_text().splitlines()]
    ascending([row["offset"] for row in rows])
    return [(row["step"], row["values"]) for row in rows]


def in_tensorboard(out: Path) -> Written:
    """By TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    (file,) = (out / "r").iterdir()
    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(file)).Load()]
    found, offsets = Written(), list[int]()
    for event in events[1:]:
        values = {value.tag: value.simple_value for value in event.summary.value}
        offsets += [value.tensor.int64_val[0] for value in event.summary.value if value.tag == "dora/offset"]
        found.append((event.step, {tag: value for tag, value in values.items() if tag != "dora/offset"}))
    assert len(offsets) == len(found)
    ascending(offsets)
    return found


def in_wandb(out: Path) -> Written:
    from wandb.proto.wandb_internal_pb2 import Record

    from pipelines.sinks.wandb_sink import records

    found, offsets = Written(), list[int]()
    for file in sorted(out.glob("wandb/offline-run-*/run-r.wandb")):
        for record in map(Record.FromString, records(file)):
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if values:
                assert values["dora/offset"] == values["_step"]
                offsets.append(int(values["_step"]))
                own = [key for key in values if "/" in key and key != "dora/offset"]
                found.append((int(values["step"]), {key: float(values[key]) for key in own}))
    ascending(offsets)
    return found


def in_mlflow(out: Path) -> Written:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dora")
    (run,) = client.search_runs([experiment.experiment_id])
    found: dict[int, tuple[int, dict[str, float]]] = {}
    for name in run.data.metrics:
        for one in client.get_metric_history(run.info.run_id, name):
            point = found.setdefault(one.timestamp, (one.step, {}))
            if name != "dora/offset":
                assert name not in point[1]
                point[1][name] = one.value
    return [found[at] for at in sorted(found)]


READERS: dict[str, Callable[[Path], Written]] = {
    "jsonl": in_lines,
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "mlflow": in_mlflow,
}
every_sink = pytest.mark.parametrize("sink", list(SINKS))


def needs(sink: str) -> None:
    for library in LIBRARIES.get(sink, ()):
        pytest.importorskip(library)


@every_sink
def test_a_sink_that_is_started_again_and_again_has_each_point_of_a_live_run_once(tmp_path: Path, sink: str) -> None:
    needs(sink)
    run, out = Live(tmp_path / "r"), tmp_path / "out"
    with supervised(run.folder):
        assert run.send(sink, out) == 0
        for count in (4, 1, 7):
            run.say(count)
            assert run.send(sink, out) == count
        run.archive()
        run.say(2)
        assert run.send(sink, out) == 2
    run.archive()
    assert run.send(sink, out) == 0
    run.say(1)
    run.archive()
    assert run.send(sink, out) == 1
    assert READERS[sink](out) == expected(15)


@pytest.mark.parametrize("sink", ["jsonl", "tensorboard"])
def test_an_output_that_was_cut_off_anywhere_by_a_kill_becomes_whole_again(tmp_path: Path, sink: str) -> None:
    needs(sink)
    run, out = ended(tmp_path / "r", 5), tmp_path / "out"
    run.send(sink, out)
    (file,) = [path for path in out.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    whole = file.read_bytes()
    for length in range(0, len(whole), 3):
        file.write_bytes(whole[:length])
        run.send(sink, out)
        assert file.read_bytes() == whole, length


def test_a_point_that_was_written_in_part_is_once_in_mlflow(tmp_path: Path) -> None:
    """The kill came between its figures and its offset."""
    needs("mlflow")
    from pipelines.sinks.mlflow_sink import MlFlow

    run, out = ended(tmp_path / "r", 3), tmp_path / "out"
    out.mkdir()
    sink = MlFlow(out, "r")
    first = said(0)
    half = sink._metric("trainer/loss", first.values["loss"], first.at // 1000, 0)
    sink._client.log_batch(sink._run, [half])
    assert run.send("mlflow", out) == 3
    assert in_mlflow(out) == expected(3)


def test_figures_that_are_not_finite_and_points_that_cannot_be_read_stop_nothing(tmp_path: Path) -> None:
    run, out = Live(tmp_path / "r"), tmp_path / "out"
    run.producer.send(TOPICS.metrics, b'{"run": "r"}', {})
    odd = MetricPoint(run="r", source="trainer", at=1, step=2, values={"loss": math.nan})
    publish(run.producer, TOPICS.metrics, odd)
    run.archive()
    assert run.send("jsonl", out) == 1
    (line,) = (out / "r.jsonl").read_text().splitlines()
    assert json.loads(line) == {"offset": 1, "at": 1, "step": 2, "values": {"trainer/loss": "nan"}}


def test_a_follower_ends_with_the_run_and_a_second_one_is_refused_meanwhile(tmp_path: Path) -> None:
    run, out, sent = Live(tmp_path / "r"), tmp_path / "out", list[int]()
    with supervised(run.folder):
        run.say(3)
        follower = threading.Thread(target=lambda: sent.append(run.send("jsonl", out, follow=True)))
        follower.start()
        end = threading.Event()
        for _ in range(600):
            if (out / "r.jsonl").exists() and len((out / "r.jsonl").read_text().splitlines()) == 3:
                break
            end.wait(0.05)
        with pytest.raises(BadInput, match="another `dora metrics` writes jsonl of run r there"):
            run.send("jsonl", out)
        run.say(2)
        run.archive()
    follower.join(60)
    assert not follower.is_alive()
    assert sent == [5]
    assert in_lines(out) == expected(5)


def test_another_file_of_that_name_is_left_as_it_is(tmp_path: Path) -> None:
    run, out = ended(tmp_path / "r", 2), tmp_path / "out"
    out.mkdir()
    for text in ("notes of mine", '{"offset": "first"}\n'):
        (out / "r.jsonl").write_text(text)
        with pytest.raises(BadInput, match="not written by `dora metrics`"):
            run.send("jsonl", out)
        assert (out / "r.jsonl").read_text() == text


def test_wrong_words_are_said_and_end_with_2(tmp_path: Path) -> None:
    run = ended(tmp_path / "r", 2)

    def dora(*argv: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["metrics", *map(str, argv)])
        return done.exit_code, done.output

    code, text = dora(run.folder, "excel", tmp_path / "out")
    assert code == 2
    assert "there are jsonl, tensorboard, wandb, mlflow" in text
    (tmp_path / "file").write_text("")
    code, text = dora(run.folder, "jsonl", tmp_path / "file")
    assert code == 2
    assert "cannot be written" in text
    assert dora(tmp_path / "none", "jsonl", tmp_path / "out")[0] == 2
    code, text = dora(run.folder, "jsonl", tmp_path / "out", "--json")
    assert (code, json.loads(text)) == (0, {"points": 2})


@pytest.mark.parametrize("sink", list(LIBRARIES))
def test_a_library_that_is_not_there_is_named_with_what_to_install(
    tmp_path: Path, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended(tmp_path / "r", 1)
    name = LIBRARIES[sink][-1]
    for loaded in [one for one in sys.modules if one.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    done = CliRunner().invoke(app, ["metrics", str(run.folder), sink, str(tmp_path / "out")])
    assert done.exit_code == 2
    assert f"the library {name} is not installed: pip install 'dora-rl[sinks]'" in done.output
