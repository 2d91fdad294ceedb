"""Megatron learners for tests, and the same computation written down straight with transformers and torch."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.models import write_tiny
from schemas.settings import Settings
from workers.trainer.learners.base import Learner, Sample
from workers.trainer.learners.hf_config import LLAMA3_ROPE
from workers.trainer.learners.megatron_learner import MegatronLearner

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0} | LLAMA3_ROPE
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-tied": {"family": "llama"},
    "llama-untied": {"family": "llama", "tied": False},
    "llama-no-groups": {"family": "llama", "num_attention_heads": 4, "num_key_value_heads": 4},
    "llama3-rope": {"family": "llama", "tied": False, "rope_parameters": LLAMA3},
    "mistral": {"family": "mistral", "tied": False},
    "qwen2-tied": {"family": "qwen2"},
    "qwen2.5-untied": {"family": "qwen2", "tied": False, "hidden_size": 128} | FOUR_HEADS,
    "qwen3-tied": {"family": "qwen3"},
    "qwen3-untied": {"family": "qwen3", "tied": False} | FOUR_HEADS,
}
"""Arguments of `write_tiny`: biases, norms of queries and keys, tied heads, and 1, 2 or 4 queries per key."""


def write_family(folder: Path, name: str, **changes: Any) -> None:
    write_tiny(folder, **{"seed": 3, **FAMILIES[name], **changes})


def hf_model(folder: Path, dtype: str = "float32") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def learner_of(
    model: Path, *, dtype: str = "float32", steps: int = 1, sampling: dict[str, Any] | None = None, **training: Any
) -> MegatronLearner:
    tree = {
        "model": str(model),
        "dtype": dtype,
        "steps": steps,
        "group_size": 4,
        "sampling": sampling or {},
        "training": {"learning_rate": 1e-3} | training,
        "dataset": [{"path": "rows.jsonl"}],
    }
    return MegatronLearner(Settings.model_validate(tree), model)


def save(learner: Learner, folder: Path) -> None:
    """A checkpoint at once; every rank calls it."""
    folder.mkdir(exist_ok=True)
    snapshot = learner.snapshot(folder)
    snapshot.write()
    snapshot.finish()


def samples_of(seed: int, groups: int = 3, group_size: int = 4, temperature: float = 0.7) -> list[Sample]:
    """Random prompts and responses of uneven length, groups whole, a token masked here and there."""
    chance = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt = [chance.randrange(500) for _ in range(chance.randrange(1, 12))]
        for _ in range(group_size):
            response = [chance.randrange(500) for _ in range(chance.randrange(1, 14))]
            mask = [chance.random() > 0.1 for _ in response]
            behaviour = [-6.3 + chance.gauss(0, 0.4) if counts else 0.0 for counts in mask]
            samples.append(Sample(prompt, response, behaviour, mask, temperature, chance.gauss(0, 1), group))
    return samples


def straight_logprobs(model: Any, sample: Sample) -> Any:
    """Log-probs [R] of one sample alone, by transformers, with a gradient."""
    import torch

    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].float() / sample.temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


def straight_step(
    model: Any, samples: Sequence[Sample], *, level: str, clip: tuple[float, float], learning_rate: float
) -> tuple[float, float]:
    """One AdamW step of a transformers model, sample by sample, no packing: (loss, gradient norm before clipping)."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    total = sum(sum(sample.loss_mask) for sample in samples)
    counted = sum(any(sample.loss_mask) for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        mask = torch.tensor(sample.loss_mask)
        ratio = (straight_logprobs(model, sample) - torch.tensor(sample.logprobs)).exp()
        inside = ratio.clamp(1 - clip[0], 1 + clip[1])
        gain = torch.minimum(ratio * sample.advantage, inside * sample.advantage)[mask].sum()
        share = total if level == "token" else counted * max(1, int(mask.sum()))
        loss = loss - gain / share
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), float(norm)


def samples_from(plain: Sequence[Any]) -> list[Sample]:
    """Samples from their fields in order (JSON)."""
    return [Sample(*one) for one in plain]
