"""Log-probs and entropy of the response tokens out of logits, a few rows at a time.

What the loss needs of [T, V] logits is two numbers a row; its gradient is (one-hot - softmax) times a number a row. So
no float32 copy of the logits is made: forward and backward pass take a few rows to float32, where they stay in the
processor's cache, and the logits are kept as the model gave them. All arithmetic is float32.

Shapes: T = response tokens, V = words (all of them: one rank holds the head).
"""

from typing import Any

import torch

ROWS = 32
"""Of 49,152 words: 6 MB in float32."""


def logprobs_and_entropy(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob [T] of each target, entropy [T] in nats) of softmax(logits_TV / temperature_T), float32.

    The gradient is that of the log-probs; the entropy has none. The backward pass overwrites logits_TV, once.
    """
    warm = bool((temperature_T != 1.0).any())
    found: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(
        logits_TV, targets_T, temperature_T if warm else None
    )
    return found


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_T = torch.empty(len(targets_T), dtype=torch.float32, device=logits_TV.device)
        entropy_T = torch.empty_like(logprobs_T)
        for part in _parts(len(targets_T)):
            log_probs = _scaled(logits_TV, temperature_T, part).log_softmax(dim=-1)
            logprobs_T[part] = log_probs.gather(1, targets_T[part, None]).squeeze(1)
            entropy_T[part] = -log_probs.exp().mul_(log_probs).sum(dim=-1)
        ctx.save_for_backward(logits_TV, targets_T, temperature_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_TV, targets_T, temperature_T = ctx.saved_tensors
        gradient_T = gradients[0]
        grad_TV = logits_TV.detach()
        for part in _parts(len(targets_T)):
            upstream = gradient_T[part] if temperature_T is None else gradient_T[part] / temperature_T[part]
            rows = _scaled(logits_TV, temperature_T, part).softmax(dim=-1).mul_(-upstream[:, None])
            rows.scatter_add_(1, targets_T[part, None], upstream[:, None])
            grad_TV[part] = rows
        return grad_TV, None, None


def _parts(rows: int) -> list[slice]:
    return [slice(start, start + ROWS) for start in range(0, rows, ROWS)]


def _scaled(logits_TV: torch.Tensor, temperature_T: torch.Tensor | None, part: slice) -> torch.Tensor:
    rows = logits_TV[part].float()
    return rows if temperature_T is None else rows / temperature_T[part, None]
