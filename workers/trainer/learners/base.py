"""A learner as the trainer's service sees it. Implementations: `megatron_learner.py`, `paced_learner.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.transport.weights.manifest import RawTensor


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory as the learner needs it; `advantage` belongs to all its tokens. Samples of one `group` follow one
    another.

    prompt_ids [P], response_ids [R], logprobs [R] (behaviour, at `temperature`), loss_mask [R]. lag = step - version.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    loss_mask: Sequence[bool]
    temperature: float
    advantage: float
    group: int = 0
    lag: int = 0


class Snapshot(Protocol):
    """The state of a learner at one moment, on its way to the disk."""

    def write(self) -> None:
        """In any thread, once. The learner's next change waits only until the state is copied. OSError (disk)."""

    def finish(self) -> None:
        """What is left to do after `write`, in the learner's own thread; short. OSError."""


class Learner(Protocol):
    """A model under training."""

    def train(self, samples: Sequence[Sample], step: int = 0) -> dict[str, float]:
        """One step (`updates_per_step` updates) on exactly these samples; figures of the step (`loss_figures.py`, and
        grad_norm, learning_rate, updates, updates_skipped). `step` is its number: the learning rate's schedule."""

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probs [R] of each sample's response under the weights now, at its temperature."""

    def probe(self, ids: Sequence[int]) -> list[float]:
        """Log-prob [len(ids) - 1] of each id given those before it, temperature 1, under the weights as published."""

    def export(self) -> Iterator[RawTensor]:
        """All tensors by their Hugging Face names, in the published dtype, on the host."""

    def snapshot(self, folder: Path) -> Snapshot:
        """Weights, optimizer and RNG as they are now, for files in `folder`; of one learner one at a time. OSError."""

    def restore(self, folder: Path) -> None:
        """Take up what a snapshot wrote."""

    def close(self) -> None: ...
