"""The archive: every record of every topic, once, whatever happens to it; and what is read from it."""

import re
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from schemas import arrow
from schemas import messages as m
from schemas.codec import arrow_headers
from schemas.topics import Topics, score_partition, version_key
from tests.unit.reward_rows import Deadline, a_bus, a_process, a_row, complete
from workers.runtime.errors import BadInput
from workers.taps import evaluate
from workers.taps.archive import RAW_SCHEMA, TEXT_SCHEMA, Archive, Roll, check, read, schema_of, serve, write_file
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus

TOPICS = Topics("r")
AT_ONCE = Roll(period_s=0.0)
NEVER = Roll(period_s=1e9)


def say(bus: MemoryBus, count: int, first: int = 0) -> None:
    producer = bus.producer()
    for at in range(first, first + count):
        publish(producer, TOPICS.metrics, m.MetricPoint(run="r", source="s", at=at, values={"x": float(at)}))


def archive_all(bus: MemoryBus, folder: Path) -> None:
    process = a_process(folder, "archive")
    process.stopping.set()
    assert serve(process, bus) == 0


def offsets(folder: Path, kind: str) -> list[int]:
    found: list[int] = read(folder, kind).column("offset").to_pylist()
    return found


def committed(bus: MemoryBus, topic: str) -> int:
    return bus.committed(TOPICS.group("archive"), topic)[0]


def test_at_the_stop_every_topic_is_read_to_its_end(tmp_path: Path) -> None:
    bus = a_bus()
    bus.make_topics([TOPICS.requests_spec(3, 2), TOPICS.requests_spec(12, 2)])
    for version, partition in ((12, 0), (3, 1), (3, 0)):
        bus.producer().send(TOPICS.requests(version), b'{"a": 1}', {"id": "x"}, partition=partition, key=b"3")
    rows = [a_row(group, index) for group in range(5) for index in range(2)]
    complete(bus, rows[:2])
    for row in rows[2:]:
        complete(bus, [row])
    say(bus, 3)
    archive_all(bus, tmp_path)
    table = read(tmp_path, "completions")
    assert table.column_names == [*arrow.TRAJECTORY.names, "partition", "offset"]
    there = {(row["group"], row["index"], row["partition"]) for row in arrow.to_rows(table)}
    assert there == {(row["group"], row["index"], score_partition(row["group"])) for row in rows}
    requests = read(tmp_path, "requests")
    assert requests.schema == TEXT_SCHEMA
    assert requests.column("partition").to_pylist() == [0, 1, 0]
    assert requests.column("value").to_pylist() == ['{"a": 1}'] * 3
    assert requests.column("id").to_pylist() == ["x"] * 3
    assert requests.column("key").to_pylist() == ["3"] * 3
    assert (tmp_path / "archive" / "requests.v000003" / f"1.{0:020d}.arrow").is_file()
    assert offsets(tmp_path, "metrics") == [0, 1, 2]
    assert read(tmp_path, "journal").num_rows == 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_offsets_are_committed_after_the_files_are_in_place(tmp_path: Path) -> None:
    bus = a_bus()
    say(bus, 2)
    archive = Archive(a_process(tmp_path), bus, NEVER)
    archive.turn()
    assert committed(bus, TOPICS.metrics) == 0
    assert offsets(tmp_path, "metrics") == []
    archive.finish()
    assert committed(bus, TOPICS.metrics) == 2
    assert offsets(tmp_path, "metrics") == [0, 1]
    archive.close()


def test_after_a_crash_between_file_and_commit_the_file_is_replaced_and_nothing_comes_twice(tmp_path: Path) -> None:
    bus = a_bus()
    say(bus, 3)
    archive_all(bus, tmp_path)
    bus.offsets.clear()  # the commit never reached the broker
    say(bus, 2, first=3)
    archive_all(bus, tmp_path)
    assert offsets(tmp_path, "metrics") == [0, 1, 2, 3, 4]
    assert len(list((tmp_path / "archive" / "metrics").iterdir())) == 1


def test_a_restarted_archive_goes_on_where_it_had_committed(tmp_path: Path) -> None:
    bus = a_bus()
    say(bus, 3)
    archive_all(bus, tmp_path)
    say(bus, 2, first=3)
    archive_all(bus, tmp_path)
    assert offsets(tmp_path, "metrics") == [0, 1, 2, 3, 4]
    names = sorted(file.name for file in (tmp_path / "archive" / "metrics").iterdir())
    assert names == [f"0.{0:020d}.arrow", f"0.{3:020d}.arrow"]


def test_what_two_files_hold_is_read_once(tmp_path: Path) -> None:
    for first, last in ((0, 3), (2, 6)):
        rows = [
            {"partition": 0, "offset": offset, "timestamp": 0, "key": None, "id": None, "value": "{}"}
            for offset in range(first, last)
        ]
        table = pa.Table.from_pylist(rows, schema=TEXT_SCHEMA)
        write_file(tmp_path / "archive" / "metrics" / f"0.{first:020d}.arrow", table)
    assert offsets(tmp_path, "metrics") == [0, 1, 2, 3, 4, 5]


def test_a_record_that_cannot_be_read_is_kept_raw_and_the_rest_goes_on(tmp_path: Path) -> None:
    bus = a_bus()
    bus.producer().send(TOPICS.completions, b"no arrow", {"id": "trajectory/0.0.0"})
    complete(bus, [{**a_row(4, 0), "prompt_ids": None}])
    complete(bus, [a_row(4, 1)])
    bus.producer().send(TOPICS.metrics, b"\xff", {})
    bus.producer().send(TOPICS.metrics, b"no json", {})
    say(bus, 1)
    archive_all(bus, tmp_path)
    assert offsets(tmp_path, "completions") == [2]
    assert offsets(tmp_path, "metrics") == [2]
    kept = {}
    for file in (tmp_path / "archive" / "unreadable").iterdir():
        with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        assert table.schema == RAW_SCHEMA
        kept[file.name] = table.to_pylist()[0]
    assert sorted(kept) == [
        f"completions.0.{0:020d}.arrow",
        f"completions.0.{1:020d}.arrow",
        f"metrics.0.{0:020d}.arrow",
        f"metrics.0.{1:020d}.arrow",
    ]
    assert kept[f"completions.0.{0:020d}.arrow"]["value"] == b"no arrow"
    assert "prompt_ids is null" in kept[f"completions.0.{1:020d}.arrow"]["reason"]
    assert "UnicodeDecodeError" in kept[f"metrics.0.{0:020d}.arrow"]["reason"]


def test_topics_that_come_and_go_while_it_reads(tmp_path: Path) -> None:
    bus = a_bus()
    process = a_process(tmp_path, "archive")
    archive = Archive(process, bus, AT_ONCE)
    thread_error: list[BaseException] = []

    def work() -> None:
        try:
            while not process.stopping.is_set():
                archive.turn()
            archive.finish()
        except BaseException as error:
            thread_error.append(error)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    deadline = Deadline(30)
    for version in range(2):
        topic = TOPICS.requests(version)
        bus.make_topics([TOPICS.requests_spec(version, 1)])
        bus.producer().send(topic, b"{}", {}, key=version_key(version))
        while committed(bus, topic) < 1:
            deadline.check(f"{topic} archived")
            assert not thread_error
            process.stopping.wait(0.02)
        bus.delete_topics([topic])
    say(bus, 1)
    process.stopping.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not thread_error
    assert read(tmp_path, "requests").num_rows == 2
    assert offsets(tmp_path, "metrics") == [0]


@pytest.mark.parametrize("roll", [Roll(1e9, bytes_max=1), Roll(1e9, records_max=1)])
def test_files_are_written_when_there_is_enough_to_write(tmp_path: Path, roll: Roll) -> None:
    bus = a_bus()
    say(bus, 1)
    archive = Archive(a_process(tmp_path), bus, roll)
    archive.turn()
    archive.close()
    assert offsets(tmp_path, "metrics") == [0]


def test_held_out_accuracy_counts_each_sample_once_and_errors_apart(tmp_path: Path) -> None:
    bus = a_bus()
    unseen = {"metadata": '{"unseen": true, "level": 3}'}
    cases: list[tuple[int, int, int, float | None, dict[str, Any]]] = [
        (1, 0, 0, 1.0, {}),
        (1, 0, 0, 1.0, {}),  # redelivered
        (1, 1, 0, None, {"metadata": '{"unseen": false}'}),
        (2, 0, 0, 0.0, unseen),
        (2, 1, 1, 1.0, unseen),
        (3, 0, 0, 0.0, {"version": 2}),
    ]
    for group, index, attempt, outcome, other in cases:
        row = a_row(group, index, attempt=attempt, purpose="eval", scored_at=4_000_000, **other)
        error = "timed out" if outcome is None else None
        row.update(reward=outcome, outcome=outcome, score_error=error)
        bus.producer().send(
            TOPICS.evaluations,
            arrow.to_bytes([row]),
            arrow_headers(group, index, attempt),
            partition=score_partition(group),
        )
    archive_all(bus, tmp_path)
    assert evaluate.heldout(tmp_path) == {
        0: {"all": evaluate.Accuracy(2 / 3, 3, 1), "unseen": evaluate.Accuracy(0.5, 2, 0)},
        2: {"all": evaluate.Accuracy(0.0, 1, 0)},
    }


class _Late(MemoryBus):
    """Lists a topic once more that is deleted by now, as a broker may."""

    def __init__(self) -> None:
        super().__init__()
        self.make_topics(TOPICS.specs())
        self.gone = {TOPICS.requests(7): 1}

    def topics(self, prefix: str) -> dict[str, int]:
        gone, self.gone = self.gone, {}
        return super().topics(prefix) | gone


def test_a_topic_that_is_deleted_after_it_was_listed_stops_nothing(tmp_path: Path) -> None:
    bus = _Late()
    complete(bus, [a_row(0, 0)])
    archive_all(bus, tmp_path)
    assert len(read(tmp_path, "completions")) == 1


@pytest.mark.parametrize("name", ["finish_reason", "kv_recomputed"])
def test_a_name_in_a_file_that_is_no_longer_text_is_damage_of_it(tmp_path: Path, name: str) -> None:
    """A column's name, or one inside of a column of structures."""
    file = tmp_path / "archive" / "trajectories" / f"0.{0:020d}.arrow"
    write_file(file, pa.Table.from_pylist([a_row(0, 0)], schema=schema_of("trajectories")))
    whole = file.read_bytes()
    assert name.encode() in whole
    file.write_bytes(whole.replace(name.encode(), b"\xff" + name[1:].encode()))
    with pytest.raises(BadInput, match=re.escape(f"{file} is damaged")):
        check(tmp_path, "trajectories")
