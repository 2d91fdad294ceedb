"""What changes from step to step: the learning rate, the reference. Pure: a step trained again has the same."""

import math

from schemas.settings import Settings


def learning_rate(step: int, settings: Settings) -> float:
    """Of step `step` (from 0): rises linearly over `warmup_steps`, the last of which has all of it; then stays, or
    falls (linear, cosine) so that step `steps`, which is never trained, would have 0."""
    training = settings.training
    full, warmup = training.learning_rate, training.warmup_steps
    if step < warmup:
        return full * (step + 1) / warmup
    if training.schedule == "constant":
        return full
    left = 1.0 - (step - warmup) / (settings.steps - warmup)
    return full * (left if training.schedule == "linear" else (1.0 - math.cos(math.pi * left)) / 2)


def renews_reference(step: int, settings: Settings) -> bool:
    """The version that step `step` begins with (it has the step's number) becomes the reference of the KL."""
    training = settings.training
    if training.kl_refresh_steps:
        return step > 0 and step % training.kl_refresh_steps == 0
    return step > 0 and step == training.kl_version
