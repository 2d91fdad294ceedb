"""What `dora validate` says of a configuration or a dataset that is right (what is wrong is a BadInput)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipelines import config_file, examples, progress, validate
from pipelines.examples import Example
from schemas.settings import Columns


@dataclass(frozen=True, slots=True)
class Validated:
    """`more`: what only `--json` says."""

    source: Path
    rows: dict[str, int]
    notes: list[str]
    examples: list[Example]
    more: dict[str, Any] = field(default_factory=dict)


def configuration(file: Path, overrides: Sequence[str], *, offline: bool) -> Validated:
    """BadInput."""
    settings = config_file.read_settings(file, overrides)
    checked = validate.check_settings(settings, str(file), offline=offline, show=True)
    notes = [*checked.notes, *examples.notes(checked.examples)]
    return Validated(file, checked.rows, notes, list(checked.examples), {"prompt_tokens_max": checked.tokens_max})


def dataset(path: Path, columns: Columns, model: str) -> Validated:
    """A dataset alone; with `model` as that one sees it. BadInput."""
    table = validate.check_dataset(path, columns)
    shown = examples.examples([table], validate.resolve(model) if model else None, None)
    return Validated(path, {str(path): len(table.rows)}, [], shown)


def show(found: Validated, *, as_json: bool) -> None:
    if as_json:
        said = {"valid": True, "source": str(found.source), "rows": found.rows, "notes": found.notes, **found.more}
        print(json.dumps(said | {"examples": [asdict(example) for example in found.examples]}, ensure_ascii=False))
        return
    for headline, rows in examples.lines(found.examples):
        progress.print_labelled(headline, rows)
    counts = ", ".join(f"{name}: {count} rows" for name, count in found.rows.items())
    print("\n".join([f"{found.source} is valid ({counts})", *(f"note: {note}" for note in found.notes)]))
