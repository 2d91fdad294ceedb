"""How long a swap of weights stops decoding, over vLLM's own reload of the same tensors from memory.

One engine on SmolLM2 swaps between two versions: version 0 is the model, version 1 has its layers in the opposite
order. One row is one pair: requests decode until the new version is prepared beside them, and are stopped; from there
to when the engine can take requests of the new version is the stop (its probe is in it). Then vLLM's `reload_weights`
of the same tensors, which lie in memory (no hash, no probe). After each swap the probe is compared with that of an
engine that vLLM loaded with the version.
"""

import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.bench.benchmarks import Bench
from pipelines.bench.engine_process import Worker, engines, publish
from pipelines.device import best_dtype
from schemas.ids import RequestKey, sampling_seed
from schemas.messages import RequestRecord, WeightsRecord
from workers.runtime import clock
from workers.transport.weights.manifest import Dtype, Fingerprint, RawTensor
from workers.transport.weights.store import read_tensors

PAIRS = 8
REQUESTS, PROMPT_TOKENS, STEPS = 4, 64, 8
"""What decodes before each swap; steps that are timed alone."""
_LAYER = "model.layers."


def measure() -> Bench:
    with tempfile.TemporaryDirectory(prefix="dora-bench-") as root:
        rows = _pairs(Path(root), best_dtype())
    ratios = [row["swap_stop_over_reload"] for row in rows]
    figures = {
        "swap_stop_over_reload": round(statistics.median(ratios), 3),
        "swap_stop_over_reload_worst": round(max(ratios), 3),
        "swap_stop_s": round(statistics.median(row["swap_stop_s"] for row in rows), 4),
        "reload_s": round(statistics.median(row["reload_s"] for row in rows), 4),
        "prepare_s": round(statistics.median(row["prepare_s"] for row in rows), 4),
        "step_beside_over_alone": round(statistics.median(row["step_beside_over_alone"] for row in rows), 3),
        "probe_difference_max": max(row["probe_difference"] for row in rows),
    }
    return Bench(rows, figures)


def _pairs(root: Path, dtype: Dtype) -> list[dict[str, Any]]:
    model, store = root / "model", root / "weights"
    rows: list[dict[str, Any]] = []
    with engines(_Swapper, root, dtype, model) as (engine,):
        weights, probes = [engine.ask("publish")], [engine.ask("probe")]
        made = publish(root / "turned", 1, _turned(model), (), model, dtype)
        turned = Path(made.location.removeprefix("file://"))
        with engines(_Swapper, root, dtype, turned) as (cold,):
            probes.append(cold.ask("probe"))
        engine.ask("load", weights[0])
        weights.append(publish(store, 1, read_tensors(turned), probes[1], model, dtype))
        for number in range(PAIRS + 1):
            version = (number + 1) % 2
            row = engine.ask("pair", number, weights[version], probes[version])
            if number:  # the first of a process warms up
                rows.append({"dtype": dtype, "version": version, **row})
    return rows


def _turned(model: Path) -> Iterator[RawTensor]:
    """The tensors of the model, its layers in the opposite order."""
    tensors = list(read_tensors(model))
    layers = 1 + max(_layer(one.name) for one in tensors)
    for one in tensors:
        number = _layer(one.name)
        rest = one.name.removeprefix(f"{_LAYER}{number}")
        name = one.name if number < 0 else f"{_LAYER}{layers - 1 - number}{rest}"
        yield RawTensor(name, one.dtype, one.shape, one.data)


def _layer(name: str) -> int:
    return int(name.removeprefix(_LAYER).partition(".")[0]) if name.startswith(_LAYER) else -1


class _Swapper(Worker):
    def pair(self, number: int, weights: WeightsRecord, cold_probe: Sequence[float]) -> dict[str, Any]:
        from workers.rollout.engines.vllm_spare import tensors_of

        keys = self._begin(number)
        alone_s = statistics.median(self._step() for _ in range(STEPS))
        began, beside = clock.monotonic_s(), []
        while not self.engine.prepare(weights):
            beside.append(self._step())
        prepare_s = clock.monotonic_s() - began
        began = clock.monotonic_s()
        self.engine.stop(keys)
        self.engine.load(weights)
        swap_s = clock.monotonic_s() - began
        differs = max(abs(a - b) for a, b in zip(self.probe(), cold_probe, strict=True))
        held = list(tensors_of(Path(weights.location.removeprefix("file://")), Fingerprint()))
        began = clock.monotonic_s()
        self.engine.reload(held)
        reload_s = clock.monotonic_s() - began
        return {
            "swap_stop_s": round(swap_s, 4),
            "reload_s": round(reload_s, 4),
            "swap_stop_over_reload": round(swap_s / reload_s, 4),
            "prepare_s": round(prepare_s, 4),
            "step_beside_over_alone": round(statistics.median(beside) / alone_s, 3),
            "probe_difference": differs,
        }

    def _begin(self, number: int) -> tuple[RequestKey, ...]:
        """Requests of the version that it serves, prefilled."""
        version = self.engine.version
        assert version is not None
        requests = [_request(number, index, version) for index in range(REQUESTS)]
        for one in requests:
            self.engine.add(one)
        self.engine.step()
        return tuple(one.key for one in requests)

    def _step(self) -> float:
        """Its seconds."""
        began = clock.monotonic_s()
        self.engine.step()
        return clock.monotonic_s() - began


def _request(number: int, index: int, version: int) -> RequestRecord:
    rng = random.Random(number * REQUESTS + index)
    row = {"run": "bench", "sequence": 0, "purpose": "train", "task": "", "prompt_row": 0, "answer": "", "queued_at": 0}
    whose = {"group": number, "index": index, "attempt": 0, "version": version, "engine": 0, "incarnation": 0}
    sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 2048}
    ids = tuple(rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS))
    seed = sampling_seed(0, number, index)
    return RequestRecord.model_validate({**row, **whose, **sampled, "prompt_ids": ids, "seed": seed})
