"""The summary, from an archive written by hand: two steps, a move, a duplicate, a void, a lost engine."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pipelines import pictures, report
from pipelines.cli import app
from pipelines.config_file import write_resolved
from pipelines.tally import Tally
from schemas import messages as m
from schemas.settings import Settings
from schemas.summary import Summary
from tests.unit.pipeline_parts import some_settings
from tests.unit.report_run import SECOND, journal, text_file, write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "r")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return some_settings(tmp_path, groups_per_batch=1)


def test_every_group_and_token_is_counted_once(run_dir: Path, settings: Settings) -> None:
    made = report.summarise(settings, run_dir, [])
    assert made.steps == 2
    assert made.groups.model_dump() == {"opened": 4, "trained": 2, "voided": {"failed": 1}, "live": 1}
    assert made.trajectories.model_dump() == {"generated": 4, "trained": 4, "duplicates_ignored": 1}
    assert (made.tokens_generated, made.tokens_trained) == (8, 8)
    assert made.lag.model_dump() == {"histogram": {0: 2, 1: 2}, "max": 1}
    assert made.tokens_per_second == round(8 / 10, 2)  # from the first issue at 3 s to version 2 at 13 s
    assert made.versions.model_dump() == {"published": 3, "hosted_max": 1}
    assert (made.weights.fingerprint_first, made.weights.fingerprint_last) == ("f0", "f2")
    assert (made.faults.engine_lost, made.faults.restarts) == (1, 1)
    moves = made.migrations
    assert (moves.count, moves.kv_reused, moves.tokens_recomputed, moves.bytes) == (3, 1, 42, 90)
    assert moves.reprefilled == {"no_handle": 1, "checksum": 1}


def test_rewards_are_of_the_trained_rows_and_held_out_ones_apart(run_dir: Path, settings: Settings) -> None:
    reward = report.summarise(settings, run_dir, []).reward
    assert (reward.first, reward.last) == (0.5, 1.0)
    assert (reward.heldout_before, reward.heldout_after) == (0.5, 1.0)
    assert (reward.unseen_before, reward.unseen_after) == (1.0, 1.0)


def test_time_shares_add_up_all_incarnations_and_counters_that_began_again(run_dir: Path, settings: Settings) -> None:
    share = report.summarise(settings, run_dir, []).time_share
    assert (share.decode, share.idle, share.prefill, share.reprefill) == (0.5, 0.5, 0.0, 0.25)
    assert share.blocked_by_oldest == round(2.4 / 12, 4)
    assert share.decide == round(0.6 / 12, 4)


def test_the_files_are_written_and_read_back(run_dir: Path, settings: Settings) -> None:
    made = report.write(settings, run_dir)
    assert Summary.model_validate_json((run_dir / "summary.json").read_text()) == made
    metrics = pq.read_table(run_dir / "metrics.parquet").to_pylist()
    assert {"source": "trainer", "step": 0, "name": "loss", "value": 0.25}.items() <= metrics[-1].items()
    text = report.as_text(made)
    assert "held-out       50.0 % before, 100.0 % after" in text
    assert "lag 0: 2, lag 1: 2" in text


def test_a_run_that_never_started_has_a_summary_too(tmp_path: Path, settings: Settings) -> None:
    made = report.summarise(settings, tmp_path, [])
    assert (made.steps, made.tokens_per_second, made.reward.heldout_before) == (0, 0.0, None)
    assert "nothing trained" in report.as_text(made)


def test_a_snapshot_in_mid_run_says_what_is_live_and_who_hosts_what(settings: Settings) -> None:
    tally = Tally()
    for record in journal()[:5]:
        tally.take(json.loads(record.model_dump_json()))
    tally.take_point({"source": "orchestrator", "values": {"groups_live": 3, "groups_complete": 1}})
    now = tally.snapshot(settings, 2)
    assert (now.step, now.version, now.reward) == (1, 1, 0.5)
    assert (now.queues.groups_live, now.engines[0].version, now.tokens_per_second) == (3, 0, 50.0)
    assert pictures.line(now).startswith("r: step 1/2, version 1, reward 0.500, 50 tokens/s, live groups 3, engines v0")
    assert "| live groups | 3 of 2, 1 complete |" in pictures.markdown(now)


def test_the_line_of_progress_says_how_many_groups_were_voided_and_why_the_last_was(settings: Settings) -> None:
    tally = Tally()
    why = "sample 3: not scored: KeyError: " + "x" * 500
    for record in journal():
        said = json.loads(record.model_dump_json().replace('"detail":""', f'"detail":"{why}"'))
        tally.take(said)
    line = pictures.line(tally.snapshot(settings, 2))
    assert "voided 1 groups (the last failed: sample 3: not scored: KeyError: xxx" in line
    assert line.endswith("...)")
    assert "voided" not in pictures.line(Tally().snapshot(settings, 2))


def test_a_summary_without_held_out_rows_does_not_speak_of_them(tmp_path: Path, settings: Settings) -> None:
    run = tmp_path / "none"
    run.mkdir()
    assert "held-out" not in report.as_text(report.summarise(settings, run, []))


def test_a_curve_of_many_steps_stays_small() -> None:
    svg = pictures.curve(tuple(n / 5000 for n in range(5000)), "reward")
    assert len(svg) < 5000
    assert svg.startswith("<svg")


def test_a_tap_of_an_ended_run_reads_the_archive(run_dir: Path, settings: Settings) -> None:
    write_resolved(settings, run_dir)
    said = CliRunner().invoke(app, ["tap", str(run_dir), "trajectories"]).stdout.splitlines()
    assert len(said) == 5
    assert "group 11 sample 0 version 0 stop 2 tokens reward 1.000 engines 0 -> 1" in said
    points = CliRunner().invoke(app, ["tap", str(run_dir), "metrics", "--json"]).stdout.splitlines()
    assert json.loads(points[-1])["value"]["values"] == {"loss": 0.25}


def test_the_night_between_stop_and_resume_is_not_the_runs_time(tmp_path: Path, settings: Settings) -> None:
    night = 8 * 3600
    at = [0, 10, 20, night, night + 10]
    ticks = [
        m.JournalRecord(run="r", sequence=n, inputs={}, events=(m.Tick(now=seconds * SECOND),), effects=())
        for n, seconds in enumerate(at)
    ]
    text_file(tmp_path, "journal", list(ticks))
    assert report.summarise(settings, tmp_path, []).seconds == 30.0
