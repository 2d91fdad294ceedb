"""Everything a person can get wrong, found before anything starts. BadInput says where and what to do."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pipelines import datasets, model_folder, needs, prompts
from pipelines.datasets import Table
from pipelines.device import best_dtype
from pipelines.models import resolve_model
from schemas.settings import Columns, Dataset, Settings
from workers.reward import graders
from workers.runtime.errors import BadInput

MODELS_CACHE = Path(".models")
GRADER_LOAD_S_MAX = 120.0
_LOAD_GRADER = """
import sys
sys.path.insert(0, sys.argv[1])
from workers.reward import graders
try:
    graders.load(sys.argv[2])
except Exception as error:
    print(error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
    sys.exit(1)
"""


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that can start: `settings.model` is an absolute folder, `settings.dtype` is not `auto`.
    `prompts` is None if the model is not here: then both are as they were given, and `tokens_max` is 0."""

    settings: Settings
    tables: tuple[Table, ...]
    prompts: prompts.Prompts | None
    notes: tuple[str, ...]

    @property
    def rows(self) -> dict[str, int]:
        return {f"{table.settings.purpose}:{table.name}": len(table.rows) for table in self.tables}

    @property
    def tokens_max(self) -> int:
        return max(len(ids) for table in self.prompts.ids for ids in table) if self.prompts else 0


def check_settings(settings: Settings, *, offline: bool = False) -> Checked:
    """Graders, model, datasets, every row with its token count, memory and disk. With `offline` a model that is not
    here is left out, and this machine with it."""
    for place, dataset in enumerate(settings.dataset):
        _check_grader(f"dataset.{place}.grader", dataset.grader, settings.reward.path)
    tables = tuple(datasets.read_tables(settings))  # before the model: it may take a while to make one
    if offline and not _is_here(settings.model):
        note = f"model {settings.model} is not here: its tokens, memory and disk are not checked"
        return Checked(settings, tables, None, (*settings.notes(), note))
    model = resolve(settings.model)
    settings = with_dtype(settings.model_copy(update={"model": str(model)}))
    looked = model_folder.look(model, settings)
    loaded = prompts.load(settings, model)
    notes = [] if offline else needs.check(settings, looked)
    return Checked(settings, loaded.tables, loaded, (*settings.notes(), *notes))


def _is_here(model: str) -> bool:
    name = model.removeprefix("builtin:")
    return ((MODELS_CACHE / name if name != model else Path(model)) / "config.json").is_file()


def _check_grader(key: str, name: str, path: str) -> None:
    """A person's own module is loaded in a process of its own: what it does stays there."""
    try:
        graders.check_name(name)
        if _is_own(name):
            _load_own(name, path)
        else:
            graders.load(name)
    except ValueError as error:
        raise BadInput(f"{key}: {error}") from error


def _is_own(name: str) -> bool:
    return ":" in name and not name.startswith(("reasoning_gym:", "workers."))


def _load_own(name: str, path: str) -> None:
    command = [sys.executable, "-c", _LOAD_GRADER, path, name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=GRADER_LOAD_S_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{name} was not loaded after {GRADER_LOAD_S_MAX:.0f} s") from error
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ValueError(f"{said} (own graders are looked up in {path})")


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


def check_dataset(path: Path, columns: Columns) -> Table:
    """A dataset alone."""
    return Table(path.stem, str(path), Dataset(path=str(path), columns=columns), datasets.read_rows(path, columns))
