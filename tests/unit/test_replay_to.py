"""`dora replay --to`: what is said again under a fresh name, and what of it is changed."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.config_file import read_resolved, write_resolved
from pipelines.replay_to import Again, Wanted, say_again
from schemas.arrow import to_bytes, to_rows, to_table
from schemas.codec import arrow_headers, decode, encode
from schemas.messages import BatchRecord, Member, PromptRecord, Scored, StopRun
from schemas.topics import Topics
from tests.unit.test_replay import STEPS, Stopping, trained
from tests.unit.trainer_world import World, row
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.runtime.process import Process
from workers.taps import archive
from workers.trainer.service import serve
from workers.transport.records.bus import Bus, BusUnavailable, Record, publish
from workers.transport.records.memory_bus import MemoryBus


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder that nobody changes."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    trained(folder)
    return folder


def again(folder: Path, bus: Bus, **wanted: Any) -> Again:
    return say_again(folder, replace(Wanted("there"), **wanted), lambda *_: nullcontext(bus))


def read(bus: Bus, topic: str) -> list[Record]:
    """All partitions, one after the other."""
    found = []
    for partition in range(bus.topics(topic)[topic]):
        reader = bus.reader()
        reader.add(topic, partition, "earliest")
        found += reader.poll(0)
    return found


def batches(bus: Bus, name: str) -> list[BatchRecord]:
    return [decode(BatchRecord, one.value, one.headers) for one in read(bus, Topics(name).batches)]


def row_of(bus: Bus, name: str, member: Member) -> Mapping[str, Any]:
    """What lies where a batch says that the member's row is."""
    there = [one for one in read(bus, Topics(name).trajectories) if one.partition == member.partition]
    (found,) = [one for one in there if one.offset == member.offset]
    return to_rows(to_table(found.value))[member.row]


def said(folder: Path, world: World) -> None:
    """Archive the world's log, whole."""
    process = Process("archive", world.settings, folder)
    process.stopping.set()
    assert archive.serve(process, world.bus) == 0


def as_before(before: Record, now: Record, run: str, name: str) -> bool:
    """Rule 1: but for the run's name and the places of rows the same; bytes and all if the name is the same."""
    where = (before.partition, before.key, before.headers) == (now.partition, now.key, now.headers)
    if before.headers["schema"].startswith("trajectory/"):
        renamed = [one | {"run": name} for one in to_rows(to_table(before.value))]
        return where and now.value == (before.value if run == name else to_bytes(renamed))
    expected = json.loads(before.value) | ({"run": name} if b'"run"' in before.value else {})
    got = json.loads(now.value)
    for one in (expected, got):
        for member in one.get("members", []):
            del member["offset"]
    return where and expected == got and (run != name or "members" in got or before.value == now.value)


@pytest.mark.parametrize("name", ["r", "fresh"])
def test_every_record_is_said_again_as_it_was(tmp_path: Path, name: str) -> None:
    """Under the old name (on another broker), where bytes are equal, and under a new one."""
    world = trained(tmp_path / "run")
    bus = MemoryBus()
    told = again(tmp_path / "run", bus, name=name)
    assert told.topics == {"trajectories": 20, "batches": 5, "weights": 6, "metrics": 5, "status": 3}
    assert told.unreadable == []
    for kind in told.topics:
        before, now = read(world.bus, world.topics.of(kind)), read(bus, Topics(name).of(kind))
        assert len(before) == len(now) == told.topics[kind]
        assert all(as_before(one, other, "r", name) for one, other in zip(before, now, strict=True)), kind
    assert bus.topics("dora.").keys() == {spec.name for spec in Topics(name).specs()}


def test_batches_name_the_rows_where_they_lie_now(tmp_path: Path) -> None:
    """Rows that nobody trained are not in the range, so the others lie elsewhere; nor is what cannot be read."""
    world = World(tmp_path / "run")
    for group in range(100, 108):
        world.add_row(row(group, 0, 0))
    world.producer.send(world.topics.trajectories, b"no rows", arrow_headers(0, 0, 0), partition=1)
    _finish(world, tmp_path / "run")
    bus = MemoryBus()
    told = again(tmp_path / "run", bus, name="fresh", step="0-4")
    assert told.moved == STEPS
    assert len(told.unreadable) == 1
    assert "trajectories.1.00000000000000000002.arrow" in told.unreadable[0]
    before, now = batches(world.bus, "r"), batches(bus, "fresh")
    assert [one.step for one in now] == list(range(STEPS))
    for old, new in zip(before, now, strict=True):
        assert new.model_copy(update={"run": "r", "members": ()}) == old.model_copy(update={"members": ()})
        for was, member in zip(old.members, new.members, strict=True):
            assert member.model_copy(update={"offset": was.offset}) == was
            assert row_of(bus, "fresh", member) == row_of(world.bus, "r", was) | {"run": "fresh"}
            assert was.offset > member.offset


def _finish(world: World, folder: Path) -> None:
    """Batches for the world, trained and archived."""
    write_resolved(world.settings, folder)
    for step in range(STEPS):
        world.send_batch(world.batch(step))
    process = Process("trainer", world.settings, folder)
    assert serve(process, world.bus, Stopping(process, STEPS)) == 0
    said(folder, world)


@pytest.mark.parametrize(("step", "steps"), [("0", [0]), ("1-3", [1, 2, 3]), ("all", [0, 1, 2, 3, 4])])
def test_steps_bring_their_rows_versions_and_figures(tmp_path: Path, step: str, steps: list[int]) -> None:
    world = World(tmp_path / "run")
    world.add_row(row(900, 0, 0))
    _finish(world, tmp_path / "run")
    bus = MemoryBus()
    told = again(tmp_path / "run", bus, name="fresh", step=step)
    assert [one.step for one in batches(bus, "fresh")] == steps
    assert told.topics["weights"] == len(steps) + 1
    assert told.topics["metrics"] == len(steps)
    groups = {to_rows(to_table(one.value))[0]["group"] for one in read(bus, Topics("fresh").trajectories)}
    assert (900 in groups) == (step == "all")
    assert groups - {900} == {group for one in batches(bus, "fresh") for group, _ in one.groups}


def test_a_position_chooses_from_the_first_topic_and_brings_the_rows(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    bus, topics = MemoryBus(), ("batches", "trajectories")
    told = again(tmp_path / "run", bus, name="fresh", topics=topics, since="0:1", until="0:3")
    assert [one.step for one in batches(bus, "fresh")] == [1, 2]
    assert told.topics == {"batches": 2, "trajectories": 8}
    for batch in batches(bus, "fresh"):
        for member in batch.members:
            assert row_of(bus, "fresh", member)["group"] == member.group


def test_a_position_names_partitions_and_a_time_chooses_from_all(tmp_path: Path) -> None:
    world = trained(tmp_path / "run")
    bus = MemoryBus()
    told = again(tmp_path / "run", bus, name="some", topics=("trajectories",), since="0:2,1:9", until="3:0")
    assert [one.partition for one in read(bus, Topics("some").trajectories)].count(0) == 4
    assert {one.partition for one in read(bus, Topics("some").trajectories)} == {0, 2}
    told = again(tmp_path / "run", bus, name="late", topics=("batches", "weights", "trajectories"), since="1h")
    assert told.topics["weights"] == STEPS + 1
    at = read(world.bus, world.topics.weights)[2].timestamp_us / 1e6
    when = datetime.fromtimestamp(at, UTC).isoformat()
    told = again(tmp_path / "run", bus, name="later", topics=("weights",), since=when)
    assert told.topics == {"weights": STEPS - 1}
    told = again(tmp_path / "run", bus, name="early", topics=("weights",), until=when)
    assert told.topics == {"weights": 2}


def test_a_score_says_where_its_row_lies_now(tmp_path: Path) -> None:
    """Of an evaluation too, whose topic is another one; what else is on the topic stays as it is."""
    world = World(tmp_path / "run")
    lost = world.add_row(row(4, 0, 0))
    member = world.add_row(row(8, 0, 0))
    assert member.offset == lost.offset + 1
    rows = to_bytes([row(9, 1, 0, purpose="eval")])
    world.producer.send(world.topics.evaluations, rows, arrow_headers(9, 1, 0), partition=1)
    word = {"version": 0, "reward": 1.0, "outcome": 1.0, "error": None, "attempt": 0}
    place = member.model_dump(exclude={"attempt"})
    publish(world.producer, world.topics.status, Scored(purpose="train", **place, **word))
    publish(world.producer, world.topics.status, StopRun(reason="é"))
    held_out = {"group": 9, "index": 1, "partition": 1, "offset": 0, "row": 0}
    publish(world.producer, world.topics.status, Scored(purpose="eval", **held_out, **word))
    world.send_batch(BatchRecord(run="r", step=0, exhausted=False, groups=((8, 0),), members=(member,)))
    write_resolved(world.settings, tmp_path / "run")
    said(tmp_path / "run", world)
    bus, topics = MemoryBus(), ("status", "trajectories", "evaluations")
    again(tmp_path / "run", bus, name="fresh", topics=topics, since="0:0", until="0:9")
    scored, stop, evaluated = read(bus, Topics("fresh").status)
    assert json.loads(scored.value)["offset"] == 0
    assert stop.value == encode(StopRun(reason="é"))[0]
    assert json.loads(evaluated.value)["offset"] == 0
    assert len(read(bus, Topics("fresh").trajectories)) == 1


def test_a_batch_comes_after_its_rows_and_all_in_order_of_time(tmp_path: Path) -> None:
    """The world's rows say that they were scored in 1970; a row that says it was scored after its batch, too."""
    world = World(tmp_path / "run")
    late = world.add_row(row(0, 0, 0, scored_at=clock.now_us() + 10**9))
    world.send_batch(BatchRecord(run="r", step=0, exhausted=False, groups=((0, 0),), members=(late,)))
    world.send_batch(world.batch(1))
    write_resolved(world.settings, tmp_path / "run")
    said(tmp_path / "run", world)
    order: list[str] = []
    bus = Watched(order)
    again(tmp_path / "run", bus, name="fresh")
    assert order == ["trajectories"] * 5 + ["batches"] * 2


class Watched(MemoryBus):
    """Notes the order in which records of all topics are sent, and when."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order, self.at = order, list[float]()

    def producer(self, transactional_id: str | None = None) -> Any:
        producer = super().producer(transactional_id)
        send = producer.send

        def noted(topic: str, *rest: Any, **more: Any) -> Any:
            self.order.append(topic.rpartition(".")[2])
            self.at.append(clock.monotonic_s())
            return send(topic, *rest, **more)

        producer.send = noted  # type: ignore[method-assign]
        return producer


def test_records_come_as_far_apart_as_in_the_run(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    for index, ms in enumerate((0, 300, 900)):
        world.add_row(row(0, index, 0, scored_at=10**9 + ms * 1000))
    write_resolved(world.settings, tmp_path / "run")
    said(tmp_path / "run", world)
    bus, began = Watched([]), clock.monotonic_s()
    again(tmp_path / "run", bus, name="half", topics=("trajectories",), speed=2.0)
    _, second, third = bus.at
    assert second - began >= 0.15
    assert third - began >= 0.45


def test_a_trainer_on_what_was_said_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    world = trained(tmp_path / "run")
    bus = MemoryBus()
    told = again(tmp_path / "run", bus, topics=("batches", "trajectories"))
    assert told.name == "r-again-000"
    assert told.run_dir == tmp_path / "r-again-000"
    settings = read_resolved(told.run_dir)
    assert settings == read_resolved(tmp_path / "run").model_copy(update={"name": "r-again-000"})
    process = Process("trainer", settings, told.run_dir)
    assert serve(process, bus, Stopping(process, STEPS)) == 0
    weights = [json.loads(one.value)["fingerprint"] for one in read(bus, Topics(told.name).weights)]
    assert weights == [one.fingerprint for one in world.weights()]


def test_names_count_up_past_folders_and_topics_that_are_there(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    bus = MemoryBus()
    bus.make_topics(Topics("r-again-001").specs())
    (tmp_path / "r-again-000").mkdir()
    assert again(tmp_path / "run", bus, topics=("metrics",)).name == "r-again-002"
    with pytest.raises(BadInput, match=r"--as r-again-001: the broker at there has 13 topics dora\.r-again-001"):
        again(tmp_path / "run", bus, name="r-again-001")
    with pytest.raises(BadInput, match=r"--as run: .*/run exists: choose another name"):
        again(tmp_path / "run", bus, name="run")
    with pytest.raises(BadInput, match="--as a b: run name 'a b': use 1 to 80 letters"):
        again(tmp_path / "run", bus, name="a b")


def test_prompts_keep_their_numbers(tmp_path: Path) -> None:
    """They are said from the first on, whatever the range; with a hole in them they are refused."""
    world = World(tmp_path / "run")
    write_resolved(world.settings, tmp_path / "run")
    for number in range(3):
        publish(world.producer, world.topics.prompts, _prompt(number))
    said(tmp_path / "run", world)
    bus = MemoryBus()
    told = again(tmp_path / "run", bus, name="all", since="2100-01-01")
    assert told.topics == {"prompts": 3}
    world.producer.send(world.topics.prompts, b"{", {"schema": "prompt/1", "id": "x"})
    publish(world.producer, world.topics.prompts, _prompt(4))
    said(tmp_path / "run", world)
    with pytest.raises(BadInput, match="prompts: row 4 would be row 3"):
        again(tmp_path / "run", bus, name="hole")


def _prompt(number: int) -> PromptRecord:
    fields = {"prompt": "p", "prompt_ids": (1,), "answer": "", "task": "t", "dataset": "d", "purpose": "train"}
    return PromptRecord(run="r", epoch=0, row=number, max_new_tokens=4, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"step": "5"}, "no batch of run r is of step 5"),
        ({"step": "3-9"}, "no batch of run r is of step 5"),
        ({"step": "4-2"}, "--step 4-2: with --to a step"),
        ({"step": "²"}, "--step ²: with --to a step"),
        ({"step": "1", "since": "1h"}, "a range is of steps, or of time and offsets"),
        ({"step": "1", "topics": ("weights",)}, "give --topic batches too"),
        ({"step": "1", "topics": ("batches", "trajectories", "prompts")}, "--step with --topic prompts"),
        ({"topics": ("journal",)}, "--decisions"),
        ({"topics": ("batches",)}, "it names rows of trajectories: give --topic trajectories too"),
        ({"topics": ("metric",)}, "did you mean metrics"),
        ({"since": "0:4"}, "a position is of one topic: name it by --topic"),
        ({"since": "tomorrow"}, "--since tomorrow: write a duration"),
        ({"until": "noon"}, "--until noon: write a duration"),
        ({"since": "now"}, "said nothing in that range"),
        ({"topics": ("evaluations",)}, "said nothing in that range"),
        ({"speed": 0.0}, "--speed 0.0: 1 = as it was"),
        ({"speed": float("nan")}, "--speed nan"),
    ],
)
def test_what_cannot_be_said_again_is_refused_and_nothing_is_made(run: Path, wanted: dict[str, Any], why: str) -> None:
    bus = MemoryBus()
    with pytest.raises(BadInput, match=why):
        again(run, bus, **wanted)
    assert bus.topics("dora.") == {}
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_rows_that_are_gone_are_refused(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    for file in (tmp_path / "run" / "archive" / "trajectories").glob("2.*.arrow"):
        file.unlink()
    with pytest.raises(BadInput, match=r"record 1 of batches names record 2/\d+ of trajectories, which is not there"):
        again(tmp_path / "run", MemoryBus())


def test_somebody_who_writes_to_the_same_name_is_noticed(tmp_path: Path) -> None:
    trained(tmp_path / "run")

    class Shared(MemoryBus):
        def make_topics(self, specs: Any) -> None:
            super().make_topics(specs)
            super().producer().send("dora.r-again-000.batches", b"{}", {})

    with pytest.raises(BusUnavailable, match="somebody else writes there"):
        again(tmp_path / "run", Shared())


def test_a_record_that_its_reader_will_bury_is_said_again_as_it_is(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    bad = [b'{"run":"r","members":7}', b"[1]", b'"r"']
    for value in bad:
        world.producer.send(world.topics.batches, value, {"schema": "batch/1", "id": "b"})
    write_resolved(world.settings, tmp_path / "run")
    said(tmp_path / "run", world)
    bus = MemoryBus()
    again(tmp_path / "run", bus, name="fresh")
    assert [one.value for one in read(bus, Topics("fresh").batches)] == [b'{"run":"fresh","members":7}', *bad[1:]]


@pytest.mark.parametrize("more", [["--as", "x"], ["--speed", "2"], ["--topic", "batches"], ["--until", "1h"]])
def test_options_of_to_without_it_are_refused(run: Path, more: list[str]) -> None:
    done = CliRunner().invoke(app, ["replay", str(run), "--step", "1", *more], catch_exceptions=False)
    assert done.exit_code == 2
    assert "go with --to" in done.output


def test_to_goes_with_no_comparison(run: Path) -> None:
    argv = ["replay", str(run), "--to", "127.0.0.1:1", "--decisions"]
    done = CliRunner().invoke(app, argv, catch_exceptions=False)
    assert done.exit_code == 2
    assert "not --decisions" in done.stderr
