"""Two small layers of the model as one autograd step each: fewer passes over memory and fewer tensors kept for the
backward pass than the same formulas written with torch's own operations. Megatron's fused ones exist on a GPU only.

Shapes: S = tokens, D = hidden size, F = inner size of the MLP.
"""

from typing import Any

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """x / rms(x) * weight, in float32 inside. Zhang and Sennrich, arXiv 1910.07467, equation 4."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        assert not config.layernorm_zero_centered_gamma
        assert not config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = _Normed.apply(x, self.weight, self.eps)
        return normed


class GatedSilu:
    """silu(gate) * up of [gate, up]. Shazeer, arXiv 2002.05202, equation 6. No module: it has no state to save."""

    def __init__(self, config: Any) -> None:
        assert config.activation_func_clamp_value is None
        assert config.glu_linear_offset == 0.0

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = _Gated.apply(both)
        return gated


class _Normed(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D] -> the same shape and dtype."""
        wide = x.float()
        scale = wide.pow(2).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        grad = gradients[0].to(torch.float32, copy=True)
        product = (grad * normed).flatten(0, -2)
        along = product.mv(weight.float()).div_(x.size(-1)).view_as(scale)
        grad.mul_(weight.float()).sub_(normed.mul_(along)).mul_(scale)
        return grad.to(x.dtype), product.sum(dim=0).to(weight.dtype), None


class _Gated(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        """[..., 2F] -> [..., F]."""
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        grad = torch.empty_like(both)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(gradients[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=grad_gate)
        return grad
