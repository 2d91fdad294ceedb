"""A configuration file -> settings that mean the same from any folder; and the resolved copy in a run's folder."""

from collections.abc import Iterable
from pathlib import Path

from pipelines.runs import RESOLVED
from schemas.settings import Settings, SettingsError, parse_settings
from workers.runtime.errors import BadInput


def read_settings(config: Path, overrides: Iterable[str] = ()) -> Settings:
    """Settings of a TOML file; dataset paths become absolute (from the file's folder). BadInput."""
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
    folder = config.resolve().parent
    datasets = tuple(
        dataset.model_copy(update={"path": str((folder / dataset.path).resolve())}) if dataset.path else dataset
        for dataset in settings.dataset
    )
    return settings.model_copy(update={"dataset": datasets})


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


def refuse_changes(before: Settings, after: Settings) -> None:
    """A resumed run is the same run: only `steps` may grow, and where its services are may change. BadInput."""
    free = {"steps", "broker", "prefect", "kafka", "runs_dir"}
    old, new = before.model_dump(), after.model_dump()
    changed = [name for name in old if name not in free and old[name] != new[name]]
    if changed:
        raise BadInput(
            f"--resume: {', '.join(changed)} differ(s) from run {before.name} as it was started; "
            f"only `steps` may grow. Resume with that run's own {RESOLVED}, or start a new run."
        )
    if after.steps < before.steps:
        raise BadInput(f"--resume: steps = {after.steps}, the run has {before.steps} already: steps may only grow")
