"""`dora eval --follow` beside a real run: killed at any moment and started again, it ends with the archive's tables."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipelines.config_file import read_resolved
from pipelines.evaluate import tables_of
from tests.integration.whole_run import ROOT, Running, assert_good, dora_run
from tests.unit.reward_rows import Deadline
from tests.unit.test_tables import by_cell, counted
from workers.taps import archive
from workers.taps.tables import FILE, Tables

pytestmark = [pytest.mark.integration, pytest.mark.full]


@contextlib.contextmanager
def _following(running: Running) -> Iterator["subprocess.Popen[bytes]"]:
    """The command, ended with the test."""
    argv = [sys.executable, "-m", "pipelines.cli", "eval", str(running.run_dir), "--follow", "--json"]
    with (running.run_dir / "eval.txt").open("ab") as out:
        popen = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        yield popen
    finally:
        if popen.poll() is None:
            psutil.Process(popen.pid).kill()
        popen.wait()


def _taken(run_dir: Path) -> int:
    """Samples that are in the tables now."""
    if not (run_dir / FILE).exists():
        return 0
    tables = Tables("r", 1, run_dir / FILE)
    try:
        return sum(cell[0] for cell in by_cell(tables.now())[0].values())
    finally:
        tables.close()


def test_tables_of_a_tap_that_was_killed_three_times_are_those_of_the_archive(tmp_path: Path) -> None:
    pause = threading.Event()
    with dora_run("paced", tmp_path, "prefect.enabled=false", "steps=60") as running:
        deadline, seen = Deadline(200), 0
        while not (running.run_dir / "archive").is_dir():
            deadline.check(running.story())
            pause.wait(0.2)
        for _ in range(3):
            with _following(running) as popen:
                while _taken(running.run_dir) <= seen:
                    deadline.check(running.story())
                    pause.wait(0.1)
                popen.kill()  # in the middle of whatever it does
            seen = _taken(running.run_dir)
        with _following(running) as popen:
            ran = running.wait()
            assert popen.wait(60) == 0, (running.run_dir / "eval.txt").read_text()
    assert_good(ran, running, steps=60)
    group_size = read_resolved(ran.run_dir).group_size
    expected = counted(ran.run_dir, group_size)
    assert sum(cell[0] for cell in expected[0].values()) == ran.summary.trajectories.generated
    kept = Tables("r", group_size, ran.run_dir / FILE)
    assert by_cell(kept.now()) == expected
    kept.close()
    assert by_cell(tables_of(ran.run_dir, [])) == expected
    last = json.loads((ran.run_dir / "eval.txt").read_text().splitlines()[-1])
    assert len(last["cells"]) == len(expected[0])
    assert archive.read(ran.run_dir, "tables").num_rows > 0
