"""`dora status`: what it says of a run in every state of its life, from its folder alone; and how fast it answers."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from pipelines import children, pictures, report, runs, snapshot, status
from pipelines.cli import app
from pipelines.config_file import write_resolved
from pipelines.snapshot import EngineView, Queues, Snapshot
from tests.unit.mind_driver import S
from tests.unit.pipeline_parts import some_settings
from workers.runtime import clock

LIMIT_S = 30.0
NOW = Snapshot(
    run="r",
    step=11,
    steps=20,
    step_next=12,
    staleness_max=2,
    version=11,
    seconds=75.0,
    reward=0.5,
    engines={0: EngineView(11, None, 8, 6, 0, 900, 2000), 1: EngineView(10, 11, 8, 2, 3, 100, 2000)},
    queues=Queues(7, 8, 2, 4, 1, 8, 3, 12),
    voided={"failed": 2},
    voided_last="failed: sample 3: not scored: KeyError: 'nope'",
    lag={0: 30, 2: 10},
    lag_live={1: 3, 2: 4},
    lag_complete={2: 2},
    tokens_per_second=812.4,
    tokens_per_second_overall=790.0,
    steps_per_minute=9.0,
    last_step_s=6.1,
    trainer_tokens_per_second=1204.0,
    blocked_by_oldest_s=1.5,
    blocked_share=0.02,
    trainer_train_share=0.3,
    trainer_publish_share=0.08,
    moves=12,
    tokens_prefilled_again=5120,
    engines_lost=1,
    restarts=2,
    dead_letters=3,
)


class Folder:
    """A run's folder as a supervisor leaves it at some moment."""

    def __init__(self, place: Path) -> None:
        self.run_dir = place / "runs" / "r"
        self.run_dir.mkdir(parents=True)
        write_resolved(some_settings(place), self.run_dir)

    def supervised(self, alive: bool = True) -> None:
        """`supervisor.json` of this process, or of one that was killed."""
        lock = children.RunLock(self.run_dir)
        lock.take()
        lock.note(broker="127.0.0.1:9092", prefect="http://127.0.0.1:4200")
        if not alive:
            said = json.loads((self.run_dir / children.LOCK).read_text())
            said["supervisor"]["created"] -= 1000.0  # the number of a process that is used again
            (self.run_dir / children.LOCK).write_text(json.dumps(said))

    def left(self) -> None:
        (self.run_dir / children.LOCK).unlink()

    def says(self, now: Snapshot = NOW, ago_s: float = 0.0, **outcome: str) -> None:
        at = clock.now_us() - int(ago_s * S)
        view = asdict(now) | {"at": at, "outcome": outcome or None}
        children.write_whole(self.run_dir / runs.STATUS, json.dumps(view))

    def status(self) -> status.Status:
        return status.status_of(self.run_dir)

    def text(self) -> str:
        return status.as_text(self.status())

    def json(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(status.as_json(self.status()))
        return said


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# --- the states -------------------------------------------------------------------------------


def test_a_live_run_says_all_that_people_ask(folder: Folder) -> None:
    folder.supervised()
    folder.says()
    text = folder.text()
    for part in (
        "r  running",
        "step 11 of 20, about 1 min 0 s to go, up for 1 min 15 s, reward 0.500",
        "v10 .. v12 (K = 2), newest v11, next to choose: batch 12",
        "0    v11        █████████░░░ 6/8 seats, KV 900/2,000 tokens",
        "1    v10>v11    ███░░░░░░░░░ 2/8 seats, KV 100/2,000 tokens, 3 waiting, loading",
        "7 live of 8, 2 complete; 4 chosen, 1 evaluating",
        "8 running, 3 waiting; 12 prompts unread",
        "0: 30 █████████ 75 %   2: 10 ███ 25 %",
        "1: 3, 2: 4 (groups, if chosen next)",
        "complete    2: 2",
        "812 tokens/s now, 790 tokens/s over all",
        "9.0 steps/min, the last took 6.1 s, 1,204 tokens/s",
        "blocked by the oldest 1.5 s (2.0 %); trainer waits 62.0 %, trains 30.0 %, publishes 8.0 %",
        "12 requests moved, 5,120 tokens prefilled again",
        "1 engines lost, 2 restarts, 3 dead letters",
        "groups: failed: 2; the last failed: sample 3: not scored: KeyError: 'nope'",
        str(folder.run_dir),
        "127.0.0.1:9092",
        "http://127.0.0.1:4200",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    said = folder.json()
    assert (said["live"], said["state"], said["broker"]) == (True, "running", "127.0.0.1:9092")
    assert said["now"]["engines"]["1"]["loading"] == 11
    assert "resume" not in said


def test_a_late_word_of_a_live_supervisor_is_said_to_be_late(folder: Folder) -> None:
    """Its lock was written before: the word is its own."""
    folder.supervised()
    lock = json.loads((folder.run_dir / children.LOCK).read_text())
    ago_s = min(60.0, clock.now_us() / 1e6 - lock["supervisor"]["created"] - 1.0)
    folder.says(ago_s=ago_s)
    late = "(last word " in folder.text()
    assert late == (ago_s > status.QUIET_S_MAX)


def test_a_run_whose_supervisor_was_killed_says_so_and_how_to_go_on(folder: Folder) -> None:
    folder.supervised(alive=False)
    folder.says(ago_s=42)
    text = folder.text()
    assert "no supervisor: last word 42 s ago" in text
    assert f"go on with dora run {folder.run_dir}/config.toml --resume" in text
    assert "step 11 of 20" in text
    assert not any(word in text for word in ("8 running", "seats", "127.0.0.1", "tokens/s now", "to go"))
    said = folder.json()
    assert (said["state"], said["live"], said["now"]["engines"]) == ("lost", False, {})
    assert said["now"]["queues"]["requests_running"] == 0
    assert said["said_s_ago"] >= 42
    assert said["resume"].endswith("config.toml --resume")


def test_a_finished_run_says_its_outcome_and_summary_and_nothing_runs(folder: Folder, tmp_path: Path) -> None:
    folder.says(kind="done", reason="20 steps trained")
    report.write(some_settings(tmp_path), folder.run_dir)
    text = folder.text()
    assert "r  done: 20 steps trained" in text
    assert "voided: none" in text
    assert "nothing trained" in text, "the summary is that of the archive"
    assert not any(word in text for word in ("running", "seats", "--resume"))
    said = folder.json()
    assert (said["state"], said["outcome"]["kind"], said["summary"]["steps"]) == ("ended", "done", 0)
    assert (said["now"]["engines"], said["now"]["queues"]["requests_running"]) == ({}, 0)
    assert "resume" not in said


def test_a_run_without_its_summary_says_what_it_did(folder: Folder) -> None:
    folder.says(kind="cancelled", reason="stopped by SIGINT")
    text = folder.text()
    assert f"cancelled: stopped by SIGINT; go on with dora run {folder.run_dir}/config.toml --resume" in text
    assert "step 11 of 20" in text
    assert "8 running" not in text


def test_what_a_former_supervisor_said_is_not_said_of_a_resumed_run(folder: Folder, tmp_path: Path) -> None:
    long_ago_s = clock.now_us() / 1e6 - psutil.Process().create_time() + 60
    report.write(some_settings(tmp_path), folder.run_dir)
    folder.says(ago_s=long_ago_s, kind="cancelled", reason="stopped by SIGINT")
    folder.supervised()
    said = folder.json()
    assert (said["state"], said["now"], said["outcome"], said["summary"]) == ("starting", None, None, None)
    folder.says()
    assert folder.status().state == "running"
    folder.says(kind="done", reason="20 steps trained")
    assert "ending: done: 20 steps trained" in folder.text()
    folder.left()
    assert folder.status().state == "ended"


def test_a_run_that_never_said_a_word(folder: Folder) -> None:
    assert "not running: it ended before its first word" in folder.text()
    folder.supervised(alive=False)
    assert "no supervisor: it died before its first word" in folder.text()


def test_many_engines_are_shown_by_version(folder: Folder) -> None:
    folder.supervised()
    engines = {n: EngineView(10 + n % 2, 12 if n == 0 else None, 4, 3, 0, 10, 100) for n in range(40)}
    folder.says(replace(NOW, engines=engines))
    text = folder.text()
    assert "20 x v11      █████████░░░ 60/80 seats" in text
    assert "19 x v10" in text
    assert " 1 x loading" in text


# --- which run --------------------------------------------------------------------------------


def _dora(*arguments: str | Path, **environment: str) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


def test_a_run_is_a_folder_or_a_name_and_a_wrong_one_is_answered_with_the_nearest(folder: Folder) -> None:
    there = folder.run_dir.parent
    for name in ("paced-000", "tiny-003"):
        (there / name).mkdir()
        (there / name / runs.RESOLVED).write_text("")
    assert "not running" in _dora("status", folder.run_dir).stdout
    assert "not running" in _dora("status", "r", "--runs-dir", there).stdout
    assert "not running" in _dora("status", "r", DORA_RUNS_DIR=str(there)).stdout
    near = _dora("status", "paced-00", "--runs-dir", there)
    assert (near.exit_code, f"did you mean paced-000 in {there}?" in near.stderr) == (2, True), near.stderr
    beside = _dora("status", there / "tiny-03")
    assert (beside.exit_code, f"did you mean tiny-003 in {there}?" in beside.stderr) == (2, True), beside.stderr
    far = _dora("status", "zzzzzz", "--runs-dir", there)
    assert far.exit_code == 2
    assert all(name in far.stderr for name in ("the newest in", "paced-000", "tiny-003"))
    assert "no run at all" in _dora("status", "r", "--runs-dir", there / "nowhere").stderr


# --- watching ---------------------------------------------------------------------------------


def _script(*steps: Callable[[], None]) -> Callable[[float], None]:
    """What happens while a watch waits, one step a wait."""
    left = list(steps)
    return lambda _: left.pop(0)()


def test_a_watch_without_terminal_says_a_line_per_period_until_the_end(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends() -> None:
        folder.says(kind="done", reason="20 steps trained")
        folder.left()

    folder.supervised()
    folder.says()
    status.watch(folder.run_dir, False, _script(lambda: folder.says(replace(NOW, step=12)), ends))
    assert [line[:30] for line in capsys.readouterr().out.splitlines()] == [
        "r: step 11/20, version 11, rew",
        "r: step 12/20, version 11, rew",
        "r: done: 20 steps trained",
    ]
    folder.supervised()
    folder.says()
    status.watch(folder.run_dir, True, _script(ends))
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states == ["running", "ended"]


def test_ctrl_c_ends_a_watch_and_is_no_failure(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    folder.supervised()
    folder.says()
    monkeypatch.setattr(threading.Event, "wait", interrupted)
    done = _dora("status", folder.run_dir, "--watch")
    assert (done.exit_code, done.stdout.count("step 11/20")) == (0, 1)


def test_a_watch_on_a_terminal_draws_in_place_until_ctrl_c(folder: Folder) -> None:
    folder.supervised()
    folder.says()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pipelines.cli", "status", str(folder.run_dir), "--watch"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    timer = threading.Timer(LIMIT_S, process.kill)
    timer.start()
    seen = ""
    while "step 12 of 20" not in seen:
        seen += os.read(ours, 65536).decode("utf-8", "replace")  # OSError when it was killed at the limit
        if "step 11 of 20" in seen:
            folder.says(replace(NOW, step=12))
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 0
    timer.cancel()
    os.close(ours)
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert "\x1b[1A" in seen, "the cursor goes up: the second picture lies on the first"


# --- how fast ---------------------------------------------------------------------------------


def test_status_imports_nothing_that_takes_long(folder: Folder) -> None:
    """Nothing but the command line's own library, and psutil; rich only to draw on a terminal."""
    folder.supervised()
    folder.says()
    code = (
        "import sys, pipelines.cli as c\n"
        "try: c.app(sys.argv[1:])\n"
        "finally: print('\\n' + ' '.join({name.split('.')[0] for name in sys.modules} | "
        "{n for n in sys.modules if n.startswith('schemas.')}))"
    )
    command = [sys.executable, "-c", code, "status", str(folder.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "psutil" in loaded, done.stdout
    slow = {"pyarrow", "kafka", "prefect", "torch", "transformers", "tokenizers", "rich", "numpy", "httpx", "tomli_w"}
    assert loaded & slow == set()
    assert {"schemas.settings", "schemas.messages"} & loaded == set()


def test_a_snapshot_is_read_back_and_other_versions_of_it_can_be_read_too() -> None:
    said = json.loads(json.dumps(asdict(NOW)))
    assert snapshot.read(said) == NOW
    del said["moves"], said["queues"]["prompts_unread"]
    said["of_tomorrow"] = said["engines"]["0"]["of_tomorrow"] = 1
    assert snapshot.read(said) == replace(NOW, moves=0, queues=replace(NOW.queues, prompts_unread=0))
    assert snapshot.read({"run": "r"}) == Snapshot("r")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (273_600, "3 d 4 h")],
)
def test_durations_are_said_in_two_units(seconds: float, said: str) -> None:
    assert pictures.duration(seconds) == said
