"""The command that `infra/docker-compose.yml` starts for a run, as a process, with a given broker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.archive_checker import check
from tests.integration.whole_run import ROOT

pytestmark = pytest.mark.integration
LIMIT_S = 280.0


def test_the_run_of_the_compose_file_runs(tmp_path: Path, broker_address: str) -> None:
    service = yaml.safe_load((ROOT / "infra/docker-compose.yml").read_text())["services"]["run"]
    program, *arguments = [word.replace("${DORA_CONFIG:-quickstart}", "paced") for word in service["command"]]
    assert program == ".venv/bin/dora"
    assert set(service["environment"]) == {"DORA_BROKER", "DORA_PREFECT"}
    for name in ("configs", ".models"):
        (ROOT / name).mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DORA_"))}
    env |= {"DORA_BROKER": broker_address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "pipelines.cli", *arguments, "--set", "prefect.enabled=false", "--set", "steps=3"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert check(tmp_path / "runs" / "paced-000") == []
