"""What the tap `evaluate` says on `tables`: scored training samples counted so far, a record for each changed cell.

A record replaces the one before it with the same key (its `id`), so that whoever reads the topic has the tables.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from schemas.records import Message

OPEN = "open"
"""Difficulty of a group that is not trained and of which samples are missing."""
STRATA = ("none", "to a quarter", "to a half", "to three quarters", "above", "all")
"""Difficulty of a group: the share of its judged samples that are correct (outcome >= 0.5)."""


def stratum(correct: int, judged: int) -> str:
    """Of STRATA; `judged` is at least 1."""
    if correct in (0, judged):
        return STRATA[-1] if correct else STRATA[0]
    return STRATA[1 + min(3, -(-4 * correct // judged) - 1)]


class Cell(Message):
    """Samples of one version, task, difficulty and lag (None: not trained so far). `judged` of them have a reward, with
    the mean `reward`; `tokens` are those of all their responses, `cut` responses ended at their limit."""

    kind: Literal["cell"] = "cell"
    run: str
    version: int
    task: str
    difficulty: str
    lag: int | None
    samples: int
    judged: int
    reward: float | None
    tokens: int
    cut: int


class Learned(Message):
    """What the gradient made of the samples of one version at one lag, as the trainer said: counted tokens, shares of
    them that the clip took out, mean k3 estimate of KL(what sampled, weights at the gradient)."""

    kind: Literal["learned"] = "learned"
    run: str
    version: int
    lag: int
    tokens: int
    clip_low_share: float
    clip_high_share: float
    mismatch_kl: float


Table = Annotated[Cell | Learned, Field(discriminator="kind")]
TABLES: TypeAdapter[Table] = TypeAdapter(Table)
