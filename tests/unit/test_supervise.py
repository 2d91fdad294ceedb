"""The supervisor with small fake processes: who is started, restarted, stopped, and that nothing is left."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipelines import children
from pipelines.children import RunLock
from pipelines.processes import RUN_MARK, ProcessSpec, process_name, specs, worker_environment
from pipelines.supervise import RESTARTS_MAX, Outcome, StopRequest, Supervisor
from schemas.codec import decode
from schemas.messages import STATUS, EndRun, EngineGone
from schemas.settings import Settings
from schemas.topics import Topics
from tests.unit.pipeline_parts import some_settings
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.transport.records.bus import publish
from workers.transport.records.memory_bus import MemoryBus

LIMIT_S = 30.0
_UP = "open(sys.argv[1], 'a').write('up\\n'); signal.pause()"
UNTIL_TERM = f"import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); {_UP}"
DEAF = f"import signal, sys; signal.signal(15, signal.SIG_IGN); {_UP}"
SAYS_ITS_END = (
    "import signal, sys; signal.signal(15, lambda *_: (open({!r}, 'a').write({!r}), sys.exit(0))); signal.pause()"
)


class Stage:
    """A run folder, a log in memory, and fake processes; `ups` counts how often each came up."""

    def __init__(self, folder: Path) -> None:
        self.settings: Settings = some_settings(folder)
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.topics = Topics(self.settings.name)
        self.bus = MemoryBus()
        self.bus.make_topics(self.topics.specs())
        self.stop = StopRequest()

    def spec(self, kind: str, code: str, number: int = 0) -> ProcessSpec:
        name = process_name(kind, number)
        argv = (sys.executable, "-c", code, str(self.run_dir / f"{name}.up"))
        return ProcessSpec(name, kind, number, argv, {RUN_MARK: str(self.run_dir)})

    def ups(self, name: str) -> int:
        file = self.run_dir / f"{name}.up"
        return file.read_text().count("up") if file.exists() else 0

    def run(self, *fakes: ProcessSpec, meanwhile: Callable[[], None] = lambda: None) -> Outcome:
        lock = RunLock(self.run_dir)
        lock.take()
        supervisor = Supervisor(self.settings, self.run_dir, "", self.bus, lock=lock, specs=list(fakes))
        helper = threading.Thread(target=meanwhile, daemon=True)
        helper.start()
        outcome = supervisor.run(lambda _: None, self.stop)
        helper.join(LIMIT_S)
        lock.release()
        assert self.leftovers() == []
        return outcome

    def leftovers(self) -> list[str]:
        return [
            " ".join(process.cmdline())
            for process in psutil.process_iter()
            if process.pid != os.getpid() and _mark(process) == str(self.run_dir)
        ]

    def end_run(self, outcome: str = "done", reason: str = "all steps trained") -> None:
        publish(self.bus.producer(), self.topics.control, EndRun(outcome=outcome, reason=reason))


def _mark(process: psutil.Process) -> str | None:
    try:
        return str(process.environ().get(RUN_MARK))
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None


def _until(true: Callable[[], bool], what: str) -> None:
    limit = clock.monotonic_s() + LIMIT_S
    while not true():
        assert clock.monotonic_s() < limit, f"not within {LIMIT_S} s: {what}"
        threading.Event().wait(0.02)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_the_run_ends_with_the_orchestrators_last_word_and_the_archive_ends_last(stage: Stage) -> None:
    order = stage.run_dir / "order"
    outcome = stage.run(
        stage.spec("archive", SAYS_ITS_END.format(str(order), "archive ")),
        stage.spec("orchestrator", "import threading; threading.Event().wait(0.6)"),
        stage.spec("trainer", SAYS_ITS_END.format(str(order), "trainer ")),
        meanwhile=stage.end_run,
    )
    assert outcome == Outcome("done", "all steps trained")
    assert outcome.exit_code == 0
    assert order.read_text() == "trainer archive "


def test_a_failed_last_word_is_exit_code_1(stage: Stage) -> None:
    said = partial(stage.end_run, "failed", "256 groups without signal in a row")
    outcome = stage.run(stage.spec("orchestrator", ""), meanwhile=said)
    assert (outcome.exit_code, outcome.reason) == (1, "256 groups without signal in a row")


def test_an_end_that_was_said_before_a_resume_is_not_the_end_of_what_was_resumed(stage: Stage) -> None:
    stage.end_run("failed", "said before")
    outcome = stage.run(stage.spec("orchestrator", ""), meanwhile=partial(stage.end_run, "done", "said now"))
    assert outcome == Outcome("done", "said now")


def test_a_killed_engine_is_told_of_and_started_again(stage: Stage) -> None:
    reader = stage.bus.reader()
    reader.add(stage.topics.status, 0, "earliest")

    def meanwhile() -> None:
        _until(lambda: stage.ups("rollout-1") == 1, "the engine is up")
        said = children.read_lock(stage.run_dir)
        assert said is not None
        os.kill(said["processes"]["rollout-1"]["pid"], signal.SIGKILL)
        _until(lambda: stage.ups("rollout-1") == 2, "the engine is up again")
        stage.stop.ask("cancelled", "test")

    outcome = stage.run(
        stage.spec("rollout", UNTIL_TERM, 1), stage.spec("orchestrator", UNTIL_TERM), meanwhile=meanwhile
    )
    assert outcome.exit_code == 130
    (record,) = reader.poll(0)
    gone = decode(STATUS, record.value, record.headers)
    assert isinstance(gone, EngineGone)
    assert (gone.engine, gone.reason) == (1, "signal 9")


def test_a_resume_says_that_the_engines_of_last_time_were_stopped_with_the_run(stage: Stage) -> None:
    reader = stage.bus.reader()
    reader.add(stage.topics.status, 0, "earliest")
    stage.end_run("cancelled", "said before")
    stage.run(stage.spec("rollout", UNTIL_TERM, 1), stage.spec("orchestrator", ""), meanwhile=stage.end_run)
    gone = decode(STATUS, (record := reader.poll(0)[0]).value, record.headers)
    assert isinstance(gone, EngineGone)
    assert (gone.engine, gone.stopped) == (1, True)


def test_bad_input_is_never_tried_again_and_its_last_lines_are_said(stage: Stage) -> None:
    code = "import sys; open(sys.argv[1], 'a').write('up'); print('model: no such folder'); sys.exit(2)"
    outcome = stage.run(stage.spec("trainer", code), stage.spec("orchestrator", UNTIL_TERM))
    assert outcome.exit_code == 1
    assert "model: no such folder" in outcome.reason
    assert stage.ups("trainer") == 1


def test_a_process_that_always_fails_ends_the_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.supervise.RESTART_DELAY_S", 0.0)
    code = "import sys; open(sys.argv[1], 'a').write('up'); sys.exit('cuda is on fire')"
    outcome = stage.run(stage.spec("reward", code), stage.spec("orchestrator", UNTIL_TERM))
    assert outcome.exit_code == 1
    assert "reward-0 ended (exit code 1) for the 6th time" in outcome.reason
    assert "cuda is on fire" in outcome.reason
    assert stage.ups("reward-0") == RESTARTS_MAX + 1


def test_a_trainer_that_is_killed_again_and_again_is_told_what_takes_less_memory(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.supervise.RESTART_DELAY_S", 0.0)
    code = "import os, sys; open(sys.argv[1], 'a').write('up'); os.kill(os.getpid(), 9)"
    outcome = stage.run(stage.spec("trainer", code), stage.spec("orchestrator", UNTIL_TERM))
    assert "(signal 9) for the 6th time" in outcome.reason
    assert "if memory ran out, lower training.micro_batch_tokens" in outcome.reason


def test_an_orchestrator_that_ends_without_a_last_word_is_started_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.supervise.LAST_WORD_S_MAX", 0.2)

    def meanwhile() -> None:
        _until(lambda: stage.ups("orchestrator") == 2, "the orchestrator is up again")
        stage.stop.ask("cancelled", "test")

    code = "import sys; open(sys.argv[1], 'a').write('up')"
    assert stage.run(stage.spec("orchestrator", code), meanwhile=meanwhile).kind == "cancelled"


def test_a_deaf_process_and_its_own_children_are_killed_at_their_limit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.supervise.CANCEL_LIMIT_S", 0.5)
    family = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}, sys.argv[1]]); {DEAF}"

    def meanwhile() -> None:
        _until(lambda: stage.ups("rollout-0") == 2, "parent and child are up")
        stage.stop.ask("cancelled", "SIGINT")

    assert stage.run(stage.spec("rollout", family), meanwhile=meanwhile).exit_code == 130


def test_a_stop_gives_the_archive_what_the_others_left_of_the_time_and_says_if_it_was_cut_short(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.supervise.CANCEL_LIMIT_S", 0.5)
    monkeypatch.setattr("pipelines.supervise.CANCEL_ARCHIVE_LIMIT_S", 1.0)

    def meanwhile() -> None:
        _until(lambda: stage.ups("archive") == 1 and stage.ups("trainer") == 1, "both are up")
        stage.stop.ask("cancelled", "SIGINT")

    fakes = [stage.spec("archive", DEAF), stage.spec("trainer", DEAF)]
    outcome = stage.run(*fakes, meanwhile=meanwhile)
    assert outcome.exit_code == 130
    assert "the archive was cut short" in outcome.reason


def test_a_live_run_is_not_started_twice_and_a_dead_ones_processes_are_cleared(stage: Stage) -> None:
    first, second = RunLock(stage.run_dir), RunLock(stage.run_dir)
    first.take()
    with pytest.raises(BadInput, match="is running now"):
        second.take()
    left = children.start(stage.spec("rollout", DEAF), stage.run_dir / "logs" / "rollout-0.log")
    first.add("rollout-0", left.popen.pid)
    said = children.read_lock(stage.run_dir)
    assert said is not None
    file = stage.run_dir / children.LOCK
    file.write_text(file.read_text().replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
    assert second.take() == ["rollout-0"]
    assert left.popen.wait(LIMIT_S) == -signal.SIGKILL


def test_a_reused_process_id_is_not_taken_for_ours() -> None:
    ours = children.identity_of(os.getpid())
    assert children.is_alive(ours)
    assert not children.is_alive(ours | {"created": ours["created"] - 100})


def test_every_process_of_a_run_has_one_thread_and_says_whose_it_is(stage: Stage) -> None:
    made = specs(stage.settings, stage.run_dir, "127.0.0.1:9")
    assert [spec.name for spec in made] == [
        "archive",
        "orchestrator",
        "trainer",
        "prompts",
        "reward-0",
        "rollout-0",
        "rollout-1",
    ]
    assert {spec.environment["OMP_NUM_THREADS"] for spec in made} == {"1"}
    assert {spec.environment[RUN_MARK] for spec in made} == {str(stage.run_dir)}
    assert [spec.engine for spec in made if spec.engine is not None] == [0, 1]
    real = stage.settings.model_copy(update={"engines": stage.settings.engines.model_copy(update={"kind": "vllm"})})
    assert worker_environment(real, "rollout")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
