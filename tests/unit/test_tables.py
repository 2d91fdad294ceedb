"""The running tables: equal to a count of the archive by another hand, and killed at any moment they lose and double
nothing."""

import math
import random
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from pipelines import evaluate
from pipelines.cli import app
from pipelines.evaluate import Follow, tables_of
from schemas import arrow
from schemas import messages as m
from schemas.codec import arrow_headers, decode_of_topic
from schemas.tables import STRATA, Cell, Learned, Table, stratum
from schemas.topics import Topics, score_partition, version_key
from tests.unit.pipeline_parts import supervised
from tests.unit.reward_rows import Deadline, a_bus, a_process, a_row, records
from tests.unit.small_run import CONFIG
from workers.taps import archive
from workers.taps.tables import FEEDS, FILE, Tables
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus

TOPICS = Topics("r")
GROUP_SIZE = 2
STEPS = 4


def _scored(dice: random.Random, group: int, index: int, attempt: int = 0, **other: Any) -> dict[str, Any]:
    judged = dice.random() < 0.9
    reward = dice.choice([0.0, 0.1, 1.0, 0.7]) if judged else None
    length = dice.randint(1, 9)
    return a_row(
        group,
        index,
        attempt=attempt,
        version=group % 3,
        task=f"task-{group % 2}",
        scored_at=4_000_000,
        reward=reward,
        outcome=reward,
        score_error=None if judged else "timed out",
        finish_reason=dice.choice(["stop", "length"]),
        response_ids=[7] * length,
        logprobs=[-0.5] * length,
        loss_mask=[True] * length,
        **other,
    )


def _fill(bus: MemoryBus, dice: random.Random) -> None:
    """24 groups, rows that come twice, second attempts, a group that is not complete; four steps."""
    producer = bus.producer()
    rows = [_scored(dice, group, index) for group in range(24) for index in range(GROUP_SIZE)][:-1]
    rows += [_scored(dice, 3, 1, attempt=1), _scored(dice, 4, 0, attempt=2), *dice.sample(rows, 4)]
    for row in rows:
        partition = score_partition(row["group"])
        headers = arrow_headers(row["group"], row["index"], row["attempt"])
        producer.send(TOPICS.trajectories, arrow.to_bytes([row]), headers, partition=partition)
    for step in range(STEPS):
        groups = tuple((group, group % 3) for group in range(6 * step, 6 * step + 5) if step - group % 3 >= 0)
        batch = m.BatchRecord(run="r", step=step, exhausted=False, groups=groups, members=())
        publish(producer, TOPICS.batches, batch, key=version_key(step))
        names = ("clip_low_share", "clip_high_share", "mismatch_kl")
        figures = {f"lag_{lag}_{name}": dice.random() for lag in range(min(step, 2) + 1) for name in names}
        figures |= {f"lag_{lag}_tokens": float(dice.randint(1, 99)) for lag in range(min(step, 2) + 1)}
        for metrics in (figures, {name: value + 1 for name, value in figures.items()}):  # said again after a crash
            word = m.WeightsRecord(
                run="r", version=step + 1, step=step, groups=groups, trajectories=9, location="file:///v",
                manifest_sha256="0", fingerprint="f", created_at=1, metrics=metrics,
            )  # fmt: skip
            publish(producer, TOPICS.weights, word, key=version_key(step + 1))


def _begun(folder: Path, seed: int) -> MemoryBus:
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    bus = a_bus()
    _fill(bus, random.Random(seed))
    return bus


def _archive(folder: Path, bus: MemoryBus) -> None:
    process = a_process(folder, "archive")
    process.stopping.set()
    assert archive.serve(process, bus) == 0


def counted(folder: Path, group_size: int = GROUP_SIZE) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """By plain loops over the archive: no SQL, no code of the tap."""
    samples: dict[tuple[int, int], dict[str, Any]] = {}
    for row in archive.read(folder, "trajectories").to_pylist():
        key = row["group"], row["index"]
        if key not in samples or (samples[key]["reward"] is None and row["reward"] is not None):
            samples[key] = row
    lags: dict[int, int] = {}
    for text in archive.read(folder, "batches").column("value").to_pylist():
        batch = m.BatchRecord.model_validate_json(text)
        lags |= {group: batch.step - version for group, version in batch.groups}
    of_group = defaultdict(list)
    for (group, _), row in samples.items():
        of_group[group].append(row)
    cells: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for group, rows in of_group.items():
        judged = [row["outcome"] for row in rows if row["outcome"] is not None]
        share = sum(outcome >= 0.5 for outcome in judged) / len(judged) if judged else None
        if group not in lags and len(rows) < group_size:
            name = "open"
        elif share is None:
            name = "not judged"
        else:
            bounds = {0.0: "none", 0.25: "to a quarter", 0.5: "to a half", 0.75: "to three quarters", 0.99: "above"}
            name = next((name for bound, name in bounds.items() if share <= bound), "all")
        cells[rows[0]["version"], rows[0]["task"], name, lags.get(group)] += rows
    counted = {}
    for key, rows in cells.items():
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        mean = math.fsum(rewards) / len(rewards) if rewards else None
        tokens = sum(len(row["response_ids"]) for row in rows)
        counted[key] = (len(rows), len(rewards), mean, tokens, sum(r["finish_reason"] == "length" for r in rows))
    learned: dict[Any, Any] = {}
    for text in archive.read(folder, "weights").column("value").to_pylist():
        word = m.WeightsRecord.model_validate_json(text)
        for lag in range(3):
            names = ("tokens", "clip_low_share", "clip_high_share", "mismatch_kl")
            said = tuple(word.metrics.get(f"lag_{lag}_{name}") for name in names)
            if said[0] is not None and word.step is not None:
                learned.setdefault((word.step - lag, lag), said)
    return counted, learned


def by_cell(tables: list[Table]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    cells, learned = {}, {}
    for one in tables:
        if isinstance(one, Cell):
            key = (one.version, one.task, one.difficulty, one.lag)
            cells[key] = (one.samples, one.judged, one.reward, one.tokens, one.cut)
        else:
            figures = (one.tokens, one.clip_low_share, one.clip_high_share, one.mismatch_kl)
            learned[one.version, one.lag] = figures
    return cells, learned


@pytest.mark.parametrize("seed", range(3))
def test_tables_equal_a_count_of_the_archive_to_the_last_bit(tmp_path: Path, seed: int) -> None:
    _archive(tmp_path / "r", _begun(tmp_path / "r", seed))
    found = tables_of(tmp_path / "r", [])
    assert by_cell(found) == counted(tmp_path / "r")
    assert len([one for one in found if isinstance(one, Cell)]) > 10
    assert len([one for one in found if isinstance(one, Learned)]) == 9


def _pieces(folder: Path, dice: random.Random) -> list[tuple[str, pa.Table, tuple[str, int], tuple[int, int]]]:
    """All that is archived, in pieces as a tap may bring them: each partition in order, the partitions in any."""
    queues = []
    for feed in FEEDS:
        for name, partition, table in archive.files(folder, feed):
            queue, start = [], 0
            while start < table.num_rows:
                end = min(table.num_rows, start + dice.randint(1, 5))
                part = table.slice(start, end - start)
                queue.append((feed, part, (name, partition), (part.column("offset")[-1].as_py() + 1, 0)))
                start = end
            queues.append(queue)
    found = []
    while queues := [queue for queue in queues if queue]:
        found.append(dice.choice(queues).pop(0))
    return found


def test_killed_at_any_statement_and_started_again_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """The file is copied at every statement, as a kill would leave it; each copy goes on from its own positions."""
    dice = random.Random(7)
    folder, kept = tmp_path / "r", tmp_path / "kept"
    _archive(folder, _begun(folder, 7))
    kept.mkdir()
    pieces = _pieces(folder, dice)
    copies: list[Path] = []

    def copy(_: str) -> None:
        if dice.random() < 0.1:
            copies.append(shutil.copytree(kept, tmp_path / f"copy-{len(copies)}"))

    tables = Tables("r", GROUP_SIZE, kept / FILE)
    tables._db.set_trace_callback(copy)
    for piece in pieces:
        tables.take(*piece)
    whole = tables.now()
    tables.close()
    assert by_cell(whole) == counted(folder)
    assert len(copies) > 3
    for number, one in enumerate(copies):
        again = Tables("r", GROUP_SIZE, one / FILE)
        left = [piece for piece in pieces if again.positions(piece[0]).get(piece[2], (0, 0)) < piece[3]]
        dice.shuffle(left)
        left.sort(key=lambda piece: (piece[2], piece[3]))
        for piece in left:
            again.take(*piece)
        assert again.now() == whole, f"copy {number}"
        again.close()


def _on_the_topic(bus: MemoryBus) -> list[Table]:
    """What a reader of `tables` has: the last record of each key; cells without samples are gone."""
    last: dict[bytes, Any] = {}
    for record in records(bus, TOPICS.tables):
        last[record.key] = decode_of_topic("tables", record.value, record.headers)
    return [one for one in last.values() if not isinstance(one, Cell) or one.samples]


def _following(folder: Path, bus: MemoryBus) -> tuple[threading.Event, threading.Thread]:
    """A tap in a thread of its own."""
    stopping = threading.Event()

    def body() -> None:
        Follow(folder, stopping=stopping, open_bus=lambda *_: nullcontext(bus)).run()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return stopping, thread


def test_live_tables_are_said_on_their_topic_and_go_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "SAY_S", 0.1)
    folder = tmp_path / "r"
    bus = _begun(folder, 1)

    def wait(until: Callable[[], bool]) -> None:
        deadline, pause = Deadline(), threading.Event()
        while not until():
            deadline.check("the tables")
            pause.wait(0.05)

    with supervised(folder):
        stopping, thread = _following(folder, bus)
        wait(lambda: by_cell(_on_the_topic(bus)) == by_cell(tables_of(folder, [], lambda *_: nullcontext(bus))))
        stopping.set()
        thread.join(30)
        assert not thread.is_alive()
        dice = random.Random(3)
        for group, index in ((23, 1), (24, 0), (24, 1)):  # 23 is complete now
            row = _scored(dice, group, index)
            headers, partition = arrow_headers(group, index, 0), score_partition(group)
            bus.producer().send(TOPICS.trajectories, arrow.to_bytes([row]), headers, partition=partition)
        stopping, thread = _following(folder, bus)
        wait(lambda: by_cell(_on_the_topic(bus)) == by_cell(tables_of(folder, [], lambda *_: nullcontext(bus))))
        _archive(folder, bus)
    thread.join(30)
    assert not thread.is_alive()
    assert by_cell(tables_of(folder, [])) == counted(folder)
    kept = Tables("r", GROUP_SIZE, folder / FILE)
    assert by_cell(kept.now()) == counted(folder)
    kept.close()
    assert "open" not in {key[2] for key in counted(folder)[0]}


def test_the_command_prints_both_tables(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    _archive(folder, _begun(folder, 0))
    text = CliRunner().invoke(app, ["eval", str(folder)], catch_exceptions=False).stdout
    assert "training samples by version" in text
    assert "mismatch_kl" in text
    empty = tmp_path / "s"
    empty.mkdir()
    (empty / "config.toml").write_text(CONFIG)
    assert CliRunner().invoke(app, ["eval", str(empty)]).stdout == "no scored samples yet\n"
    assert CliRunner().invoke(app, ["eval", str(tmp_path / "t")]).exit_code == 2


def test_difficulty_is_the_share_of_a_group_that_is_correct() -> None:
    assert [stratum(correct, 8) for correct in (0, 1, 2, 3, 4, 5, 6, 7, 8)] == [
        STRATA[n] for n in (0, 1, 1, 2, 2, 3, 3, 4, 5)
    ]
