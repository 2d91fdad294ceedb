"""People control runs from the Prefect UI: by the requests that the UI sends, on a real server, broker and worker.

Rule 1: one `dora up` serves the whole file, as people use it; the last word is that `dora down` leaves nothing.
Rule 2: parts are paced: what is tested is control, not models. The checker of the archive looks at every run.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines import home
from pipelines.config_file import read_settings
from pipelines.home import Kept
from tests.archive_checker import check
from tests.integration.browser import browser, program
from tests.integration.killing import steps_of, until_step
from tests.integration.prefect_api import FINAL, Ui, flow_run_of
from tests.integration.whole_run import ROOT, Ran, Running, dora_run, replayed_differently
from workers.runtime import clock
from workers.taps import archive

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
CANCEL_S_MAX = 10.0
SUSPEND_S_MAX = 60.0
"""With its checkpoint and a whole archive, on a busy machine."""
AWAY_S = 30.0
STARTS_S = 10.0
"""Longer than a run that was asked to stop waits for its server."""
FRESH_HOME_S_MAX = 280.0
"""A first server makes its database: minutes on a busy machine."""
PAUSE_S_MAX = 10.0
"""Between two steps while the server is away; paced ones take about a second."""


@dataclass(frozen=True, slots=True)
class House:
    """`dora up`."""

    folder: Path
    kept: Kept
    ui: Ui
    environment: Mapping[str, str]

    def run(self, folder: Path, *overrides: str, resume: bool = False) -> contextlib.AbstractContextManager[Running]:
        """Named after the test: all share one broker."""
        return dora_run("paced", folder, *overrides, name=folder.name, resume=resume, environment=self.environment)


def _dora(environment: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DORA_"))}
    argv = [sys.executable, "-m", "pipelines.cli", *arguments, "--json"]
    done = subprocess.run(
        argv, cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    environment = {"DORA_HOME": str(folder), "DORA_TEST_HOUSE": str(folder)}
    _dora(environment, "up")
    kept = home.kept(folder)
    assert kept is not None
    yield House(folder, kept, Ui(kept.prefect), environment)
    _dora(environment, "down")
    assert [" ".join(process.cmdline()) for process in _processes_of(folder)] == []


def _processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("DORA_TEST_HOUSE") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _assert_whole(ran: Ran, steps: int) -> None:
    assert check(ran.run_dir) == []
    assert replayed_differently(ran.run_dir) == []
    assert ran.summary.steps == steps


def _until_gone(running: Running, limit_s: float) -> None:
    limit = clock.monotonic_s() + limit_s
    while left := running.processes():
        assert clock.monotonic_s() < limit, f"still there after {limit_s} s: {left}\n{running.story()}"
        threading.Event().wait(0.05)


def test_up_twice_says_where_things_are(house: House) -> None:
    said = _dora(house.environment, "up")
    assert said == {"broker": house.kept.broker, "prefect": house.kept.ui, "home": str(house.folder)}
    assert home.kept(house.folder) == house.kept


def test_suspend_stops_at_a_checkpoint_and_resume_goes_on_in_the_same_folder(house: House, tmp_path: Path) -> None:
    with house.run(tmp_path, "steps=20", "training.checkpoint_every=50") as running:
        until_step(running, 4)
        flow_run = flow_run_of(running.run_dir)
        asked_at = clock.monotonic_s()
        house.ui.suspend(flow_run)
        ran = running.wait(SUSPEND_S_MAX)
        print(f"suspended after {clock.monotonic_s() - asked_at:.1f} s")
        assert ran.code == 3, running.story()
        assert house.ui.state(flow_run)["name"] == "Suspended"
        assert running.processes() == []
        assert list((running.run_dir / "checkpoints").iterdir()), "the only checkpoint is that of the suspension"
        assert "Press **Resume**" in house.ui.artifacts(flow_run)["markdown"]
        stopped_at = max(step for _, step in steps_of(running.run_dir))
        assert 4 <= stopped_at < 19
        house.ui.resume(flow_run)
        state = house.ui.wait_state(flow_run, lambda state: state["type"] in FINAL, 200.0)
        assert state["type"] == "COMPLETED", running.story()
        _until_gone(running, 30.0)
        _assert_whole(ran, 20)
        trained = [step for _, step in steps_of(running.run_dir)]
        assert trained == list(range(20)), "no step was trained again"
    shown = house.ui.artifacts(flow_run)
    assert shown["progress"] == 100.0
    assert {"window", "engine 0"} <= {row["what"] for row in json.loads(shown["table"])}
    assert shown["markdown"].count("data:image/svg+xml;base64,") == 4
    told = house.ui.wait_events("dora.step.trained", tmp_path.name, 20, 30.0)
    assert [said["step"] for said in told] == list(range(20))
    lines = house.ui.lines(flow_run)
    assert any(line.startswith("suspended: ") for line in lines)
    assert "step 20/20" in lines[-2]
    assert lines[-1].startswith("done: ")
    tasks = house.ui.tasks(flow_run)
    assert {"trainer", "rollout-0", "orchestrator"} <= {name for name, _ in tasks}
    assert {state for _, state in tasks} == {"COMPLETED"}
    assert len(tasks) == 2 * len({name for name, _ in tasks}), "each process was started twice"


@pytest.mark.full
def test_an_automation_starts_an_evaluator_which_is_a_flow_run_of_its_own_and_ends_with_the_run(
    house: House, tmp_path: Path
) -> None:
    """At the run's first version, and however late Prefect is then: the run keeps what it is to evaluate."""
    match = {"prefect.resource.id": f"dora.run.{tmp_path.name}", "dora.version": "0"}
    asked: dict[str, str | int] = {"run": "{{ event.resource['dora.folder'] }}", "every": 5}
    deployment = house.ui.automate(house.kept.place, "evaluate", "dora.version.published", match, **asked)
    with house.run(tmp_path, "steps=30", "scheduling.weights_keep_every=5") as running:
        ran = running.wait()
        assert ran.code == 0, running.story()
        _until(lambda: bool(house.ui.runs_of(deployment)), "the automation runs the deployment")
        (evaluator,) = house.ui.runs_of(deployment)
        state = house.ui.wait_state(evaluator, lambda state: state["type"] in FINAL, 100.0)
        assert (state["type"], state["message"]) == ("COMPLETED", "the run has ended")
    shown = house.ui.artifacts(evaluator)
    cells = json.loads(shown["table"])
    assert sum(cell["samples"] for cell in cells) == ran.summary.trajectories.generated
    assert "held-out accuracy by version" in shown["markdown"]
    versions = {row["version"] for row in archive.read(ran.run_dir, "evaluations").to_pylist()}
    assert versions == {0, 5, 10, 15, 20, 25, 30}
    assert check(ran.run_dir) == []


def test_cancel_ends_one_run_within_seconds_and_leaves_the_one_beside_it_alone(house: House, tmp_path: Path) -> None:
    """The other one is started from the form."""
    config = read_settings(ROOT / "configs/paced.toml", [f"runs_dir={tmp_path}", "name=beside", "steps=12"])
    beside = house.ui.start(house.kept.place, config=config.model_dump(mode="json"))
    with house.run(tmp_path, "steps=100") as running:
        until_step(running, 3)
        flow_run = flow_run_of(running.run_dir)
        asked_at = clock.monotonic_s()
        house.ui.cancel(flow_run)
        _until_gone(running, 60.0)
        took = clock.monotonic_s() - asked_at
        ran = running.wait(30.0)
    print(f"cancelled after {took:.1f} s")
    assert ran.code == 130
    assert took <= CANCEL_S_MAX, running.story()
    assert house.ui.wait_state(flow_run, lambda state: state["type"] in FINAL, 30.0)["type"] == "CANCELLED"
    state = house.ui.wait_state(beside, lambda state: state["type"] in FINAL, 200.0)
    assert state["type"] == "COMPLETED", state
    assert check(tmp_path / "beside") == []
    assert house.ui.ask(f"/flow_runs/{beside}")["name"] == "beside"


@pytest.mark.full
def test_retry_of_a_failed_run_completes_it(house: House, tmp_path: Path) -> None:
    """The trainer finds no configuration when it starts again: that is bad input, and fails the run at once."""
    with house.run(tmp_path, "steps=12") as running:
        until_step(running, 4)
        flow_run = flow_run_of(running.run_dir)
        config, hidden = running.run_dir / "config.toml", running.run_dir / "hidden.toml"
        config.rename(hidden)
        os.kill(running.worker("trainer"), signal.SIGKILL)
        ran = running.wait(120.0)
        assert ran.code == 1, running.story()
        state = house.ui.wait_state(flow_run, lambda state: state["type"] in FINAL, 30.0)
        assert state["type"] == "FAILED", state
        told = house.ui.artifacts(flow_run)["markdown"]
        assert "**What happened**" in told
        assert "no run here (no config.toml)" in told
        assert "press **Retry**" in told
        hidden.rename(config)
        house.ui.retry(flow_run)
        state = house.ui.wait_state(
            flow_run, lambda state: state["type"] in FINAL and state["id"] != "" and state["type"] != "FAILED", 200.0
        )
        assert state["type"] == "COMPLETED", state
        _until_gone(running, 30.0)
        _assert_whole(ran, 12)


@pytest.mark.full
def test_a_server_that_is_killed_for_half_a_minute_is_not_noticed_and_shows_all_afterwards(
    house: House, tmp_path: Path
) -> None:
    """The keeper is held meanwhile: it would start the server again at once."""
    keeper = psutil.Process(house.kept.keeper["pid"])
    with house.run(tmp_path, "steps=60") as running:
        until_step(running, 3)
        flow_run = flow_run_of(running.run_dir)
        keeper.suspend()
        try:
            os.kill(json.loads((house.folder / "prefect.lock").read_text())["pid"], signal.SIGKILL)
            begun = clock.now_us() / 1e6
            threading.Event().wait(AWAY_S)
        finally:
            keeper.resume()
        ended = clock.now_us() / 1e6
        ran = running.wait()
        assert ran.code == 0, running.story()
        _assert_whole(ran, 60)
        times = [at for at, _ in steps_of(running.run_dir)]
        away = [later - sooner for sooner, later in pairwise(times) if begun <= later <= ended]
        print(f"longest pause while the server was away: {max(away):.1f} s, {len(away)} steps")
        assert max(away) < PAUSE_S_MAX
        state = house.ui.wait_state(flow_run, lambda state: state["type"] in FINAL, 60.0)
        assert state["type"] == "COMPLETED", state
        assert house.ui.artifacts(flow_run)["progress"] == 100.0


@pytest.mark.full
def test_a_run_that_ends_while_the_server_is_away_is_shown_as_done_when_it_is_back(
    house: House, tmp_path: Path
) -> None:
    keeper = psutil.Process(house.kept.keeper["pid"])
    with house.run(tmp_path, "steps=12") as running:
        until_step(running, 3)
        flow_run = flow_run_of(running.run_dir)
        keeper.suspend()
        try:
            os.kill(json.loads((house.folder / "prefect.lock").read_text())["pid"], signal.SIGKILL)
            ran = running.wait()
            threading.Event().wait(STARTS_S)
        finally:
            keeper.resume()
        assert ran.code == 0, running.story()
        _assert_whole(ran, 12)
        state = house.ui.wait_state(flow_run, lambda state: state["type"] in FINAL, 200.0)
        assert state["type"] == "COMPLETED", state
        assert house.ui.artifacts(flow_run)["progress"] == 100.0


@pytest.mark.full
def test_a_borrowed_server_outlives_the_run_that_started_it(tmp_path: Path) -> None:
    """Without `dora up`: the first run's keeper serves the second one, and ends after it."""
    environment = {"DORA_HOME": str(tmp_path / "home"), "DORA_TEST_HOUSE": str(tmp_path)}
    with dora_run("paced", tmp_path / "one", "steps=1000", environment=environment) as one:
        _until(lambda: bool(steps_of(one.run_dir)), "a first step", FRESH_HOME_S_MAX)
        with dora_run("paced", tmp_path / "two", "steps=8", environment=environment) as two:
            _until(lambda: bool(steps_of(two.run_dir)), "a first step beside it", FRESH_HOME_S_MAX)
            asked_at = clock.monotonic_s()
            one.popen.send_signal(signal.SIGINT)
            assert one.wait(60.0).code == 130, one.story()
            print(f"with a broker of its own, gone after {clock.monotonic_s() - asked_at:.1f} s")
            ran = two.wait()
            assert ran.code == 0, two.story()
            _assert_whole(ran, 8)
    assert [" ".join(process.cmdline()) for process in _processes_of(tmp_path)] == []


@pytest.mark.full
def test_a_pause_by_the_api_is_a_suspension_and_the_command_resumes_the_same_flow_run(
    house: House, tmp_path: Path
) -> None:
    with house.run(tmp_path, "steps=14") as running:
        until_step(running, 4)
        flow_run = flow_run_of(running.run_dir)
        house.ui.pause(flow_run)
        assert running.wait(SUSPEND_S_MAX).code == 3, running.story()
        assert house.ui.state(flow_run)["name"] == "Suspended"
    with house.run(tmp_path, "steps=14", resume=True) as running:
        ran = running.wait()
        assert ran.code == 0, running.story()
        assert flow_run_of(running.run_dir) == flow_run
        _assert_whole(ran, 14)
    assert house.ui.state(flow_run)["type"] == "COMPLETED"


@pytest.mark.full
def test_cancel_and_suspend_are_obeyed_when_the_worker_is_deaf(house: House, tmp_path: Path) -> None:
    worker = psutil.Process(json.loads((house.folder / "worker.lock").read_text())["pid"])
    for number, (press, code) in enumerate([(house.ui.suspend, 3), (house.ui.cancel, 130)]):
        with house.run(tmp_path / f"{tmp_path.name}-{number}", "steps=200") as running:
            until_step(running, 3)
            worker.suspend()
            try:
                asked_at = clock.monotonic_s()
                press(flow_run_of(running.run_dir))
                _until_gone(running, SUSPEND_S_MAX)
                took = clock.monotonic_s() - asked_at
                assert running.wait(10.0).code == code
            finally:
                worker.resume()
            print(f"{press.__name__} without a worker: gone after {took:.1f} s")
            assert press == house.ui.suspend or took <= CANCEL_S_MAX
            house.ui.wait_state(
                flow_run_of(running.run_dir), lambda state: state["name"] in ("Suspended", "Cancelled"), 10.0
            )
            assert check(running.run_dir) == []


@pytest.mark.full
def test_people_start_watch_suspend_resume_and_cancel_a_run_in_a_browser(house: House, tmp_path: Path) -> None:
    """Only clicks, from the form on; the pictures are kept (DORA_SCREENSHOTS)."""
    if program() is None:
        pytest.skip("no Chromium here: install the Debian package `chromium`, or set DORA_CHROMIUM")
    config = read_settings(ROOT / "configs/paced.toml", [f"runs_dir={tmp_path}", "name=clicked", "steps=400"])
    parameters = urllib.parse.quote(json.dumps({"config": config.model_dump(mode="json"), "resume": False}))
    deployment = house.ui.ask(f"/deployments/name/train/{house.kept.place}")["id"]
    run_dir, where = tmp_path / "clicked", house.kept.ui
    with browser(tmp_path) as page:
        page.open(f"{where}/deployments/deployment/{deployment}/run?parameters={parameters}")
        page.see("Samples per prompt (G).")
        page.shoot("1-form")
        page.confirm("Samples per prompt (G).", "Submit")
        _until(lambda: run_dir.is_dir() and len(steps_of(run_dir)) > 3, "a fourth step")
        flow_run = flow_run_of(run_dir)
        page.open(f"{where}/runs/flow-run/{flow_run}")
        page.see("Running")
        page.shoot("2-running")
        page.click("Suspend")
        page.confirm("Suspend Flow Run", "Submit")
        house.ui.wait_state(flow_run, lambda state: state["name"] == "Suspended", SUSPEND_S_MAX)
        page.see("Suspended")
        page.shoot("3-suspended")
        _until(
            lambda: home.Launch(house.folder, flow_run).noted("ended") == {"code": 3}, "the end of the suspended run"
        )
        before = len(steps_of(run_dir))
        page.click("Resume")
        page.confirm("Resume Flow Run", "Submit")
        _until(lambda: len(steps_of(run_dir)) > before + 2, "steps after the resume")
        page.open(f"{where}/artifacts/artifact/{house.ui.artifact(flow_run, 'markdown')}")
        page.see("step")
        page.shoot("4-report")
        page.open(f"{where}/runs/flow-run/{flow_run}")
        page.see("Running")
        page.see("live groups")
        page.shoot("5-running-again")
        page.click("Cancel")
        page.confirm("Cancel Flow Run", "Confirm")
        asked_at = clock.monotonic_s()
        house.ui.wait_state(flow_run, lambda state: state["type"] == "CANCELLED", 30.0)
        print(f"cancelled after {clock.monotonic_s() - asked_at:.1f} s")
        page.see("Cancelled")
        page.shoot("6-cancelled")
    assert check(run_dir) == []


def _until(true: Callable[[], bool], what: str, limit_s: float = 150.0) -> None:
    limit = clock.monotonic_s() + limit_s
    while not true():
        assert clock.monotonic_s() < limit, f"not within {limit_s:.0f} s: {what}"
        threading.Event().wait(0.1)
