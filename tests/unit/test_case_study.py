"""The case study's tables, by hand: selection looks like staleness until groups of one difficulty are compared."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.case_study import Group, as_text, case_study, tables, trained_groups
from pipelines.cli import app
from tests.unit.small_run import write_run


def _group(lag: int, correct: int, tokens: int) -> Group:
    outcomes = tuple(float(place < correct) for place in range(4))
    return Group(lag, (tokens,) * 4, outcomes, outcomes)


def test_a_lower_pass_rate_of_stale_groups_vanishes_within_a_difficulty() -> None:
    fresh = [_group(0, 3, 10), _group(0, 3, 20), _group(0, 1, 90)]
    stale = [_group(1, 3, 30), _group(1, 1, 90), _group(1, 1, 110)]
    found = tables([*fresh, *stale])
    assert found["by_lag"] == [
        {"lag": 0, "groups": 3, "pass": 0.5833, "tokens_median": 20, "tokens_mean": 40.0},
        {"lag": 1, "groups": 3, "pass": 0.4167, "tokens_median": 90, "tokens_mean": 76.7},
    ]
    assert found["by_difficulty"] == [
        {"correct": "to a quarter", "groups": 3, "reward_variance": 0.1875, "pass_lag_0": 0.25, "pass_lag_1": 0.25},
        {
            "correct": "to three quarters",
            "groups": 3,
            "reward_variance": 0.1875,
            "pass_lag_0": 0.75,
            "pass_lag_1": 0.75,
        },
    ]


@pytest.mark.parametrize(
    ("correct", "stratum"), [(0, "none"), (1, "to a quarter"), (2, "to a half"), (3, "to three quarters"), (4, "all")]
)
def test_each_group_is_in_the_stratum_of_its_correct_share(correct: int, stratum: str) -> None:
    assert _group(0, correct, 1).stratum == stratum


def test_more_than_three_quarters_is_a_stratum_of_its_own() -> None:
    assert Group(0, (1,) * 5, (1.0,) * 5, (1.0, 1.0, 1.0, 1.0, 0.0)).stratum == "above"


def test_a_run_is_reported_from_its_archive(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert [group.lag for group in trained_groups(tmp_path, [])] == [0, 0, 1, 0, 1]
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["summary"]["run"] == "r"
    assert [row["groups"] for row in said["case_study"]["by_lag"]] == [3, 2]
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "trained groups by lag:" in done.stdout
    assert as_text(case_study(tmp_path, [])) in done.stdout


def test_a_run_that_is_not_there_is_exit_code_2(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 2
