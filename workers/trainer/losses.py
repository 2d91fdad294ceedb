"""The policy-gradient loss on a trajectory's own behaviour log-probs: pure functions of tensors.

    loss = sum_T weight * -gain                    gain: clipped_gain | cispo_gain, of a ratio
         + kl_coef * sum_T weight * k3             to the reference model
         - entropy_coef * sum_T weight * entropy

    ratio  = pi / anchor, of a token, or of its sequence (GSPO)
    anchor = what sampled; decoupled: the version at the start of the step
    gain   is weighted by anchor / what sampled, truncated or masked, if `tis_cap` says so (decoupled only)

By default this is PPO's clipped ratio with a group-relative advantage (GRPO, arXiv 2402.03300, equation 3), the clip
asymmetric (DAPO, arXiv 2503.14476, section 3.1). All log-probs are at the sampling temperature.

Rule 1: denominators are global. They are in `token_weights`, made once per optimizer update from all of its samples, so
   the sum of the losses of micro-batches does not depend on how the samples were split. A sample is never split.
Rule 2: a token whose loss mask is false counts in no denominator and no figure.
Rule 3: a log-ratio is clamped to +-LOG_RATIO_MAX before exp. One that is not finite is left out, and counted.

Shapes: T = response tokens of a micro-batch, samples one after the other; V = vocabulary; [] = scalar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from schemas.settings import Training

LOG_RATIO_MAX = 20.0
K3_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of the T tokens before the forward pass: log-probs as sampled, advantage, weight in the loss (from
    `token_weights`), whether the token counts (bool), its sample (int64, 0 1 2 ... in the order of the tokens) and the
    lag of that (int64).

    proximal_T: log-probs under the version at the start of the step; None: the weights now are that version.
    reference_T: log-probs under the reference model; None without a KL.
    """

    behaviour_T: torch.Tensor
    advantages_T: torch.Tensor
    weights_T: torch.Tensor
    mask_T: torch.Tensor
    sample_T: torch.Tensor
    lag_T: torch.Tensor
    proximal_T: torch.Tensor | None = None
    reference_T: torch.Tensor | None = None


def token_weights(loss_masks: Sequence[Sequence[bool]], level: str, tokens_max: int) -> list[list[float]]:
    """Weight of every response token in the loss of an update: [[R] per sample]; all 0 if all are masked.

    `token`: 1 / counted tokens of the update (DAPO, arXiv 2503.14476, equation 8).
    `sequence`: the mean over samples of the mean over their counted tokens (GRPO, arXiv 2402.03300, equation 3).
    `constant`: 1 / (samples x tokens_max): no length weighs on another (Dr. GRPO, arXiv 2503.20783, section 3.2).
    Samples are those with a counted token; tokens_max is the limit of a response.
    """
    counts = [sum(mask) for mask in loss_masks]
    samples = sum(1 for count in counts if count)
    if level == "token":
        total = sum(counts)
        shares = [1.0 / total if count else 0.0 for count in counts]
    elif level == "sequence":
        shares = [1.0 / (samples * count) if count else 0.0 for count in counts]
    else:
        assert level == "constant", level
        shares = [1.0 / (samples * tokens_max) if count else 0.0 for count in counts]
    return [[share if counted else 0.0 for counted in mask] for share, mask in zip(shares, loss_masks, strict=True)]


def policy_loss(
    logprobs_T: torch.Tensor, entropy_T: torch.Tensor, tokens: Tokens, objective: Training
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's part of the update's loss [], and sums [] for `loss_figures.figures` (float64, no gradient).

    logprobs_T carries the gradient, with an entropy_coef entropy_T too.
    """
    now_T = logprobs_T.detach()
    anchor_T = tokens.behaviour_T
    if objective.decoupled:
        anchor_T = now_T if tokens.proximal_T is None else tokens.proximal_T
    used_T = tokens.mask_T
    for known_T in (anchor_T, tokens.behaviour_T, tokens.reference_T):
        if known_T is not None:
            used_T = used_T & torch.isfinite(now_T - known_T)
    log_ratio_T = _bounded(logprobs_T - anchor_T, used_T)
    if objective.ratio == "sequence":
        log_ratio_T = _per_sample(log_ratio_T, used_T, tokens.sample_T, mean=True)
    ratio_T = log_ratio_T.exp()
    gain = cispo_gain if objective.ratio == "cispo" else clipped_gain
    gain_T = gain(ratio_T, logprobs_T, tokens.advantages_T, objective)
    columns: dict[str, torch.Tensor] = {}
    if objective.tis_cap:
        log_weight_T = _bounded(anchor_T - tokens.behaviour_T, used_T)
        tis_T, cut_T = importance_weights(log_weight_T, used_T, tokens.sample_T, objective)
        gain_T = tis_T * gain_T
        columns |= {"tis": tis_T, "tis_cut": cut_T}
    loss = -_total(tokens.weights_T * gain_T, used_T)
    if tokens.reference_T is not None:
        kl_T = k3(_bounded(tokens.reference_T - logprobs_T, used_T))
        loss = loss + objective.kl_coef * _total(tokens.weights_T * kl_T, used_T)
        columns["reference_kl"] = kl_T.detach()
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * _total(tokens.weights_T * entropy_T, used_T)
    with torch.no_grad():
        ratio_T = log_ratio_T.double().exp()
        columns |= {"ratio": ratio_T} | _clipped(ratio_T, tokens.advantages_T, objective)
        columns |= _drift(_bounded(now_T - tokens.behaviour_T, used_T).double())
        columns["entropy"] = torch.where(torch.isfinite(entropy_T), entropy_T, 0.0)
        sums = _sums_per_lag(columns, used_T, tokens)
        sums["loss"] = loss.detach().double()
    return loss, sums


def clipped_gain(
    ratio_T: torch.Tensor, _logprobs_T: torch.Tensor, advantages_T: torch.Tensor, objective: Training
) -> torch.Tensor:
    """[T] min(r A, clip(r, 1 - low, 1 + high) A): PPO, arXiv 1707.06347, equation 7, asymmetric as in DAPO.

    With clip_dual = c it is at least c A where A < 0 (Ye et al., dual-clip PPO, arXiv 1912.09729).
    """
    clipped_T = ratio_T.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    gain_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if not objective.clip_dual:
        return gain_T
    return torch.where(advantages_T < 0, torch.maximum(gain_T, objective.clip_dual * advantages_T), gain_T)


def cispo_gain(
    ratio_T: torch.Tensor, logprobs_T: torch.Tensor, advantages_T: torch.Tensor, objective: Training
) -> torch.Tensor:
    """[T] clip(r, 1 - low, 1 + high) A log pi, no gradient through the clipped ratio: no token loses its gradient.

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    weight_T = ratio_T.detach().clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    return weight_T * advantages_T * logprobs_T


@torch.no_grad()
def importance_weights(
    log_weight_T: torch.Tensor, used_T: torch.Tensor, sample_T: torch.Tensor, objective: Training
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [T] of every token, without a gradient, and [T] whether it was cut.

    log_weight_T: log of (version at the start of the step / what sampled), 0 where not used. Its level: the token; the
    product of its sequence; the geometric mean of its sequence. Truncated to tis_cap (Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025), or masked: 0 unless within 1 / tis_cap .. tis_cap
    (IcePop, arXiv 2510.18855). What is masked stays in the denominators.
    """
    if objective.tis_level != "token":
        mean = objective.tis_level == "geometric"
        log_weight_T = _per_sample(log_weight_T, used_T, sample_T, mean=mean).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    weight_T, cap = log_weight_T.exp(), objective.tis_cap
    if objective.tis_mask:
        cut_T = (weight_T > cap) | (weight_T < 1.0 / cap)
        return torch.where(cut_T, 0.0, weight_T), cut_T
    return weight_T.clamp(max=cap), weight_T > cap


def k3(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """[T] exp(x) - x - 1 >= 0 of x = log (reference / pi), at most K3_MAX, where its gradient ends.

    Schulman, "Approximating KL divergence", 2020; GRPO, arXiv 2402.03300, equation 4.
    """
    return (log_ratio_T.expm1() - log_ratio_T).clamp(max=K3_MAX)


def _clipped(ratio_T: torch.Tensor, advantages_T: torch.Tensor, objective: Training) -> dict[str, torch.Tensor]:
    """[T] 1 where the clip removed the gradient (cispo: where it cut the ratio)."""
    low_T, high_T = ratio_T < 1.0 - objective.clip_low, ratio_T > 1.0 + objective.clip_high
    if objective.ratio == "cispo":
        return {"clip_low": low_T, "clip_high": high_T}
    said = {"clip_low": low_T & (advantages_T < 0), "clip_high": high_T & (advantages_T > 0)}
    if objective.clip_dual:
        said["clip_dual"] = (ratio_T > objective.clip_dual) & (advantages_T < 0)
    return said


def _drift(log_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """[T] of log (weights now / what sampled) of each token: for effective sample size and mismatch."""
    ratio_T = log_T.exp()
    return {"drift": ratio_T, "drift_squared": ratio_T.square(), "k3": ratio_T - 1.0 - log_T}


def _sums_per_lag(columns: Mapping[str, torch.Tensor], used_T: torch.Tensor, tokens: Tokens) -> dict[str, torch.Tensor]:
    """Sums [] of the columns, float64; those of one lag as `lag_<lag>_...`."""
    sums = _sums(columns, used_T, tokens.mask_T)
    for lag in tokens.lag_T[tokens.mask_T].unique().tolist():
        of_lag_T = tokens.lag_T == lag
        part = _sums(columns, used_T & of_lag_T, tokens.mask_T & of_lag_T)
        sums |= {f"lag_{lag}_{name}": value for name, value in part.items()}
    return sums


def _sums(columns: Mapping[str, torch.Tensor], used_T: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    sums = {name: values_T[used_T].double().sum() for name, values_T in columns.items()}
    ratio = columns["ratio"][used_T]
    sums["ratio_max"] = ratio.max() if ratio.numel() else ratio.new_zeros(())
    return sums | {"finite": used_T.double().sum(), "tokens": mask_T.double().sum()}


def _bounded(log_ratio_T: torch.Tensor, used_T: torch.Tensor) -> torch.Tensor:
    """Rule 3: 0 where not used."""
    safe_T = torch.where(used_T, log_ratio_T, torch.zeros_like(log_ratio_T))
    return safe_T.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def _per_sample(values_T: torch.Tensor, used_T: torch.Tensor, sample_T: torch.Tensor, *, mean: bool) -> torch.Tensor:
    """[T] the sum (or mean) of the sample's used values, at each of its tokens; values are 0 where not used.

    The mean of log-ratios is GSPO's (Zheng et al., arXiv 2507.18071, equation 7).
    """
    if not len(sample_T):
        return values_T
    zeros = values_T.new_zeros(int(sample_T[-1]) + 1)
    totals = zeros.index_add(0, sample_T, values_T)
    if mean:
        totals = totals / zeros.index_add(0, sample_T, used_T.to(values_T.dtype)).clamp(min=1.0)
    return totals[sample_T]


def _total(values_T: torch.Tensor, used_T: torch.Tensor) -> torch.Tensor:
    return torch.where(used_T, values_T, torch.zeros_like(values_T)).sum()


@torch.no_grad()
def entropy_of(logits_TV: torch.Tensor, rows_max: int = 256) -> torch.Tensor:
    """Entropy [T] in nats of softmax(logits_TV), a few rows at a time so that no second copy of [T, V] is held."""
    parts = []
    for rows in logits_TV.split(rows_max):
        log_norm = rows.logsumexp(dim=-1)
        probs = (rows - log_norm[:, None]).exp_()
        parts.append(log_norm - (probs * rows).sum(dim=-1))
    return torch.cat(parts) if parts else logits_TV.new_zeros(0)


def entropy_with_gradient(logits_TV: torch.Tensor) -> torch.Tensor:
    """As `entropy_of`, with its gradient: holds two copies of [T, V] until the backward pass."""
    log_probs_TV = logits_TV.log_softmax(dim=-1)
    return -(log_probs_TV.exp() * log_probs_TV).sum(dim=-1)
