"""A learner without a model: real messages and files, no large tensor. A step takes as long as a table says.

Its weights are one small tensor that every step changes, by a function of what was trained alone: a step that is
trained again gives the same fingerprint.
"""

import hashlib
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.settings import Settings
from workers.trainer.learners.base import Sample, Snapshot
from workers.trainer.schedule import learning_rate
from workers.transport.weights.manifest import RawTensor

STEP_S = 0.01
STEP_S_PER_TOKEN = 0.000002
_STATE = "state.bin"
_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Snapshot:
    file: Path
    state: bytes

    def write(self) -> None:
        self.file.write_bytes(self.state)

    def finish(self) -> None:
        """All is written."""


class PacedLearner:
    def __init__(self, settings: Settings, *, pace: float = 1.0) -> None:
        """`pace` multiplies the table's seconds."""
        self._settings = settings
        self._pace = pace
        self._state = hashlib.sha256(f"seed/{settings.seed}".encode()).digest()[:_BYTES]
        self._dtype, self._item_bytes = ("BF16", 2) if settings.dtype == "bfloat16" else ("F32", 4)

    def train(self, samples: Sequence[Sample], step: int = 0) -> dict[str, float]:
        tokens = sum(len(sample.prompt_ids) + len(sample.response_ids) for sample in samples)
        threading.Event().wait(self._pace * (STEP_S + STEP_S_PER_TOKEN * tokens))
        digest = hashlib.sha256(self._state)
        for sample in samples:
            digest.update(struct.pack(f"<{len(sample.response_ids)}id", *sample.response_ids, sample.advantage))
        self._state = digest.digest()[:_BYTES]
        counted = sum(sum(sample.loss_mask) for sample in samples)
        zeros = ("loss", "grad_norm", "clip_low_share", "clip_high_share", "mismatch_kl", "entropy", "nonfinite")
        ones = ("ratio_mean", "ratio_max", "ess", "updates")
        said = dict.fromkeys(zeros, 0.0) | dict.fromkeys(ones, 1.0) | {"tokens": float(counted), "updates_skipped": 0.0}
        return said | {"learning_rate": learning_rate(step, self._settings)}

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Those that were sampled: engine and trainer agree."""
        return [list(sample.logprobs) for sample in samples]

    def probe(self, ids: Sequence[int]) -> list[float]:
        """-1 .. 0, a function of the state and the id."""
        return [-self._state[place % _BYTES] / 256.0 for place in range(1, len(ids))]

    def export(self) -> Iterator[RawTensor]:
        yield RawTensor("paced.weight", self._dtype, (_BYTES // self._item_bytes,), self._state)

    def snapshot(self, folder: Path) -> Snapshot:
        return _Snapshot(folder / _STATE, self._state)

    def restore(self, folder: Path) -> None:
        self._state = (folder / _STATE).read_bytes()

    def close(self) -> None:
        """It holds nothing."""
