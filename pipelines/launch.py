"""`dora run`: from a configuration file to a finished run.

    read, check all (exit 2 before anything starts) -> claim runs/<name> -> broker, Prefect -> supervise -> report

Rule 1: nothing is left in `runs` by a configuration that is refused.
Rule 2: SIGINT and SIGTERM stop the run within seconds; `--resume` goes on from what is on the log and in checkpoints.
"""

import contextlib
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipelines import config_file, report, validate
from pipelines.children import RunLock
from pipelines.local_services import StartStopped
from pipelines.progress import ProgressView
from pipelines.runs import RESOLVED, STATUS
from pipelines.services import Services
from pipelines.snapshot import Snapshot
from pipelines.supervise import Outcome, StopRequest, Supervisor
from schemas.settings import Settings
from schemas.topics import Topics
from workers.runtime.errors import BadInput, DoraError
from workers.runtime.process import on_stop_signals
from workers.transport.records.bus import Bus

RUNS_MAX = 1000


def run_config(config: Path, overrides: Sequence[str], resume: bool) -> int:
    """Run it; the exit code. BadInput, DoraError."""
    settings = config_file.read_settings(config, overrides)
    if resume:
        settings = _resumed(settings)
    elif settings.name and (Path(settings.runs_dir) / settings.name).exists():
        raise BadInput(
            f"{config}: run {settings.name} exists already in {settings.runs_dir}: go on with it by --resume, "
            "or choose another name"
        )
    settings = validate.check_settings(settings).settings
    for note in settings.notes():
        print(f"note: {note}", file=sys.stderr)
    settings, run_dir = _claim(settings, config.stem, resume)
    lock = RunLock(run_dir)
    cleared = lock.take()
    try:
        _log_to(run_dir)
        config_file.write_resolved(settings, run_dir)
        if cleared:
            print(f"ended what a crash had left running: {', '.join(cleared)}", file=sys.stderr)
        return _run(settings, run_dir, lock)
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


def _log_to(run_dir: Path) -> None:
    """The supervisor's own log, as every process has one."""
    (run_dir / "logs").mkdir(exist_ok=True)
    handler = logging.FileHandler(run_dir / "logs" / "supervisor.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("kafka", "urllib3", "httpx", "prefect"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _run(settings: Settings, run_dir: Path, lock: RunLock) -> int:
    stop = StopRequest()
    with _signals(stop):
        outcome, ui = _under_way(settings, run_dir, lock, stop)
    return _finish(settings, run_dir, outcome, ui)


def _under_way(settings: Settings, run_dir: Path, lock: RunLock, stop: StopRequest) -> tuple[Outcome, str]:
    """From the first service to the last: how the run ended, and where its UI was. Whoever asks at the start that it
    stops is heard then."""
    from workers.transport.records.kafka_bus import open_bus

    services = Services(settings, run_dir, lock, lambda: stop.asked)
    bus: Bus | None = None
    try:
        with ProgressView() as view:
            services.start_broker()
            services.start_prefect()
            if stop.outcome is not None:
                return stop.outcome, services.ui
            view.say(f"run folder {run_dir}" + (f", Prefect UI {services.ui}" if services.prefect else ""))
            bus = open_bus(settings, services.broker)
            if not (run_dir / STATUS).is_file():
                _refuse_foreign_topics(bus, settings)
            supervisor = Supervisor(settings, run_dir, services.broker, bus, lock=lock, keep_services=services.keep)
            return _supervise(settings, supervisor, stop, services, view), services.ui
    except StartStopped:
        assert stop.outcome is not None
        return stop.outcome, services.ui
    finally:
        if bus is not None:
            bus.close()
        services.stop()


def _supervise(
    settings: Settings, supervisor: Supervisor, stop: StopRequest, services: Services, view: ProgressView
) -> Outcome:
    def body(also: Callable[[Snapshot], None]) -> Outcome:
        def on_progress(snapshot: Snapshot) -> None:
            view.show(snapshot)
            also(snapshot)

        with _signals(stop):  # again: Prefect's flow engine puts its own handler in place
            return supervisor.run(on_progress, stop)

    if not services.prefect:
        return body(lambda _: None)
    from pipelines.flows import run_as_flow

    return run_as_flow(settings, stop, body)


def _refuse_foreign_topics(bus: Bus, settings: Settings) -> None:
    """Of a run that never began nothing can be on the log, with `--resume` or without."""
    there = bus.topics(Topics(settings.name).prefix)
    if there:
        raise BadInput(
            f"the broker has {len(there)} topics of a run named {settings.name} already (e.g. {min(there)}): "
            "choose another name, or resume that run where its folder is"
        )


def _finish(settings: Settings, run_dir: Path, outcome: Outcome, ui: str) -> int:
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
        print(f"  Prefect UI     {ui} (a server that the run started ended with it; its history stays)")
    if outcome.kind == "failed":
        print(f"dora: the run failed: {outcome.reason}", file=sys.stderr)
    elif outcome.kind != "done":
        hint = f"dora run {run_dir / RESOLVED} --resume"
        print(f"dora: {outcome.kind}: {outcome.reason}. Go on with: {hint}", file=sys.stderr)
    return outcome.exit_code


@contextlib.contextmanager
def _signals(stop: StopRequest) -> Iterator[None]:
    """SIGINT and SIGTERM ask the run to stop, nothing more."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    on_stop_signals(lambda got: stop.ask("cancelled", f"stopped by {signal.Signals(got).name}"))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
