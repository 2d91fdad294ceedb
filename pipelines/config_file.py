"""A configuration file -> settings that mean the same from any folder; and the resolved copy in a run's folder."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.runs import RESOLVED
from schemas.settings import Settings, SettingsError, parse_settings
from workers.runtime.errors import BadInput
from workers.trainer.learners.layout import PIPELINE, TENSOR


def read_settings(config: Path, overrides: Iterable[str] = ()) -> Settings:
    """Settings of a TOML file; paths of datasets and graders become absolute (from the file's folder). BadInput."""
    try:
        text = config.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{config}: no such configuration file") from None
    except IsADirectoryError:
        raise BadInput(f"{config} is a folder; give the configuration file, e.g. configs/quickstart.toml") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{config}: not UTF-8 (byte {error.start})") from error
    try:
        settings = parse_settings(text, str(config), overrides)
    except SettingsError as error:
        raise BadInput(str(error)) from error
    return anchored(settings, config.resolve().parent)


def anchored(settings: Settings, folder: Path) -> Settings:
    """Dataset paths relative to `folder` become absolute."""
    datasets = tuple(
        dataset.model_copy(update={"path": str((folder / dataset.path).resolve())}) if dataset.path else dataset
        for dataset in settings.dataset
    )
    reward = settings.reward.model_copy(update={"path": str((folder / settings.reward.path).resolve())})
    return settings.model_copy(update={"dataset": datasets, "reward": reward})


def read_resolved(run_dir: Path) -> Settings:
    """Settings of a run, as they were when it started. BadInput if there is no such run."""
    file = run_dir / RESOLVED
    if not file.is_file():
        raise BadInput(f"{run_dir}: no run here (no {RESOLVED}); runs are folders like runs/quickstart-000")
    return parse_settings(file.read_text(encoding="utf-8"), str(file))


def write_resolved(settings: Settings, run_dir: Path) -> None:
    import tomli_w

    unfinished = run_dir / f"{RESOLVED}.tmp"
    unfinished.write_text(tomli_w.dumps(settings.model_dump(mode="json")), encoding="utf-8")
    unfinished.replace(run_dir / RESOLVED)


LAYOUT = ("training.data_parallel", f"megatron.{TENSOR}", f"megatron.{PIPELINE}")
MAY_CHANGE = ("steps", "broker", "prefect", "prometheus", "kafka", "runs_dir", "reward.path", *LAYOUT)
"""Keys of a run that say nothing of what it computes, rounding apart. (`steps` has a rule of its own.)"""


def refuse_changes(before: Settings, after: Settings) -> None:
    """A resumed run is the same run: only `steps` may grow; where its services are and how the trainer shares its work
    may change. BadInput."""
    changed = list(_changed("", before.model_dump(), after.model_dump()))
    if changed:
        shown = "\n  ".join(changed)
        raise BadInput(
            f"--resume: {len(changed)} key(s) differ from run {before.name} as it was started:\n  {shown}\n"
            f"Only `steps` may grow. Resume with that run's own {RESOLVED}, or start a new run."
        )
    if after.steps < before.steps:
        raise BadInput(f"--resume: steps = {after.steps}, the run has {before.steps} already: steps may only grow")


def _changed(key: str, old: Any, new: Any) -> Iterator[str]:
    """`key: old -> new` of all that may not change, each key with its dots."""
    if old == new or key in MAY_CHANGE:
        return
    prefix = f"{key}." if key else ""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _changed(f"{prefix}{name}", old.get(name), new.get(name))
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _changed(f"{prefix}{place}", one, other)
    elif isinstance(old, tuple) and isinstance(new, tuple):
        yield f"{key}: {len(old)} tables -> {len(new)}"
    else:
        yield f"{key}: {_said(old)} -> {_said(new)}"


def _said(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False, default=str)
