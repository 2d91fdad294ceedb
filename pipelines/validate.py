"""Everything a person can get wrong, found before anything starts. BadInput says where and what to do."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pipelines import datasets, prompts
from pipelines.device import best_dtype
from pipelines.models import resolve_model
from schemas.settings import Columns, Settings
from workers.reward import graders
from workers.runtime.errors import BadInput

MODELS_CACHE = Path(".models")


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that can start: `settings.model` is an absolute folder, `settings.dtype` is not `auto`."""

    settings: Settings
    rows: dict[str, int]
    tokens_max: int


def check_settings(settings: Settings) -> Checked:
    """Graders, model, datasets, every row with its token count."""
    for place, dataset in enumerate(settings.dataset):
        try:
            graders.load(dataset.grader)
        except ValueError as error:
            raise BadInput(f"dataset.{place}.grader: {error}") from error
    datasets.read_tables(settings)  # before the model: it may take a while to make one
    model = resolve(settings.model)
    _refuse_short_context(settings, model)
    settings = with_dtype(settings.model_copy(update={"model": str(model)}))
    loaded = prompts.load(settings, model)
    counts = {f"{table.settings.purpose}:{table.name}": len(table.rows) for table in loaded.tables}
    longest = max(len(ids) for table in loaded.ids for ids in table)
    return Checked(settings, counts, longest)


def resolve(model: str) -> Path:
    """The model's folder. BadInput. A builtin one is made in a process of its own: torch would stay in this one."""
    name = model.removeprefix("builtin:")
    if name != model and not (MODELS_CACHE / name / "config.json").is_file():
        print(f"making {model} (once, under a minute)", file=sys.stderr)
        code = "import sys, pathlib, pipelines.models as m; m.resolve_model(sys.argv[1], pathlib.Path(sys.argv[2]))"
        maker = [sys.executable, "-c", code, model, str(MODELS_CACHE)]
        subprocess.run(maker, capture_output=True, check=False)  # what it could not make is said by the next call
    try:
        return resolve_model(model, MODELS_CACHE)
    except ValueError as error:
        raise BadInput(str(error)) from error


def with_dtype(settings: Settings) -> Settings:
    """The same, with what `auto` means on this machine."""
    return settings.model_copy(update={"dtype": best_dtype()}) if settings.dtype == "auto" else settings


def _refuse_short_context(settings: Settings, model: Path) -> None:
    """An engine's longest request must fit the positions that the model knows."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    known = config.get("max_position_embeddings")
    if isinstance(known, int) and settings.engines.tokens_per_request_max > known:
        raise BadInput(
            f"engines.tokens_per_request_max = {settings.engines.tokens_per_request_max}, but the model in {model} "
            f"knows {known} positions: lower it"
        )


def check_dataset(path: Path, columns: Columns) -> int:
    """A dataset file alone: its number of rows."""
    return len(datasets.read_rows(path, columns))
