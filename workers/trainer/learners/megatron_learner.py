"""The learner on Megatron-core: model, schedule, gradient buffers, optimizer and checkpoint are Megatron's.

Rule 1: one process holds the whole model (world size 1, gloo on a CPU, nccl on a GPU).
Rule 2: published dtype = dtype of the forward pass. In bfloat16 the optimizer keeps float32 masters of its own.
Rule 3: a loss or gradient that is not finite changes nothing: the update is left out and reported (`updates_skipped`).
Rule 4: the reference model is version 0, read from the model folder. It exists with a `kl_coef` only.

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
from workers.trainer import loss_figures, losses
from workers.trainer.checkpoint import read_extra, write_extra
from workers.trainer.learners import hf_weights, megatron_cpu
from workers.trainer.learners.base import Sample
from workers.trainer.learners.hf_config import read_config
from workers.trainer.packing import MicroBatch, pack, pad
from workers.trainer.schedule import learning_rate
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


@dataclass(frozen=True, slots=True)
class _Known:
    """Log-probs [[R] per sample] of an update that are made before it: see losses.Tokens."""

    proximal: list[list[float]] | None = None
    reference: list[list[float]] | None = None


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
        self._model = self._build(config, megatron, model_folder)
        self._reference = None
        if settings.training.kl_coef:
            self._reference = self._build(config, megatron, model_folder).requires_grad_(False)
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

    def _build(self, config: Mapping[str, Any], megatron: Any, model_folder: Path) -> Any:
        """The model with the folder's weights, in the published dtype."""
        model: Any = build(config, megatron).to(self._device)
        if megatron.bf16:
            model.bfloat16()
        hf_weights.load(model, hf_weights.read_folder(model_folder))
        return model

    # --- the Protocol -------------------------------------------------------------------------

    def train(self, samples: Sequence[Sample], step: int = 0) -> dict[str, float]:
        """`updates_per_step` updates, each on its own whole groups: no sample enters two gradients."""
        training = self._settings.training
        rate = learning_rate(step, self._settings)
        for group in self._param_groups():
            group["lr"] = rate
        updates = self._updates(samples)
        known = [self._known(update, first=not place) for place, update in enumerate(updates)]
        said: list[dict[str, float]] = []
        for update, logprobs in zip(updates, known, strict=True):
            masks = [sample.loss_mask for sample in update]
            weights = losses.token_weights(masks, training.loss_level, self._settings.sampling.max_new_tokens)
            sums, norm = self._update(self._pieces(update, weights, logprobs))
            skipped = not math.isfinite(norm)
            figures = loss_figures.figures(sums)
            said.append(figures | {"grad_norm": 0.0 if skipped else norm, "updates_skipped": float(skipped)})
        return _of_step(said) | {"learning_rate": rate}

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._logprobs_by(self._ddp, samples)

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
            group.update(betas=(training.adam_beta1, training.adam_beta2), fused=True)
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

    def _known(self, samples: Sequence[Sample], *, first: bool) -> _Known:
        """Before any update of the step. The first update needs no log-probs under the version at its start: its own
        forward pass gives them."""
        training = self._settings.training
        later = training.decoupled and not first
        return _Known(
            proximal=self._logprobs_by(self._ddp, samples) if later else None,
            reference=self._logprobs_by(self._reference, samples) if training.kl_coef else None,
        )

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
        sums = loss_figures.join([{name: float(value) for name, value in part.items()} for part in parts])
        norms = [float(torch.linalg.vector_norm(buffer.grad_data)) for buffer in self._ddp.buffers]
        if not math.isfinite(sums["loss"] + math.fsum(norms)):
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
        training = self._settings.training
        scaled_TV = _scaled(logits_TV, piece)
        entropy = losses.entropy_with_gradient if training.entropy_coef else losses.entropy_of
        entropy_T = entropy(scaled_TV)  # before the log-probs, which overwrite scaled_TV
        loss, sums = losses.policy_loss(_logprobs(scaled_TV, piece), entropy_T, piece.tokens, training)
        return loss, piece.tokens.mask_T.sum().to(torch.int), sums

    def _logprobs_by(self, model: Any, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probs [[R] per sample] under a model, at each sample's temperature."""
        found: list[list[float]] = [[] for _ in samples]
        weights = [[0.0] * len(sample.response_ids) for sample in samples]  # no loss is wanted
        for micro, piece in zip(self._micro_batches(samples), self._pieces(samples, weights, _Known()), strict=True):
            row = piece.row
            with torch.no_grad():
                logits_TV = model(row.ids_S, row.positions_S, row.shape, row.predictors_T)
                flat = _logprobs(_scaled(logits_TV, piece), piece).tolist()
            for member in micro.members:
                length = len(samples[member].response_ids)
                found[member], flat = flat[:length], flat[length:]
        return found

    # --- rows ---------------------------------------------------------------------------------

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        training = self._settings.training
        lengths = [len(sample.response_ids) for sample in samples]
        together = pack if training.packing else pad
        return together([sample.prompt_ids for sample in samples], lengths, training.micro_batch_tokens)

    def _pieces(self, samples: Sequence[Sample], weights: list[list[float]], known: _Known) -> list[_Piece]:
        """The samples' micro-batches as tensors. `weights` [[R] per sample] from `losses.token_weights`."""
        prompts = [sample.prompt_ids for sample in samples]
        responses = [sample.response_ids for sample in samples]
        number = partial(torch.tensor, dtype=torch.float32, device=self._device)
        whole = partial(torch.tensor, dtype=torch.int64, device=self._device)
        pieces = []
        for micro in self._micro_batches(samples):
            held = [samples[member] for member in micro.members]
            proximal, reference = (
                None if values is None else number([value for member in micro.members for value in values[member]])
                for values in (known.proximal, known.reference)
            )
            tokens = losses.Tokens(
                behaviour_T=number([value for one in held for value in one.logprobs]),
                advantages_T=number([one.advantage for one in held for _ in one.response_ids]),
                weights_T=number([share for member in micro.members for share in weights[member]]),
                mask_T=torch.tensor([counts for one in held for counts in one.loss_mask], device=self._device),
                sample_T=whole([place for place, one in enumerate(held) for _ in one.response_ids]),
                lag_T=whole([one.lag for one in held for _ in one.response_ids]),
                proximal_T=proximal,
                reference_T=reference,
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


def _scaled(logits_TV: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Logits [T, V] in float32 at the sampling temperature."""
    scaled_TV = logits_TV.float()
    if bool((piece.temperature_T != 1.0).any()):
        scaled_TV = scaled_TV / piece.temperature_T[:, None]
    return scaled_TV


def _logprobs(scaled_TV: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Log-probs [T] of the targets. Megatron's cross entropy overwrites scaled_TV."""
    return -vocab_parallel_cross_entropy(scaled_TV, piece.row.targets_T)


def _of_step(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of a step: tokens and counts add up, maxima join, everything else is the mean over the updates that have
    it. A lag's `mismatch_kl`, and that of all, is of the first of them: later ones have moved away from what sampled
    the tokens.
    """
    said: dict[str, float] = {}
    for name in dict.fromkeys(name for one in updates for name in one):
        values = [one[name] for one in updates if name in one]
        if name.endswith(("tokens", "nonfinite", "updates_skipped")):
            said[name] = math.fsum(values)
        elif name.endswith("mismatch_kl"):
            said[name] = values[0]
        else:
            said[name] = max(values) if name.endswith("_max") else math.fsum(values) / len(values)
    return said | {"updates": float(len(updates))}


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
