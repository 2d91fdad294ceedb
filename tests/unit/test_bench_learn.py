"""Learning curves: what is read of an archive, and what the band and the slopes say of curves with a known answer."""

import json
import math
import random
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.bench import learn, learn_curves
from pipelines.cli import app
from pipelines.config_file import read_settings
from pipelines.report import write
from schemas import messages as m
from tests.unit.report_run import text_file, token_file
from tests.unit.reward_rows import a_row
from tests.unit.small_run import write_run

VERSIONS = 13


def _curves(seed: int, runs: int, shift: float = 0.0) -> list[dict[int, float]]:
    rng = random.Random(seed)
    return [{v: 0.2 + 0.04 * v + shift + rng.gauss(0, 0.05) for v in range(VERSIONS)} for _ in range(runs)]


@pytest.mark.parametrize(("freedom", "point"), [(4, 2.776), (10, 2.228), (26, 2.056), (1000, 1.962)])
def test_students_t_is_that_of_the_tables(freedom: int, point: float) -> None:
    assert learn_curves.t_95(freedom) == pytest.approx(point, rel=5e-3)


def test_curves_of_the_same_policy_leave_the_band_once_in_twenty_versions() -> None:
    inside = versions = 0
    for seed in range(200):
        found = learn_curves.compare(_curves(2 * seed, 3), _curves(2 * seed + 1, 3))
        inside += int(found["inside"])
        versions += int(found["versions"])
    share = inside / versions
    print(f"inside: {share:.3f} of {versions}")
    assert 0.93 < share < 0.97


def test_a_worse_policy_is_outside_and_it_is_said_by_how_much() -> None:
    found = learn_curves.compare(_curves(1, 3), _curves(2, 3, shift=-0.3))
    assert found["inside"] == 0
    assert found["difference_mean"] == pytest.approx(-0.3, abs=0.05)
    assert found["outside_max"] == pytest.approx(0.3 - float(found["half_width"]), abs=0.15)


def test_one_run_has_no_band() -> None:
    assert math.isnan(learn_curves.half_width(_curves(1, 1), 1))


def test_only_versions_that_all_runs_have_are_averaged() -> None:
    assert learn_curves.mean_curve([{0: 0.0, 1: 1.0, 3: 0.5}, {0: 0.5, 3: 1.0}]) == {0: 0.25, 3: 0.75}


def test_a_line_has_its_slope_and_noise_has_none() -> None:
    change, half = learn_curves.slope([0.5 * place + (-1) ** place for place in range(50)])
    assert change == pytest.approx(0.5, abs=0.01)
    assert half < 0.05
    rng = random.Random(7)
    change, half = learn_curves.slope([rng.gauss(3, 1) for _ in range(50)])
    assert abs(change) < 2 * half


def _runs(folder: Path) -> None:
    for name in ("learn-sync-k0-s1", "learn-sync-k0-s2", "learn-dora-k1-s1"):
        run_dir = folder / name
        run_dir.mkdir(parents=True)
        write_run(run_dir)
        write(read_settings(run_dir / "config.toml"), run_dir)


def test_what_is_there_is_read_tabled_and_drawn(tmp_path: Path) -> None:
    _runs(tmp_path)
    done = CliRunner().invoke(
        app, ["bench", "learn", "--runs", str(tmp_path), "--seeds", "1,2", "--steps", "0", "--json"]
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert [(row["mode"], row["seed"]) for row in said["rows"]] == [("sync-k0", 1), ("dora-k1", 1), ("sync-k0", 2)]
    assert said["rows"][0]["accuracy"] == {"0": 0.5, "1": 0.5, "2": 0.5}
    assert (said["figures"]["dora_k1_inside"], said["figures"]["dora_k1_versions"]) == (3, 3)
    table = (tmp_path / learn.TABLE).read_text()
    assert "| dora, K = 1 | 1 |" in table
    assert "3 of 3" in table
    svg = (tmp_path / learn.PLOT).read_text()
    assert svg.count("<polyline") == 4
    assert len(re.findall("<svg", svg)) == 3


def test_minutes_are_since_the_first_request_by_the_wall_clock(tmp_path: Path) -> None:
    first = 1_790_000_000 * 1_000_000
    token_file(tmp_path, "trajectories", [a_row(0, 0) | {"queued_at": first + late} for late in (5, 0, 9)])
    announced = {0: first - 60_000_000, 1: first + 90_000_000}
    record = {"run": "r", "step": None, "groups": (), "trajectories": 0, "location": "", "manifest_sha256": "0"}
    words = [m.WeightsRecord(version=v, fingerprint="f", created_at=at, **record) for v, at in announced.items()]
    text_file(tmp_path, "weights", words)
    assert learn_curves.minutes_by_version(tmp_path) == {0: 0.0, 1: 1.5}


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--modes", "dorra-k1"), "dorra-k1"), (("--seeds", "1,x"), "--seeds x"), (("--modes", "dora"), "dora-k2")],
)
def test_bad_options_are_refused(tmp_path: Path, options: tuple[str, str], named: str) -> None:
    done = CliRunner().invoke(app, ["bench", "learn", "--runs", str(tmp_path), "--steps", "0", *options])
    assert done.exit_code == 2
    assert named in done.stderr


def test_an_option_of_another_benchmark_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "tap", "--seeds", "1"])
    assert (done.exit_code, "--seeds" in done.stderr) == (2, True)
