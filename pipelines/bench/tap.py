"""What taps cost a run, and whether one that is killed, and one that stands still, lose anything.

One run, its engines and its trainer real. The model is tiny, so that steps are short beside a window, and its answers
are as long as those of configs/longtail.toml, so that rows come about as often as from SmolLM2 (what a tap costs goes
by the row). Windows take turns: without taps, with two. One tap is killed (kill -9) at the end of each window and
goes on from its last whole line; the other is stopped (SIGSTOP) and continued, once for a minute. Each window with
taps, catching up included, is divided by the mean of its two neighbours without, so that a drift of the machine falls
out. A tap's own start-up (importing libraries) lies before its window.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines import status
from pipelines.bench.benchmarks import Bench
from pipelines.tap import tap
from workers.runtime import clock

CONFIG = Path(__file__).parents[2] / "configs/longtail.toml"
CHANGED = ["model=builtin:tiny", "dtype=float32", "engines.count=2", "steps=100000", "prefect.enabled=false"]
WINDOWS = 16
WINDOW_S = 15.0
LONG_STOP_S = 60.0
LIMIT_S = 300.0
STEPS_BEFORE = 3
_COMMAND = [sys.executable, "-m", "pipelines.cli"]
Window = tuple[int, int]
"""Microseconds since the epoch, UTC: its start and its end."""


def measure() -> Bench:
    """A row for each window with taps. RuntimeError if the run ends early."""
    with tempfile.TemporaryDirectory(prefix="dora-bench-") as folder:
        with _a_run(Path(folder)) as run:
            killed, stopped = _Tap(run, "killed"), _Tap(run, "stopped")
            stopped.start()
            quiet, tapped = _windows(run, killed, stopped)
            killed.start()
            run.popen.send_signal(signal.SIGINT)
            run.popen.wait(LIMIT_S)
            for follower in (killed, stopped):
                follower.popen.wait(LIMIT_S)
        rows = _rates(run.folder, quiet, tapped)
        return Bench(rows, _figures(rows) | _against_the_log(run.folder, killed, stopped))


@dataclass(frozen=True, slots=True)
class _Run:
    folder: Path
    popen: "subprocess.Popen[bytes]"

    def check(self) -> None:
        if self.popen.poll() is not None:
            raise RuntimeError(f"the run ended with {self.popen.returncode}: see {self.folder / 'logs'}")


@contextlib.contextmanager
def _a_run(folder: Path) -> Iterator[_Run]:
    settings = [f"runs_dir={folder}", "name=tapped", *CHANGED]
    argv = [*_COMMAND, "run", str(CONFIG), *(part for one in settings for part in ("--set", one))]
    popen = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    run = _Run(folder / "tapped", popen)
    try:
        _until(run, lambda: _step(run.folder) >= STEPS_BEFORE)
        yield run
    finally:
        popen.send_signal(signal.SIGINT)
        popen.wait()


class _Tap:
    """`dora tap RUN trajectories --follow --json` into a file."""

    def __init__(self, run: _Run, name: str) -> None:
        self._run, self._file = run, run.folder.parent / f"{name}.jsonl"
        self._file.touch()
        self.popen: subprocess.Popen[bytes]

    def start(self) -> None:
        """Go on from the last whole line."""
        text = self._file.read_bytes()
        self._file.write_bytes(text[: text.rfind(b"\n") + 1])
        lines = self.lines()
        since = ["--since", str(lines[-1]["position"])] if lines else []
        argv = [*_COMMAND, "tap", str(self._run.folder), "trajectories", "--follow", "--json", *since]
        with self._file.open("ab") as sink:
            self.popen = subprocess.Popen(argv, stdout=sink)

    def wait_for_a_row(self) -> None:
        size = self.size()
        _until(self._run, lambda: self.size() > size)

    def size(self) -> int:
        return self._file.stat().st_size

    def lines(self) -> list[dict[str, Any]]:
        text = self._file.read_bytes()
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def _windows(run: _Run, killed: _Tap, stopped: _Tap) -> tuple[list[Window], list[Window]]:
    """Without taps first and last."""
    stopped.wait_for_a_row()
    os.kill(stopped.popen.pid, signal.SIGSTOP)
    quiet, tapped = [_window(run)], []
    for number in range(WINDOWS):
        killed.start()
        os.kill(stopped.popen.pid, signal.SIGCONT)
        killed.wait_for_a_row()
        tapped.append(_window(run))
        killed.popen.kill()
        killed.popen.wait()
        os.kill(stopped.popen.pid, signal.SIGSTOP)
        quiet.append(_window(run, LONG_STOP_S if number == WINDOWS // 2 else WINDOW_S))
    os.kill(stopped.popen.pid, signal.SIGCONT)
    return quiet, tapped


def _window(run: _Run, seconds: float = WINDOW_S) -> Window:
    began = clock.now_us()
    threading.Event().wait(seconds)
    run.check()
    return began, clock.now_us()


def _rates(run_dir: Path, quiet: list[Window], tapped: list[Window]) -> list[dict[str, float]]:
    """Tokens/s of each window and its neighbours, from the heartbeats that the archive has: engines count what they
    sampled."""
    heard: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for batch in tap(run_dir, "status", where="kind = 'heartbeat'"):
        columns = (batch.column(name).to_pylist() for name in ("engine", "incarnation", "timestamp", "tokens"))
        for engine, incarnation, at, tokens in zip(*columns, strict=True):
            heard.setdefault((engine, incarnation), []).append((int(at.timestamp() * 1e6), tokens))
    curves = [np.array(sorted(points)).T for points in heard.values()]

    def rate(window: Window) -> float:
        began, ended = window
        tokens = sum(float(np.diff(np.interp(window, *curve))[0]) for curve in curves)
        return round(tokens / ((ended - began) / 1e6), 1)

    return [
        {"before": rate(before), "tapped": rate(window), "after": rate(after)}
        for before, window, after in zip(quiet, tapped, quiet[1:], strict=False)
    ]


def _figures(rows: list[dict[str, float]]) -> dict[str, float | int]:
    ratios = [2 * row["tapped"] / (row["before"] + row["after"]) for row in rows]
    return {
        "windows": len(rows),
        "tokens_per_second_untapped": statistics.median(row["before"] for row in rows),
        "tokens_per_second_tapped": statistics.median(row["tapped"] for row in rows),
        "tapped_over_untapped": round(statistics.median(ratios), 4),
        "tapped_over_untapped_min": round(min(ratios), 3),
        "tapped_over_untapped_max": round(max(ratios), 3),
    }


def _against_the_log(run_dir: Path, *followers: _Tap) -> dict[str, float | int]:
    """Rows of the archive that a tap does not have, and rows that it has twice; of both taps together."""
    rows = tap(run_dir, "trajectories")
    whole = Counter(
        (row["partition"], row["offset"], row["group"], row["index"]) for b in rows for row in b.to_pylist()
    )
    lost = doubled = 0
    for follower in followers:
        has = Counter(map(_place, follower.lines()))
        lost += (whole - has).total()
        doubled += (has - whole).total()
    return {"rows": whole.total(), "lost": lost, "doubled": doubled}


def _place(row: dict[str, Any]) -> tuple[int, int, int, int]:
    return row["partition"], row["offset"], row["group"], row["index"]


def _step(run_dir: Path) -> int:
    now = status.status_of(run_dir).now if run_dir.is_dir() else None
    return 0 if now is None else now.step


def _until(run: _Run, true: Any) -> None:
    limit = clock.monotonic_s() + LIMIT_S
    while not true():
        run.check()
        if clock.monotonic_s() > limit:
            raise RuntimeError(f"nothing came within {LIMIT_S:.0f} s: see {run.folder / 'logs'}")
        threading.Event().wait(0.05)
