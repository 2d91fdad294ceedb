"""A vLLM engine on SmolLM2 for a benchmark, in a process of its own, as in a run: the parent asks, a `Worker` answers.

The model's folder is `ROOT/model`, versions are published under `ROOT/weights`.
"""

import json
import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipelines.validate import resolve
from schemas.messages import WeightsRecord
from schemas.settings import Dataset, Engines, Settings
from workers.transport.kv.shared_memory import folder_of
from workers.transport.weights.manifest import Dtype, RawTensor, probe_ids
from workers.transport.weights.store import Store, read_tensors

KV_MIB = {"bfloat16": 256, "float32": 512}
LIMIT_S = 900.0


class EngineProcess:
    """The parent's end."""

    def __init__(self, worker: type["Worker"], root: Path, dtype: Dtype, number: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        made = partial(worker, root, dtype, number, folder)
        self._process = context.Process(target=_serve, args=(theirs, made), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, what: str, *args: Any) -> Any:
        """What the worker's method of that name returns. RuntimeError with the engine's own traceback."""
        self._pipe.send((what, args))
        if not self._pipe.poll(LIMIT_S):
            raise RuntimeError(f"the engine did not {what} in {LIMIT_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def engines(worker: type["Worker"], root: Path, dtype: Dtype, *folders: Path) -> Iterator[list[EngineProcess]]:
    """One on each folder (`root/model` is SmolLM2), which vLLM itself loaded from there."""
    model = root / "model"
    if not model.exists():
        model.symlink_to(resolve("builtin:smollm2"))
    opened = [EngineProcess(worker, root, dtype, number, folder) for number, folder in enumerate(folders)]
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


def _serve(pipe: Connection, made: Callable[[], "Worker"]) -> None:
    """An engine's process: answers until the pipe is closed."""
    worker = made()
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:
            worker.engine.close()
            return
        try:
            answer = getattr(worker, what)(*args)
        except Exception:
            pipe.send(RuntimeError(traceback.format_exc()))
            raise
        pipe.send(answer)


class Worker:
    """In the engine's process."""

    def __init__(self, root: Path, dtype: Dtype, number: int, folder: Path) -> None:
        from workers.rollout.engines.vllm_engine import VllmEngine

        self.root, self.dtype = root, dtype
        self.engine = VllmEngine(_settings(folder, dtype), folder, kv_folder=folder_of("bench", root), number=number)

    def probe(self) -> list[float]:
        """Of what it serves."""
        return self.engine.probe(probe_ids(self._vocabulary()), 0)

    def publish(self) -> WeightsRecord:
        """Version 0: the model as it is. Its probe is this engine's, which loaded it by vLLM's own way."""
        model = self.root / "model"
        return publish(self.root / "weights", 0, read_tensors(model), self.probe(), model, self.dtype)

    def load(self, weights: WeightsRecord) -> None:
        self.engine.load(weights)

    def _vocabulary(self) -> int:
        return int(json.loads((self.root / "model/config.json").read_text())["vocab_size"])


def publish(  # noqa: PLR0917
    store: Path, version: int, tensors: Iterable[RawTensor], probe: Sequence[float], model: Path, dtype: Dtype
) -> WeightsRecord:
    """With the configuration of `model`; returns what the trainer would say of it."""
    made = Store(store).publish(version, tensors, model_folder=model, probe_logprobs=probe, dtype=dtype)
    return WeightsRecord(
        run="bench",
        version=version,
        step=None,
        groups=(),
        trajectories=0,
        location=made.location,
        manifest_sha256=made.manifest_sha256,
        fingerprint=made.fingerprint,
        created_at=0,
    )


def _settings(model: Path, dtype: Dtype) -> Settings:
    sizes = Engines(seats=4, kv_mib=KV_MIB[dtype], kv_host_mib=KV_MIB[dtype], tokens_per_request_max=4096)
    return Settings.model_validate(
        {
            "model": str(model),
            "dtype": dtype,
            "steps": 1,
            "group_size": 2,
            "engines": sizes,
            "sampling": {"ignore_eos": True},
            "dataset": (Dataset(path="none.jsonl"),),
            "vllm": {"load_format": "auto"},
        }
    )
