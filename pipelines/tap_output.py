"""What `dora tap` prints and writes: lines, JSON, answers to SQL, an Arrow file, the position to go on from.

Rule 1: a position (or the state file) is never ahead of what was written: after a restart from it nothing is lost.
With `--follow --json` every line carries the position after it, so whoever keeps the lines doubles nothing either.
"""

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines import tap as taps
from pipelines import tap_columns
from pipelines.archived import complain
from pipelines.tap import Ask, Shown, Stream
from pipelines.tap_positions import Positions, State
from workers.runtime import clock
from workers.runtime.errors import BadInput

SQL_PERIOD_S = 2.0
"""With `--follow` a query is asked again at most so often."""
CELL_CHARACTERS_MAX = 60


@dataclass(frozen=True, slots=True)
class Output:
    """How the rows are wanted."""

    as_json: bool = False
    sql: str = ""
    arrow: Path | None = None
    state: Path | None = None


def show(run_dir: Path, topic: str, ask: Ask, output: Output, stopping: threading.Event) -> None:
    """What the command does. BadInput, BusUnavailable."""
    if output.sql:
        damage = _show_sql(run_dir, topic, ask, output, stopping)
    elif not topic:
        damage = _list_topics(run_dir, ask, output)
    else:
        damage = _show_rows(run_dir, replace(ask, topic=topic), output, stopping)
    complain(damage)


def _list_topics(run_dir: Path, ask: Ask, output: Output) -> list[str]:
    """What of the archive could not be read; so do the others."""
    if ask != Ask() or output.arrow or output.state:
        raise BadInput("which topic? Give one after the run; `dora tap RUN` alone lists them")
    damage: list[str] = []
    for topic in taps.topics_of(run_dir, damage):
        print(json.dumps(topic) if output.as_json else f"{topic['topic']:<13} {topic['rows']:>9}  {topic['what']}")
    return damage


# --- rows -----------------------------------------------------------------------------------


def _show_rows(run_dir: Path, ask: Ask, output: Output, stopping: threading.Event) -> list[str]:
    state = None
    if output.state is not None:
        state = State(output.state, run_dir.name, taps.known_topic(ask.topic))
        before = state.read()
        ask = ask if before is None else replace(ask, since=before)
    stream = Stream(run_dir, ask, stopping)
    positions = stream.source.positions.copy()
    try:
        if output.arrow is not None:
            _write_arrow(output.arrow, stream, positions)
        else:
            _print_rows(stream, ask, output.as_json, positions, state)
    finally:
        if state is not None:
            state.write(positions)
        _last_words(stream, ask, positions)
    return stream.source.damage


def _print_rows(stream: Stream, ask: Ask, as_json: bool, positions: Positions, state: State | None) -> None:
    for part in stream.parts():
        rows = tap_columns.to_rows(stream.kind, part.batch)
        for row, at in zip(rows, part.after, strict=True):
            assert part.place is not None
            after = positions.copy()
            after.of[part.place] = at
            if as_json and ask.follow:
                row["position"] = str(after)
            print(_line(stream.kind, row, as_json), flush=ask.follow or state is not None)
            positions.of[part.place] = at
            if state is not None:
                state.write(positions)
        _move(positions, part)
        if state is not None and not rows and part.place is not None:
            state.write(positions)


def _write_arrow(file: Path, stream: Stream, positions: Positions) -> None:
    """A whole file under its name at the end, however the tap ends, or none."""
    unfinished = file.with_name(file.name + ".tmp")
    try:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, stream.schema) as writer:
            rows = 0
            for part in stream.parts():
                if part.batch.num_rows:
                    writer.write_batch(part.batch)
                rows += part.batch.num_rows
                _move(positions, part)
        unfinished.replace(file)
        print(f"{rows} rows in {file}", file=sys.stderr)
    except FileNotFoundError as error:
        raise BadInput(f"--arrow {file}: there is no folder {file.parent}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _move(positions: Positions, part: Shown) -> None:
    if part.place is not None:
        positions.of[part.place] = part.end


def _last_words(stream: Stream, ask: Ask, positions: Positions) -> None:
    for what in stream.source.unreadable[:10]:
        print(f"left out, not readable: {what}", file=sys.stderr)
    if ask.follow or ask.limit is not None:
        print(f"position {positions}  (go on with --since {positions or 'beginning'})", file=sys.stderr)


def _line(kind: str, row: Mapping[str, Any], as_json: bool) -> str:
    """JSON, or the part that people look for."""
    if as_json:
        return json.dumps(row, ensure_ascii=False)
    texts = "".join(f"\n  {name}: {row[name]}" for name in ("prompt_text", "response_text") if name in row)
    if not tap_columns.is_tokens(kind):
        return f"{row['offset']} {json.dumps(row['value'], ensure_ascii=False)}{texts}"
    score = "-" if row["reward"] is None else f"{row['reward']:.3f}"
    path = " -> ".join(stay["engine"] for stay in row["engine_path"])
    return (
        f"group {row['group']} sample {row['index']} version {row['version']} {row['finish_reason']} "
        f"{len(row['response_ids'])} tokens reward {score} engines {path}{texts}"
    )


# --- SQL ------------------------------------------------------------------------------------


def _show_sql(run_dir: Path, topic: str, ask: Ask, output: Output, stopping: threading.Event) -> list[str]:
    from pipelines.tap_sql import named_topics, query

    if output.state is not None:
        raise BadInput("--state: a query is asked of all rows anew; it has no position")
    kinds = list(dict.fromkeys([*([taps.known_topic(topic)] if topic else []), *named_topics(output.sql)]))
    if not kinds:
        raise BadInput("--sql: the query names no topic; its tables are topics, e.g. select count(*) from trajectories")
    empty = {kind: Stream(run_dir, replace(ask, topic=kind)).schema.empty_table() for kind in kinds}
    query(output.sql, empty)  # a mistake is said before anything is read
    if not ask.follow:
        damage: list[str] = []
        tables = {kind: taps.table_of(run_dir, kind, ask, damage) for kind in kinds}
        _print_answer(query(output.sql, tables), output)
        return damage
    if len(kinds) > 1 or output.arrow is not None:
        raise BadInput("--sql with --follow takes one topic, and no --arrow")
    stream = Stream(run_dir, replace(ask, topic=kinds[0]), stopping)
    for table in _growing(stream):
        _print_answer(query(output.sql, {kinds[0]: table}), output)
    return stream.source.damage


def _growing(stream: Stream) -> Iterator[pa.Table]:
    """All rows so far, again and again when there are more."""
    batches: list[pa.RecordBatch] = []
    fresh, said_at = True, float("-inf")
    for part in stream.parts():
        if part.batch.num_rows:
            batches.append(part.batch)
            fresh = True
        now = clock.monotonic_s()
        if fresh and part.place is None and now - said_at >= SQL_PERIOD_S:
            yield pa.Table.from_batches(batches, schema=stream.schema)
            fresh, said_at = False, now
    yield pa.Table.from_batches(batches, schema=stream.schema)


def _print_answer(found: pa.Table, output: Output) -> None:
    if output.arrow is not None:
        with pa.OSFile(str(output.arrow), "wb") as sink, pa.ipc.new_file(sink, found.schema) as writer:
            writer.write_table(found)
        print(f"{found.num_rows} rows in {output.arrow}", file=sys.stderr)
    elif output.as_json:
        for row in found.to_pylist():
            print(json.dumps(row, ensure_ascii=False, default=str), flush=True)
    else:
        print("\n".join(_aligned(found)), flush=True)


def _aligned(found: pa.Table) -> Iterator[str]:
    columns = [
        [name, *map(_cell, column.to_pylist())] for name, column in zip(found.column_names, found.columns, strict=True)
    ]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= CELL_CHARACTERS_MAX else text[: CELL_CHARACTERS_MAX - 3] + "..."
