"""A person's first run: `dora init`, their own rows and reward function. Taps are killed meanwhile."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.tap import tap
from tests.integration.whole_run import ROOT, Running, assert_good, dora_run
from workers.runtime import clock
from workers.taps import archive

pytestmark = pytest.mark.integration
LIMIT_S = 200.0
STEPS = 10
PACED = (
    "model=builtin:tiny",
    "dtype=float32",
    "engines.kind=paced",
    "training.kind=paced",
    "prefect.enabled=false",
    f"steps={STEPS}",
)
Place = tuple[int, int]


class Tap:
    """`dora tap ... --follow --json` of a run, started again after each end from where it says that it was."""

    def __init__(self, running: Running, topic: str, *options: str) -> None:
        self._argv = [sys.executable, "-m", "pipelines.cli", "tap", str(running.run_dir), topic, "--follow", "--json"]
        self._options = options
        self._file = running.run_dir.parent / f"{topic}.{len(options)}.jsonl"
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        with self._file.open("ab") as sink:
            self.popen = subprocess.Popen([*self._argv, *self._options, *options], cwd=ROOT, stdout=sink)

    def wait_lines(self, count: int) -> None:
        end, pause = clock.monotonic_s() + LIMIT_S, threading.Event()
        while len(self.lines()) < count:
            assert self.popen is not None
            if self.popen.poll() is not None:
                return  # the run has ended, and so has the tap
            assert clock.monotonic_s() < end, f"{count} lines did not come: {len(self.lines())}"
            pause.wait(0.02)

    def kill(self, number: signal.Signals) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)
        self.popen.wait(60)

    def lines(self) -> list[dict[str, object]]:
        """Whole lines."""
        text = self._file.read_bytes()
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def cut_half_line(self) -> None:
        text = self._file.read_bytes()
        self._file.write_bytes(text[: text.rfind(b"\n") + 1])

    def places(self) -> list[Place]:
        return [(int(str(row["partition"])), int(str(row["offset"]))) for row in self.lines()]


def _started(folder: Path, running: Running) -> None:
    """Until the run has rows on its broker (a follow tap may be started at any time; this makes the kills count)."""
    end, pause = clock.monotonic_s() + LIMIT_S, threading.Event()
    while not (folder / "r" / "supervisor.json").exists() or "broker" not in (
        json.loads((folder / "r" / "supervisor.json").read_text())
    ):
        assert running.popen.poll() is None, running.story()
        assert clock.monotonic_s() < end, running.story()
        pause.wait(0.1)


def test_a_run_on_own_rows_with_own_reward_is_tapped_without_loss_or_doubles(tmp_path: Path) -> None:
    seed = int(os.environ.get("DORA_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    assert CliRunner().invoke(app, ["init", str(tmp_path / "first.toml")]).exit_code == 0
    with dora_run(str(tmp_path / "first"), tmp_path, *PACED) as running:
        _started(tmp_path, running)
        by_line, by_state = Tap(running, "trajectories"), Tap(running, "status", "--state", str(tmp_path / "state"))
        by_line.start()
        by_state.start()
        for _ in range(3):
            by_line.wait_lines(len(by_line.lines()) + chance.randint(1, 20))
            by_line.kill(signal.SIGKILL)
            by_line.cut_half_line()
            lines = by_line.lines()
            by_line.start(*(["--since", str(lines[-1]["position"])] if lines else []))
            by_state.wait_lines(len(by_state.lines()) + chance.randint(1, 60))
            by_state.kill(signal.SIGTERM)
            by_state.start()
        ran = running.wait()
        for following in (by_line, by_state):
            assert following.popen is not None
            assert following.popen.wait(LIMIT_S) in (0, -signal.SIGTERM, 130)
        assert_good(ran, running, steps=STEPS)
    for following, topic in ((by_line, "trajectories"), (by_state, "status")):
        table = archive.read(ran.run_dir, topic)
        whole = list(zip(table.column("partition").to_pylist(), table.column("offset").to_pylist(), strict=True))
        assert sorted(following.places()) == sorted(whole), topic
    rows = [row for batch in tap(ran.run_dir, "trajectories", decode=True) for row in batch.to_pylist()]
    assert {row["score_error"] for row in rows} == {None}
    assert {round(row["reward"], 3) for row in rows} <= {0.0, 0.1, 1.0}
    assert all(row["prompt_text"].startswith("<|user|>What is ") for row in rows)
    query = [
        "tap",
        str(ran.run_dir),
        "--sql",
        "select count(*) as n from trajectories t join weights w using (version)",
    ]
    assert json.loads(CliRunner().invoke(app, [*query, "--json"]).stdout) == {"n": len(rows)}
