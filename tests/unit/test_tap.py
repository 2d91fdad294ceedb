"""A tap of a run: archive and broker are one stream, and a position parts it without loss or doubles."""

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines import tap_columns
from pipelines.tap import Ask, Shown, Stream, tap, topics_of
from pipelines.tap_positions import Positions, parse
from schemas.topics import KINDS, Topics
from tests.unit.pipeline_parts import supervised
from tests.unit.reward_rows import Deadline, a_bus, a_process, a_row, complete
from tests.unit.small_run import CONFIG, write_run
from workers.runtime.errors import BadInput
from workers.taps import archive
from workers.transport.records.bus import Bus, BusUnavailable
from workers.transport.records.memory_bus import MemoryBus

TOPICS = Topics("r")
FIELDS = tuple[int, int, int, int]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tap") / "r"
    folder.mkdir()
    write_run(folder)
    return folder


def _keys(batches: list[pa.RecordBatch]) -> list[FIELDS]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    return [(row["partition"], row["offset"], row["group"], row["index"]) for row in rows]


def _begun(folder: Path) -> MemoryBus:
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    return a_bus()


def _archive(folder: Path, bus: MemoryBus) -> None:
    process = a_process(folder, "archive")
    process.stopping.set()
    assert archive.serve(process, bus) == 0


def _stream(folder: Path, bus: Bus, **ask: Any) -> Stream:
    return Stream(folder, Ask("completions", **ask), open_bus=lambda *_: nullcontext(bus))


def _shown(parts: Iterator[Shown]) -> list[pa.RecordBatch]:
    return [part.batch for part in parts if part.batch.num_rows]


def test_python_gives_record_batches_with_the_columns_of_the_archive(run_dir: Path) -> None:
    batches = list(tap(run_dir, "trajectories"))
    assert all(isinstance(batch, pa.RecordBatch) for batch in batches)
    whole = archive.read(run_dir, "trajectories")
    assert pa.Table.from_batches(batches).equals(whole.combine_chunks())
    assert next(tap("r", "trajectories", runs_dir=run_dir.parent, limit=3)).num_rows == 3
    assert list(tap(run_dir, "partials")) == []


def test_json_topics_have_typed_columns_and_the_text(run_dir: Path) -> None:
    (batch,) = tap(run_dir, "weights", where="version = 2")
    (row,) = batch.to_pylist()
    assert (row["version"], row["fingerprint"], row["trajectories"]) == (2, "weights-2", 4)
    assert json.loads(row["value"])["groups"] == [[2, 0], [3, 1]]
    (point,) = next(tap(run_dir, "metrics", where="source = 'trainer' and values['loss'] < 1")).to_pylist()
    assert dict(point["values"]) == {"loss": 0.5}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in archive.TOKEN_KINDS])
def test_every_json_topic_has_one_schema_whatever_is_in_its_records(kind: str) -> None:
    schema = tap_columns.schema_of(kind)
    assert len(set(schema.names)) == len(schema.names)
    strange = [{name: {"no": ["such", "type"]} for name in tap_columns.fields_of(kind)}, [1], {}]
    rows = [
        {"partition": 0, "offset": n, "timestamp": 1, "key": None, "id": None, "value": json.dumps(value)}
        for n, value in enumerate(strange)
    ]
    assert tap_columns.typed(kind, pa.Table.from_pylist(rows, archive.TEXT_SCHEMA)).schema == schema


def test_rows_of_one_record_are_parted_too(tmp_path: Path) -> None:
    bus = _begun(tmp_path / "r")
    for group in (0, 1, 2):
        complete(bus, [a_row(group, index) for index in range(3)])
    with supervised(tmp_path / "r"):
        whole = _keys(_shown(_stream(tmp_path / "r", bus).parts()))
        assert len(whole) == 9
        for count in range(1, 9):
            first = list(_stream(tmp_path / "r", bus, limit=count).parts())
            position = Positions("completions")
            for part in first:
                if part.place:
                    position.of[part.place] = part.end
            again = _stream(tmp_path / "r", bus, since=str(position))
            assert _keys(_shown(iter(first))) + _keys(_shown(again.parts())) == whole


def test_positions_are_read_as_they_are_written() -> None:
    for text in ("", "0:12", "0:12,1:40.3", "v000001/0:5,v000012/3:7.1"):
        assert str(parse("requests", text)) == text
    with pytest.raises(ValueError, match="no position"):
        parse("requests", "0:12,")


class _Moody(MemoryBus):
    """A broker that is away now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.away, self.refused = False, 0

    def topics(self, prefix: str) -> dict[str, int]:
        if self.away:
            self.refused += 1
            raise BusUnavailable("away")
        return super().topics(prefix)


class _Following:
    """A follow tap in a thread of its own."""

    def __init__(self, folder: Path, bus: Bus, **ask: Any) -> None:
        self.rows: list[FIELDS] = []
        self.stream = _stream(folder, bus, follow=True, **ask)
        self.thread = threading.Thread(target=self._body, daemon=True)
        self.thread.start()

    def _body(self) -> None:
        for part in self.stream.parts():
            self.rows += _keys([part.batch])

    def wait(self, count: int) -> None:
        deadline, pause = Deadline(), threading.Event()
        while len(self.rows) < count:
            deadline.check(self.rows)
            pause.wait(0.02)

    def join(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()


def test_a_follow_tap_waits_for_a_broker_that_is_away_and_ends_with_the_archive(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    bus = _Moody()
    bus.make_topics(TOPICS.specs())
    with supervised(folder):
        complete(bus, [a_row(0, 0)])
        following = _Following(folder, bus)
        following.wait(1)
        bus.away = True
        complete(bus, [a_row(1, 0)])
        deadline, pause = Deadline(), threading.Event()
        while bus.refused < 2:
            deadline.check("the tap to notice that its broker is away")
            pause.wait(0.02)
        complete(bus, [a_row(2, 0)])
        bus.away = False
        following.wait(3)
        bus.away = True
        complete(bus, [a_row(3, 0)])
        bus.away = False
        _archive(folder, bus)
        bus.away = True
    following.join()
    assert sorted(group for _, _, group, _ in following.rows) == [0, 1, 2, 3]


def test_without_follow_a_broker_that_is_away_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    bus = _Moody()
    bus.away = True
    with supervised(folder), pytest.raises(BusUnavailable):
        _shown(_stream(folder, bus).parts())


def test_what_is_archived_and_still_on_the_broker_comes_once(tmp_path: Path) -> None:
    bus = _begun(tmp_path / "r")
    complete(bus, [a_row(0, 0)])
    _archive(tmp_path / "r", bus)
    complete(bus, [a_row(0, 1)])
    with supervised(tmp_path / "r"):
        rows = _keys(_shown(_stream(tmp_path / "r", bus).parts()))
        (count,) = [
            topic["rows"]
            for topic in topics_of(tmp_path / "r", [], lambda *_: nullcontext(bus))
            if topic["topic"] == "completions"
        ]
    assert rows == [(0, 0, 0, 0), (0, 1, 0, 1)]
    assert count == 2


def test_now_shows_only_what_comes_later(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    bus = _begun(folder)
    complete(bus, [a_row(0, 0)])
    _archive(folder, bus)
    complete(bus, [a_row(1, 0)])
    with supervised(folder):
        assert _shown(_stream(folder, bus, since="now").parts()) == []
        following = _Following(folder, bus, since="now")
        deadline, pause = Deadline(), threading.Event()
        while len(following.stream.source.positions.of) < 4:
            deadline.check("the tap to find its partitions")
            pause.wait(0.02)
        complete(bus, [a_row(2, 0)])
        following.wait(1)
        _archive(folder, bus)
    following.join()
    assert [group for _, _, group, _ in following.rows] == [2]


def test_a_duration_and_a_time_are_of_the_rows_own_time(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    bus = _begun(folder)
    for group, finished in enumerate((3_000_000, 4_000_000, 5_000_000)):
        complete(bus, [a_row(group, 0, finished_at=finished)])
    _archive(folder, bus)
    assert [g for _, _, g, _ in _keys(list(tap(folder, "completions", since="1970-01-01T00:00:04")))] == [1, 2]
    assert list(tap(folder, "completions", since="10m")) == []
    assert len(_keys(list(tap(folder, "completions", since="40000d")))) == 3
    with pytest.raises(BadInput, match="write a duration"):
        next(tap(folder, "completions", since="yesterday"))


def test_requests_of_a_retired_version_come_from_the_archive(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    bus = _begun(folder)
    for version in (0, 1):
        bus.make_topics([TOPICS.requests_spec(version, 1)])
        bus.producer().send(TOPICS.requests(version), json.dumps({"version": version}).encode(), {})
    _archive(folder, bus)
    bus.delete_topics([TOPICS.requests(0)])
    bus.producer().send(TOPICS.requests(1), b'{"version": 1, "group": 7}', {})
    bus.producer().send(TOPICS.requests(1), b"no json", {})
    with supervised(folder):
        stream = Stream(folder, Ask("requests"), open_bus=lambda *_: nullcontext(bus))
        rows = [row for batch in _shown(stream.parts()) for row in batch.to_pylist()]
    assert [(row["version"], row["offset"], row["group"]) for row in rows] == [(0, 0, None), (1, 0, None), (1, 1, 7)]
    assert [what.split(": ")[0] for what in stream.source.unreadable] == ["requests.v000001 0:2"]


def test_a_record_that_cannot_be_read_stops_no_tap(tmp_path: Path) -> None:
    bus = _begun(tmp_path / "r")
    bus.producer().send(TOPICS.completions, b"no arrow", {})
    complete(bus, [a_row(4, 0)])
    with supervised(tmp_path / "r"):
        assert [g for _, _, g, _ in _keys(_shown(_stream(tmp_path / "r", bus).parts()))] == [4]


def test_a_stopped_follow_tap_ends_at_once(tmp_path: Path) -> None:
    bus = _begun(tmp_path / "r")
    stopping = threading.Event()

    def opened(*_: object) -> AbstractContextManager[Bus]:
        return nullcontext(bus)

    with supervised(tmp_path / "r"):
        for part in Stream(tmp_path / "r", Ask("completions", follow=True), stopping, opened).parts():
            assert part.place is None
            stopping.set()


class _Forgetful(MemoryBus):
    """A topic is archived and deleted between the list and the first look at it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = folder / "archive" / "requests.v000000" / f"0.{0:020d}.arrow"

    def topics(self, prefix: str) -> dict[str, int]:
        found = super().topics(prefix)
        if prefix == TOPICS.prefix + "requests" and not self._file.exists():
            row = {"partition": 0, "offset": 0, "timestamp": 1, "key": None, "id": None, "value": '{"version": 0}'}
            archive.write_file(self._file, pa.Table.from_pylist([row], archive.TEXT_SCHEMA))
            self.delete_topics([TOPICS.requests(0)])
        return found

    def reader(self, group: str | None = None, gather_ms: int = 0) -> Any:
        """As Kafka's: a topic that is not there cannot be added."""
        reader, there = super().reader(group, gather_ms), super().topics
        add = reader.add

        def checked(topic: str, partition: int, start: Any) -> None:
            if topic not in there(topic):
                raise BusUnavailable(f"topic {topic} does not exist")
            add(topic, partition, start)

        reader.add = checked  # type: ignore[method-assign]
        return reader


def test_a_topic_deleted_under_the_taps_eyes_is_read_from_the_archive(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    bus = _Forgetful(folder)
    for version in (0, 1):
        bus.make_topics([TOPICS.requests_spec(version, 1)])
        bus.producer().send(TOPICS.requests(version), json.dumps({"version": version}).encode(), {})
    with supervised(folder):
        stream = Stream(folder, Ask("requests"), open_bus=lambda *_: nullcontext(bus))
        rows = [row["version"] for batch in _shown(stream.parts()) for row in batch.to_pylist()]
    assert sorted(rows) == [0, 1]
