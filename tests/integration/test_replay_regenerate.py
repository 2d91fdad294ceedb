"""`dora replay --group G --regenerate` on a real run: groups that moved, groups of mixed versions, greedy groups."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.replay_regenerate import LOGPROB_TOLERANCE
from tests.integration.parts import LIMIT_S, Parts
from tests.integration.whole_run import ROOT, assert_good
from workers.taps import archive

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(2 * LIMIT_S)]
STEPS = 4
GREEDY = 0.01
"""Temperature of the held-out rows: the likeliest token always."""
KEPT = Parts("tiny", STEPS, ("scheduling.weights_keep=99", f"evaluation.temperature={GREEDY}"))


@pytest.mark.parametrize("mode", ["dora", "partial"])
def test_groups_of_a_real_run_are_sampled_again_token_by_token(tmp_path: Path, mode: str) -> None:
    with KEPT.run(tmp_path, f"mode={mode}") as running:
        ran = running.wait(LIMIT_S)
        assert_good(ran, running, STEPS)
    trained = archive.read(ran.run_dir, "trajectories").to_pylist()
    held_out = archive.read(ran.run_dir, "evaluations").to_pylist()
    stays = [(len(row["engine_path"]), row["group"]) for row in trained]
    wanted = {max(stays)[1], min(row["group"] for row in held_out)}
    for group in wanted:
        said = _again(ran.run_dir, group)
        assert said["same"], said
        for one in said["samples"]:
            assert one["others"] == []
            assert one["equal"] == one["tokens"] > 0
            assert one["mean"] <= LOGPROB_TOLERANCE["float32"]
    versions = {stay["version"] for row in trained for stay in row["engine_path"]}
    assert len(versions) >= 2


def _again(run_dir: Path, group: int) -> dict[str, Any]:
    argv = [sys.executable, "-m", "pipelines.cli", "replay", str(run_dir), "--group", str(group), "--regenerate"]
    done = subprocess.run([*argv, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["regenerated"]
    return found
