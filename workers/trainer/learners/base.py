"""A learner as the trainer's service sees it. Implementations: `megatron_learner.py`, `paced_learner.py`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.transport.weights.manifest import RawTensor


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory as the learner needs it; `advantage` belongs to all its tokens. Samples of one `group` follow one
    another.

    prompt_ids [P], response_ids [R], logprobs [R] (behaviour, at `temperature`), loss_mask [R].
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    loss_mask: Sequence[bool]
    temperature: float
    advantage: float
    group: int = 0


class Learner(Protocol):
    """A model under training."""

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One step (`updates_per_step` updates) on exactly these samples; figures of the step (see SPEC section 6:
        loss, grad_norm, ratio_mean, ratio_max, clip_low_share, clip_high_share, mismatch_kl, entropy, tokens)."""

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probs [R] of each sample's response under the weights now, at its temperature."""

    def probe(self, ids: Sequence[int]) -> list[float]:
        """Log-prob [len(ids) - 1] of each id given those before it, temperature 1, under the weights as published."""

    def export(self) -> Iterator[RawTensor]:
        """All tensors by their Hugging Face names, in the published dtype, on the host."""

    def save(self, folder: Path, extra: Mapping[str, object]) -> None:
        """Weights, optimizer, RNG and `extra` (JSON) into an empty folder."""

    def restore(self, folder: Path) -> dict[str, object]:
        """Take up what `save` wrote; returns `extra`."""

    def close(self) -> None: ...
