"""From rows to samples: limits of length, truncated sampling, lag (cases D02, E02)."""

import math
from typing import Any

import pytest

from schemas.settings import Settings
from tests.unit.trainer_world import row
from workers.trainer.losses import token_weights
from workers.trainer.samples import overlong_penalty, samples_of


def settings_of(**training: Any) -> Settings:
    tree = {"model": "m", "steps": 9, "group_size": 2, "dataset": [{"path": "rows.jsonl"}]}
    return Settings.model_validate(tree | {"training": training, "sampling": {"max_new_tokens": 20}})


def long_row(index: int, tokens: int, finish: str = "stop", **changes: Any) -> dict[str, Any]:
    columns = {"response_ids": [1] * tokens, "logprobs": [-1.0] * tokens, "loss_mask": [True] * tokens}
    return row(0, index, 0, finish_reason=finish, **columns, **changes)


def test_samples_have_the_rows_tokens_their_advantage_and_their_lag() -> None:
    rows = [row(4, 0, 1), row(4, 1, 1), row(5, 0, 3), row(5, 1, 3)]
    samples = samples_of(rows, 3, settings_of())
    assert [one.response_ids for one in samples] == [one["response_ids"] for one in rows]
    assert [one.advantage for one in samples] == pytest.approx([-1.0, 1.0, -1.0, 1.0])
    assert [(one.group, one.lag) for one in samples] == [(4, 2), (4, 2), (5, 0), (5, 0)]
    assert [one.logprobs for one in samples] == [one["logprobs"] for one in rows]


def test_log_probs_of_truncated_sampling_are_those_of_the_whole_distribution() -> None:
    """D02: probabilities (0.5, 0.3, 0.2), top_p 0.8: (0.625, 0.375) were sampled from; the trainer sees 0.5 and 0.3."""
    kept = [math.log(0.8)] * 3
    sampled = [math.log(0.625), math.log(0.375), 0.0]
    columns = {"logprobs": sampled, "kept_logmass": kept, "loss_mask": [True, True, False], "top_p": 0.8}
    (one,) = samples_of([row(0, 0, 0, **columns)], 0, settings_of())
    assert one.logprobs == pytest.approx([math.log(0.5), math.log(0.3), 0.0])


def test_a_response_that_was_cut_and_is_masked_counts_in_no_denominator() -> None:
    """E02: two completions of 10 tokens, one truncated and masked: divide by 10."""
    rows = [long_row(0, 10), long_row(1, 10, "length")]
    kept = samples_of(rows, 0, settings_of())
    assert [one.loss_mask for one in kept] == [[True] * 10] * 2
    masked = samples_of(rows, 0, settings_of(overlong_mask=True))
    assert [one.loss_mask for one in masked] == [[True] * 10, [False] * 10]
    assert [one.advantage for one in masked] == [one.advantage for one in kept]
    assert token_weights([one.loss_mask for one in masked], "token", 20) == [[0.1] * 10, [0.0] * 10]


@pytest.mark.parametrize(
    ("tokens", "finish", "expected"),
    [
        (1, "stop", 0.0),
        (12, "stop", 0.0),
        (14, "stop", -0.25),
        (19, "stop", -0.875),
        (30, "stop", -1.0),
        (5, "length", -1.0),
    ],
)
def test_the_soft_penalty_falls_over_the_last_tokens_before_the_limit(
    tokens: int, finish: str, expected: float
) -> None:
    """A limit of 20, the last 8 tokens of it; who was cut at a lower limit of its own has all of it."""
    assert overlong_penalty(long_row(0, tokens, finish), limit=20, tokens=8) == expected


def test_the_soft_penalty_enters_the_advantage_and_leaves_the_row_alone() -> None:
    rows = [long_row(0, 3, reward=1.0), long_row(1, 16, reward=1.0)]
    assert [one.advantage for one in samples_of(rows, 0, settings_of(advantage="dr_grpo"))] == [0.0, 0.0]
    samples = samples_of(rows, 0, settings_of(advantage="dr_grpo", overlong_penalty_tokens=8))
    assert [one.advantage for one in samples] == [0.25, -0.25]
    assert [one["reward"] for one in rows] == [1.0, 1.0]
