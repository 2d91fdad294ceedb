"""Records of a dataset's files, one by one, whatever they are: JSONL, Parquet, a Hugging Face `datasets` folder.

Rule 1: rows count from 0 over all files of a dataset, lines of a JSONL file from 1; `place` says both to people.
Rule 2: a file that is not what its name says is a BadInput with the file and what to do.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.runs import RESOLVED
from workers.runtime.errors import BadInput

BATCH_ROWS = 1024
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_KINDS = "write JSONL, Parquet (a file or a folder of them), or a folder that `datasets` saved"


@dataclass(frozen=True, slots=True)
class Found:
    """A row as its file has it, or `fault`: why it is none."""

    place: str
    record: Mapping[str, Any] | None
    fault: str = ""


def records(path: Path) -> Iterator[Found]:
    """The rows of a file or folder, in order. BadInput."""
    if not path.exists():
        raise BadInput(no_such_file(path))
    try:
        if path.is_dir():
            yield from _of_tables(_folder(path))
        elif path.suffix == ".parquet":
            yield from _of_tables([path])
        else:
            yield from _of_lines(path)
    except PermissionError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error


def no_such_file(path: Path) -> str:
    """That it is not there, with the nearest name in its folder."""
    there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, there, n=1, cutoff=0.5)
    return f"{path}: no such file{f': did you mean {near[0]}?' if near else ''}"


def _of_lines(path: Path) -> Iterator[Found]:
    with path.open("rb") as file:
        row = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _of_line(f"row {row} (line {number})", line)
                row += 1


def _of_line(place: str, line: bytes) -> Found:
    try:
        value = json.loads(line.decode("utf-8").rstrip())  # or a fault at the end is one of the next line
    except UnicodeDecodeError as error:
        return Found(place, None, f"not UTF-8 (byte {error.start} of the line)")
    except json.JSONDecodeError as error:
        return Found(place, None, f"not JSON: {error.msg} (column {error.colno})")
    except RecursionError:
        return Found(place, None, "not JSON: nested too deeply")
    if not isinstance(value, dict):
        return Found(place, None, f"a JSON object is needed, this is {type(value).__name__}")
    return Found(place, value)


def _folder(path: Path) -> list[Path]:
    """The data files of a folder. BadInput if it is none of those we read."""
    if (path / _STATE).is_file():
        return _saved(path)
    if (path / _SPLITS).is_file():
        splits = ", ".join(sorted(split.name for split in path.iterdir() if (split / _STATE).is_file()))
        raise BadInput(f"{path}: this holds several splits ({splits}): name one, e.g. {path.name}/train")
    files = sorted(path.glob("*.parquet"))
    if files:
        return files
    raise BadInput(f"{path}: no data files in this folder: {_instead(path)}")


def _instead(path: Path) -> str:
    """What to name instead of a folder without data files: JSONL files in it, folders below it, but no run's."""
    lines = sorted(file.name for file in path.glob("*.jsonl"))
    if lines:
        return f"there are JSONL files in it ({', '.join(lines[:3])}): name one, e.g. {path / lines[0]}"
    files = [file for file in path.rglob("*.parquet") if not _of_a_run(file, path)]
    below = sorted({str(file.parent.relative_to(path)) for file in files})
    return f"there are Parquet files in {', '.join(below[:3])}: name that folder" if below else _KINDS


def _of_a_run(file: Path, top: Path) -> bool:
    folders = [folder for folder in file.parents if folder == top or top in folder.parents]
    return any((folder / RESOLVED).is_file() for folder in folders)


def _saved(path: Path) -> list[Path]:
    """Files of a folder that `Dataset.save_to_disk` wrote, in their order."""
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        files = [path / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path / _STATE}: not what `datasets` writes: {error!r}") from error
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise BadInput(f"{missing[0]}: no such file, but {path / _STATE} names it: copy the whole folder")
    return files


def _of_tables(files: Sequence[Path]) -> Iterator[Found]:
    row = 0
    for file in files:
        try:
            for batch in _batches(file):
                for record in _rows(batch):
                    yield Found(f"row {row}", record)
                    row += 1
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            what = "Parquet" if file.suffix == ".parquet" else "Arrow"
            raise BadInput(f"{file}: cannot be read as {what}: {str(error).splitlines()[0]}") from error


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as parquet:
            yield from parquet.iter_batches(BATCH_ROWS)
        return
    with pa.memory_map(str(file)) as source:
        try:
            reader = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            whole = pa.ipc.open_file(source)
            yield from (whole.get_batch(number) for number in range(whole.num_record_batches))
            return
        yield from reader


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    for start in range(0, batch.num_rows, BATCH_ROWS):
        rows: list[dict[str, Any]] = batch.slice(start, BATCH_ROWS).to_pylist()
        yield from rows
