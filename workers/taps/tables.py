"""The tap `evaluate`: running tables of a run by version, task, difficulty and lag, in one SQLite file.

    trajectories -> samples     batches -> lag of each trained group     weights -> what the trainer said of each lag

Rule 1: what a piece of a topic adds, and that it was read, are one transaction: killed at any moment and started again,
the tap loses no row and counts none twice.
Rule 2: the tables are a function of the rows, whatever order the topics come in: of rows of one sample (group, index)
the first with a verdict counts, of records of one step the first. Sums are exact (`math.fsum`) before they are rounded.
"""

import json
import math
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.codec import BadRecord, decode_of_topic, headers_of_topic, is_ours
from schemas.messages import BatchRecord, WeightsRecord
from schemas.tables import OPEN, Cell, Learned, Table, stratum
from workers.runtime.errors import BadInput

FEEDS = ("trajectories", "batches", "weights")
"""The kinds of topic that they are made of."""
FILE = "tables.sqlite"
Positions = dict[tuple[str, int], tuple[int, int]]
"""(topic without its prefix, partition) -> next offset, rows of that record already taken."""
_SCHEMA = """
create table if not exists samples (
    grp integer, idx integer, version integer, task text, reward real, outcome real, tokens integer, cut integer,
    primary key (grp, idx)) without rowid;
create table if not exists trained (grp integer primary key, lag integer);
create table if not exists learned (
    version integer, lag integer, tokens integer, clip_low real, clip_high real, kl real, primary key (version, lag));
create table if not exists positions (
    feed text, topic text, partition integer, next integer, rows integer, primary key (feed, topic, partition));
create table if not exists said (id text primary key, value text);
"""
_SAMPLE = """
insert into samples values (?, ?, ?, ?, ?, ?, ?, ?) on conflict do update set version = excluded.version,
    task = excluded.task, reward = excluded.reward, outcome = excluded.outcome, tokens = excluded.tokens,
    cut = excluded.cut where samples.reward is null and excluded.reward is not null
"""
_CELLS = """
with of_group as (
    select grp, count(*) as samples, count(outcome) as judged, coalesce(sum(outcome >= 0.5), 0) as correct
    from samples group by grp)
select version, task,
    case when lag is null and of_group.samples < :group_size then :open
         when judged = 0 then 'not judged' else stratum(correct, judged) end as difficulty,
    lag, count(*), count(reward), exact_sum(reward), sum(tokens), sum(cut)
from samples join of_group using (grp) left join trained using (grp)
group by 1, 2, 3, 4 order by 1, 2, 3, 4
"""


class _ExactSum:
    """An aggregate for SQL."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def step(self, value: float | None) -> None:
        if value is not None:
            self._values.append(value)

    def finalize(self) -> float:
        return math.fsum(self._values)


class Tables:
    """`take` pieces of the FEEDS in the order of each partition; ask at any time. `file`: where they are kept (None: in
    memory). BadInput if it is damaged."""

    def __init__(self, run: str, group_size: int, file: Path | None = None) -> None:
        self._run, self._group_size = run, group_size
        self.unreadable: list[str] = []
        """Records that were left out, a sentence each."""
        try:
            self._db = sqlite3.connect(file or ":memory:", isolation_level=None)
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise BadInput(f"{file}: {error}: delete it, the tables are then counted anew") from error
        self._db.create_function("stratum", 2, stratum, deterministic=True)
        self._db.create_aggregate("exact_sum", 1, _ExactSum)  # type: ignore[arg-type]

    def positions(self, feed: str) -> Positions:
        """Up to where a feed was taken."""
        found = self._db.execute("select topic, partition, next, rows from positions where feed = ?", (feed,))
        return {(topic, partition): (offset, rows) for topic, partition, offset, rows in found}

    def take(self, feed: str, rows: pa.Table, place: tuple[str, int], end: tuple[int, int]) -> None:
        """Rows of the archive's columns of one partition, and where it stands after them (rule 1)."""
        self._db.execute("begin immediate")
        try:
            if feed == "trajectories":
                self._db.executemany(_SAMPLE, _samples(rows))
            else:
                for offset, text in zip(
                    rows.column("offset").to_pylist(), rows.column("value").to_pylist(), strict=True
                ):
                    self._take_record(feed, f"{place[0]} {place[1]}:{offset}", text.encode())
            self._db.execute("insert or replace into positions values (?, ?, ?, ?, ?)", (feed, *place, *end))
            self._db.execute("commit")
        except BaseException:
            self._db.execute("rollback")
            raise

    def _take_record(self, feed: str, where: str, value: bytes) -> None:
        try:
            record = decode_of_topic(feed, value, headers_of_topic(feed, None))
        except BadRecord as error:  # nor could whoever else reads it do anything with it
            if is_ours(value):
                self.unreadable.append(f"record {where} cannot be read ({error}): it was left out")
            return
        match record:
            case BatchRecord():
                lags = [(group, record.step - version) for group, version in record.groups]
                self._db.executemany("insert or ignore into trained values (?, ?)", lags)
            case WeightsRecord(step=int(step)):
                self._db.executemany("insert or ignore into learned values (?, ?, ?, ?, ?, ?)", _learned(record, step))

    def now(self) -> list[Table]:
        """All cells, in order."""
        arguments = {"group_size": self._group_size, "open": OPEN}
        return [*map(self._cell, self._db.execute(_CELLS, arguments)), *self._of_training()]

    def _cell(self, row: tuple[Any, ...]) -> Cell:
        version, task, difficulty, lag, samples, judged, total, tokens, cut = row
        return Cell(
            run=self._run,
            version=version,
            task=task,
            difficulty=difficulty,
            lag=lag,
            samples=samples,
            judged=judged,
            reward=total / judged if judged else None,
            tokens=tokens,
            cut=cut,
        )

    def _of_training(self) -> Iterable[Learned]:
        for version, lag, tokens, low, high, kl in self._db.execute("select * from learned order by version, lag"):
            yield Learned(
                run=self._run, version=version, lag=lag, tokens=tokens, clip_low_share=low, clip_high_share=high,
                mismatch_kl=kl,
            )  # fmt: skip

    def unsaid(self) -> list[Table]:
        """Cells that are not as they were said last; one that has no samples any more, with 0."""
        said = dict(self._db.execute("select id, value from said"))
        now = {key(cell): cell for cell in self.now()}
        gone = [json.loads(value) for name, value in said.items() if name not in now]
        empty = [
            Cell.model_validate(one | {"samples": 0, "judged": 0, "reward": None, "tokens": 0, "cut": 0})
            for one in gone
            if one["samples"]
        ]
        return [*(cell for name, cell in now.items() if said.get(name) != cell.model_dump_json()), *empty]

    def note_said(self, cells: Iterable[Table]) -> None:
        """They are on the topic."""
        self._db.execute("begin immediate")
        self._db.executemany(
            "insert or replace into said values (?, ?)", [(key(cell), cell.model_dump_json()) for cell in cells]
        )
        self._db.execute("commit")

    def close(self) -> None:
        self._db.close()


def key(cell: Table) -> str:
    """What a later record of the same cell replaces."""
    if isinstance(cell, Learned):
        return json.dumps([cell.kind, cell.version, cell.lag])
    return json.dumps([cell.kind, cell.version, cell.task, cell.difficulty, cell.lag])


def _samples(rows: pa.Table) -> Iterable[tuple[Any, ...]]:
    names = ("group", "index", "version", "task", "reward", "outcome")
    columns = [rows.column(name).to_pylist() for name in names]
    tokens = pc.list_value_length(rows.column("response_ids")).to_pylist()
    cut = pc.equal(rows.column("finish_reason"), "length").to_pylist()
    return zip(*columns, tokens, map(int, cut), strict=True)


def _learned(record: WeightsRecord, step: int) -> Iterable[tuple[Any, ...]]:
    said = record.metrics
    for lag in range(step + 1):
        start = f"lag_{lag}_"
        if f"{start}tokens" in said:
            shares = (said.get(start + name, 0.0) for name in ("clip_low_share", "clip_high_share", "mismatch_kl"))
            yield (step - lag, lag, int(said[f"{start}tokens"]), *shares)
