"""Rows of the datasets: read from JSONL or made by reasoning-gym, checked before anything starts.

Rule 1: whatever is wrong with a file is said with the file, the row and what to do; up to ten rows at once.
Rule 2: a dataset's rows are a pure function of its settings and the run's seed.
Columns: prompt, answer; optional max_new_tokens (int), metadata (object), id (unique). Rows count from 0, lines from 1.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.settings import Columns, Dataset, Settings
from workers.runtime.errors import BadInput

FAULTS_SHOWN_MAX = 10
GYM = "reasoning_gym:"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a dataset; `place` says where it stands, for messages."""

    place: str
    prompt: str
    answer: str
    max_new_tokens: int | None
    metadata: str


@dataclass(frozen=True, slots=True)
class Table:
    """A dataset with its rows. `name` is unique among the run's datasets of one purpose."""

    name: str
    source: str
    settings: Dataset
    rows: tuple[Row, ...]


def read_tables(settings: Settings) -> list[Table]:
    """All datasets of a run, in the order of the configuration. BadInput."""
    tables: list[Table] = []
    names = settings.dataset_names()
    for place, (name, dataset) in enumerate(zip(names, settings.dataset, strict=True)):
        if dataset.task:
            rows = make_rows(dataset.task, dataset.rows, settings.seed + place)
        else:
            rows = read_rows(Path(dataset.path), dataset.columns, dataset.rows)
        tables.append(Table(name, dataset.task or dataset.path, dataset, rows))
    return tables


def read_rows(path: Path, columns: Columns, rows_max: int = 0) -> tuple[Row, ...]:
    """The rows of a JSONL file, the first `rows_max` (0 = all). BadInput lists what is wrong."""
    rows: list[Row] = []
    faults: list[str] = []
    seen: dict[str, str] = {}
    lacks = _Lacks(path, columns)
    for number, line in _lines(path):
        if rows_max and len(rows) + len(faults) >= rows_max:
            break
        place = f"row {len(rows) + len(faults)} (line {number})"
        try:
            record = _record(line)
            lacks.look(record)
            row = _row(place, record, columns)
            _refuse_double_id(record, place, seen)
            rows.append(row)
        except _BadRow as fault:
            faults.append(f"{place}: {fault}")
    lacks.refuse()
    if faults:
        shown = "\n  ".join(faults[:FAULTS_SHOWN_MAX])
        more = f"\n  and {len(faults) - FAULTS_SHOWN_MAX} more" if len(faults) > FAULTS_SHOWN_MAX else ""
        raise BadInput(f"{path}: {len(faults)} bad row(s):\n  {shown}{more}\nCorrect or remove them.")
    if not rows:
        raise BadInput(f"{path}: the file has no rows")
    return tuple(rows)


def make_rows(task: str, count: int, seed: int) -> tuple[Row, ...]:
    """`count` rows of a reasoning-gym task; the whole entry is in the metadata, for its scorer."""
    if not task.startswith(GYM):
        raise BadInput(f"dataset.task: {task!r} is not known; write reasoning_gym:<task>, e.g. {GYM}basic_arithmetic")
    import reasoning_gym

    name = task.removeprefix(GYM)
    try:
        made = reasoning_gym.create_dataset(name, seed=seed, size=count)
    except ValueError as error:
        raise BadInput(f"dataset.task: reasoning-gym has no task {name!r}: {error}") from error
    rows = []
    for number in range(count):
        entry = made[number]
        metadata = json.dumps({"entry": entry}, default=str, ensure_ascii=False)
        rows.append(Row(f"row {number}", str(entry["question"]), str(entry["answer"]), None, metadata))
    return tuple(rows)


class _BadRow(Exception):
    """Why one row cannot be used."""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, counted from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; dataset.path is looked up from the configuration's folder") from None
    except (IsADirectoryError, PermissionError) as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error


def _record(line: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise _BadRow(f"not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(value, dict):
        raise _BadRow(f"a JSON object is needed, this is {type(value).__name__}")
    return value


class _Lacks:
    """Columns that rows do not have at all: in one row its own mistake, in all rows a mistake of the mapping."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path, self._roles = path, {"prompt": columns.prompt, "answer": columns.answer}
        self._never = dict(self._roles)
        """Roles whose column no row had so far."""
        self._seen: set[str] = set()

    def look(self, record: Mapping[str, Any]) -> None:
        """_BadRow if this row lacks one."""
        self._seen |= record.keys()
        self._never = {role: name for role, name in self._never.items() if name not in record}
        missing = [name for name in self._roles.values() if name not in record]
        if missing:
            raise _BadRow(f"no {' and no '.join(map(repr, missing))}; it has {_names(record)}")

    def refuse(self) -> None:
        """BadInput for the file, once all rows were looked at."""
        for role, name in self._never.items():
            if self._seen:
                raise BadInput(
                    f"{self._path}: there is no column {name!r} for the {role}; the columns are: {_names(self._seen)}. "
                    f'Name the right one: [dataset.columns] {role} = "..."'
                )


def _names(columns: Iterable[str]) -> str:
    return ", ".join(sorted(columns)) or "none"


def _row(place: str, record: Mapping[str, Any], columns: Columns) -> Row:
    prompt, answer = record[columns.prompt], record[columns.answer]
    if not isinstance(prompt, str) or not prompt:
        raise _BadRow(f"{columns.prompt} is {_shown(prompt)}: a text is needed")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise _BadRow(f"{columns.answer} is {_shown(answer)}: a text or a number is needed")
    limit = record.get("max_new_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise _BadRow(f"max_new_tokens is {_shown(limit)}: a whole number from 1 on is needed")
    metadata = record.get("metadata", {})
    if not isinstance(metadata, dict):
        raise _BadRow(f"metadata is {_shown(metadata)}: an object is needed")
    return Row(place, prompt, str(answer), limit, json.dumps(metadata, ensure_ascii=False))


def _refuse_double_id(record: Mapping[str, Any], place: str, seen: dict[str, str]) -> None:
    identity = record.get("id")
    if identity is None:
        return
    key = json.dumps(identity, sort_keys=True)
    if key in seen:
        raise _BadRow(f"id {key} is already that of {seen[key]}")
    seen[key] = place


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
