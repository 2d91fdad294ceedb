"""`dora worker KIND`: one process of a run, as the supervisor starts it or a person by hand.

What a kind needs is imported when it is needed: a scorer never loads an engine.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from pipelines.config_file import read_resolved
from pipelines.processes import metrics_port, process_name, set_environment
from workers.runtime.errors import BadInput
from workers.runtime.process import Process, run_service
from workers.transport.records.bus import Bus

Kind = Literal["orchestrator", "rollout", "reward", "trainer", "archive", "prompts"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def run_worker(kind: str, run_dir: Path, number: int, broker: str) -> int:
    """Run until it is told to stop; the exit code. BadInput."""
    if kind not in KINDS:
        raise BadInput(f"worker {kind!r} is not known; there are {', '.join(KINDS)}")
    settings = read_resolved(run_dir)
    set_environment(settings, kind)
    port = metrics_port(settings, kind, number)
    process = Process(process_name(kind, number), settings, run_dir.resolve(), port, broker)
    serve = _SERVICES[kind]

    def open_and_serve() -> int:
        from workers.transport.records.kafka_bus import open_bus

        bus = open_bus(settings, broker)
        try:
            return serve(process, bus, number)
        finally:
            bus.close()

    return run_service(process, open_and_serve)


def own_address(broker: str) -> str:
    """Of this host's interface on the way to the log: the other hosts of a run reach that, too. BadInput."""
    host, _, port = broker.partition(",")[0].rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
            unsent.connect((host, int(port)))
            return str(unsent.getsockname()[0])
    except (OSError, ValueError) as error:
        raise BadInput(
            f"engines.kv_carrier = flight: no way over IPv4 to the broker {broker} ({error}), and so no address for "
            "other hosts: give the broker by an IPv4 address, or take shared_memory"
        ) from error


def _orchestrator(process: Process, bus: Bus, _: int) -> int:
    """Of two on one run the younger stays. What the supervisor started is started again, and is then the younger."""
    from workers.orchestrator.service import serve
    from workers.transport.records.bus import Fenced

    try:
        return serve(process, bus)
    except Fenced as error:
        raise Fenced(f"another orchestrator of this run has taken over, so this one ends ({error})") from error


def _rollout(process: Process, bus: Bus, number: int) -> int:
    from pipelines.engines import engine_of
    from workers.rollout.service import serve
    from workers.transport.kv.shared_memory import folder_of

    folder = folder_of(process.run, process.run_dir)
    flies = process.settings.engines.kv_carrier == "flight"
    address = own_address(process.broker) if flies else "127.0.0.1"
    engine = engine_of(process.settings, kv_folder=folder, number=number, address=address)
    try:
        return serve(process, bus, engine, number, socket.gethostname())
    finally:
        engine.close()


def _reward(process: Process, bus: Bus, number: int) -> int:
    from workers.reward.service import serve

    return serve(process, bus, number)


def _trainer(process: Process, bus: Bus, _: int) -> int:
    from pipelines import environment
    from pipelines.learners import learner_of
    from workers.runtime.collector import set_aside
    from workers.trainer.service import serve

    environment.note(process.run_dir, process.settings)
    learner = learner_of(process.settings)
    set_aside()
    try:
        return serve(process, bus, learner)
    finally:
        learner.close()


def _archive(process: Process, bus: Bus, _: int) -> int:
    from workers.taps.archive import serve

    return serve(process, bus)


def _prompts(process: Process, bus: Bus, _: int) -> int:
    from pipelines.prompts import serve

    return serve(process, bus)


_SERVICES: dict[str, Callable[[Process, Bus, int], int]] = {
    "orchestrator": _orchestrator,
    "rollout": _rollout,
    "reward": _reward,
    "trainer": _trainer,
    "archive": _archive,
    "prompts": _prompts,
}
