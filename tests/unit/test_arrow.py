"""Whether a token row is valid: every rule of `schemas/arrow.py`, and a row that keeps them all."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from schemas.arrow import COMPLETION, NULLABLE, TRAJECTORY, invalid_reason, to_bytes, to_rows, to_table
from tests.golden.records import ROW

UNSCORED = {"reward": None, "outcome": None, "scored_at": None}


def _row(**changes: Any) -> dict[str, Any]:
    return {**ROW, **changes}


def _reason(scored: bool = True, **changes: Any) -> str | None:
    return invalid_reason(_row(**changes), scored=scored)


def _stay(**changes: Any) -> dict[str, Any]:
    return {**ROW["engine_path"][0], **changes}  # type: ignore[index]


def test_a_good_row_is_valid_scored_and_unscored() -> None:
    assert _reason() is None
    assert _reason(scored=False, **UNSCORED) is None


def test_a_row_that_has_been_on_the_log_is_still_valid() -> None:
    (row,) = to_rows(to_table(to_bytes([ROW])))
    assert invalid_reason(row, scored=True) is None


@pytest.mark.parametrize("name", [name for name in TRAJECTORY.names if name not in NULLABLE])
def test_null_where_nothing_may_be_null(name: str) -> None:
    assert _reason(**{name: None}) == f"{name} is null"


def test_missing_column_counts_as_null() -> None:
    row = _row()
    del row["metadata"]
    assert invalid_reason(row, scored=True) == "metadata is null"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"purpose": "test"}, "purpose is 'test'"),
        ({"finish_reason": "abort"}, "finish_reason is 'abort'"),
        ({"response_ids": [], "logprobs": [], "loss_mask": [], "engine_path": []}, "response_ids is empty"),
        ({"logprobs": [-0.5]}, "logprobs has 1 entries, response_ids 2"),
        ({"loss_mask": [True] * 3}, "loss_mask has 3 entries, response_ids 2"),
        ({"kept_logmass": [0.0]}, "kept_logmass has 1 entries, response_ids 2"),
        ({"top_p": 0.8}, "top_p or top_k truncate, but kept_logmass is null"),
        ({"top_k": 5}, "top_p or top_k truncate, but kept_logmass is null"),
        ({"logprobs": [-0.5, math.nan]}, "logprobs[1] is nan"),
        ({"logprobs": [-math.inf, -0.5]}, "logprobs[0] is -inf"),
        ({"logprobs": [0.1, -0.5]}, "logprobs[0] is 0.1"),
        ({"loss_mask": [True, False]}, "logprobs[1] is -0.25 where loss_mask is false"),
        ({"logprobs": [-0.5, math.inf]}, "logprobs[1] is inf"),
        ({"kept_logmass": [-0.5, math.nan]}, "kept_logmass[1] is nan"),
        ({"kept_logmass": [0.1, -0.5]}, "kept_logmass[0] is 0.1"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"response_ids": [4, -1]}, "response_ids has -1, ids are 0 or more"),
        ({"prompt_ids": [-7, 3]}, "prompt_ids has -7, ids are 0 or more"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": math.nan}, "top_p is nan, top_k 0"),
        ({"top_p": 0.0, "kept_logmass": [0.0, 0.0]}, "top_p is 0.0, top_k 0"),
        ({"engine_path": [_stay(tokens=1)]}, "engine_path's tokens do not add up to response_ids"),
        ({"engine_path": []}, "engine_path's tokens do not add up to response_ids"),
        (
            {"engine_path": [_stay(tokens=1), _stay(tokens=1, version=13)]},
            "engine_path has version 13, the row 12",
        ),
        ({"engine_path": [_stay(fingerprint="")]}, "engine_path has an empty fingerprint"),
        ({"started_at": 0}, "queued_at is after started_at"),
        ({"finished_at": 0}, "started_at is after finished_at"),
        ({"scored_at": 0}, "finished_at is after scored_at"),
        ({"reward": None}, "needs reward and outcome, or a score_error, and not both"),
        ({"outcome": None}, "needs reward and outcome, or a score_error, and not both"),
        ({"score_error": "timeout"}, "needs reward and outcome, or a score_error, and not both"),
        ({"reward": math.inf}, "reward inf, outcome 1.0: not finite"),
        ({"outcome": math.nan}, "reward 1.0, outcome nan: not finite"),
    ],
)
def test_row_that_breaks_one_rule_is_told_which(changes: dict[str, Any], said: str) -> None:
    assert _reason(**changes) == said


def test_an_id_that_the_model_does_not_know_is_told() -> None:
    ids = {"prompt_ids": [0, 9], "response_ids": [3, 9]}
    assert invalid_reason(_row(**ids), scored=True, vocabulary=10) is None
    for name in ids:
        reason = invalid_reason(_row(**ids | {name: [3, 10]}), scored=True, vocabulary=10)
        assert reason == f"{name} has 10, ids are 0 .. 9"


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids", "logprobs", "kept_logmass", "loss_mask", "engine_path"])
def test_null_inside_a_list_is_told(name: str) -> None:
    assert _reason(**{name: [None, None]}) == f"{name} has a null in it"


def test_nulls_of_a_careless_writer_are_read_so_that_they_can_be_refused() -> None:
    loose = pa.schema([pa.field(f.name, f.type) for f in TRAJECTORY])
    (row,) = to_rows(to_table(to_bytes([_row(answer=None, attachments=None)], loose)))
    assert invalid_reason(row, scored=True) == "answer is null"


def test_column_of_another_type_is_a_value_error() -> None:
    fields = [pa.field("answer", pa.list_(pa.int32())) if f.name == "answer" else f for f in TRAJECTORY]
    with pytest.raises(ValueError, match="a column of another type"):
        to_table(to_bytes([_row(answer=[1])], pa.schema(fields)))


def test_trajectory_stitched_from_three_versions_is_refused() -> None:
    """B03: (abort, abort, length) under versions 2, 4, 6 is not one trajectory."""
    path = [_stay(tokens=1, version=2), _stay(tokens=1, version=4), _stay(tokens=0, version=6)]
    assert _reason(version=2, engine_path=path) == "engine_path has version 4, the row 2"
    assert invalid_reason(_row(version=2, engine_path=path), scored=True, mixed=True) is None, "but in mode partial"
    fell = invalid_reason(_row(version=2, engine_path=path[::-1]), scored=True, mixed=True)
    assert fell == "engine_path has versions [6, 4, 2], the row 2: they never fall"


def test_truncated_row_that_accounts_for_the_kept_mass_is_valid() -> None:
    """D02."""
    assert _reason(top_p=0.8, kept_logmass=[-0.1, -0.2]) is None


def test_masked_tokens_have_log_prob_zero() -> None:
    assert _reason(loss_mask=[True, False], logprobs=[-0.5, 0.0]) is None


def test_grader_that_failed_leaves_an_error_and_no_verdict() -> None:
    assert _reason(reward=None, outcome=None, score_error="killed after 10 s") is None


def test_unscored_row_may_not_carry_a_verdict() -> None:
    assert _reason(scored=False, scored_at=None) == "scored before it was judged"


def test_negative_log_prob_of_float_noise_above_zero_is_allowed() -> None:
    assert _reason(logprobs=[5e-7, -0.5]) is None


def test_record_holds_rows_of_one_version() -> None:
    with pytest.raises(AssertionError, match="one version"):
        to_bytes([_row(), _row(version=13)])


def test_unscored_rows_are_written_with_a_null_time_of_scoring() -> None:
    (row,) = to_rows(to_table(to_bytes([_row(**UNSCORED)], COMPLETION)))
    assert row["scored_at"] is None
    assert row["reward"] is None


def test_float_values_of_numpy_are_written_too() -> None:
    row = _row(logprobs=np.array([-0.5, -0.25], np.float32), response_ids=np.array([4, 5], np.int32))
    assert to_rows(to_table(to_bytes([row]))) == [ROW]


def test_bytes_that_are_no_arrow_stream_are_a_value_error() -> None:
    for value in (b"", b"{}", to_bytes([ROW])[:50]):
        with pytest.raises(ValueError, match="not an Arrow stream"):
            to_table(value)


def test_stream_without_a_column_names_it() -> None:
    table = pa.table({"run": ["a"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match="columns missing: task, purpose, version"):
        to_table(sink.getvalue().to_pybytes())
