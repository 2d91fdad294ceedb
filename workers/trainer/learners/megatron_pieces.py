"""The micro-batches of an update as tensors: what the model sees, and what the loss needs of each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from workers.trainer import losses
from workers.trainer.learners.base import Sample
from workers.trainer.learners.megatron_model import Row, row_of
from workers.trainer.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class Piece:
    """A micro-batch with all that its loss needs; T as in losses.py."""

    row: Row
    temperature_T: torch.Tensor
    tokens: losses.Tokens


@dataclass(frozen=True, slots=True)
class Known:
    """Log-probs [[R] per sample] of an update that are made before it: see losses.Tokens."""

    proximal: list[list[float]] | None = None
    reference: list[list[float]] | None = None


def pieces_of(
    micros: Sequence[MicroBatch],
    samples: Sequence[Sample],
    weights: list[list[float]],
    known: Known,
    device: torch.device,
    *,
    blank: bool = False,
) -> list[Piece]:
    """`weights` [[R] per sample] from `losses.token_weights`. A blank piece counts no token: its loss and gradient
    are 0."""
    prompts = [sample.prompt_ids for sample in samples]
    responses = [sample.response_ids for sample in samples]
    number = partial(torch.tensor, dtype=torch.float32, device=device)
    whole = partial(torch.tensor, dtype=torch.int64, device=device)
    pieces = []
    for micro in micros:
        held = [samples[member] for member in micro.members]
        proximal, reference = (
            None if values is None else number([value for member in micro.members for value in values[member]])
            for values in (known.proximal, known.reference)
        )
        tokens = losses.Tokens(
            behaviour_T=number([value for one in held for value in one.logprobs]),
            advantages_T=number([one.advantage for one in held for _ in one.response_ids]),
            weights_T=number([share for member in micro.members for share in weights[member]]),
            mask_T=torch.tensor([counts and not blank for one in held for counts in one.loss_mask], device=device),
            sample_T=whole([place for place, one in enumerate(held) for _ in one.response_ids]),
            lag_T=whole([one.lag for one in held for _ in one.response_ids]),
            proximal_T=proximal,
            reference_T=reference,
        )
        temperature_T = number([one.temperature for one in held for _ in one.response_ids])
        pieces.append(Piece(row_of(micro, prompts, responses).to(device), temperature_T, tokens))
    return pieces
