"""The learner on Megatron-core: model, schedule, gradient buffers, optimizer and checkpoint are Megatron's.

Rule 1: one rank of a layout (layout.py): it holds its stage, its part of each matrix, and computes its share of each
   batch. Every rank makes every call, with the same arguments, and decides by the same figures (`World.gather`); what
   is whole (figures, log-probs) is whole on each, `export` on rank 0 alone. gloo on a CPU, nccl on GPUs.
Rule 2: published dtype = dtype of the forward pass. In bfloat16 the optimizer keeps float32 masters of its own.
Rule 3: a loss or gradient that is not finite changes nothing: the update is left out and reported (`updates_skipped`).
Rule 4: the reference model exists with a `kl_coef` only. It is version 0, read from the model folder, or the one that
   a step began with (schedule.py says which steps): where that may be, the reference is in the checkpoint.

    samples -> updates (whole groups) -> micro-batches, shared out (layout.py) -> rows -> logits / temperature -> loss
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from schemas.settings import Settings
from workers.trainer import loss_figures, losses
from workers.trainer.learners import hf_weights, megatron_cpu, token_logprobs
from workers.trainer.learners.base import Sample, Snapshot
from workers.trainer.learners.hf_config import read_config
from workers.trainer.learners.layout import layout_of, micro_batches, refuse_impossible, shares
from workers.trainer.learners.memory import told_what_to_lower
from workers.trainer.packing import MicroBatch, pack, pad
from workers.trainer.schedule import learning_rate, renews_reference
from workers.transport.weights.manifest import RawTensor

megatron_cpu.install()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from workers.trainer.learners import megatron_optimizer, megatron_world, vocab_parallel  # noqa: E402
from workers.trainer.learners.megatron_export import whole_tensors  # noqa: E402
from workers.trainer.learners.megatron_model import build, transformer_config  # noqa: E402
from workers.trainer.learners.megatron_pieces import Known, Piece, pieces_of  # noqa: E402
from workers.trainer.learners.megatron_snapshot import MegatronSnapshot  # noqa: E402

_SHARDS = "megatron"
_SQUARES_MAX = torch.finfo(torch.float32).max
_REFERENCE = "reference."


class _HalfModel(Float16Module):  # type: ignore[misc]
    """Gives logits as the model made them: the loss takes them to float32 a few rows at a time."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return super().forward(*inputs, fp32_output=False, **named)


class MegatronLearner:
    """AdamW on the policy-gradient loss. All calls from the thread that made it."""

    def __init__(self, settings: Settings, model_folder: Path, place: megatron_world.Place | None = None) -> None:
        """`place` among the ranks of the settings' layout, None if it has one rank. BadInput if the folder is no model
        that can be trained, or not in this layout."""
        self._settings = settings
        self._dtype = getattr(torch, settings.dtype)
        torch.set_num_threads(settings.training.threads)
        layout = layout_of(settings)
        config = read_config(model_folder)
        refuse_impossible(settings, config)
        megatron = transformer_config(config, self._dtype, settings.megatron)
        self._world = megatron_world.join(place, layout, settings.seed)
        self._cut = hf_weights.Cut(self._world.tensor_rank, layout.tensor)
        self._device = self._world.device
        self._model = self._build(config, megatron, model_folder)
        self._reference: Any = None
        if settings.training.kl_coef:
            self._reference = self._build(config, megatron, model_folder).requires_grad_(False)
        wrapped = _HalfModel(megatron, self._model) if megatron.bf16 else self._model
        wrapped.model_type = self._model.model_type
        self._ddp = megatron_optimizer.buffers(megatron, wrapped, settings.megatron)
        self._optimizer = megatron_optimizer.optimizer_of(settings, self._dtype, self._ddp)
        megatron.finalize_model_grads_func = _finish_gradients
        megatron.grad_scale_func = self._optimizer.scale_loss
        self._schedule = get_forward_backward_func()
        self._snapshot: MegatronSnapshot | None = None

    def _build(self, config: Mapping[str, Any], megatron: Any, model_folder: Path) -> Any:
        """The model with the folder's weights, in the published dtype."""
        model: Any = build(config, megatron).to(self._device)
        if megatron.bf16:
            model.bfloat16()
        hf_weights.load(model, hf_weights.read_folder(model_folder), self._cut)
        return model

    # --- the Protocol -------------------------------------------------------------------------

    def train(self, samples: Sequence[Sample], step: int = 0) -> dict[str, float]:
        """`updates_per_step` updates, each on its own whole groups: no sample enters two gradients."""
        rate = learning_rate(step, self._settings)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._refresh_reference(step)
        with told_what_to_lower(samples, self._settings):
            said = self._train(self._updates(samples))
        return _of_step(said) | {"learning_rate": rate}

    def _train(self, updates: Sequence[Sequence[Sample]]) -> list[dict[str, float]]:
        """Figures of every update."""
        training = self._settings.training
        known = [self._known(update, first=not place) for place, update in enumerate(updates)]
        said: list[dict[str, float]] = []
        for update, logprobs in zip(updates, known, strict=True):
            masks = [sample.loss_mask for sample in update]
            weights = losses.token_weights(masks, training.loss_level, self._settings.sampling.max_new_tokens)
            sums, norm = self._update(self._my_pieces(update, weights, logprobs))
            skipped = not math.isfinite(norm)
            figures = loss_figures.figures(sums)
            said.append(figures | {"grad_norm": 0.0 if skipped else norm, "updates_skipped": float(skipped)})
        return said

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self._logprobs_by(self._ddp, samples)

    def probe(self, ids: Sequence[int]) -> list[float]:
        rest = list(ids[1:])
        sample = Sample(list(ids[:1]), rest, [0.0] * len(rest), [True] * len(rest), 1.0, 0.0)
        return self.logprobs([sample])[0]

    def export(self) -> Iterator[RawTensor]:
        """Of all ranks' parts, on rank 0; elsewhere nothing, but it must be gone through too."""
        self._whole_parameters()
        for name, tensor in whole_tensors(self._model, self._dtype, self._world):
            yield hf_weights.raw(name, tensor)

    def snapshot(self, folder: Path) -> Snapshot:
        self._whole_parameters()
        state = self._sharded_state(loading=False)
        state["rng"] = torch.get_rng_state()
        self._snapshot = MegatronSnapshot(state, folder / _SHARDS)
        return self._snapshot

    def restore(self, folder: Path) -> None:
        """A checkpoint of any layout."""
        megatron_optimizer.ready_to_load(self._optimizer)
        state = dist_checkpointing.load(self._sharded_state(loading=True), str(folder / _SHARDS))
        self._model.load_state_dict(state["model"])
        if "reference" in state:
            self._reference.load_state_dict(
                {key.removeprefix(_REFERENCE): one for key, one in state["reference"].items()}
            )
        with torch.no_grad():
            self._optimizer.load_state_dict(state["optimizer"])
        megatron_optimizer.loaded(self._optimizer)
        megatron_optimizer.hold_settings(self._optimizer, self._settings)
        torch.set_rng_state(state["rng"])

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

    @torch.no_grad()
    def _refresh_reference(self, step: int) -> None:
        """At the start of some steps the reference becomes what the model is."""
        if renews_reference(step, self._settings):
            self._whole_parameters()
            if self._snapshot is not None:
                self._snapshot.wait_until_copied()
            for before, now in zip(self._reference.parameters(), self._model.parameters(), strict=True):
                before.copy_(now)

    def _known(self, samples: Sequence[Sample], *, first: bool) -> Known:
        """Before any update of the step. The first update needs no log-probs under the version at its start: its own
        forward pass gives them."""
        training = self._settings.training
        later = training.decoupled and not first
        return Known(
            proximal=self._logprobs_by(self._ddp, samples) if later else None,
            reference=self._logprobs_by(self._reference, samples) if training.kl_coef else None,
        )

    def _update(self, pieces: list[Piece]) -> tuple[dict[str, float], float]:
        """Forward, backward, optimizer step. Joined sums of the loss, and the gradient's norm before clipping."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts = self._run(self._forward_step, self._ddp, pieces, forward_only=False)
        mine = loss_figures.join([{name: float(value) for name, value in part.items()} for part in parts])
        squares = [float(torch.linalg.vector_norm(buffer.grad_data)) ** 2 for buffer in self._ddp.buffers]
        said = self._world.gather([mine if self._world.speaks else {}, math.fsum(squares)])
        sums = loss_figures.join([sums for sums, _ in said])
        if not math.isfinite(sums["loss"]) or not math.fsum(square for _, square in said) < _SQUARES_MAX:
            return sums, math.nan
        if not sums["tokens"]:
            return sums, 0.0  # nothing was counted: AdamW would still move by its momentum
        if self._snapshot is not None:
            self._snapshot.wait_until_copied()
        done, norm, _ = self._optimizer.step()
        assert done, "an update without loss scaling is always taken"
        return sums, float(norm)

    def _run(self, step: Any, model: Any, pieces: list[Piece], **options: Any) -> list[Any]:
        """Megatron's schedule over this rank's pieces; what the last stage gives of each."""
        said: list[Any] = self._schedule(
            forward_step_func=step,
            data_iterator=iter(pieces),
            model=[model],
            num_microbatches=len(pieces),
            seq_length=max(piece.row.ids_S.numel() for piece in pieces),
            micro_batch_size=1,
            **options,
        )
        return said

    def _forward_step(self, pieces: Iterator[Piece], model: Any, *_: Any) -> tuple[torch.Tensor, Any]:
        piece = next(pieces)
        return _forward(model, piece), partial(self._loss, piece)

    def _loss(self, piece: Piece, logits_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """(loss, tokens, sums). Megatron adds the losses up and divides by nothing (`_finish_gradients`)."""
        training = self._settings.training
        logprobs_T, entropy_T = self._logprobs_and_entropy(logits_TV, piece)
        loss, sums = losses.policy_loss(logprobs_T, entropy_T, piece.tokens, training)
        return loss, piece.tokens.mask_T.sum().to(torch.int), sums

    def _logprob_step(self, pieces: Iterator[Piece], model: Any, *_: Any) -> tuple[torch.Tensor, Any]:
        piece = next(pieces)
        return _forward(model, piece), lambda logits_TV, **_: self._logprobs_and_entropy(logits_TV, piece)[0]

    def _logprobs_and_entropy(self, logits_TV: torch.Tensor, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs [T] of the targets, and entropy [T], at the sampling temperature."""
        wanted = bool(self._settings.training.entropy_coef)
        if not wanted and self._world.layout.tensor == 1:
            return token_logprobs.logprobs_and_entropy(logits_TV, piece.row.targets_T, piece.temperature_T)
        scaled_TV = _scaled(logits_TV, piece)
        # before the log-probs, which overwrite scaled_TV
        entropy_T = vocab_parallel.entropy(scaled_TV, self._world.tensor_group, gradient=wanted)
        return _logprobs(scaled_TV, piece), entropy_T

    def _logprobs_by(self, model: Any, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probs [[R] per sample] under a model, at each sample's temperature."""
        weights = [[0.0] * len(sample.response_ids) for sample in samples]  # no loss is wanted
        pieces = self._my_pieces(samples, weights, Known())
        with torch.no_grad():
            rows = self._run(self._logprob_step, model, pieces, forward_only=True, collect_non_loss_data=True)
        mine: list[tuple[int, list[float]]] = []
        for micro, row in zip(self._my_share(samples), rows if self._world.speaks else [], strict=False):
            flat = row.tolist()
            for member in micro.members:
                length = len(samples[member].response_ids)
                mine.append((member, flat[:length]))
                flat = flat[length:]
        found = dict(pair for pairs in self._world.gather(mine) for pair in pairs)
        return [found[member] for member in range(len(samples))]

    # --- rows ---------------------------------------------------------------------------------

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        training = self._settings.training
        lengths = [len(sample.response_ids) for sample in samples]
        prompts = [sample.prompt_ids for sample in samples]
        together = pack if training.packing else pad
        return micro_batches(together, prompts, lengths, training.micro_batch_tokens, self._world.layout.data)

    def _my_share(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """All micro-batches in their order if there is one copy of the model."""
        micros = self._micro_batches(samples)
        return micros if self._world.layout.data == 1 else shares(micros, self._world.layout.data)[self._world.copy]

    def _my_pieces(self, samples: Sequence[Sample], weights: list[list[float]], known: Known) -> list[Piece]:
        """At least one: Megatron's collectives want every rank. A blank one if there is nothing for this rank."""
        micros = self._my_share(samples)
        if micros:
            return pieces_of(micros, samples, weights, known, self._device)
        smallest = min(self._micro_batches(samples), key=lambda micro: micro.tokens)
        return pieces_of([smallest], samples, weights, known, self._device, blank=True)

    # --- checkpoint ---------------------------------------------------------------------------

    def _whole_parameters(self) -> None:
        """With `overlap_param_gather` other ranks' parts come with the next forward pass: have them now."""
        if self._settings.megatron.get("overlap_param_gather"):
            self._ddp.disable_forward_pre_hook(param_sync=True)
            self._ddp.enable_forward_pre_hook()

    def _sharded_state(self, *, loading: bool) -> dict[str, Any]:
        layout = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }
        model = self._model.sharded_state_dict(metadata=layout)
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=loading, metadata=layout)
        state = {"model": model, "optimizer": optimizer}
        if self._settings.training.reference_changes:
            state["reference"] = self._reference.sharded_state_dict(prefix=_REFERENCE, metadata=layout)
        return state


def _forward(model: Any, piece: Piece) -> torch.Tensor:
    row = piece.row
    made: torch.Tensor = model(row.ids_S, row.positions_S, row.shape, row.predictors_T)
    return made


def _scaled(logits_TV: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Logits [T, V] in float32 at the sampling temperature."""
    scaled_TV = logits_TV.float()
    if bool((piece.temperature_T != 1.0).any()):
        scaled_TV = scaled_TV / piece.temperature_T[:, None]
    return scaled_TV


def _logprobs(scaled_TV: torch.Tensor, piece: Piece) -> torch.Tensor:
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
