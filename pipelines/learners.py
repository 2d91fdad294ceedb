"""The learner that a run's settings name, as its trainer and whoever trains its steps again make it."""

from pathlib import Path

from schemas.settings import Settings
from workers.trainer.learners.base import Learner


def learner_of(settings: Settings) -> Learner:
    """On the initial weights. BadInput if they are none that can be trained."""
    if settings.training.kind == "megatron":
        from workers.trainer.learners.ranked_learner import megatron_learner_of

        return megatron_learner_of(settings, Path(settings.model))
    from workers.trainer.learners.paced_learner import PacedLearner

    return PacedLearner(settings)
