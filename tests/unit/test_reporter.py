"""What the reporter makes of a run, and what it does when people press something; with a small stand-in for Prefect."""

import base64
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Cancelling, Paused, Running, Suspended

from pipelines import flows, pictures, plots, reporter
from pipelines.home import Launch
from pipelines.reporter import Reporter
from pipelines.snapshot import EngineView, Snapshot
from pipelines.supervise import Outcome, StopRequest
from tests.unit.pipeline_parts import some_settings

NOW = Snapshot(
    "r", step=2, steps=8, step_next=3, staleness_max=2, version=2, seconds=9.0, reward=0.5, rewards=(0.25, 0.5),
    engines={0: EngineView(version=2, seats=8, running=3), 1: EngineView(version=1, loading=2, seats=8)},
    lag={0: 8, 1: 4}, trainer_train_share=0.5, trainer_publish_share=0.1, engine_shares={"decode": 0.75, "idle": 0.25},
)  # fmt: skip


class Server:
    """What the reporter asks of a Prefect client."""

    def __init__(self) -> None:
        self.state: State[Any] = Running()
        self.name = ""
        self.artifacts: dict[UUID, Any] = {}
        self.forced: list[str] = []
        self.lines: list[str] = []
        self.tasks: dict[UUID, TaskRun] = {}

    def read_flow_run(self, _: UUID) -> "Server":
        return self

    def update_flow_run(self, _: UUID, *, name: str) -> None:
        self.name = name

    def set_flow_run_state(self, _: UUID, state: State[Any], *, force: bool) -> "Server":
        assert force
        self.forced.append(str(state.name))
        self.state = state
        return self

    def read_artifacts(self, **_: Any) -> list[Any]:
        return list(self.artifacts.values())

    def create_artifact(self, create: Any) -> Any:
        made = create.model_copy(update={})
        object.__setattr__(made, "id", uuid4())
        self.artifacts[made.id] = made
        return made

    def update_artifact(self, place: UUID, update: Any) -> None:
        self.artifacts[place].data = update.data

    def create_logs(self, logs: list[Any]) -> None:
        self.lines += [log.message for log in logs]

    def create_task_run(self, _: Any, flow_run: UUID, key: str, *, name: str, state: State[Any]) -> TaskRun:
        made = TaskRun(id=uuid4(), task_key=name, dynamic_key=key, flow_run_id=flow_run, name=name, state=state)
        self.tasks[made.id] = made
        return made

    def read_task_runs(self, **_: Any) -> list[TaskRun]:
        return list(self.tasks.values())

    def set_task_run_state(self, place: UUID, state: State[Any], *, force: bool) -> None:
        assert force
        self.tasks[place].state = state

    def processes(self) -> list[tuple[str, str]]:
        """Names and states of the task runs, in the order of their starts."""
        return [(task.name, str(task.state and task.state.name)) for task in self.tasks.values()]

    def shown(self) -> dict[str, Any]:
        return {made.type: made.data for made in self.artifacts.values()}


class Stage:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.resources: list[dict[str, str]] = []

        def emit(event: str, resource: dict[str, str], payload: dict[str, Any], **_: Any) -> None:
            self.events.append((event, payload))
            self.resources.append(resource)

        monkeypatch.setattr(reporter, "emit_event", emit)
        self.folder, self.server, self.stop = folder, Server(), StopRequest()
        (folder / "r").mkdir(parents=True, exist_ok=True)
        self.settings = some_settings(folder)

    def reporter(self) -> Reporter:
        made = Reporter(uuid4(), Launch(self.folder, "a"), "http://127.0.0.1:1")
        made.start = lambda: None  # type: ignore[method-assign]  # turns are made by hand
        made.begin(self.settings, self.folder / "r", self.stop)
        return made


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def _show(made: Reporter, stage: Stage) -> None:
    made._show(stage.server)  # type: ignore[arg-type]


def _hear(made: Reporter, stage: Stage) -> None:
    made._hear(stage.server)  # type: ignore[arg-type]


def test_there_is_one_artifact_of_each_kind_whoever_goes_on_with_the_flow_run(stage: Stage) -> None:
    first = stage.reporter()
    first.offer(NOW)
    _show(first, stage)
    assert stage.server.name == "r"
    assert stage.server.shown()["progress"] == 25.0
    second = stage.reporter()
    second.offer(Snapshot("r", step=8, steps=8, version=8))
    _show(second, stage)
    assert sorted(stage.server.shown()) == ["markdown", "progress", "table"]
    assert stage.server.shown()["progress"] == 100.0


def test_an_evaluator_that_is_started_again_updates_what_the_first_one_made(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "get_client", lambda **_: nullcontext(stage.server))
    flow_run = uuid4()
    for _ in range(2):
        flows._Evaluation(flow_run, stage.folder / "r").show([])
    assert sorted(made.key for made in stage.server.artifacts.values()) == ["r-evaluation", "r-samples"]


def _works(stage: Stage, **pids: int) -> None:
    said = {"supervisor": {}, "processes": {name: {"pid": pid, "created": float(pid)} for name, pid in pids.items()}}
    (stage.folder / "r" / "supervisor.json").write_text(json.dumps(said))


def test_each_start_of_a_process_is_a_task_run_and_each_death_is_seen(stage: Stage) -> None:
    made = stage.reporter()
    for number, trainer in enumerate((2, 2, 3)):
        _works(stage, reward=1, trainer=trainer)
        made.offer(replace(NOW, seconds=float(number)))
        _show(made, stage)
    assert stage.server.processes() == [("reward", "Running"), ("trainer", "Crashed"), ("trainer", "Running")]
    made._outcome = Outcome("suspended", "suspended in the Prefect UI")
    (stage.folder / "r" / "supervisor.json").unlink()
    _show(made, stage)
    assert [state for _, state in stage.server.processes()] == ["Completed", "Crashed", "Completed"]


def test_what_starts_and_ends_between_two_looks_of_a_slow_server_is_shown(stage: Stage) -> None:
    made = stage.reporter()
    _works(stage, archive=1)
    made.offer(NOW)
    _show(made, stage)
    for trainer in (2, 3):
        _works(stage, archive=1, trainer=trainer)
        made.offer(NOW)
    made._outcome = Outcome("done", "8 of 8 steps")
    (stage.folder / "r" / "supervisor.json").unlink()
    _show(made, stage)
    assert stage.server.processes() == [("archive", "Completed"), ("trainer", "Crashed"), ("trainer", "Completed")]


def test_processes_of_a_supervisor_that_was_killed_are_closed_by_the_next(stage: Stage) -> None:
    first = stage.reporter()
    _works(stage, trainer=1)
    first.offer(NOW)
    _show(first, stage)
    second = stage.reporter()
    _works(stage, trainer=2)
    second.offer(NOW)
    _show(second, stage)
    assert stage.server.processes() == [("trainer", "Crashed"), ("trainer", "Running")]


def test_the_log_says_how_it_stands_and_how_it_ended(stage: Stage) -> None:
    made = stage.reporter()
    made.offer(NOW)
    _show(made, stage)
    made.offer(replace(NOW, engines_lost=1))
    _show(made, stage)
    made._outcome = Outcome("failed", "the trainer died 3 times")
    _show(made, stage)
    begun, lost, stands, ended = stage.server.lines
    assert begun == stands == pictures.line(NOW)
    assert lost.startswith("an engine was lost (number 1")
    assert ended == "failed: the trainer died 3 times"


def test_every_step_version_and_lost_engine_is_told_once_also_after_a_resume(stage: Stage) -> None:
    made = stage.reporter()
    made.offer(NOW)
    _show(made, stage)
    steps = [payload for event, payload in stage.events if event == "dora.step.trained"]
    assert steps == [{"step": 0, "reward": 0.25}, {"step": 1, "reward": 0.5}]
    assert [p["version"] for event, p in stage.events if event == "dora.version.published"] == [0, 1, 2]
    assert stage.resources[2] == {  # by which an automation tells the first version from the others
        "prefect.resource.id": "dora.run.r",
        "prefect.resource.name": "r",
        "dora.folder": str(stage.folder / "r"),
        "dora.version": "0",
    }
    (stage.folder / "r" / "status.json").write_text(json.dumps({"run": "r", "step": 2, "version": 2}))
    stage.events.clear()
    resumed = stage.reporter()
    for now in (Snapshot("r"), Snapshot("r", step=3, version=3, engines_lost=1)):  # the journal is read again
        resumed.offer(now)
        _show(resumed, stage)
    assert [(event, next(iter(payload.values()))) for event, payload in stage.events] == [
        ("dora.step.trained", 2),
        ("dora.version.published", 3),
        ("dora.engine.lost", 1),
    ]


def test_suspend_asks_for_a_checkpoint_and_a_cancel_after_it_is_in_a_hurry(stage: Stage) -> None:
    made = stage.reporter()
    _hear(made, stage)
    assert not stage.stop.asked
    stage.server.state = Suspended()
    _hear(made, stage)
    assert stage.stop.outcome is not None
    assert (stage.stop.outcome.kind, stage.stop.in_a_hurry, stage.server.forced) == ("suspended", False, [])
    stage.server.state = Cancelling()
    _hear(made, stage)
    assert (stage.stop.outcome.kind, stage.stop.in_a_hurry) == ("suspended", True)


@pytest.mark.parametrize("pressed", [Paused(), Suspended(timeout_seconds=300)], ids=["pause", "with an end"])
def test_a_pause_that_would_end_by_itself_or_keep_its_process_becomes_a_suspension(
    stage: Stage, pressed: State[Any]
) -> None:
    made = stage.reporter()
    stage.server.state = pressed
    _hear(made, stage)
    assert stage.server.forced == ["Suspended"]
    assert stage.server.state.state_details.pause_timeout is None
    assert made.paused is stage.server.state


def test_the_report_of_a_failed_run_says_what_happened_and_what_to_do(stage: Stage) -> None:
    made = stage.reporter()
    made.offer(NOW)
    made._outcome = Outcome("failed", "trainer ended (exit code 2); its log ends with:\n  no such file")
    _show(made, stage)
    text = stage.server.shown()["markdown"]
    assert text.index("**What happened**") < text.index("no such file") < text.index("**What to do**")
    assert f"dora run {stage.folder}/r/config.toml --resume" in text
    assert "press **Retry**" in text


def test_a_report_has_four_plots_and_stays_small(stage: Stage) -> None:
    history = plots.History()
    for second in range(5000):
        engines = {n: EngineView(version=second // 10 + n % 2) for n in range(8)}
        history.take(Snapshot("r", seconds=float(second), engines=engines))
    now = Snapshot("r", rewards=tuple(n / 5000 for n in range(5000)), lag=NOW.lag, engine_shares=NOW.engine_shares)
    text = plots.report(now, history, None, str(stage.folder))
    drawn = [base64.b64decode(svg).decode() for svg in re.findall(r"base64,([A-Za-z0-9+/=]+)\)", text)]
    titles = [re.search(r'y="15">([^<]+)<', svg) for svg in drawn]
    assert [title and title[1] for title in titles] == [
        "mean reward per step", "trained trajectories by lag", "engines by version", "time shares",
    ]  # fmt: skip
    assert len(text) < 100_000
    assert "75.0 %" in drawn[3]


def test_a_table_of_many_engines_is_one_line_per_version() -> None:
    few = pictures.table(NOW)
    assert [row["what"] for row in few] == ["window", "groups", "requests", "engine 0", "engine 1"]
    many = Snapshot("r", engines={n: EngineView(version=n % 2, seats=1) for n in range(40)})
    assert [row["now"] for row in pictures.table(many)[3:]] == ["v0", "v1"]
