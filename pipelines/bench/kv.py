"""What a move with its KV costs, beside prefilling the same length again, and whether it goes on as if it had stayed.

Two engines on SmolLM2, each in a process of its own, as in a run. One row is one pair: a request of `tokens` tokens is
stopped on one engine and goes on on the other, from the stop to its first new token; beside it the same with the ids
alone. Both prompts are random and new, so no prefix cache helps. What moved is also sampled on one engine without a
stop, greedy and seeded in turn: ids must be equal, `dlogp_max` is the largest difference of log-probs.
"""

import json
import multiprocessing
import random
import statistics
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipelines.bench.benchmarks import Bench
from pipelines.device import best_dtype
from pipelines.validate import resolve
from schemas.ids import sampling_seed
from schemas.messages import KvHandle, RequestRecord, WeightsRecord
from schemas.settings import Dataset, Engines, Settings
from workers.runtime import clock
from workers.transport.kv.shared_memory import folder_of
from workers.transport.weights.manifest import Dtype, probe_ids
from workers.transport.weights.store import Store, read_tensors

LENGTHS = {"2k": 2000, "4k": 4000}
PAIRS = {"2k": 4, "4k": 2}
BEFORE, AFTER = 8, 8
"""Tokens that are sampled before the stop and after it."""
KV_MIB = {"bfloat16": 256, "float32": 512}
LIMIT_S = 900.0
SEED = 0


def measure() -> Bench:
    dtypes: list[Dtype] = sorted({"float32", best_dtype()})
    rows = [row for dtype in dtypes for row in _pairs(dtype)]
    of_best = [row for row in rows if row["dtype"] == best_dtype()]
    figures: dict[str, float | int] = {"tokens_recomputed_max": max(row["tokens_recomputed"] for row in rows)}
    for name, length in LENGTHS.items():
        ratios = [row["move_over_reprefill"] for row in of_best if row["tokens"] == length]
        figures[f"move_over_reprefill_{name}"] = round(statistics.median(ratios), 4)
        figures[f"move_over_reprefill_{name}_worst"] = round(max(ratios), 4)
    figures["moves_with_other_ids"] = sum(not row["same_ids"] for row in rows)
    for dtype in dtypes:
        figures[f"dlogp_max_{dtype}"] = max(row["dlogp_max"] for row in rows if row["dtype"] == dtype)
    figures["mib_per_s"] = round(statistics.median(row["mib"] / row["move_s"] for row in of_best), 1)
    return Bench(rows, figures)


def _pairs(dtype: Dtype) -> list[dict[str, Any]]:
    rng = random.Random(SEED)
    with (
        tempfile.TemporaryDirectory(prefix="dora-bench-") as root,
        _engines(Path(root), dtype) as (here, there, weights),
    ):
        rows: list[dict[str, Any]] = []
        for name, length in LENGTHS.items():
            for number in range(PAIRS[name]):
                temperature = float(number % 2)
                first = _request(rng, len(rows), length, temperature)
                moved = _move(here, there, first, offer=True)
                again = _move(here, there, _request(rng, 100 + len(rows), length, temperature), offer=False)
                here.ask("load", weights)  # empties its prefix cache
                stayed = here.ask("stay", first.model_copy(update={"attempt": 9}))
                rows.append(
                    {
                        "dtype": dtype,
                        "tokens": length,
                        "temperature": temperature,
                        "move_s": round(moved["seconds"], 4),
                        "reprefill_s": round(again["seconds"], 4),
                        "move_over_reprefill": round(moved["seconds"] / again["seconds"], 4),
                        "stop_s": round(moved["stop_s"], 4),
                        "mib": round(moved["size"] / 2**20, 1),
                        "tokens_recomputed": moved["computed"],
                        "reason": moved["reason"],
                        "same_ids": moved["ids"] == stayed[0],
                        "dlogp_max": max(abs(a - b) for a, b in zip(moved["logprobs"], stayed[1], strict=True)),
                    }
                )
    return rows


def _request(rng: random.Random, group: int, length: int, temperature: float) -> RequestRecord:
    """A random prompt; with `BEFORE` tokens of response it has KV of `length` tokens."""
    whose = {"run": "bench", "group": group, "index": 0, "attempt": 0, "version": 0, "engine": 0, "incarnation": 0}
    row = {"sequence": 0, "purpose": "train", "task": "", "prompt_row": 0, "answer": "", "queued_at": 0}
    sampled = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "max_new_tokens": BEFORE + AFTER}
    ids = tuple(rng.randrange(100, 40_000) for _ in range(length + 1 - BEFORE))
    return RequestRecord.model_validate(
        {**whose, **row, **sampled, "prompt_ids": ids, "seed": sampling_seed(SEED, group, 0)}
    )


def _move(here: "_Engine", there: "_Engine", first: RequestRecord, *, offer: bool) -> dict[str, Any]:
    """Stopped after `BEFORE` tokens; seconds from then to the first token over there."""
    ids, logprobs = here.ask("begin", first)
    began = clock.monotonic_s()
    handle: KvHandle | None = here.ask("leave", first, offer)
    stopped = clock.monotonic_s()
    so_far = {"response_ids": ids, "logprobs": logprobs, "loss_mask": (True,) * len(ids), "attempt": 1, "kv": handle}
    later = first.model_copy(update=so_far)
    took = there.ask("first_token", later)
    seconds = clock.monotonic_s() - began
    rest, rest_logprobs = there.ask("rest")
    return {
        **took,
        "seconds": seconds,
        "stop_s": stopped - began,
        "ids": [*ids, *rest],
        "logprobs": [*logprobs, *rest_logprobs],
    }


# --- the processes ------------------------------------------------------------------------------


class _Engine:
    """The parent's end."""

    def __init__(self, folder: Path, dtype: Dtype, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, folder, dtype, number), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, what: str, *args: Any) -> Any:
        """RuntimeError with the engine's own traceback."""
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
def _engines(root: Path, dtype: Dtype) -> Iterator[tuple[_Engine, _Engine, WeightsRecord]]:
    (root / "model").symlink_to(resolve("builtin:smollm2"))
    here, there = (_Engine(root, dtype, number) for number in (0, 1))
    try:
        weights = here.ask("publish")
        for engine in (here, there):
            engine.ask("load", weights)
        yield here, there, weights
    finally:
        here.close()
        there.close()


def _settings(model: Path, dtype: Dtype) -> Settings:
    engines = Engines(seats=4, kv_mib=KV_MIB[dtype], kv_host_mib=KV_MIB[dtype], tokens_per_request_max=4096)
    return Settings.model_validate(
        {
            "model": str(model),
            "dtype": dtype,
            "steps": 1,
            "group_size": 2,
            "engines": engines,
            "sampling": {"ignore_eos": True},
            "dataset": (Dataset(path="none.jsonl"),),
            "vllm": {"load_format": "auto"},
        }
    )


def _serve(pipe: Connection, root: Path, dtype: Dtype, number: int) -> None:
    """An engine's process: answers until the pipe is closed."""
    worker = _Worker(root, dtype, number)
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


class _Worker:
    def __init__(self, root: Path, dtype: Dtype, number: int) -> None:
        from workers.rollout.engines.vllm_engine import VllmEngine

        self.root, self.dtype = root, dtype
        settings = _settings(root / "model", dtype)
        self.engine = VllmEngine(settings, root / "model", kv_folder=folder_of("bench", root), number=number)

    def publish(self) -> WeightsRecord:
        """Version 0: the model as it is. Its probe is this engine's, which loaded it by vLLM's own way."""
        model = self.root / "model"
        ids = probe_ids(json.loads((model / "config.json").read_text())["vocab_size"])
        made = Store(self.root / "weights").publish(
            0, read_tensors(model), model_folder=model, probe_logprobs=self.engine.probe(ids, 0), dtype=self.dtype
        )
        return WeightsRecord(
            run="bench",
            version=0,
            step=None,
            groups=(),
            trajectories=0,
            location=made.location,
            manifest_sha256=made.manifest_sha256,
            fingerprint=made.fingerprint,
            created_at=0,
        )

    def load(self, weights: WeightsRecord) -> None:
        self.engine.load(weights)

    def begin(self, request: RequestRecord) -> tuple[list[int], list[float]]:
        self.engine.add(request)
        return self._decode(BEFORE)

    def leave(self, request: RequestRecord, offer: bool) -> KvHandle | None:
        return self.engine.stop((request.key,), offer=offer).get(request.key)

    def first_token(self, request: RequestRecord) -> dict[str, Any]:
        self.engine.add(request)
        self.first = self.engine.step()
        took = self.first[0].prefill
        assert took is not None
        return {"computed": took.computed, "size": took.size, "reason": took.reason}

    def rest(self) -> tuple[list[int], list[float]]:
        ids, logprobs = self._decode(AFTER - 1)
        return [*self.first[0].ids, *ids], [*self.first[0].logprobs, *logprobs]

    def stay(self, request: RequestRecord) -> tuple[list[int], list[float]]:
        self.engine.add(request)
        return self._decode(BEFORE + AFTER)

    def _decode(self, tokens: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < tokens:
            for part in self.engine.step():
                ids.extend(part.ids)
                logprobs.extend(part.logprobs)
        return ids, logprobs
