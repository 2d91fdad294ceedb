"""What runs inside vLLM's worker: prepare weights and swap them, write out the KV of a request that leaves, say what a
truncated draw kept.

Rule 1: vLLM's log-probs of a truncated draw are of what was kept. How much that was is known while a token is drawn and
nowhere else: `report_kept_mass` sends it along as the log-prob of an id that no model has.
"""

from pathlib import Path
from typing import Any

import torch

from schemas.messages import WeightsRecord
from workers.rollout.engines.vllm_spare import Spares
from workers.transport.kv import shared_memory, vllm_connector
from workers.transport.kv.handoff import Header, Unusable
from workers.transport.weights.manifest import Manifest

KEPT_ID = -1


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
    _spares_made: Spares | None = None

    def report_kept_mass(self) -> bool:
        """False if this vLLM draws in another way."""
        sampler = getattr(self.model_runner, "sampler", None)
        known = hasattr(sampler, "topk_topp_sampler") and hasattr(sampler, "gather_logprobs")
        if known:
            report_kept_mass(sampler)
        return known

    def prepare_version(self, record: WeightsRecord) -> bool:
        """Get the version ready beside decoding; True once it is, or `load_version` will say why it cannot be."""
        return self._spares().prepare(record)

    def load_version(self, record: WeightsRecord) -> tuple[str, Manifest]:
        """Serve it, prepared or not; returns the fingerprint of what was loaded. WeightsUnavailable."""
        spare = self._spares().take(record)
        spare.put_in()
        return spare.fingerprint, spare.manifest

    def end_preparing(self) -> None:
        """Once, at the end."""
        self._spares().close()

    def _spares(self) -> Spares:
        if self._spares_made is None:
            self._spares_made = Spares(self)
        return self._spares_made

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
            shared_memory.write(Path(path), head, vllm_connector.export(caches, blocks))
        except Unusable as error:
            return error.reason
        return ""
