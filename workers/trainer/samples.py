"""From the rows of a batch to the samples of a learner: advantages, and what a limit or a truncation changes. Pure.

Rule 1: `reward` and `outcome` of a row stay as they are: a penalty enters the advantage alone.
Rule 2: log-probs of a sample are of the whole distribution. Where top-p or top-k truncated, a row has those of what was
   kept, and `kept_logmass`: log p(kept) + log p(token | kept) = log p(token). The trainer's own are of the whole too.
"""

from collections.abc import Sequence

from schemas.arrow import Row
from schemas.settings import Settings
from workers.trainer.advantages import advantages_of
from workers.trainer.learners.base import Sample


def samples_of(rows: Sequence[Row], step: int, settings: Settings) -> list[Sample]:
    """Samples of scored rows that step `step` trains, in their order."""
    training = settings.training
    rewards = [row["reward"] for row in rows]
    if tokens := training.overlong_penalty_tokens:
        limit = settings.sampling.max_new_tokens
        rewards = [row["reward"] + overlong_penalty(row, limit, tokens) for row in rows]
    advantages = advantages_of(training.advantage, [row["group"] for row in rows], rewards)
    return [
        Sample(
            prompt_ids=row["prompt_ids"],
            response_ids=row["response_ids"],
            logprobs=whole_logprobs(row),
            loss_mask=overlong_masked(row) if training.overlong_mask else row["loss_mask"],
            temperature=row["temperature"],
            advantage=advantage,
            group=row["group"],
            lag=step - row["version"],
        )
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def overlong_penalty(row: Row, limit: int, tokens: int) -> float:
    """0 .. -1, to be added to the reward: falls over the last `tokens` tokens before `limit` (tokens of a response).

    A response that was cut has -1, whatever its own limit. DAPO's soft overlong punishment, arXiv 2503.14476,
    equation 13.
    """
    if row["finish_reason"] == "length":
        return -1.0
    over = len(row["response_ids"]) - (limit - tokens)
    return -min(1.0, max(0.0, over / tokens))


def overlong_masked(row: Row) -> Sequence[bool]:
    """The loss mask [R], all false where the response was cut. Its reward still counts among those of its group.

    DAPO's overlong filtering, arXiv 2503.14476, section 3.4.
    """
    mask: Sequence[bool] = row["loss_mask"]
    return [False] * len(mask) if row["finish_reason"] == "length" else mask


def whole_logprobs(row: Row) -> Sequence[float]:
    """Log-probs [R] of the response's tokens under the distribution before truncation; 0 where masked. Rule 2."""
    logprobs: Sequence[float] = row["logprobs"]
    if row["kept_logmass"] is None:
        return logprobs
    parts = zip(logprobs, row["kept_logmass"], row["loss_mask"], strict=True)
    return [logprob + kept if counts else 0.0 for logprob, kept, counts in parts]
