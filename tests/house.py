"""The whole house in one process: every service in a thread of its own on an in-memory log, paced engines and learner.

For tests of what the services say to each other; no proof that the product works (that is `tests/integration`).
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from pipelines import prompts
from schemas.settings import Settings
from schemas.topics import Topics
from workers.orchestrator import service as orchestrator
from workers.reward import service as reward
from workers.rollout import service as rollout
from workers.rollout.engines.paced_engine import PacedEngine
from workers.runtime.process import Process
from workers.taps import archive
from workers.trainer import service as trainer
from workers.trainer.learners.paced_learner import PacedLearner
from workers.transport.records.bus import Bus

END_LIMIT_S = 120.0


def settings_of(run_dir: Path, model: Path, **changes: object) -> Settings:
    """Small settings with paced engines; `changes` are top-level keys."""
    rows = run_dir / "rows.jsonl"
    run_dir.mkdir(parents=True, exist_ok=True)
    rows.write_text("".join(json.dumps({"prompt": f"row {i}", "answer": str(i)}) + "\n" for i in range(20)))
    tree: dict[str, object] = {
        "name": run_dir.name,
        "model": str(model),
        "steps": 4,
        "group_size": 2,
        "groups_per_batch": 3,
        "staleness_max": 2,
        "dtype": "float32",
        "engines": {"kind": "paced", "count": 2, "seats": 6},
        "training": {"kind": "paced", "checkpoint_every": 2},
        "sampling": {"max_new_tokens": 12, "ignore_eos": True},
        "dataset": [{"path": str(rows), "grader": "workers.reward.toy_graders:even_share"}],
        "prefect": {"enabled": False},
        **changes,
    }
    return Settings.model_validate(tree)


@dataclass
class House:
    settings: Settings
    run_dir: Path
    bus: Bus
    snapshot_events: int = orchestrator.SNAPSHOT_EVENTS
    codes: dict[str, int] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    threads: dict[str, threading.Thread] = field(default_factory=dict)

    def start(self, name: str, serve: Callable[[Process], int]) -> None:
        process = Process(name, self.settings, self.run_dir)

        def body() -> None:
            self.codes[name] = -1
            self.codes[name] = serve(process)

        self.processes[name] = process
        self.threads[name] = threading.Thread(target=body, name=name, daemon=True)
        self.threads[name].start()

    def start_all(self) -> None:
        bus = self.bus
        bus.make_topics(Topics(self.settings.name).specs())
        self.start("orchestrator", lambda process: orchestrator.serve(process, bus, self.snapshot_events))
        self.start("archive", lambda process: archive.serve(process, bus))
        self.start("prompts", lambda process: prompts.serve(process, bus))
        self.start("reward", lambda process: reward.serve(process, bus, 0))
        self.start("trainer", lambda process: trainer.serve(process, bus, PacedLearner(self.settings)))
        for number in range(self.settings.engines.count):
            self.start_engine(number)

    def start_engine(self, number: int) -> None:
        self.start(
            f"rollout-{number}",
            lambda process: rollout.serve(process, self.bus, PacedEngine(self.settings), number, "here"),
        )

    def wait_end(self, limit_s: float = END_LIMIT_S) -> None:
        """Until the orchestrator ends; AssertionError after `limit_s`."""
        self.threads["orchestrator"].join(limit_s)
        assert not self.threads["orchestrator"].is_alive(), f"the run did not end within {limit_s} s"

    def stop(self, name: str, limit_s: float = 30.0) -> None:
        self.processes[name].stopping.set()
        self.threads[name].join(limit_s)
        assert not self.threads[name].is_alive(), f"{name} did not stop within {limit_s} s"


@contextmanager
def house(
    settings: Settings, run_dir: Path, bus: Bus, snapshot_events: int = orchestrator.SNAPSHOT_EVENTS
) -> Iterator[House]:
    """All services; at the end they are stopped, the archive last."""
    (run_dir / "config.toml").write_text(tomli_w.dumps(settings.model_dump(mode="json")))
    built = House(settings, run_dir, bus, snapshot_events)
    built.start_all()
    try:
        yield built
    finally:
        for name in sorted(built.threads, key=lambda name: name == "archive"):
            built.stop(name)
