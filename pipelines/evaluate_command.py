"""`dora eval` for people and programs: what it prints, and how it ends."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.archived import complain
from pipelines.case_study import shown
from pipelines.evaluate import Follow, tables_of
from pipelines.pictures import grid
from schemas.tables import Cell, Learned, Table
from workers.runtime.process import on_stop_signals


def show(run_dir: Path, *, follow: bool, as_json: bool) -> int:
    """Do it and print; the exit code. BadInput, BusUnavailable."""
    if not follow:
        damage: list[str] = []
        _print(tables_of(run_dir, damage), as_json=as_json)
        complain(damage)
        return 0
    stopping, signals = threading.Event(), list[int]()

    def stop(number: int) -> None:
        signals.append(number)
        stopping.set()

    on_stop_signals(stop)
    following = Follow(run_dir, lambda tables: _print(tables, as_json=as_json), stopping)
    following.run()
    complain(following.damage)
    return 130 if signals else 0


def _print(tables: Sequence[Table], *, as_json: bool) -> None:
    print(json.dumps(as_dict(tables)) if as_json else as_text(tables), flush=True)


def as_dict(tables: Sequence[Table]) -> dict[str, Any]:
    """What `--json` prints: rows of both tables."""
    return {
        name: [one.model_dump(mode="json", exclude={"kind", "run"}) for one in tables if isinstance(one, of)]
        for name, of in (("cells", Cell), ("learned", Learned))
    }


_TITLES = {
    "cells": "training samples by version, task, difficulty (share of a group that is correct) and lag",
    "learned": "what the gradient made of them, by version and lag",
}


def as_text(tables: Sequence[Table]) -> str:
    """For people."""
    parts = []
    for name, rows in as_dict(tables).items():
        if rows:
            cells = [list(rows[0]), *([shown(cell) for cell in row.values()] for row in rows)]
            parts += [f"{_TITLES[name]}:", *(f"  {line}" for line in grid(cells)), ""]
    return "\n".join(parts).rstrip() or "no scored samples yet"
