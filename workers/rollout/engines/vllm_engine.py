"""vLLM as an engine: one synchronous LLMEngine in this process, driven step by step. One of two files that import vllm.

Rule 1: weights are swapped between steps while no request is inside, so no sample mixes two versions.
Rule 2: log-probs are those of the sampled distribution (`processed_logprobs`: temperature and truncation applied), and
   where top-p or top-k truncate, the mass that they kept comes with each.
Rule 3: prefills are never split: on a CPU vLLM cannot rewind a request's generator after a part of a prompt and dies.
Rule 4: the prefix cache is emptied at each load and its entries carry the version, so none is read by another one.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.ids import RequestKey
from schemas.messages import KvHandle, RequestRecord, WeightsRecord
from schemas.settings import Settings
from workers.rollout.engines.base import Load, Tokens
from workers.rollout.engines.vllm_extension import KEPT_ID
from workers.rollout.engines.vllm_kv import KvMoves
from workers.runtime.errors import BadInput, ProbeMismatch, WeightsUnavailable
from workers.transport.weights.manifest import PROBE_TOKENS, Manifest, probe_differs

BLOCK_TOKENS = 32
BATCH_TOKENS_MIN = 2048
EXTENSION = "workers.rollout.engines.vllm_extension.WeightsExtension"
_PROBE = "probe"


def _environment(threads: int) -> dict[str, str]:
    """What vLLM reads while it is imported: everything in this process, nothing compiled, nothing downloaded."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


class VllmEngine:
    """One replica on the model of `model_folder`. BadInput if vLLM refuses the model or the settings.

    `kv_folder`: of the run in shared memory, for the KV of requests that move; None = they are prefilled again.
    `address`: of this host, for engines of others that fetch it.
    """

    def __init__(
        self,
        settings: Settings,
        model_folder: Path,
        *,
        kv_folder: Path | None = None,
        number: int = 0,
        address: str = "127.0.0.1",
    ) -> None:
        self._truncates = settings.sampling.truncates
        os.environ.update(_environment(settings.engines.threads))
        if self._truncates:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # that one draws elsewhere
        import torch

        torch.set_num_threads(settings.engines.threads)
        self.seats = settings.engines.seats
        self.tokens_per_request_max = settings.engines.tokens_per_request_max
        self._settings = settings
        self._stop_ids = [] if settings.sampling.ignore_eos else eos_ids(model_folder)
        self._requests: dict[str, RequestKey] = {}
        self._version: int | None = None
        self._fingerprint = ""
        self._engine = _start(settings, model_folder)
        if self._truncates and not all(self._engine.collective_rpc("report_kept_mass")):
            raise BadInput("sampling.top_p, sampling.top_k: this vLLM cannot report the kept mass: use 1 and 0")
        self._core = self._engine.engine_core.engine_core
        self._pool = self._core.scheduler.kv_cache_manager.block_pool
        self._block_tokens: int = self._core.vllm_config.cache_config.block_size
        self._blocks_free_max: int = self._pool.get_num_free_blocks()
        self.kv_tokens_max = self._blocks_free_max * self._block_tokens
        self._moves = KvMoves(settings, model_folder, self._engine, kv_folder, number, address)
        self._internal: dict[str, str] = {}
        """vLLM's own name of each request that has no token yet or runs."""
        self._new: set[str] = set()

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def prepare(self, weights: WeightsRecord) -> bool:
        return all(self._engine.collective_rpc("prepare_version", args=(weights,)))

    def load(self, weights: WeightsRecord) -> None:
        assert not self._requests, "swap with requests inside"
        self._version, self._fingerprint = None, ""
        answers = self._engine.collective_rpc("load_version", args=(weights,))
        loaded, manifest = {fingerprint for fingerprint, _ in answers}, answers[0][1]
        if loaded != {weights.fingerprint}:
            raise WeightsUnavailable(
                f"version {weights.version}: loaded tensors have fingerprint {', '.join(sorted(loaded))}, "
                f"announced {weights.fingerprint}"
            )
        emptied = self._engine.reset_prefix_cache()
        assert emptied, "the prefix cache still holds blocks of a request"
        self._check_probe(weights.version, manifest)
        self._version, self._fingerprint = weights.version, weights.fingerprint
        self._moves.serves(weights.fingerprint)

    def reload(self, tensors: Sequence[tuple[str, Any]]) -> None:
        """vLLM's own way to take weights from memory, to be measured beside `load`: nothing is checked."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})

    def add(self, request: RequestRecord) -> None:
        assert request.host_version == self._version, (
            f"{request.key} is for {request.host_version}, not {self._version}"
        )
        assert (request.top_p < 1 or request.top_k > 0) == self._truncates, f"{request.key}: of other settings"
        so_far = len(request.response_ids)
        if len(request.prompt_ids) + request.max_new_tokens > self.tokens_per_request_max:
            raise ValueError(
                f"prompt of {len(request.prompt_ids)} and response of up to {request.max_new_tokens} tokens exceed "
                f"engines.tokens_per_request_max = {self.tokens_per_request_max}"
            )
        if not request.prompt_ids or so_far >= request.max_new_tokens:
            raise ValueError(f"{len(request.prompt_ids)} prompt tokens, {so_far} of {request.max_new_tokens} new ones")
        name = _name(request.key)
        assert name not in self._requests, f"request {name} is inside already"
        ids = (*request.prompt_ids, *request.response_ids)
        entrance = self._moves.enter(name, request, ids)
        self._submit(
            name,
            ids,
            salt=request.host_version,
            temperature=request.temperature,
            seed=request.seed,
            extra_args=entrance.parameters(drawn=so_far),
            max_tokens=request.max_new_tokens - so_far,
            stop_token_ids=self._stop_ids,
            ignore_eos=self._settings.sampling.ignore_eos,
            top_p=request.top_p,
            top_k=request.top_k,
            logprobs=int(self._truncates),
        )
        self._requests[name] = request.key
        self._internal[name] = self._engine.output_processor.external_req_ids[name][-1]
        self._new.add(name)

    def step(self) -> list[Tokens]:
        self._moves.release_loaded()
        if not self._engine.has_unfinished_requests():
            return []
        said = []
        for output in self._engine.step():
            part = output.outputs[0]
            ids = tuple(part.token_ids)
            places = part.logprobs or ()
            logprobs = tuple(place[one].logprob for one, place in zip(ids, places, strict=True))
            kept = tuple(place[KEPT_ID].logprob for place in places) if self._truncates else None
            name = output.request_id
            key, prefill = self._requests[name], None
            if name in self._new:
                self._new.discard(name)
                prefill = self._moves.settle(name, self._internal[name], output.num_cached_tokens or 0)
            finish = part.finish_reason if output.finished else None
            if output.finished:
                del self._requests[name], self._internal[name]
            said.append(Tokens(key, ids, logprobs, finish, kept, prefill))
        return said

    def stop(self, keys: tuple[RequestKey, ...], *, offer: bool = False) -> dict[RequestKey, KvHandle]:
        handles = {}
        for key in keys:
            name = _name(key)
            whose = (key.group, key.index, key.attempt)
            handle = self._moves.leave(name, self._internal.pop(name), whose, offer=offer)
            if handle is not None:
                handles[key] = handle
        names = [_name(key) for key in keys]
        self._engine.abort_request(names)
        for name in names:
            del self._requests[name]
            self._new.discard(name)
        return handles

    def load_now(self) -> Load:
        running, waiting = self._core.scheduler.get_request_counts()
        used = self._blocks_free_max - self._pool.get_num_free_blocks()
        return Load(running, waiting, used * self._block_tokens)

    def tend(self) -> None:
        self._moves.tend()

    def close(self) -> None:
        self._moves.close()
        self._engine.collective_rpc("end_preparing")
        self._engine.engine_core.shutdown()

    def _submit(self, name: str, ids: Sequence[int], *, salt: int, **sampling: Any) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling)
        self._engine.add_request(name, tokens_input(list(ids), cache_salt=f"v{salt}"), params)

    def _check_probe(self, version: int, manifest: Manifest) -> None:
        got = self.probe(manifest.probe_ids, version)
        if differs := probe_differs(manifest.probe_logprobs, got, manifest.dtype):
            raise ProbeMismatch(f"version {version}: {differs}")

    def probe(self, ids: Sequence[int], version: int) -> list[float]:
        """Log-prob [len(ids) - 1] of each id given those before it, at temperature 1, under what is loaded now."""
        self._submit(_PROBE, ids, salt=version, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        found: list[float] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                places = (output.prompt_logprobs or [])[1:]
                found.extend(place[one].logprob for one, place in zip(ids[1:], places, strict=False))
        return found if len(found) == len(ids) - 1 else [math.nan] * (len(ids) - 1)


def _name(key: RequestKey) -> str:
    return f"{key.group}/{key.index}/{key.attempt}"


def eos_ids(model_folder: Path) -> list[int]:
    """The ids that end a response, of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = model_folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return list(found) if isinstance(found, list) else [found]
    return []


def _start(settings: Settings, model_folder: Path) -> Any:
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    if "kv_transfer_config" in settings.vllm:
        raise BadInput("[vllm] kv_transfer_config: engines have a connector of their own; leave the key out")
    from workers.transport.kv import vllm_connector

    engines = settings.engines
    length = max(engines.tokens_per_request_max, PROBE_TOKENS + 1)
    arguments: dict[str, Any] = {
        "model": str(model_folder),
        "load_format": "dummy",
        "dtype": settings.dtype,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": engines.kv_mib << 20,
        "max_model_len": length,
        "max_num_seqs": engines.seats,
        "max_num_batched_tokens": max(BATCH_TOKENS_MIN, length + engines.seats),
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "kv_transfer_config": KVTransferConfig(**vllm_connector.configuration()),
        "disable_log_stats": True,
    }
    unknown = [key for key in settings.vllm if key not in EngineArgs.__dataclass_fields__]
    if unknown:
        raise BadInput(f"[vllm] {unknown[0]}: vLLM's EngineArgs have no such key")
    try:
        return LLMEngine.from_engine_args(EngineArgs(**(arguments | settings.vllm)))
    except ValueError as error:
        raise BadInput(f"model {model_folder}, [vllm]: vLLM refuses: {error}") from error
