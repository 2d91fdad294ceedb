"""`dora tap`: read a stream of a run without touching it: no group, no commit, nothing the run could notice.

A live run is read from its broker, one that has ended from its archive; the rows are the same.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines import children
from pipelines.config_file import read_resolved
from schemas import arrow
from schemas.topics import KINDS, Topics
from workers.runtime.errors import BadInput
from workers.taps import archive
from workers.transport.records.bus import Bus, BusUnavailable, Record

POLL_MS = 500


def rows(run_dir: Path, kind: str, follow: bool, stopping: threading.Event) -> Iterator[dict[str, Any]]:
    """Rows of a topic from its beginning; with `follow` until the run ends. BadInput."""
    if kind not in KINDS:
        raise BadInput(f"topic {kind!r} is not known; there are {', '.join(KINDS)}")
    lock = children.read_lock(run_dir)
    if lock is None or not children.is_live(run_dir) or "broker" not in lock:
        yield from _archived(run_dir, kind)
        return
    seen: dict[int, int] = {}
    try:
        for row in _live(run_dir, lock["broker"], kind, follow, stopping):
            seen[row["partition"]] = row["offset"]
            yield row
    except BusUnavailable:
        if children.is_live(run_dir):
            raise
        # The run ended meanwhile and took its broker along: its archive has the rest.
        yield from (row for row in _archived(run_dir, kind) if row["offset"] > seen.get(row["partition"], -1))


def _live(run_dir: Path, broker: str, kind: str, follow: bool, stopping: threading.Event) -> Iterator[dict[str, Any]]:
    from workers.transport.records.kafka_bus import open_bus

    settings = read_resolved(run_dir)
    bus = open_bus(settings, broker)
    try:
        yield from read_log(bus, Topics(settings.name), kind, lambda: follow and children.is_live(run_dir), stopping)
    finally:
        bus.close()


def read_log(
    bus: Bus, topics: Topics, kind: str, more: Callable[[], bool], stopping: threading.Event
) -> Iterator[dict[str, Any]]:
    """Rows of all topics of a kind: up to the end of now, or on while `more()`. BusUnavailable."""
    reader = bus.reader()
    try:
        reading: set[tuple[str, int]] = set()
        while not stopping.is_set():
            there = _partitions(bus, topics, kind)
            for topic, partition in sorted(there - reading):
                reader.add(topic, partition, "earliest")
            reading |= there
            records = reader.poll(POLL_MS)
            for record in records:
                yield from _of_record(kind, record)
            if not records and reader.at_end() and not more():
                return
    finally:
        reader.close()


def _partitions(bus: Bus, topics: Topics, kind: str) -> set[tuple[str, int]]:
    found = bus.topics(topics.prefix + kind)
    return {
        (topic, partition) for topic, count in found.items() if topics.kind(topic) == kind for partition in range(count)
    }


def _of_record(kind: str, record: Record) -> Iterator[dict[str, Any]]:
    where = {"partition": record.partition, "offset": record.offset}
    if kind in archive.TOKEN_KINDS:
        for row in arrow.to_rows(arrow.to_table(record.value)):
            yield row | where
    else:
        yield where | {"timestamp": record.timestamp_us, "value": json.loads(record.value)}


def _archived(run_dir: Path, kind: str) -> Iterator[dict[str, Any]]:
    table = archive.read(run_dir, kind)
    if kind in archive.TOKEN_KINDS:
        yield from arrow.to_rows(table)
        return
    for row in table.to_pylist():
        at = int(row["timestamp"].timestamp() * 1e6)
        yield {
            "partition": row["partition"],
            "offset": row["offset"],
            "timestamp": at,
            "value": json.loads(row["value"]),
        }


def lines(kind: str, found: Iterable[Mapping[str, Any]], as_json: bool) -> Iterator[str]:
    """One line per row: JSON, or the part that people look for."""
    for row in found:
        if as_json:
            yield json.dumps(row, ensure_ascii=False)
        elif kind in archive.TOKEN_KINDS:
            score = "-" if row["reward"] is None else f"{row['reward']:.3f}"
            path = " -> ".join(stay["engine"] for stay in row["engine_path"])
            yield (
                f"group {row['group']} sample {row['index']} version {row['version']} {row['finish_reason']} "
                f"{len(row['response_ids'])} tokens reward {score} engines {path}"
            )
        else:
            yield f"{row['offset']} {json.dumps(row['value'], ensure_ascii=False)}"
