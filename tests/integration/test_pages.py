"""Pages that people follow: their commands, in order, in one shell, with nothing but what a checkout has."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

import psutil
import pytest

from pipelines.home import HOME_VARIABLE
from tests.archive_checker import check
from tests.integration.whole_run import ROOT, Ran, Running, environment_of
from workers.taps import evaluate

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1800)]


def _followed(page: str, folder: Path, limit_s: float) -> Ran:
    """Every block ```sh of the page, as one script that ends at the first command that fails."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.M | re.S)
    script, output, mark = folder / "page.sh", folder / "page.txt", uuid.uuid4().hex
    script.write_text("\n".join(["set -euxo pipefail", *blocks]))
    shutil.copytree(ROOT / "configs", folder / "configs")
    models = ROOT / ".models"  # as the checkout has them after its first run
    models.mkdir(exist_ok=True)
    (folder / models.name).symlink_to(models)
    places = {
        "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        HOME_VARIABLE: str(folder / ".run"),
    }
    with output.open("wb") as sink:
        popen = subprocess.Popen(
            ["bash", str(script)],
            cwd=folder,
            env={**environment_of(mark), **places},
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    running = Running(popen, output, folder / "runs", mark)
    try:
        ran = running.wait(limit_s)
        assert ran.code == 0, ran.said
        assert running.processes() == [], "the page ends all that it starts"
    finally:
        for process in running.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        popen.wait()
    return ran


def test_the_tutorial_can_be_followed_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    said = _followed("TUTORIAL.md", tmp_path, 1700.0).said
    run_dir = tmp_path / "runs" / "first"
    assert check(run_dir) == []
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 16
    for words in ("exit code 130", "to the last bit", "byte for byte", "as it was: all tokens equal"):
        assert words in said
    assert list(evaluate.fingerprints(run_dir)) == [0, 4, 8, 12, 16]
    assert (tmp_path / "first.html").stat().st_size > 10_000
    assert (tmp_path / "first-model" / "model.safetensors").is_file()


def test_a_task_of_ones_own_is_made_and_rehearsed_as_the_page_says(tmp_path: Path) -> None:
    said = _followed("HOWTO-own-task.md", tmp_path, 900.0).said
    assert check(tmp_path / "runs" / "rehearsal") == []
    assert "2 bad row(s)" in said
    assert (tmp_path / "answers.jsonl").read_text().count("response_text") == 2
