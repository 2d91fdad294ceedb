"""What a step says when memory runs out: how much was asked for, and which setting to lower."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from schemas.settings import Settings
from workers.runtime.errors import BadInput
from workers.trainer.learners.base import Sample

_SAID_ON_A_CPU = "can't allocate memory"


@contextmanager
def told_what_to_lower(samples: Sequence[Sample], settings: Settings) -> Iterator[None]:
    """BadInput instead of an allocation that failed. (A machine that promises more memory than it has kills the process
    instead; the supervisor then says the like.)"""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one too
        if not isinstance(error, torch.OutOfMemoryError) and _SAID_ON_A_CPU not in str(error):
            raise
        longest = max(len(sample.prompt_ids) + len(sample.response_ids) for sample in samples)
        raise BadInput(f"memory ran out in training: {advice(longest, settings)} ({error})") from error


def advice(longest: int, settings: Settings) -> str:
    """What to lower when one forward pass is too large; `longest` sample of the batch, tokens. A sample is never
    split."""
    budget = settings.training.micro_batch_tokens
    if longest >= budget:
        return (
            f"one sample has {longest} tokens, training.micro_batch_tokens = {budget} cannot split it: lower "
            "sampling.max_new_tokens or engines.tokens_per_request_max, or take a smaller model"
        )
    return f"lower training.micro_batch_tokens = {budget} (at least {longest}, the longest sample, is needed)"
