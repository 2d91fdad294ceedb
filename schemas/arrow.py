"""Token rows: the columns of `completions`, `trajectories`, `evaluations`, and the one word on whether a row is valid.

A record's value is one Arrow IPC stream, zstd, of one or more rows of one version. The names are an interface: people
query them in SQL. `logprobs` are those of the distribution that was sampled (temperature and truncation applied).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

_TIME = pa.timestamp("us", tz="UTC")
STAY = pa.struct(
    [
        pa.field("engine", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("kv_reused", pa.int32(), nullable=False),
        pa.field("kv_recomputed", pa.int32(), nullable=False),
    ]
)
NULLABLE = frozenset({"kept_logmass", "reward", "outcome", "score_error"})
_COLUMNS: list[tuple[str, pa.DataType]] = [
    ("run", pa.string()),
    ("task", pa.string()),
    ("purpose", pa.string()),
    ("version", pa.int64()),
    ("group", pa.int64()),
    ("prompt_row", pa.int64()),
    ("index", pa.int32()),
    ("attempt", pa.int32()),
    ("prompt_ids", pa.list_(pa.int32())),
    ("response_ids", pa.list_(pa.int32())),
    ("answer", pa.string()),
    ("logprobs", pa.list_(pa.float32())),
    ("kept_logmass", pa.list_(pa.float32())),
    ("loss_mask", pa.list_(pa.bool_())),
    ("temperature", pa.float32()),
    ("top_p", pa.float32()),
    ("top_k", pa.int32()),
    ("finish_reason", pa.string()),
    ("engine_path", pa.list_(STAY)),
    ("queued_at", _TIME),
    ("started_at", _TIME),
    ("finished_at", _TIME),
    ("scored_at", _TIME),
    ("reward", pa.float32()),
    ("outcome", pa.float32()),
    ("reward_parts", pa.map_(pa.string(), pa.float32())),
    ("score_error", pa.string()),
    ("attachments", pa.map_(pa.string(), pa.string())),
    ("metadata", pa.string()),
]
TRAJECTORY = pa.schema([pa.field(name, kind, nullable=name in NULLABLE) for name, kind in _COLUMNS])
COMPLETION = pa.schema([pa.field(f.name, f.type, nullable=f.nullable or f.name == "scored_at") for f in TRAJECTORY])
"""As TRAJECTORY, but not scored yet: `scored_at` may be null too."""
_READ = pa.schema([pa.field(f.name, f.type) for f in TRAJECTORY])
# One record is small: threads of pyarrow's own would cost more than they save.
_WRITE_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)

Row = Mapping[str, Any]


def to_bytes(rows: Sequence[Row], schema: pa.Schema = TRAJECTORY) -> bytes:
    """Rows (of one version) as one IPC stream. Times are microseconds since 1970 (int)."""
    assert len({row["version"] for row in rows}) == 1, "one record holds rows of one version"
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_WRITE_OPTIONS) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def to_table(value: bytes) -> pa.Table:
    """The rows of a record; any column may hold nulls, others than ours are dropped. ValueError if the bytes are no
    Arrow stream, or columns are missing or of another type."""
    try:
        with pa.ipc.open_stream(value, options=_READ_OPTIONS) as reader:
            table = reader.read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"not an Arrow stream: {error}") from error
    there = set(table.column_names)
    missing = [name for name in TRAJECTORY.names if name not in there]
    if missing:
        raise ValueError(f"columns missing: {', '.join(missing)}")
    try:
        ours = table.select(_READ.names)
        return ours if ours.schema.types == _READ.types else ours.cast(_READ)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"a column of another type: {error}") from error


def to_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Python rows; times as microseconds since 1970 (int), maps as dicts."""
    for name in ("queued_at", "started_at", "finished_at", "scored_at"):
        place = table.column_names.index(name)
        table = table.set_column(place, name, table.column(name).cast(pa.int64()))
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        for name in ("reward_parts", "attachments"):
            row[name] = None if row[name] is None else dict(row[name])
    return rows


def invalid_reason(row: Row, *, scored: bool, mixed: bool = False, vocabulary: int | None = None) -> str | None:
    """Why this row may not be used, or None. The one place that says so.

    `mixed`: mode `partial`, where a sample goes on under later versions than its group's.
    `vocabulary`: ids that the model knows are below it; None where nobody computes with them.

    `scored`: the row comes from `trajectories` or `evaluations`, so it has a verdict or a `score_error`.
    Reward applies it before writing (a bad row is dead-lettered), the trainer before the gradient (a bad row is a bug).
    """
    for name in TRAJECTORY.names:
        unscored = not scored and name == "scored_at"
        if row.get(name) is None and name not in NULLABLE and not unscored:
            return f"{name} is null"
    for name in ("prompt_ids", "response_ids", "logprobs", "kept_logmass", "loss_mask", "engine_path"):
        if None in (row[name] or ()):
            return f"{name} has a null in it"
    return (
        _lengths(row)
        or _ids(row, vocabulary)
        or _numbers(row)
        or _path(row, mixed)
        or _times(row, scored)
        or _verdict(row, scored)
    )


def _lengths(row: Row) -> str | None:
    tokens = len(row["response_ids"])
    if row["purpose"] not in ("train", "eval"):
        return f"purpose is {row['purpose']!r}"
    if row["finish_reason"] not in ("stop", "length", "error"):
        return f"finish_reason is {row['finish_reason']!r}"
    for name in ("prompt_ids", "response_ids"):
        if not row[name]:
            return f"{name} is empty"
    for name in ("logprobs", "loss_mask", "kept_logmass"):
        if row[name] is not None and len(row[name]) != tokens:
            return f"{name} has {len(row[name])} entries, response_ids {tokens}"
    truncated = row["top_p"] < 1.0 or row["top_k"] > 0
    if truncated and row["kept_logmass"] is None:
        return "top_p or top_k truncate, but kept_logmass is null"
    return None


def _ids(row: Row, vocabulary: int | None) -> str | None:
    for name in ("prompt_ids", "response_ids"):
        worst = min(row[name]) if min(row[name]) < 0 else max(row[name])
        if worst < 0 or (vocabulary is not None and worst >= vocabulary):
            known = "0 or more" if vocabulary is None else f"0 .. {vocabulary - 1}"
            return f"{name} has {worst}, ids are {known}"
    return None


def _numbers(row: Row) -> str | None:
    for place, (logprob, counts) in enumerate(zip(row["logprobs"], row["loss_mask"], strict=True)):
        if not -1e30 < logprob <= 1e-6:
            return f"logprobs[{place}] is {logprob}"
        if not counts and logprob != 0.0:
            return f"logprobs[{place}] is {logprob} where loss_mask is false"
    for place, kept in enumerate(row["kept_logmass"] or ()):
        if not -1e30 < kept <= 1e-6:
            return f"kept_logmass[{place}] is {kept}"
    if not 0.0 < row["temperature"] < 1e30:
        return f"temperature is {row['temperature']}"
    if not 0.0 < row["top_p"] <= 1.0 or row["top_k"] < 0:
        return f"top_p is {row['top_p']}, top_k {row['top_k']}"
    return None


def _path(row: Row, mixed: bool) -> str | None:
    path = row["engine_path"]
    if sum(stay["tokens"] for stay in path) != len(row["response_ids"]):
        return "engine_path's tokens do not add up to response_ids"
    versions = [stay["version"] for stay in path]
    other = [version for version in versions if version != row["version"]]
    if mixed:
        if [row["version"], *versions] != sorted([row["version"], *versions]):
            return f"engine_path has versions {versions}, the row {row['version']}: they never fall"
    elif other:
        return f"engine_path has version {other[0]}, the row {row['version']}"
    if any(not stay["fingerprint"] for stay in path):
        return "engine_path has an empty fingerprint"
    return None


def _times(row: Row, scored: bool) -> str | None:
    names = ["queued_at", "started_at", "finished_at"] + (["scored_at"] if scored else [])
    for before, after in pairwise(names):
        if row[before] > row[after]:
            return f"{before} is after {after}"
    return None


def _verdict(row: Row, scored: bool) -> str | None:
    judged = row["reward"] is not None and row["outcome"] is not None
    if not scored:
        return None if row["reward"] is None and row["outcome"] is None else "scored before it was judged"
    if judged == (row["score_error"] is not None):
        return "needs reward and outcome, or a score_error, and not both"
    if judged and not (abs(row["reward"]) < 1e30 and abs(row["outcome"]) < 1e30):
        return f"reward {row['reward']}, outcome {row['outcome']}: not finite"
    return None
