"""`dora eval` for people and programs: what it prints, and how it ends."""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines import pictures
from pipelines.archived import complain
from pipelines.case_study import shown
from pipelines.config_file import read_resolved
from pipelines.evaluate import tables_of, watch
from schemas.tables import Cell, Learned, Table
from workers.runtime.errors import BadInput
from workers.runtime.log import to_stderr
from workers.runtime.process import on_stop_signals
from workers.taps import evaluate

_TITLES = {
    "heldout": "held-out accuracy by version",
    "cells": "training samples by version, task, difficulty (share of a group that is correct) and lag",
    "learned": "what the gradient made of them, by version and lag",
}


def show(run_dir: Path, *, every: int | None, follow: bool, as_json: bool) -> int:
    """Do it and print; the exit code. BadInput, BusUnavailable."""
    damage: list[str] = []
    if not follow:
        if every is not None:
            raise BadInput("--every: only `--follow` samples; without it what was sampled is shown")
        _print(run_dir, tables_of(run_dir, damage), damage, as_json=as_json)
        complain(damage)
        return 0
    stopping, signals = threading.Event(), list[int]()

    def stop(number: int) -> None:
        signals.append(number)
        stopping.set()

    on_stop_signals(stop)
    to_stderr(read_resolved(run_dir).name)
    for sentence in watch(run_dir, every, lambda now: _print(run_dir, now, damage, as_json=as_json), stopping):
        print(f"dora: {sentence}", file=sys.stderr)
    _print(run_dir, tables_of(run_dir, damage) if not signals else [], damage, as_json=as_json)
    complain(damage)
    return 130 if signals else 0


def _print(run_dir: Path, tables: Sequence[Table], damage: list[str], *, as_json: bool) -> None:
    rows = found(run_dir, tables, damage)
    print(json.dumps(rows) if as_json else as_text(rows), flush=True)


def found(run_dir: Path, tables: Sequence[Table], damage: list[str]) -> dict[str, Any]:
    """Rows of each table, as `--json` prints them; the held-out ones are read from the archive."""
    return as_dict(tables, evaluate.heldout(run_dir, damage), evaluate.fingerprints(run_dir, damage))


def as_dict(
    tables: Sequence[Table],
    heldout: Mapping[int, Mapping[str, evaluate.Accuracy]],
    fingerprints: Mapping[int, str],
) -> dict[str, Any]:
    """Of what is known."""
    curve = [
        {"version": version, "of": tag, "mean": one.mean, "samples": one.rows, "errors": one.errors}
        | {"fingerprint": fingerprints.get(version, "")}
        for version, of in heldout.items()
        for tag, one in of.items()
    ]
    rows = {"heldout": curve}
    for name, kind in (("cells", Cell), ("learned", Learned)):
        rows[name] = [one.model_dump(mode="json", exclude={"kind", "run"}) for one in tables if isinstance(one, kind)]
    return rows


def as_text(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """For people."""
    parts = []
    for name, rows in tables.items():
        if rows:
            cells = [list(rows[0]), *([shown(cell)[:24] for cell in row.values()] for row in rows)]
            parts += [f"{_TITLES[name]}:", *(f"  {line}" for line in pictures.grid(cells)), ""]
    return "\n".join(parts).rstrip() or "no scored samples yet"
