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
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.config_file import read_resolved
from pipelines.evaluate import tables_of
from tests.integration.whole_run import ROOT, Running, assert_good, dora_run
from tests.unit.reward_rows import Deadline
from tests.unit.test_tables import by_cell, counted
from workers.taps import archive, evaluate
from workers.taps.tables import FILE, Tables

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]


@contextlib.contextmanager
def _following(running: Running, every: int = 0) -> Iterator["subprocess.Popen[bytes]"]:
    """The command, ended with the test."""
    argv = [
        sys.executable,
        "-m",
        "pipelines.cli",
        "eval",
        str(running.run_dir),
        "--follow",
        "--every",
        str(every),
        "--json",
    ]
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


def test_a_held_out_curve_beside_a_real_run_has_a_point_for_each_second_version(tmp_path: Path) -> None:
    """Real engines and trainer; the evaluator is killed once while it samples. The run keeps few versions."""
    pause = threading.Event()
    changed = ("prefect.enabled=false", "steps=8", "scheduling.weights_keep=1", "evaluation.samples=2")
    with dora_run("tiny", tmp_path, *changed) as running:
        deadline, own = Deadline(400), running.run_dir / "archive" / "evaluations"
        while not (running.run_dir / "weights" / "v000000").is_dir():
            deadline.check(running.story())
            pause.wait(0.2)
        with _following(running, every=2) as popen:
            while not list(own.glob("1000.*.arrow")):
                assert popen.poll() is None, (running.run_dir / "eval.txt").read_text()
                deadline.check((running.run_dir / "eval.txt").read_text())
                pause.wait(0.05)
            popen.kill()
        with _following(running, every=2) as popen:
            ran = running.wait()
            assert popen.wait(300) == 0, (running.run_dir / "eval.txt").read_text()
    assert_good(ran, running, steps=8)
    announced = [json.loads(text) for text in archive.read(ran.run_dir, "weights").column("value").to_pylist()]
    fingerprints = {said["version"]: said["fingerprint"] for said in announced}
    rows = [row for row in archive.read(ran.run_dir, "evaluations").to_pylist() if row["partition"] == 1000]
    of_version: dict[int, set[tuple[int, int]]] = {}
    for row in rows:
        (stay,) = row["engine_path"]
        assert (stay["version"], stay["fingerprint"]) == (row["version"], fingerprints[row["version"]])
        of_version.setdefault(row["version"], set()).add((row["group"], row["index"]))
    assert sorted(of_version) == [0, 2, 4, 6, 8]
    assert len({len(samples) for samples in of_version.values()}) == 1
    assert len(rows) == sum(map(len, of_version.values())), "no sample comes twice"
    assert set(of_version) <= set(evaluate.heldout(ran.run_dir))
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(ran.run_dir), "--html", str(page)]).exit_code == 0
    assert all(fingerprints[version][:16] in page.read_text() for version in of_version)
