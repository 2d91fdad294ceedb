"""The Prefect flows: people's view and control of a run, an evaluator, an export; a thin shell round `launch`,
`evaluate` and `export`.

Rule 1: Prefect is never on the data path. What it is told is told by the reporter's thread; it hears no more than that.
Rule 2: a flow run keeps its run folder: Resume and Retry go on where the run stopped (the launch remembers the folder).
Rule 3: how it ended is noted in the launch before Prefect is told: a command that is attached needs no server to know.
Annotations stay evaluated here (no `from __future__ import annotations`): Prefect makes the form from them, and the
texts beside its fields from `Args`.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.settings import temporary_settings
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field

from pipelines import config_file, faults, home, launch
from pipelines.alone import Taken
from pipelines.artifacts import Artifacts
from pipelines.home import Launch
from pipelines.reporter import AWAY, IMPATIENT, Reporter
from pipelines.runs import RESOLVED, find_run
from pipelines.supervise import Outcome
from schemas.settings import Settings
from schemas.tables import Table


@flow(name="train", persist_result=False)
def train(
    config: Settings,
    resume: bool = False,
) -> State[Any]:
    """One run: starts, watches and ends its processes; Suspend, Resume, Cancel and Retry are obeyed within seconds.

    Args:
        config: The run, as in a configuration file. Paths are relative to the checkout's folder.
        resume: Go on with the run of this name. (One that was suspended or failed here: press Resume or Retry there.)
    """
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    noted = Launch(home.folder(), os.environ[home.LAUNCH_VARIABLE])
    reporter = Reporter(context.flow_run.id, noted, os.environ.get("PREFECT_API_URL", "").removesuffix("/api"))
    with _spoken(noted):
        try:
            outcome = _run(config, resume, noted, reporter)
        except BaseException as error:
            code = faults.exit_code_of(error)
            noted.note("ended", code=1 if code is None else code)
            outcome = Outcome("failed", str(error) or type(error).__name__)
            if code is None:
                raise
            print(faults.sentence(error))
        finally:
            reporter.close(outcome)
    return _state(outcome, reporter)


@contextlib.contextmanager
def _spoken(noted: Launch) -> Iterator[None]:
    """What the run says is for the command that is attached."""
    with (
        noted.stdout.open("a", buffering=1) as out,
        noted.stderr.open("a", buffering=1) as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        yield


def _run(config: Settings, resume: bool, noted: Launch, reporter: Reporter) -> Outcome:
    if noted.noted("withdrawn"):
        noted.note("ended", code=130)
        return Outcome("cancelled", "it began too late: the command that asked for it went on without Prefect")
    asked, before = noted.asked(), noted.noted("run")
    settings = config_file.anchored(config, Path.cwd())
    if before is not None and (Path(before["folder"]) / RESOLVED).is_file():
        resume = True
        settings = settings.model_copy(update={"name": Path(before["folder"]).name})
    settings = launch.ready(settings, "the form", resume, checked=bool(asked))
    outcome = launch.run(settings, asked.get("stem", "train"), resume, reporter)
    noted.note("ended", code=outcome.exit_code)
    return outcome


def _state(outcome: Outcome, reporter: Reporter) -> State[Any]:
    """As the UI shows it."""
    if outcome.kind == "suspended":
        raise Pause(outcome.reason, state=reporter.paused)
    if outcome.kind == "done":
        return Completed(message=outcome.reason)
    if outcome.kind == "failed":
        return Failed(message=outcome.reason)
    return Cancelled(message=f"{outcome.reason}; Retry goes on from the checkpoint")


@flow(name="export", persist_result=False)
def export(
    run: str,
    version: Annotated[int, Field(ge=0)],
    folder: str,
    runs_dir: str = "runs",
) -> State[Any]:
    """A version of a run as a Hugging Face folder.

    Args:
        run: The run's name or folder.
        version: Which version.
        folder: A new folder for the files.
        runs_dir: Where names of runs are looked up.
    """
    from pipelines.export import export as copy

    try:
        record = copy(find_run(run, Path(runs_dir)), version, Path(folder))
    except Exception as error:
        if faults.exit_code_of(error) is None:
            raise
        return Failed(message=str(error))
    return Completed(message=f"version {version} is in {Path(folder).resolve()}, fingerprint {record.fingerprint}")


@flow(name="evaluate", persist_result=False)
def evaluate(
    run: str,
    every: Annotated[int | None, Field(ge=0)] = None,
    runs_dir: str = "runs",
) -> State[Any]:
    """Beside a run until it ends: its samples counted, its held-out rows sampled on versions. Cancel ends it alone.

    Args:
        run: The run's name or folder.
        every: Held-out rows on each version that this divides; 0 = on none, empty = on each if the run has such rows.
            What the run had deleted before is missing, but with scheduling.weights_keep_every = this.
        runs_dir: Where names of runs are looked up.
    """
    from pipelines.evaluate import watch

    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    try:
        folder = find_run(run, Path(runs_dir))
        shown = _Evaluation(context.flow_run.id, folder)
        missing = watch(folder, every, shown.show, shown.stopping)
        shown.show(shown.last)
    except Taken as error:
        return Cancelled(message=str(error))  # what an automation starts for each version is one too many, no failure
    except Exception as error:
        if faults.exit_code_of(error) is None:
            raise
        return Failed(message=str(error))
    if shown.stopping.is_set():
        return Cancelled(message="another one goes on where it stopped")
    return Completed(message="; ".join(missing) or "the run has ended")


class _Evaluation:
    """What an evaluator has found, as artifacts of its flow run that are updated in place. `stopping`: Cancel was
    pressed."""

    def __init__(self, flow_run: UUID, run_dir: Path) -> None:
        self.stopping = threading.Event()
        self.last: Sequence[Table] = ()
        self._flow_run, self._run_dir = flow_run, run_dir
        self._artifacts = Artifacts(flow_run)

    def show(self, tables: Sequence[Table]) -> None:
        """A server that is away is told later."""
        from pipelines import evaluate_command

        self.last = tables
        found = evaluate_command.found(self._run_dir, tables, [])
        try:
            with temporary_settings(IMPATIENT), get_client(sync_client=True) as client:
                run = self._run_dir.name
                self._artifacts.put(client, "table", f"{run}-samples", json.dumps(found["cells"]))
                text = f"```\n{evaluate_command.as_text(found)}\n```"
                self._artifacts.put(client, "markdown", f"{run}-evaluation", text)
                self._hear(client)
        except AWAY as error:
            print(f"not shown: {error}")

    def _hear(self, client: SyncPrefectClient) -> None:
        state = client.read_flow_run(self._flow_run).state
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            self.stopping.set()
