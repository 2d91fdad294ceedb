"""Entropy of logits whose words are cut over tensor-parallel ranks; with one rank, `losses.py`'s own functions.

Shapes: T = response tokens, V = words of this rank; W = words of all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist

from workers.trainer import losses

ROWS_MAX = 256
"""Rows of which a second copy is held at once, where no gradient is wanted."""


def entropy(logits_TV: torch.Tensor, group: Any, *, gradient: bool) -> torch.Tensor:
    """Entropy [T] in nats of softmax over all W words, the same on every rank of `group`. Collective.

    H = log Z - sum_W p x, with Z and the sums joined over the ranks. dH / dx = p (sum_W p x - x): a rank's own words
    have their whole gradient without another exchange.
    """
    if group.size() == 1:
        return losses.entropy_with_gradient(logits_TV) if gradient else losses.entropy_of(logits_TV)
    if gradient:
        found: torch.Tensor = _Entropy.apply(logits_TV, group)
        return found
    with torch.no_grad():
        parts = [_parts(rows, group)[0] for rows in logits_TV.split(ROWS_MAX)]
    return torch.cat(parts) if parts else logits_TV.new_zeros(0)


def _parts(logits_TV: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entropy [T], p [T, V], sum_W p x [T]."""
    peak_T = logits_TV.amax(dim=-1)
    dist.all_reduce(peak_T, op=dist.ReduceOp.MAX, group=group)
    probs_TV = (logits_TV - peak_T[:, None]).exp_()
    norm_T = probs_TV.sum(dim=-1)
    dist.all_reduce(norm_T, group=group)
    probs_TV.div_(norm_T[:, None])
    mean_T = (probs_TV * logits_TV).sum(dim=-1)
    dist.all_reduce(mean_T, group=group)
    return peak_T + norm_T.log() - mean_T, probs_TV, mean_T


class _Entropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits_TV: torch.Tensor, group: Any) -> torch.Tensor:
        entropy_T, probs_TV, mean_T = _parts(logits_TV, group)
        # Kept whole, not as logits: the cross entropy that comes after it overwrites those.
        ctx.save_for_backward(probs_TV.mul_(mean_T[:, None] - logits_TV))
        return entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope_TV,) = ctx.saved_tensors
        return gradients[0][:, None] * slope_TV, None
