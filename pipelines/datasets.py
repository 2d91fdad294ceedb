"""Rows of the datasets: read from files (`dataset_files.py`) or made by reasoning-gym, checked before anything starts.

Rule 1: whatever is wrong with a file is said with the file, the row and what to do; up to ten rows at once.
Rule 2: a dataset's rows are a pure function of its settings and the run's seed.
Columns: prompt, answer; optional max_new_tokens (int), metadata (object, or its JSON text), id (unique).
All other columns with JSON values are added to the metadata under their names; the object's own keys win.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pipelines.dataset_files import no_such_file, records
from schemas.settings import Columns, Dataset, Settings
from workers.runtime.errors import BadInput

FAULTS_SHOWN_MAX = 10
METADATA_BYTES_MAX = 64 << 10
GYM = "reasoning_gym:"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a dataset; `place` says where it stands, for messages."""

    place: str
    prompt: str
    answer: str
    max_new_tokens: int | None
    metadata: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class Table:
    """A dataset with its rows. `name` is unique among the run's datasets of one purpose."""

    name: str
    source: str
    settings: Dataset
    rows: tuple[Row, ...]


def read_tables(settings: Settings, source: str = "") -> list[Table]:
    """All datasets of a run, in the order of the configuration. BadInput; it names the file `source` if given."""
    tables: list[Table] = []
    names = settings.dataset_names()
    for place, (name, dataset) in enumerate(zip(names, settings.dataset, strict=True)):
        if dataset.task:
            rows = make_rows(dataset.task, dataset.rows, settings.seed + place)
        elif not Path(dataset.path).exists():
            key = key_of(source, f"dataset.{place}.path")
            raise BadInput(
                f"{key}: {no_such_file(Path(dataset.path))} (it is looked up from the configuration's folder)"
            )
        else:
            rows = read_rows(Path(dataset.path), dataset.columns, dataset.rows)
        tables.append(Table(name, dataset.task or dataset.path, dataset, rows))
    return tables


def key_of(source: str, key: str) -> str:
    """A key as faults begin with it: `my_run.toml: dataset.0.path`."""
    return f"{source}: {key}" if source else key


def read_rows(path: Path, columns: Columns, rows_max: int = 0, *, alone: bool = False) -> tuple[Row, ...]:
    """The rows of a dataset's files, the first `rows_max` (0 = all). BadInput lists what is wrong; of a dataset `alone`
    columns are named by options, not by a configuration."""
    rows: list[Row] = []
    faults: list[str] = []
    seen: dict[str, str] = {}
    lacks = _Lacks(path, columns, alone)
    for found in islice(records(path), rows_max or None):
        try:
            if found.record is None:
                raise _BadRow(found.fault)
            lacks.look(found.record)
            row = _row(found.place, found.record, columns)
            _refuse_double_id(found.record, found.place, seen)
            rows.append(row)
        except _BadRow as fault:
            faults.append(f"{found.place}: {fault}")
    lacks.refuse()
    if faults:
        shown = "\n  ".join(faults[:FAULTS_SHOWN_MAX])
        more = f"\n  and {len(faults) - FAULTS_SHOWN_MAX} more" if len(faults) > FAULTS_SHOWN_MAX else ""
        raise BadInput(f"{path}: {len(faults)} bad row(s):\n  {shown}{more}\nCorrect or remove them.")
    if not rows:
        raise BadInput(f"{path}: there are no rows in it")
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


class _Lacks:
    """Columns that rows do not have at all: in one row its own mistake, in all rows a mistake of the mapping."""

    def __init__(self, path: Path, columns: Columns, alone: bool) -> None:
        self._path, self._roles = path, {"prompt": columns.prompt, "answer": columns.answer}
        self._advice = "--{0} NAME" if alone else '[dataset.columns] {0} = "..."'
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
                    f"Name the right one: {self._advice.format(role)}"
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
    return Row(place, prompt, str(answer), limit, _metadata(record, columns))


def _metadata(record: Mapping[str, Any], columns: Columns) -> str:
    """The object of the column `metadata` (files without objects hold its JSON text) and all columns of no role."""
    given = record.get("metadata")
    metadata = {} if given is None else given
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = given
    if not isinstance(metadata, dict):
        raise _BadRow(f"metadata is {_shown(given)}: an object is needed")
    known = (columns.prompt, columns.answer, "max_new_tokens", "metadata", "id")
    others = {name: value for name, value in record.items() if name not in known and _is_json(value)}
    whole = others | metadata
    text = json.dumps(whole, ensure_ascii=False, default=str)
    size = len(text.encode("utf-8", "replace"))
    if size > METADATA_BYTES_MAX:
        largest = max(whole, key=lambda name: len(json.dumps(whole[name], default=str)))
        raise _BadRow(
            f"its metadata (columns of no other use, and `metadata`) is {size} bytes of JSON, the limit is "
            f"{METADATA_BYTES_MAX}; the largest is {largest!r}: leave it out"
        )
    return text


def _is_json(value: Any) -> bool:
    """Dates, bytes and NaN of a Parquet file are not."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _refuse_double_id(record: Mapping[str, Any], place: str, seen: dict[str, str]) -> None:
    identity = record.get("id")
    if identity is None:
        return
    key = json.dumps(identity, sort_keys=True, default=str)
    if key in seen:
        raise _BadRow(f"id {key} is already that of {seen[key]}")
    seen[key] = place


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
