"""From a configuration to a finished run: what `dora run` does without Prefect, and what the flow `train` does.

    read, check all (exit 2 before anything starts) -> claim runs/<name> -> broker -> supervise -> report

Rule 1: nothing is left in `runs` by a configuration that is refused.
Rule 2: SIGINT and SIGTERM stop the run within seconds; `--resume` goes on from what is on the log and in checkpoints.
Rule 3: an onlooker hears of the run and may ask it to stop; the run never waits for it.
"""

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from pipelines import config_file, report, validate
from pipelines.children import RunLock
from pipelines.faults import StartStopped
from pipelines.progress import ProgressView
from pipelines.runs import RESOLVED, STATUS
from pipelines.services import Services
from pipelines.snapshot import Snapshot
from pipelines.supervise import Outcome, StopRequest, Supervisor
from schemas.settings import Settings
from schemas.topics import Topics
from workers.runtime.errors import BadInput, DoraError
from workers.runtime.log import to_file
from workers.runtime.process import on_stop_signals
from workers.transport.records.bus import Bus

RUNS_MAX = 1000


class Onlooker(Protocol):
    """Who watches a run from its folder's first moment. `ui` = where people look ("" = nowhere)."""

    ui: str

    def begin(self, settings: Settings, run_dir: Path, stop: StopRequest) -> None: ...

    def offer(self, now: Snapshot, /) -> None: ...


class Nobody:
    """A run without an onlooker."""

    ui = ""

    def begin(self, settings: Settings, run_dir: Path, stop: StopRequest) -> None:
        """Nothing."""

    def offer(self, now: Snapshot, /) -> None:
        """Nothing."""


def ready(settings: Settings, source: str, resume: bool, *, checked: bool = False) -> Settings:
    """Checked against everything that is there; `checked` = they were, a moment ago. BadInput."""
    if resume:
        settings = _resumed(settings)
    elif settings.name and (Path(settings.runs_dir) / settings.name).exists():
        raise BadInput(
            f"{source}: run {settings.name} exists already in {settings.runs_dir}: go on with it by --resume, "
            "or choose another name"
        )
    return settings if checked else validate.check_settings(settings, source).settings


def run(settings: Settings, stem: str, resume: bool, onlooker: Onlooker | None = None) -> Outcome:
    """The whole life of a run whose settings are ready; without a name it is called after `stem`. DoraError."""
    for note in settings.notes():
        print(f"note: {note}", file=sys.stderr)
    settings, run_dir = _claim(settings, stem, resume)
    lock = RunLock(run_dir)
    cleared = lock.take()
    try:
        _log_to(run_dir, settings.name)
        config_file.write_resolved(settings, run_dir)
        if cleared:
            print(f"ended what a crash had left running: {', '.join(cleared)}", file=sys.stderr)
        return _run(settings, run_dir, lock, onlooker or Nobody())
    except BadInput:
        if not resume and not (run_dir / STATUS).is_file():
            shutil.rmtree(run_dir)
        raise
    finally:
        lock.release()


def _resumed(settings: Settings) -> Settings:
    if not settings.name:
        raise BadInput("--resume: which run? Add --set name=<run>, or give the run's own file: runs/<run>/config.toml")
    before = config_file.read_resolved(Path(settings.runs_dir) / settings.name)
    if settings.model != before.model:
        settings = settings.model_copy(update={"model": str(validate.resolve(settings.model))})
    if settings.dtype == "auto":
        settings = settings.model_copy(update={"dtype": before.dtype})
    config_file.refuse_changes(before, settings)
    return settings


def _claim(settings: Settings, stem: str, resume: bool) -> tuple[Settings, Path]:
    """The run's folder, ours alone."""
    runs = Path(settings.runs_dir).resolve()
    if resume:
        return settings, runs / settings.name
    runs.mkdir(parents=True, exist_ok=True)
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in stem)[:70] or "run"
    names = [settings.name] if settings.name else [f"{stem}-{number:03d}" for number in range(RUNS_MAX)]
    for name in names:
        try:
            (runs / name).mkdir()
        except FileExistsError:
            continue
        return settings.model_copy(update={"name": name}), runs / name
    raise BadInput(f"{runs}: no free name among {names[0]} .. {names[-1]}: choose one by --set name=...")


def _log_to(run_dir: Path, run: str) -> None:
    """The supervisor's own log, as every process has one."""
    (run_dir / "logs").mkdir(exist_ok=True)
    to_file(run_dir / "logs" / "supervisor.log", run)


def _run(settings: Settings, run_dir: Path, lock: RunLock, onlooker: Onlooker) -> Outcome:
    stop = StopRequest()
    with _signals(stop):
        outcome = _under_way(settings, run_dir, lock, onlooker, stop)
    _finish(settings, run_dir, outcome, onlooker.ui)
    return outcome


def _under_way(settings: Settings, run_dir: Path, lock: RunLock, onlooker: Onlooker, stop: StopRequest) -> Outcome:
    """From the first service to the last. Whoever asks at the start that it stops is heard then."""
    from workers.transport.records.kafka_bus import open_bus

    services = Services(settings, run_dir, lock, lambda: stop.asked)
    bus: Bus | None = None
    try:
        with ProgressView(shows=not onlooker.ui) as view:
            onlooker.begin(settings, run_dir, stop)
            services.start_broker()
            if stop.outcome is not None:
                return stop.outcome
            lock.note(**({"prefect": onlooker.ui} if onlooker.ui else {}))
            view.say(f"run folder {run_dir}" + (f", Prefect UI {onlooker.ui}" if onlooker.ui else ""))
            bus = open_bus(settings, services.broker)
            if not (run_dir / STATUS).is_file():
                _refuse_foreign_topics(bus, settings)
            supervisor = Supervisor(settings, run_dir, services.broker, bus, lock=lock, keep_services=services.keep)

            def on_progress(now: Snapshot) -> None:
                view.show(now)
                onlooker.offer(now)

            return supervisor.run(on_progress, stop)
    except StartStopped:
        assert stop.outcome is not None
        return stop.outcome
    finally:
        if bus is not None:
            bus.close()
        services.stop()


def _refuse_foreign_topics(bus: Bus, settings: Settings) -> None:
    """Of a run that never began nothing can be on the log, with `--resume` or without."""
    there = bus.topics(Topics(settings.name).prefix)
    if there:
        raise BadInput(
            f"the broker has {len(there)} topics of a run named {settings.name} already (e.g. {min(there)}): "
            "choose another name, or resume that run where its folder is"
        )


def _finish(settings: Settings, run_dir: Path, outcome: Outcome, ui: str) -> None:
    try:
        made = report.write(settings, run_dir)
    except (OSError, ValueError) as error:
        if outcome.kind == "done":
            raise DoraError(f"the run is done, but its archive cannot be read: {error}") from error
        print(f"no summary: {error}", file=sys.stderr)
    else:
        print(report.as_text(made))
    print(f"  folder         {run_dir} (archive/, weights/, logs/, summary.json, metrics.parquet)")
    if ui:
        print(f"  Prefect UI     {ui} (a server that a command started ends with it; its history stays)")
    if outcome.kind == "failed":
        print(f"dora: the run failed: {outcome.reason}", file=sys.stderr)
    elif outcome.kind != "done":
        hint = f"dora run {run_dir / RESOLVED} --resume"
        print(f"dora: {outcome.kind}: {outcome.reason}. Go on with: {hint}", file=sys.stderr)


@contextlib.contextmanager
def _signals(stop: StopRequest) -> Iterator[None]:
    """SIGINT and SIGTERM ask the run to stop, nothing more."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    why = {signal.SIGINT: "stopped by Ctrl-C", signal.SIGTERM: "stopped by Ctrl-C in its command, or by SIGTERM"}
    on_stop_signals(lambda got: stop.ask("cancelled", why[signal.Signals(got)]))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
