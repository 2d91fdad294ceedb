"""A room of processes that are ranks of one layout after the other: their libraries are loaded once."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from schemas.settings import Settings
from tests.integration.whole_run import ROOT
from workers.trainer.learners.base import Sample
from workers.trainer.learners.layout import layout_of

TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
SHARED: dict[str, Any] = {"use_distributed_optimizer": True}
OVERLAP: dict[str, Any] = {**SHARED, "overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True)
class Case:
    """A layout: copies of the model, and `[megatron]`."""

    data: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)

    def settings(self, model: Path, *, dtype: str = "float32", **training: Any) -> Settings:
        tree = {
            "model": str(model),
            "dtype": dtype,
            "steps": 99,
            "group_size": 4,
            "training": {"learning_rate": 1e-3, "micro_batch_tokens": 60, "data_parallel": self.data} | training,
            "megatron": self.megatron,
            "dataset": [{"path": "rows.jsonl"}],
        }
        return Settings.model_validate(tree)


def plain(samples: Sequence[Sample]) -> list[Any]:
    """As JSON carries them."""
    return [astuple(one) for one in samples]


class Room:
    """`ranks` processes. `folder` is theirs to write to."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.folder = folder
        self._worlds = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.integration.layout_rank"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(ranks)
        ]

    def run(self, settings: Settings, *calls: tuple[str, Any]) -> list[Any]:
        """What each call gives on rank 0; on the others the same, or nothing."""
        self._worlds += 1
        told = {"settings": settings.model_dump(mode="json"), "model": settings.model, "calls": calls}
        told["meet"] = str(self.folder / f"meet-{self._worlds}")
        used = self._processes[: layout_of(settings).ranks]
        for rank, process in enumerate(used):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**told, "rank": rank}).encode() + b"\n")
            process.stdin.flush()
        said = []
        for rank, process in enumerate(used):
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"rank {rank} of {settings.megatron} ended: exit code {process.wait()}"
            said.append(json.loads(line))
        for rank, other in enumerate(said[1:], 1):
            for (call, _), one, here in zip(calls, other, said[0], strict=True):
                assert one is None or call == "bytes" or one == here, f"rank {rank} says otherwise of {call}"
        return [*said[0]]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
