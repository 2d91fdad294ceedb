"""The processes of a run: kind, number, command line, environment. Nothing is started here.

What works as a worker without being started as one gets the same environment (`set_environment`).
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from pipelines import device
from schemas.settings import Settings
from workers.trainer.learners.layout import layout_of

RUN_MARK = "DORA_RUN_DIR"
"""Set in the environment of every process of a run, so that leftovers can be told apart."""
_VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One worker process. `engine` is its engine number, None if it is no engine."""

    name: str
    kind: str
    number: int
    argv: tuple[str, ...]
    environment: dict[str, str]

    @property
    def engine(self) -> int | None:
        return self.number if self.kind == "rollout" else None


def process_name(kind: str, number: int) -> str:
    return f"{kind}-{number}" if kind in ("rollout", "reward") else kind


def worker_environment(settings: Settings, kind: str) -> dict[str, str]:
    """Threads and library switches of one worker. One OpenMP thread each unless the settings say more: spinning
    threads of several processes on few cores slow all of them down many times over."""
    threads = {"rollout": settings.engines.threads, "trainer": settings.training.threads}.get(kind, 1)
    shared = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    shared |= {"KMP_BLOCKTIME": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}
    if kind == "rollout" and settings.engines.kind == "vllm":
        shared |= _VLLM
    return shared


def set_environment(settings: Settings, kind: str) -> None:
    """Of this process, where it is not set; before the libraries are loaded that read it."""
    for name, value in worker_environment(settings, kind).items():
        os.environ.setdefault(name, value)


def specs(settings: Settings, run_dir: Path, broker: str) -> list[ProcessSpec]:
    """All processes of a run in the order they start: whoever must hear everything first."""
    return [_spec(settings, run_dir, broker, kind, number) for kind, number in _all(settings)]


def _all(settings: Settings) -> list[tuple[str, int]]:
    counts = {"archive": 1, "orchestrator": 1, "trainer": 1, "prompts": 1}
    counts |= {"reward": settings.reward.workers, "rollout": settings.engines.count}
    return [(kind, number) for kind, count in counts.items() for number in range(count)]


def metrics_port(settings: Settings, kind: str, number: int) -> int:
    """Of its Prometheus endpoint; 0 = it has none."""
    first, there = settings.prometheus.port, _all(settings)
    return first + there.index((kind, number)) if first and (kind, number) in there else 0


def _spec(settings: Settings, run_dir: Path, broker: str, kind: str, number: int) -> ProcessSpec:
    argv = [sys.executable, "-m", "pipelines.cli", "worker", kind]
    argv += ["--run-dir", str(run_dir), "--number", str(number), "--broker", broker]
    environment = worker_environment(settings, kind) | {RUN_MARK: str(run_dir), "DORA_PARENT": str(os.getpid())}
    per_engine = int(settings.vllm.get("tensor_parallel_size", 1))
    ranks = layout_of(settings).ranks
    if gpus := device.gpus_of(kind, number, device.visible_gpus(), per_engine, ranks):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return ProcessSpec(process_name(kind, number), kind, number, tuple(argv), environment)
