"""One training step from its batch and rows, as the trainer does it and a replay does it again."""

from collections.abc import Sequence
from typing import Any

from schemas.messages import BatchRecord
from schemas.settings import Settings
from workers.trainer import batches
from workers.trainer.learners.base import Learner
from workers.trainer.samples import samples_of


def train(
    learner: Learner,
    record: BatchRecord,
    rows: Sequence[dict[str, Any]],
    settings: Settings,
    vocabulary: int | None = None,
) -> dict[str, float]:
    """The learner's figures of step `record.step`. AssertionError, before the gradient, if it may not train these.
    `vocabulary`: see `schemas.arrow.invalid_reason`."""
    batches.check(record, rows, settings, vocabulary)
    return learner.train(samples_of(rows, record.step, settings), record.step)
