"""What a move with its KV costs, beside prefilling the same length again, and whether it goes on as if it had stayed.

Two engines on SmolLM2, each in a process of its own, as in a run. One row is one pair: a request of `tokens` tokens is
stopped on one engine and goes on on the other, from the stop to its first new token; beside it the same with the ids
alone. Of that, `stop_s` is copying it out, `claim_s` claiming and checking it, `first_step_s` loading it and computing
a token; `later_step_s` is a step that computes one alone. Both prompts are random and new, so no prefix cache helps.
What moved is also sampled on one engine without a stop, greedy and seeded in turn: ids must be equal, `dlogp_max` is
the largest difference of log-probs. Last come the carriers alone (`carriers.py`).
"""

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from pipelines.bench import carriers
from pipelines.bench.benchmarks import Bench
from pipelines.bench.engine_process import EngineProcess, Worker, engines
from pipelines.device import best_dtype
from schemas.ids import sampling_seed
from schemas.messages import KvHandle, RequestRecord
from workers.runtime import clock
from workers.transport.weights.manifest import Dtype

LENGTHS = {"2k": 2000, "4k": 4000}
PAIRS = {"2k": 4, "4k": 2}
BEFORE, AFTER = 8, 8
"""Tokens that are sampled before the stop and after it."""
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
    with tempfile.TemporaryDirectory(prefix="dora-bench-") as root:
        carried = carriers.rows(Path(root))
    figures |= {f"{row['carrier']}_mib_per_s": row["mib_per_s"] for row in carried}
    return Bench([*rows, *carried], figures)


def _pairs(dtype: Dtype) -> list[dict[str, Any]]:
    rng = random.Random(SEED)
    with (
        tempfile.TemporaryDirectory(prefix="dora-bench-") as root,
        engines(_Mover, Path(root), dtype, *[Path(root) / "model"] * 2) as (here, there),
    ):
        weights = here.ask("publish")
        for engine in (here, there):
            engine.ask("load", weights)
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
                        "claim_s": round(moved["claim_s"], 4),
                        "first_step_s": round(moved["first_step_s"], 4),
                        "later_step_s": round(statistics.median(moved["later_steps_s"]), 4),
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


def _move(here: EngineProcess, there: EngineProcess, first: RequestRecord, *, offer: bool) -> dict[str, Any]:
    """Stopped after `BEFORE` tokens; seconds from then to the first token over there."""
    ids, logprobs = here.ask("begin", first)
    began = clock.monotonic_s()
    handle: KvHandle | None = here.ask("leave", first, offer)
    stopped = clock.monotonic_s()
    so_far = {"response_ids": ids, "logprobs": logprobs, "loss_mask": (True,) * len(ids), "attempt": 1, "kv": handle}
    later = first.model_copy(update=so_far)
    took = there.ask("first_token", later)
    seconds = clock.monotonic_s() - began
    rest, rest_logprobs, later_steps_s = there.ask("rest")
    return {
        **took,
        "seconds": seconds,
        "stop_s": stopped - began,
        "later_steps_s": later_steps_s,
        "ids": [*ids, *rest],
        "logprobs": [*logprobs, *rest_logprobs],
    }


class _Mover(Worker):
    def begin(self, request: RequestRecord) -> tuple[list[int], list[float]]:
        self.engine.add(request)
        return self._decode(BEFORE)

    def leave(self, request: RequestRecord, offer: bool) -> KvHandle | None:
        return self.engine.stop((request.key,), offer=offer).get(request.key)

    def first_token(self, request: RequestRecord) -> dict[str, Any]:
        times = [clock.monotonic_s()]
        self.engine.add(request)
        times.append(clock.monotonic_s())
        self.first = self.engine.step()
        times.append(clock.monotonic_s())
        took = self.first[0].prefill
        assert took is not None
        stages = {"claim_s": times[1] - times[0], "first_step_s": times[2] - times[1]}
        return {"computed": took.computed, "size": took.size, "reason": took.reason, **stages}

    def rest(self) -> tuple[list[int], list[float], list[float]]:
        """All its tokens here, and the seconds of each step after the first; then what was loaded is released."""
        ids, logprobs, steps_s = list(self.first[0].ids), list(self.first[0].logprobs), []
        for _ in range(AFTER - 1):
            began = clock.monotonic_s()
            (part,) = self.engine.step()
            steps_s.append(clock.monotonic_s() - began)
            ids.extend(part.ids)
            logprobs.extend(part.logprobs)
        self.engine.tend()
        return ids, logprobs, steps_s

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
