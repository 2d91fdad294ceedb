"""The loop that one would write without this project: a transformers model, torch's AdamW, our loss, nothing else.

It is meant to be a good one: the fastest attention of those that transformers has here, logits of the response only,
one padded batch for each forward pass, float32 masters for a bfloat16 model, the optimizer's fused pass over memory.

Shapes: B = samples of a batch, S = tokens of the longest, R = response tokens of the longest, T = all response tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from schemas.settings import Settings
from workers.trainer import loss_figures, losses
from workers.trainer.learners.base import Sample

ROWS = 32
"""Of the log-probs whose entropy is made at once: they stay in the cache."""


class PlainLoop:
    """`attention` as transformers names it. All samples of a call make one batch: they fit."""

    def __init__(self, settings: Settings, model_folder: Path, attention: str) -> None:
        self._settings = settings
        dtype = getattr(torch, settings.dtype)
        loaded = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype, attn_implementation=attention)
        self._model: Any = loaded.train()
        self._parameters = list(self._model.parameters())
        masters = dtype == torch.bfloat16
        self._masters = [p.detach().float().requires_grad_() for p in self._parameters] if masters else self._parameters
        training = settings.training
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            weight_decay=training.weight_decay,
            fused=True,
        )

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One update; `loss`, `grad_norm` and the loss's other figures."""
        training = self._settings.training
        masks = [sample.loss_mask for sample in samples]
        weights = losses.token_weights(masks, training.loss_level, self._settings.sampling.max_new_tokens)
        logprobs_T, entropy_T = self._logprobs(samples)
        loss, sums = losses.policy_loss(logprobs_T, entropy_T, _tokens(samples, weights), training)
        loss.backward()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                master.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, training.clip_grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            if self._masters is not self._parameters:
                torch._foreach_copy_(self._parameters, self._masters)
        said = loss_figures.figures({name: float(value) for name, value in sums.items()})
        return said | {"grad_norm": float(norm)}

    def _logprobs(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs [T] of the responses, and the entropy [T] at their tokens, without a gradient."""
        rows = [[*sample.prompt_ids, *sample.response_ids] for sample in samples]
        longest = max(map(len, rows))
        ids_BS = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        ragged = any(len(row) < longest for row in rows)
        sees_BS = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]) if ragged else None
        first = min(len(sample.prompt_ids) for sample in samples) - 1
        kept = longest - first
        logits_BRV = self._model(ids_BS, attention_mask=sees_BS, use_cache=False, logits_to_keep=kept).logits
        places = [(len(one.prompt_ids) - 1 - first, len(one.response_ids)) for one in samples]
        if ragged or any(start for start, _ in places):
            logits_TV = torch.cat(
                [logits_BRV[b, start : start + count] for b, (start, count) in enumerate(places)]
            ).float()
        else:
            logits_TV = logits_BRV[:, :-1].float().flatten(0, 1)
        temperature_T = torch.tensor([one.temperature for one in samples for _ in one.response_ids])
        if bool((temperature_T != 1.0).any()):
            logits_TV = logits_TV / temperature_T[:, None]
        targets_T = torch.tensor([token for one in samples for token in one.response_ids])
        log_probs_TV = logits_TV.log_softmax(dim=-1)
        logprobs_T = log_probs_TV.gather(1, targets_T[:, None]).squeeze(1)
        with torch.no_grad():
            parts = [-rows.exp().mul_(rows).sum(dim=-1) for rows in log_probs_TV.split(ROWS)]
        return logprobs_T, torch.cat(parts)


def _tokens(samples: Sequence[Sample], weights: Sequence[Sequence[float]]) -> losses.Tokens:
    def each(name: str) -> torch.Tensor:
        return torch.tensor([getattr(one, name) for one in samples for _ in one.response_ids])

    return losses.Tokens(
        behaviour_T=torch.tensor([value for one in samples for value in one.logprobs]),
        advantages_T=each("advantage"),
        weights_T=torch.tensor([share for one in weights for share in one]),
        mask_T=torch.tensor([counts for one in samples for counts in one.loss_mask]),
        sample_T=torch.tensor([place for place, one in enumerate(samples) for _ in one.response_ids]),
        lag_T=each("lag"),
    )
