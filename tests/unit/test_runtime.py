"""The body of a worker process: its log lines, its clock, its exit codes, its signals."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workers.runtime import clock
from workers.runtime.errors import BadInput, DoraError, ProbeMismatch, WeightsUnavailable
from workers.runtime.log import Line, Log

ROOT = Path(__file__).parents[2]
LIMIT_S = 60
START = """
import sys
from pathlib import Path
from schemas.settings import parse_settings
from workers.runtime.errors import *
from workers.runtime.process import Process, run_service
settings = parse_settings('name="r"\\nmodel="m"\\nsteps=1\\n[[dataset]]\\npath="a"\\n', "a.toml")
process = Process("rollout-0", settings, Path("."))
"""


def _run(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", START + code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_a_log_line_is_time_level_process_event_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Log("rollout-0").info("swapped", version=3, load_s=0.41)
    line = Line("r").format(caplog.records[-1])
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(time + " INFO rollout-0 swapped version=3 load_s=0.41 run=r", line)


def test_fields_read_back_whatever_is_in_them(caplog: pytest.LogCaptureFixture) -> None:
    said = {"reason": 'no "answer", a = b\nin row 3', "detail": "", "folder": "a b", "group": 7, "error": None}
    with caplog.at_level(logging.INFO):
        Log("reward-0").info("not_scored", **said, version=(3, 4))
    line = Line("r").format(caplog.records[-1])
    assert "\n" not in line
    fields = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)', line)
    read = {name: json.loads(text) if text.startswith('"') else text for name, text in fields}
    assert read == {name: str(value) for name, value in said.items()} | {"version": "3,4", "run": "r"}


def test_a_log_line_of_an_exception_carries_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise DoraError("gone")
    except DoraError:
        Log("trainer").exception("failed", step=1)
    text = Line("").format(caplog.records[-1])
    assert "ERROR trainer failed step=1\nTraceback" in text
    assert text.endswith("DoraError: gone")


def test_clock_counts_microseconds_since_1970_and_never_runs_backwards() -> None:
    assert clock.now_us() > 1_700_000_000 * 10**6
    moments = [clock.monotonic_s() for _ in range(100)]
    assert moments == sorted(moments)
    assert clock.cpu_s() > 0


def test_own_errors_are_one_tree_and_bad_input_is_a_value_error() -> None:
    assert issubclass(BadInput, DoraError)
    assert issubclass(BadInput, ValueError)
    assert issubclass(WeightsUnavailable, DoraError)
    assert issubclass(ProbeMismatch, DoraError)


def test_service_that_returns_ends_with_its_code() -> None:
    """Each line names the run, of libraries too."""
    done = _run(
        "import logging; sys.exit(run_service(process, lambda: logging.getLogger('kafka').warning('late') or 0))"
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" INFO ")[-1].split(" WARNING ")[-1] for line in done.stderr.splitlines()]
    assert re.fullmatch(r"rollout-0 started pid=\d+ run=r", lines[0])
    assert lines[1:] == ["kafka late run=r", "rollout-0 ended code=0 run=r"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        ("BadInput('row 3: no answer')", 2, 'ERROR rollout-0 bad_input error="row 3: no answer"'),
        ("DoraError('lost')", 1, 'ERROR rollout-0 failed error="DoraError: lost"'),
        ("ProbeMismatch('stale')", 1, 'ERROR rollout-0 failed error="ProbeMismatch: stale"'),
    ],
)
def test_worlds_fault_is_one_line_and_an_exit_code(error: str, code: int, line: str) -> None:
    done = _run(f"def serve():\n    raise {error}\nsys.exit(run_service(process, serve))")
    assert done.returncode == code, done.stderr
    assert done.stderr.rstrip().endswith(f"{line} run=r")
    assert "Traceback" not in done.stderr


def test_our_bug_falls_with_its_trace() -> None:
    done = _run("def serve():\n    assert False, 'our bug'\nsys.exit(run_service(process, serve))")
    assert done.returncode == 1
    assert "AssertionError: our bug" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_the_service_end_its_step(number: signal.Signals) -> None:
    code = (
        "def serve():\n    print('up', flush=True)\n    assert process.stopping.wait(50)\n    return 0\n"
        "sys.exit(run_service(process, serve))"
    )
    with subprocess.Popen([sys.executable, "-c", START + code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(number)
        assert child.wait(LIMIT_S) == 0


def test_signal_in_the_very_moment_of_waiting_does_not_lock_the_service_up() -> None:
    """Once in a thousand runs on a busy machine: the handler came while the main thread held the event's own lock."""
    done = _run(
        "import os, signal\n"
        "def serve():\n"
        "    with process.stopping._cond:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return 0 if process.stopping.wait(50) else 1\n"
        "sys.exit(run_service(process, serve))"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_worker_whose_parent_is_killed_stops_by_itself() -> None:
    worker = (
        "import os\ndef serve():\n    print(os.getpid(), flush=True)\n    stopped = process.stopping.wait(50)\n"
        "    print('stopped' if stopped else 'forgotten', flush=True)\n    return 0\n"
        "sys.exit(run_service(process, serve))"
    )
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {START + worker!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) != child.pid
        os.kill(child.pid, signal.SIGKILL)
        assert child.stdout.readline() == "stopped\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_worker_whose_parent_is_killed_ends_even_if_it_waits_for_something_that_has_gone() -> None:
    worker = (
        "import os, threading\nimport workers.runtime.process as body\nbody.ORPHAN_S_MAX = 0.2\n"
        "def serve():\n    print(os.getpid(), flush=True)\n    threading.Event().wait(50)\n    return 0\n"
        "sys.exit(run_service(process, serve))"
    )
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {START + worker!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        assert "orphan_gave_up" in child.stderr.read()  # to its end: the worker has closed it, so it has gone


def test_worker_that_is_told_to_stop_by_its_living_parent_has_the_time_it_needs() -> None:
    code = (
        "import threading\nimport workers.runtime.process as body\nbody.ORPHAN_S_MAX = 0.0\n"
        "def serve():\n    print('up', flush=True)\n    assert process.stopping.wait(50)\n"
        "    threading.Event().wait(0.5)\n    return 0\nsys.exit(run_service(process, serve))"
    )
    with subprocess.Popen([sys.executable, "-c", START + code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(LIMIT_S) == 0
