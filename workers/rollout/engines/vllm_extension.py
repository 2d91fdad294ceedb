"""What runs inside vLLM's worker: swap the weights in place, and hash exactly the bytes that were loaded; write out the
KV of a request that leaves.

Rule 1: every tensor is copied once; the copy is hashed and the copy is loaded. So the fingerprint is of what is served.
Rule 2: after a reload on a CPU a tied output layer still computes with its old packed copy of the embedding, and
nothing says so. `repack_output_layers` packs it again; the probe of a version is what would notice without it.
Rule 3: vLLM's log-probs of a truncated draw are of what was kept. How much that was is known while a token is drawn and
nowhere else: `report_kept_mass` sends it along as the log-prob of an id that no model has.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from workers.transport.kv import shared_memory, vllm_connector
from workers.transport.kv.handoff import Header, Unusable
from workers.transport.weights.manifest import Fingerprint, RawTensor
from workers.transport.weights.store import read_tensors

KEPT_ID = -1
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def repack_output_layers(model: torch.nn.Module) -> int:
    """Pack the weights of output layers again where a CPU kernel keeps its own copy of them; returns how many."""
    packed = [
        module
        for module in model.modules()
        if hasattr(module, "cpu_linear") and type(module).__name__ == "ParallelLMHead"
    ]
    for module in packed:
        module.quant_method.process_weights_after_loading(module)
    return len(packed)


def report_kept_mass(sampler: Any) -> None:
    """Of each drawn token, with `logprobs=1`: the entry KEPT_ID is the log of the probability mass that top-p and top-k
    kept. (vLLM would have put the likeliest token there.)

    The likeliest token is always kept, and its log-prob grows by what was cut: kept = before - after. That needs two
    numbers a row, not a second copy of the logits. `logprobs_mode` must be `processed_logprobs`.
    """
    draw, gather = sampler.topk_topp_sampler.forward, sampler.gather_logprobs
    under_way: list[torch.Tensor] = []

    def drawing(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [requests, words], at the temperature; they are changed in place."""
        before = logits.max(dim=-1).values - logits.logsumexp(dim=-1)
        drawn, logprobs = draw(logits, generators, k, p)
        under_way[:] = [(before - logprobs.max(dim=-1).values).clamp(max=0.0)]
        return drawn, logprobs

    def gathering(logprobs: torch.Tensor, count: int, token_ids: torch.Tensor) -> Any:
        found = gather(logprobs, count, token_ids)
        if count != 1:  # of a prompt: nothing was drawn
            return found
        (kept,) = under_way
        ids, values = found.logprob_token_ids.clone(), found.logprobs.clone()
        ids[:, 1], values[:, 1] = KEPT_ID, kept
        return found._replace(logprob_token_ids=ids, logprobs=values)

    sampler.topk_topp_sampler.forward, sampler.gather_logprobs = drawing, gathering


class WeightsExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`), called by `collective_rpc`."""

    model_runner: Any
    reload_weights: Any

    def report_kept_mass(self) -> bool:
        """False if this vLLM draws in another way."""
        sampler = getattr(self.model_runner, "sampler", None)
        known = hasattr(sampler, "topk_topp_sampler") and hasattr(sampler, "gather_logprobs")
        if known:
            report_kept_mass(sampler)
        return known

    def load_version(self, folder: str) -> str:
        """Load all tensors of the folder in place; returns their fingerprint. WeightsUnavailable."""
        whole = Fingerprint()
        tensors = _tensors(Path(folder), whole)
        self.reload_weights(weights_iterator=tensors)
        for name, _ in tensors:
            raise AssertionError(f"vLLM did not load {name}")
        repack_output_layers(self.model_runner.model)
        return whole.hexdigest()

    def begin_handover(self, block_count: int) -> tuple[str, str, int] | None:
        """Let the connector find this worker's requests. Returns layout and dtype of the KV and bytes of one block of
        all layers; None if blocks are not what the connector can copy (one contiguous run of bytes in each layer)."""
        layers = self.model_runner.compilation_config.static_forward_context
        vllm_connector.remember(self.model_runner)
        caches = vllm_connector.caches(layers)
        if not caches or any(len(one) != block_count or not one.is_contiguous() for one in caches.values()):
            return None
        some = next(iter(caches.values()))
        return vllm_connector.layout(layers, caches), str(some.dtype), sum(one[0].nbytes for one in caches.values())

    def export_kv(self, path: str, blocks: list[int], header: str) -> str:
        """Write the blocks to `path`, behind the header (JSON); the reason if it could not be, or nothing."""
        caches = vllm_connector.caches(self.model_runner.compilation_config.static_forward_context)
        try:
            head = Header.model_validate_json(header)
            shared_memory.write(Path(path), head, lambda into: vllm_connector.export(caches, blocks, into))
        except Unusable as error:
            return error.reason
        return ""


def _tensors(folder: Path, whole: Fingerprint) -> Iterator[tuple[str, torch.Tensor]]:
    for raw in read_tensors(folder):
        data = bytearray(raw.data)
        whole.add(RawTensor(raw.name, raw.dtype, raw.shape, memoryview(data)))
        yield raw.name, torch.frombuffer(data, dtype=_DTYPES[raw.dtype]).view(raw.shape)
