"""The command attached to a flow run: it follows the launch, not the server; with a small process for the run."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from pipelines import attach, deployments, home, launch, updown
from pipelines.children import identity_of
from pipelines.faults import ServiceFailed
from pipelines.home import Kept, Launch
from pipelines.supervise import Outcome
from tests.unit.pipeline_parts import a_config

RUN = """
import json, sys
from pathlib import Path
from pipelines.home import Launch
launch = Launch(Path(sys.argv[1]), sys.argv[2])
launch.stderr.write_text("run folder somewhere\\n")
launch.stdout.write_text("run r: the summary\\n")
code = sys.argv[3]
if code == "wait":
    import signal, threading
    gone = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: gone.set())
    print("up", flush=True)
    gone.wait(60.0)
    code = "130"
if code != "dies":
    launch.note("ended", code=int(code))
"""


class Prefect:
    """Stands for server and worker: `begin` is what the worker does with a flow run."""

    def __init__(self, home_folder: Path) -> None:
        self.home, self.code = home_folder, "0"
        self.asked: list[tuple[bool, str]] = []
        self.withdrawn: list[str] = []
        self.state = ("Scheduled", "", False)
        self.begins = True
        self.process: subprocess.Popen[bytes] | None = None

    def create_run(self, _: str, __: Any, resume: bool, name: str) -> UUID:
        self.asked.append((resume, name))
        if self.begins:
            argv = [sys.executable, "-c", RUN, str(self.home), name, self.code]
            self.process = subprocess.Popen(argv, stdout=subprocess.PIPE)
            if self.code == "wait":
                assert self.process.stdout is not None
                self.process.stdout.readline()
            Launch(self.home, name).note("process", **identity_of(self.process.pid))
            threading.Thread(target=self.process.wait, daemon=True).start()
        return uuid4()


@pytest.fixture
def prefect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prefect:
    fake = Prefect(tmp_path / "home")
    kept = Kept(keeper=identity_of(os.getpid()), prefect="http://127.0.0.1:9/api", place="here", ready=True)
    monkeypatch.setenv(home.HOME_VARIABLE, str(fake.home))
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_CLIENT_MAX_RETRIES", "PREFECT_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")  # set by the command: back afterwards
    monkeypatch.setenv("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "")
    monkeypatch.setattr(attach, "on_stop_signals", lambda _: None)
    monkeypatch.setattr(updown, "wait_ready", lambda *_, **__: kept)
    monkeypatch.setattr(updown, "using", _using)
    monkeypatch.setattr(deployments, "create_run", fake.create_run)
    monkeypatch.setattr(deployments, "state_of", lambda _: fake.state)
    monkeypatch.setattr(deployments, "withdraw", lambda _, reason: fake.withdrawn.append(reason))
    monkeypatch.setattr(attach, "LOOK_AT_STATE_S", 0.0)
    return fake


@contextlib.contextmanager
def _using(_: Path) -> Iterator[None]:
    yield


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that went on in this process."""
    gone_on: list[str] = []

    def run(_: Any, stem: str, __: bool) -> Outcome:
        gone_on.append(stem)
        return Outcome("done", "here")

    monkeypatch.setattr(launch, "run", run)
    return gone_on


def _config(folder: Path) -> Path:
    return a_config(folder, prefect={"enabled": True})


@pytest.mark.parametrize("code", [0, 1, 3, 130])
def test_it_says_what_the_run_says_and_ends_with_its_code(
    tmp_path: Path, prefect: Prefect, here: list[str], capsys: pytest.CaptureFixture[str], code: int
) -> None:
    prefect.code = str(code)
    assert attach.run_config(_config(tmp_path), [], False) == code
    said = capsys.readouterr()
    assert said.out == "run r: the summary\n"
    assert "run folder somewhere" in said.err
    assert here == []


def test_a_run_whose_process_is_killed_is_said_and_how_to_go_on(
    tmp_path: Path, prefect: Prefect, here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prefect.code = "dies"
    assert attach.run_config(_config(tmp_path), [], False) == 1
    assert "the run's process was killed; go on with: dora run" in capsys.readouterr().err
    assert here == []


def test_ctrl_c_is_handed_to_the_run_without_the_server(
    tmp_path: Path, prefect: Prefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefect.code = "wait"
    pressed: list[Callable[[int], None]] = []
    monkeypatch.setattr(attach, "on_stop_signals", pressed.append)

    def create_run(*arguments: Any) -> UUID:
        made = prefect.create_run(*arguments)
        pressed[0](2)
        return made

    monkeypatch.setattr(deployments, "create_run", create_run)
    assert attach.run_config(_config(tmp_path), [], False) == 130
    assert prefect.process is not None
    assert prefect.process.wait(10.0) == 0


def test_without_services_the_run_goes_on_here(
    tmp_path: Path, prefect: Prefect, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_ready(*_: object, **__: object) -> Kept:
        raise ServiceFailed("no port is free")

    monkeypatch.setattr(updown, "wait_ready", wait_ready)
    assert attach.run_config(_config(tmp_path), [], False) == 0
    assert here == ["small"]
    assert prefect.asked == []


def test_a_flow_run_that_no_worker_begins_is_withdrawn_and_the_run_goes_on_here(
    tmp_path: Path, prefect: Prefect, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "BEGIN_S_MAX", 0.0)
    prefect.begins = False
    assert attach.run_config(_config(tmp_path), [], False) == 0
    assert here == ["small"]
    assert len(prefect.withdrawn) == 1
    assert Launch(prefect.home, prefect.asked[0][1]).noted("withdrawn") == {}, "a worker that comes late sees it"


def test_a_flow_run_that_is_cancelled_before_it_begins_is_exit_code_130(
    tmp_path: Path, prefect: Prefect, here: list[str]
) -> None:
    prefect.begins, prefect.state = False, ("Cancelled", "by hand", True)
    assert attach.run_config(_config(tmp_path), [], False) == 130
    assert here == []


def test_a_resume_goes_on_with_the_suspended_flow_run_and_its_launch(
    tmp_path: Path, prefect: Prefect, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    flow_run = uuid4()
    (run_dir / "flow_run.json").write_text(json.dumps({"flow_run": str(flow_run), "launch": "before"}))
    monkeypatch.setattr(launch, "ready", lambda settings, *_, **__: settings)
    resumed: list[UUID] = []

    def resume_suspended(which: UUID, _: object) -> bool:
        resumed.append(which)
        prefect.create_run("", None, True, "before")
        return True

    monkeypatch.setattr(deployments, "resume_suspended", resume_suspended)
    assert attach.run_config(_config(tmp_path), ["name=r"], True) == 0
    assert resumed == [flow_run]
    assert here == []
