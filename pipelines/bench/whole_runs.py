"""Whole runs by the main command, as benchmarks make them: without Prefect, each in a folder of its own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.runs import RESOLVED, SUMMARY
from workers.runtime.errors import DoraError

CONFIGS = Path(__file__).parents[2] / "configs"


class RunFailed(DoraError):
    """A run of the benchmark did not end well."""


def complete(folder: Path, config: str, settings: Sequence[str]) -> None:
    """The run of that folder has ended well after this: nothing is done for one that has, an interrupted one goes on,
    a missing one is made of `configs/CONFIG.toml` with the settings. RunFailed."""
    if (folder / SUMMARY).is_file():
        return
    argv = ["run", str(folder / RESOLVED), "--resume"]
    if not (folder / RESOLVED).is_file():
        given = (f"runs_dir={folder.parent}", f"name={folder.name}", *settings)
        argv = ["run", str(CONFIGS / f"{config}.toml"), *(part for one in given for part in ("--set", one))]
    argv += ["--set", "prefect.enabled=false"]
    code = subprocess.run([sys.executable, "-m", "pipelines.cli", *argv], stdout=sys.stderr, check=False).returncode
    if code:
        raise RunFailed(f"{folder}: the run ended with {code}; the same command goes on with it")
