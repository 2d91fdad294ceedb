"""The learner on Megatron-core: model, schedule, gradient buffers, optimizer and checkpoint are Megatron's.

Rule 1: one process holds the whole model (world size 1, gloo on a CPU, nccl on a GPU).
Rule 2: published dtype = dtype of the forward pass. In bfloat16 the optimizer keeps float32 masters of its own.
Rule 3: a gradient that is not finite changes nothing: the update is left out and reported (`updates_skipped`).

    samples -> updates (whole groups) -> micro-batches (packing.py) -> rows -> logits / temperature -> losses.py
"""

import itertools
import math
import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from schemas.settings import Settings
from workers.trainer import losses
from workers.trainer.checkpoint import read_extra, write_extra
from workers.trainer.learners import hf_weights, megatron_cpu
from workers.trainer.learners.base import Sample
from workers.trainer.packing import MicroBatch, pack
from workers.transport.weights.manifest import RawTensor

megatron_cpu.install()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from workers.trainer.learners.megatron_model import (  # noqa: E402
    Row,
    build,
    read_config,
    row_of,
    transformer_config,
)

_SHARDS = "megatron"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A micro-batch with all that its loss needs; T as in losses.py."""

    row: Row
    temperature_T: torch.Tensor
    tokens: losses.Tokens


class MegatronLearner:
    """AdamW on the policy-gradient loss. All calls from the thread that made it."""

    def __init__(self, settings: Settings, model_folder: Path) -> None:
        """BadInput if the folder is no model that can be trained."""
        self._settings = settings
        self._dtype = getattr(torch, settings.dtype)
        torch.set_num_threads(settings.training.threads)
        config = read_config(model_folder)
        megatron = transformer_config(config, self._dtype, settings.megatron)
        _join_world(settings.seed)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = build(config, megatron).to(self._device)
        if megatron.bf16:
            self._model.bfloat16()
        hf_weights.load(self._model, hf_weights.read_folder(model_folder))
        wrapped = Float16Module(megatron, self._model) if megatron.bf16 else self._model
        wrapped.model_type = self._model.model_type
        self._ddp = DistributedDataParallel(
            megatron, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False), wrapped
        )
        self._optimizer = get_megatron_optimizer(_optimizer_config(settings, self._dtype), [self._ddp])
        for group in self._param_groups():
            group["fused"] = True  # one pass over memory instead of one per operation
        megatron.finalize_model_grads_func = _finish_gradients
        megatron.grad_scale_func = self._optimizer.scale_loss
        self._schedule = get_forward_backward_func()

    # --- the Protocol -------------------------------------------------------------------------

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """`updates_per_step` updates, each on its own whole groups: no sample enters two gradients."""
        said: list[dict[str, float]] = []
        for update in self._updates(samples):
            masks = [sample.loss_mask for sample in update]
            weights = losses.token_weights(masks, self._settings.training.loss_level)
            sums, norm = self._update(self._pieces(update, weights))
            skipped = not math.isfinite(norm)
            said.append(losses.figures(sums) | {"grad_norm": 0.0 if skipped else norm, "updates_skipped": skipped})
        return _of_step(said)

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in samples]
        weights = [[0.0] * len(sample.response_ids) for sample in samples]  # no loss is wanted
        for micro, piece in zip(self._micro_batches(samples), self._pieces(samples, weights), strict=True):
            flat = self._forward(piece).tolist()
            for member in micro.members:
                length = len(samples[member].response_ids)
                found[member], flat = flat[:length], flat[length:]
        return found

    def probe(self, ids: Sequence[int]) -> list[float]:
        rest = list(ids[1:])
        sample = Sample(list(ids[:1]), rest, [0.0] * len(rest), [True] * len(rest), 1.0, 0.0)
        return self.logprobs([sample])[0]

    def export(self) -> Iterator[RawTensor]:
        for name, tensor in hf_weights.export(self._model, self._dtype):
            yield hf_weights.raw(name, tensor)

    def save(self, folder: Path, extra: Mapping[str, object]) -> None:
        shards = folder / _SHARDS
        shards.mkdir()
        state = self._sharded_state(loading=False)
        state["rng"] = torch.get_rng_state()
        # Saving is synchronous, so results pass within this process. Megatron's own queue would be a server process,
        # started anew from the main module, that outlives a killed trainer.
        filesystem_async._results_queue = queue.Queue()
        dist_checkpointing.save(state, str(shards))
        write_extra(folder, extra)

    def restore(self, folder: Path) -> dict[str, object]:
        state = dist_checkpointing.load(self._sharded_state(loading=True), str(folder / _SHARDS))
        self._model.load_state_dict(state["model"])
        with torch.no_grad():
            self._optimizer.load_state_dict(state["optimizer"])
        training = self._settings.training
        for group in self._param_groups():  # the run's settings hold, not those of the checkpoint
            group.update(lr=training.learning_rate, betas=(training.adam_beta1, training.adam_beta2), fused=True)
        torch.set_rng_state(state["rng"])
        return read_extra(folder)

    def close(self) -> None:
        """The process group lives as long as the process: another learner may be made in it."""

    # --- one update ---------------------------------------------------------------------------

    def _updates(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """Consecutive whole groups, as even as can be; fewer updates where there are fewer groups."""
        pairs = itertools.pairwise(samples)
        begins = [0, *(place for place, (one, next_) in enumerate(pairs, 1) if one.group != next_.group)]
        count = min(self._settings.training.updates_per_step, len(begins))
        edges = [begins[len(begins) * number // count] for number in range(count)] + [len(samples)]
        return [samples[start:end] for start, end in itertools.pairwise(edges)]

    def _update(self, pieces: list[_Piece]) -> tuple[dict[str, float], float]:
        """Forward, backward, optimizer step. Joined sums of the loss, and the gradient's norm before clipping."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts = self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=iter(pieces),
            model=[self._ddp],
            num_microbatches=len(pieces),
            seq_length=max(piece.row.ids_S.numel() for piece in pieces),
            micro_batch_size=1,
            forward_only=False,
        )
        sums = losses.join([{name: float(value) for name, value in part.items()} for part in parts])
        if not all(bool(torch.isfinite(buffer.grad_data.sum())) for buffer in self._ddp.buffers):
            return sums, math.nan
        if not sums["tokens"]:
            return sums, 0.0  # nothing was counted: AdamW would still move by its momentum
        done, norm, _ = self._optimizer.step()
        assert done, "an update without loss scaling is always taken"
        return sums, float(norm)

    def _forward_step(self, pieces: Iterator[_Piece], model: Any, *_: Any) -> tuple[torch.Tensor, Any]:
        piece = next(pieces)
        row = piece.row
        return model(row.ids_S, row.positions_S, row.shape, row.predictors_T), partial(self._loss, piece)

    def _loss(self, piece: _Piece, logits_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """(loss, tokens, sums). Megatron adds the losses up and divides by nothing (`_finish_gradients`)."""
        logprobs_T, entropy_T = _logprobs(logits_TV, piece, with_entropy=True)
        training = self._settings.training
        loss, sums = losses.policy_loss(
            logprobs_T, entropy_T, piece.tokens, losses.Clip(training.clip_low, training.clip_high)
        )
        return loss, piece.tokens.mask_T.sum().to(torch.int), sums

    @torch.no_grad()
    def _forward(self, piece: _Piece) -> torch.Tensor:
        """Log-probs [T] without a gradient."""
        row = piece.row
        logits_TV = self._ddp(row.ids_S, row.positions_S, row.shape, row.predictors_T)
        return _logprobs(logits_TV, piece, with_entropy=False)[0]

    # --- rows ---------------------------------------------------------------------------------

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        lengths = [len(sample.response_ids) for sample in samples]
        return pack([sample.prompt_ids for sample in samples], lengths, self._settings.training.micro_batch_tokens)

    def _pieces(self, samples: Sequence[Sample], weights: list[list[float]]) -> list[_Piece]:
        """The samples' micro-batches as tensors. `weights` [[R] per sample] from `losses.token_weights`."""
        prompts = [sample.prompt_ids for sample in samples]
        responses = [sample.response_ids for sample in samples]
        pieces = []
        for micro in self._micro_batches(samples):
            held = [samples[member] for member in micro.members]
            number = partial(torch.tensor, dtype=torch.float32, device=self._device)
            tokens = losses.Tokens(
                behaviour_T=number([value for one in held for value in one.logprobs]),
                advantages_T=number([one.advantage for one in held for _ in one.response_ids]),
                weights_T=number([share for member in micro.members for share in weights[member]]),
                mask_T=torch.tensor([counts for one in held for counts in one.loss_mask], device=self._device),
            )
            temperature_T = number([one.temperature for one in held for _ in one.response_ids])
            pieces.append(_Piece(row_of(micro, prompts, responses).to(self._device), temperature_T, tokens))
        return pieces

    # --- checkpoint ---------------------------------------------------------------------------

    def _param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def _sharded_state(self, *, loading: bool) -> dict[str, Any]:
        layout = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }
        model = self._model.sharded_state_dict(metadata=layout)
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=loading, metadata=layout)
        return {"model": model, "optimizer": optimizer}


def _logprobs(logits_TV: torch.Tensor, piece: _Piece, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [T] of the targets at the sampling temperature, and entropies [T] (empty unless wanted).

    Entropy first: Megatron's cross entropy overwrites its float32 input.
    """
    scaled_TV = logits_TV.float()
    if bool((piece.temperature_T != 1.0).any()):
        scaled_TV = scaled_TV / piece.temperature_T[:, None]
    entropy_T = losses.entropy_of(scaled_TV.detach()) if with_entropy else scaled_TV.new_zeros(0)
    return -vocab_parallel_cross_entropy(scaled_TV, piece.row.targets_T), entropy_T


def _of_step(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of a step: tokens and counts add up, maxima join, everything else is the mean over updates.

    `mismatch_kl` is of the first update: later ones have moved away from what sampled the tokens.
    """
    added = ("tokens", "nonfinite", "updates_skipped")
    said: dict[str, float] = {}
    for name in updates[0]:
        values = [float(one[name]) for one in updates]
        mean = math.fsum(values) / len(values)
        said[name] = sum(values) if name in added else max(values) if name.endswith("_max") else mean
    return said | {"mismatch_kl": updates[0]["mismatch_kl"], "updates": float(len(updates))}


def _finish_gradients(model: Any, _tokens: Any = None, *args: Any, **kwargs: Any) -> None:
    """As Megatron does, but not divided by a token count: the weights of the loss hold the denominators."""
    finalize_model_grads(model, None, *args, **kwargs)


def _optimizer_config(settings: Settings, dtype: torch.dtype) -> Any:
    training = settings.training
    return OptimizerConfig(
        optimizer="adam",
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        clip_grad=training.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=False,
    )


def _join_world(seed: int) -> None:
    """A world of one process, once per process. Layouts over several would come from torchrun's environment here."""
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    # The tracker whose fork() does nothing: there is no dropout, and on a CPU no CUDA generator to fork.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
