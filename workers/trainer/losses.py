"""The policy-gradient loss on a trajectory's own behaviour log-probs: pure functions of tensors.

Objective: PPO's clipped ratio with a group-relative advantage (GRPO, arXiv 2402.03300, equation 3), the clip asymmetric
(DAPO, arXiv 2503.14476, section 3.1). The ratio is per token, pi / behaviour, both at the sampling temperature.

Rule 1: denominators are global. They are in `token_weights`, made once per optimizer update from all of its samples, so
   the sum of the losses of micro-batches does not depend on how the samples were split.
Rule 2: a token whose loss mask is false counts in no denominator and no figure.
Rule 3: a log-ratio is clamped to +-LOG_RATIO_MAX before exp. One that is not finite is left out, and counted.

Shapes: T = response tokens of a micro-batch, samples one after the other; V = vocabulary; [] = scalar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

LOG_RATIO_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Clip:
    """The ratio is clipped to 1 - low .. 1 + high."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of the T tokens before the forward pass: log-probs as sampled, advantage, weight in the loss (from
    `token_weights`), and whether the token counts (bool)."""

    behaviour_T: torch.Tensor
    advantages_T: torch.Tensor
    weights_T: torch.Tensor
    mask_T: torch.Tensor


def token_weights(loss_masks: Sequence[Sequence[bool]], level: str) -> list[list[float]]:
    """Weight of every response token in the loss of an update: [[R] per sample], summing to 1 (or all 0 if all masked).

    `token`: 1 / counted tokens of the update. `sequence`: the mean over samples of the mean over their counted tokens.
    """
    counts = [sum(mask) for mask in loss_masks]
    if level == "token":
        total = sum(counts)
        shares = [1.0 / total if count else 0.0 for count in counts]
    else:
        assert level == "sequence", level
        samples = sum(1 for count in counts if count)
        shares = [1.0 / (samples * count) if count else 0.0 for count in counts]
    return [[share if counted else 0.0 for counted in mask] for share, mask in zip(shares, loss_masks, strict=True)]


def policy_loss(
    logprobs_T: torch.Tensor, entropy_T: torch.Tensor, tokens: Tokens, clip: Clip
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the update's loss [], and sums [] for `figures` (float64, no gradient).

    logprobs_T carries the gradient. loss = sum_T weight * -min(ratio * A, clip(ratio) * A).
    """
    log_ratio_T = logprobs_T - tokens.behaviour_T
    finite_T = torch.isfinite(log_ratio_T) & tokens.mask_T
    safe_T = torch.where(finite_T, log_ratio_T, torch.zeros_like(log_ratio_T)).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio_T = safe_T.exp()
    clipped_T = ratio_T.clamp(1.0 - clip.low, 1.0 + clip.high)
    gain_T = torch.minimum(ratio_T * tokens.advantages_T, clipped_T * tokens.advantages_T)
    zero = torch.zeros((), dtype=gain_T.dtype, device=gain_T.device)
    loss = -torch.where(finite_T, tokens.weights_T * gain_T, zero).sum()
    with torch.no_grad():
        sums = _sums(safe_T[finite_T].double(), tokens.advantages_T[finite_T], clip)
        entropy = entropy_T[finite_T].double()
        sums["entropy"] = torch.where(torch.isfinite(entropy), entropy, 0.0).sum()
        sums["tokens"] = tokens.mask_T.double().sum()
        sums["loss"] = loss.double()
    return loss, sums


def _sums(log_ratio: torch.Tensor, advantage: torch.Tensor, clip: Clip) -> dict[str, torch.Tensor]:
    """Of the tokens that entered the loss. `*_max` is joined by max, everything else by addition."""
    ratio = log_ratio.exp()
    low = (ratio < 1.0 - clip.low) & (advantage < 0)
    high = (ratio > 1.0 + clip.high) & (advantage > 0)
    return {
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "ratio_max": ratio.max() if ratio.numel() else ratio.new_zeros(()),
        "clip_low": low.double().sum(),
        "clip_high": high.double().sum(),
        "k3": (ratio - 1.0 - log_ratio).sum(),
        "finite": torch.full_like(log_ratio, 1.0).sum(),
    }


def join(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of several micro-batches as one."""
    joined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            before = joined.get(name, 0.0)
            joined[name] = max(before, value) if name.endswith("_max") else before + value
    return joined


def figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Figures of an update from its joined sums. All finite; an update without a counted token has `tokens` 0.

    `mismatch_kl` is the mean k3 estimate of KL(behaviour, trainer), `ess` the effective sample size as a share (1 = on
    policy), the clip shares count tokens whose gradient the clip removed, `nonfinite` tokens with no usable log-ratio.
    """
    used = sums.get("finite", 0.0)
    tokens = sums.get("tokens", 0.0)
    per_token = {
        "ratio_mean": "ratio",
        "clip_low_share": "clip_low",
        "clip_high_share": "clip_high",
        "mismatch_kl": "k3",
        "entropy": "entropy",
    }
    said = {figure: sums[name] / used if used else 0.0 for figure, name in per_token.items()}
    said["loss"] = sums.get("loss", 0.0)
    said["ratio_max"] = sums.get("ratio_max", 0.0)
    said["ess"] = sums["ratio"] ** 2 / (used * sums["ratio_squared"]) if used else 0.0
    said["tokens"] = tokens
    said["nonfinite"] = tokens - used
    return said


@torch.no_grad()
def entropy_of(logits_TV: torch.Tensor, rows_max: int = 256) -> torch.Tensor:
    """Entropy [T] in nats of softmax(logits_TV), a few rows at a time so that no second copy of [T, V] is held."""
    parts = []
    for rows in logits_TV.split(rows_max):
        log_norm = rows.logsumexp(dim=-1)
        probs = (rows - log_norm[:, None]).exp_()
        parts.append(log_norm - (probs * rows).sum(dim=-1))
    return torch.cat(parts) if parts else logits_TV.new_zeros(0)
