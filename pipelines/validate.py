"""Everything a person can get wrong, found before anything starts. BadInput says where and what to do."""

import difflib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines import datasets, examples, model_folder, needs, prompts
from pipelines.datasets import Table, key_of
from pipelines.device import best_dtype
from pipelines.examples import Example
from pipelines.models import resolve_model
from schemas.settings import Columns, Dataset, Settings
from workers.reward import graders
from workers.runtime.errors import BadInput
from workers.trainer.learners import layout

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
    `prompts` is None if the model is not here: then both are as they were given, and `tokens_max` is 0. `examples` are
    the rows on which graders were tried."""

    settings: Settings
    tables: tuple[Table, ...]
    prompts: prompts.Prompts | None
    notes: tuple[str, ...]
    examples: tuple[Example, ...]

    @property
    def rows(self) -> dict[str, int]:
        return {f"{table.settings.purpose}:{table.name}": len(table.rows) for table in self.tables}

    @property
    def tokens_max(self) -> int:
        return max(len(ids) for table in self.prompts.ids for ids in table) if self.prompts else 0


def check_settings(settings: Settings, source: str = "", *, offline: bool = False, show: bool = False) -> Checked:
    """Graders, model, datasets, every row with its token count, memory and disk. `source` is the configuration's name
    in faults. With `offline` a model that is not here is left out, and this machine with it. A person's own graders
    are tried on their first rows; with `show` all are, and the rows of all are in `examples`."""
    for place, dataset in enumerate(settings.dataset):
        _check_grader(key_of(source, f"dataset.{place}.grader"), dataset.grader, settings.reward.path)
    tables = tuple(datasets.read_tables(settings, source))  # before the model: it may take a while to make one
    tried = tables if show else tuple(table for table in tables if graders.is_own(table.settings.grader))
    if offline and not _is_here(settings.model):
        note = f"model {settings.model} is not here: its tokens, memory and disk are not checked"
        return Checked(settings, tables, None, (*settings.notes(), note), tuple(examples.examples(tried, None, None)))
    model = resolve(settings.model)
    settings = with_dtype(settings.model_copy(update={"model": str(model)}))
    looked = model_folder.look(model, settings)
    layout.refuse_impossible(settings, looked.config)
    loaded = prompts.load(settings, model)
    notes = [] if offline else needs.check(settings, looked)
    found = examples.examples(tried, model, settings.reward)
    _refuse_useless_graders(source, tables, found)
    return Checked(settings, loaded.tables, loaded, (*settings.notes(), *notes), tuple(found))


def _refuse_useless_graders(source: str, tables: Sequence[Table], found: Sequence[Example]) -> None:
    """BadInput for a person's own grader that can judge no reference answer: it will judge no response either. (One
    that comes with dora says of the answers that they are not for it: a note.)"""
    for place, table in enumerate(tables):
        name = f"{table.settings.purpose}:{table.name}"
        tried = [one for one in found if one.dataset == name and (one.error or one.verdict is not None)]
        if tried and graders.is_own(table.settings.grader) and all(one.error for one in tried):
            one = tried[0]
            raise BadInput(
                f"{key_of(source, f'dataset.{place}.grader')}: {one.grader} judged none of {len(tried)} reference "
                f"answer(s) of {table.source}, e.g. {one.row}, answer {one.answer!r}: {one.error}. "
                "Correct it: a response without worth is 0, not an error."
            )


def _is_here(model: str) -> bool:
    name = model.removeprefix("builtin:")
    return ((MODELS_CACHE / name if name != model else Path(model)) / "config.json").is_file()


def _check_grader(key: str, name: str, path: str) -> None:
    """A person's own module is loaded in a process of its own: what it does stays there."""
    try:
        graders.check_name(name)
        if graders.is_own(name):
            _load_own(name, path)
        else:
            graders.load(name)
    except ValueError as error:
        raise BadInput(f"{key}: {error}") from error


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
        raise ValueError(f"{said}{_nearest_module(name, said, path)} (own graders are looked up in {path})")


def _nearest_module(name: str, said: str, path: str) -> str:
    """If it is the grader's module that is not there."""
    module, _, function = name.partition(":")
    if f"No module named {module!r}" not in said:
        return ""
    near = difflib.get_close_matches(module, sorted(file.stem for file in Path(path).glob("*.py")), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}:{function}?" if near else ""


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
    return Table(
        path.stem, str(path), Dataset(path=str(path), columns=columns), datasets.read_rows(path, columns, alone=True)
    )
