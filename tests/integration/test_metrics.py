"""`dora metrics --follow` beside a run, killed (-9) again and again: each point of the run is in the output once."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from schemas.messages import MetricPoint
from tests.integration.parts import LIMIT_S, QUICK
from tests.integration.whole_run import ROOT, assert_good
from tests.unit.test_metrics import READERS, Written, every_sink, needs
from workers.taps import archive

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(2 * LIMIT_S)]
STEPS = 40
PAUSES_S = (1.0, 6.0)
"""Between a start and its kill: a sink may be loading its library, or at work."""


@every_sink
def test_a_sink_that_is_killed_beside_a_run_loses_and_doubles_nothing(tmp_path: Path, sink: str) -> None:
    needs(sink)
    seed = int(os.environ.get("DORA_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance, pause, kills = random.Random(seed), threading.Event(), 0
    with QUICK.run(tmp_path, f"steps={STEPS}") as running:
        argv = [sys.executable, "-m", "pipelines.cli", "metrics", str(running.run_dir), sink, str(tmp_path / "out")]
        while not (running.run_dir / "config.toml").exists():
            assert running.popen.poll() is None, running.story()
            pause.wait(0.1)
        while running.popen.poll() is None:
            follower = subprocess.Popen([*argv, "--follow"], cwd=ROOT, stdout=subprocess.DEVNULL)
            pause.wait(chance.uniform(*PAUSES_S))
            follower.send_signal(signal.SIGKILL)
            kills += follower.wait(LIMIT_S) == -signal.SIGKILL
        ran = running.wait()
        assert_good(ran, running, STEPS)
    assert kills >= 2
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    written, expected = by_name(READERS[sink](tmp_path / "out")), by_name(_said(ran.run_dir))
    assert written.keys() == expected.keys()
    for name, values in expected.items():
        assert written[name] == pytest.approx(values, rel=1e-6), name  # TensorBoard keeps float32


def by_name(points: Written) -> dict[str, list[float]]:
    """All values of each figure, however often it was said."""
    found: dict[str, list[float]] = {}
    for _, values in points:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: sorted(values) for name, values in found.items()}


def _said(run_dir: Path) -> Written:
    texts = archive.read(run_dir, "metrics").column("value").to_pylist()
    points = [MetricPoint.model_validate_json(text) for text in texts]
    return [(0, {f"{one.source}/{name}": value for name, value in one.values.items()}) for one in points]
