"""`dora simulate`: runs by hand, bounds that hold, what it prints, what it refuses."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.simulate.compare import candidates, compare, figures, in_mode
from pipelines.simulate.cost import CostModel, Split, Work
from pipelines.simulate.deployment import Deployment, changed
from pipelines.simulate.lengths import Lengths, Lognormal
from pipelines.simulate.page import of_modes
from pipelines.simulate.presets import NAMES, preset
from pipelines.simulate.record import Tape
from pipelines.simulate.runs import Job, run
from schemas.settings import Settings
from tests.unit.pipeline_parts import a_config

COST = CostModel(
    t0_s=1.0, t1_s=0.5, prefill_tokens_per_s=2.0, load_s=3.0, publish_s=1.0, train_s=5.0, score_s=0.0, poll_s=0.25
)
TEN = Lognormal(10.0, 0.0)
SAID = ("--set", "cost.t0_s=0.02", "--set", "cost.t1_s=0.001", "--set", "cost.train_s=3")
LONG = ("--set", "work.median=3", "--set", "work.sigma=1.0")


def serially(jobs: Sequence[Job]) -> list[Tape]:
    return [run(job) for job in jobs]


def _deployment(
    *,
    mode: str = "dora",
    staleness: int = 2,
    engines: int = 1,
    seats: int = 2,
    groups: int = 1,
    lengths: Lengths = TEN,
    cost: CostModel = COST,
    steps: int = 1000,
    measured: int = 4,
) -> Deployment:
    settings = Settings.model_validate(
        {
            "name": "small",
            "model": "simulated",
            "mode": mode,
            "steps": steps,
            "group_size": 2,
            "groups_per_batch": groups,
            "staleness_max": staleness,
            "sampling": {"max_new_tokens": 100},
            "engines": {"count": engines, "seats": seats, "tokens_per_request_max": 200}
            | {"timeout_s": 1e6, "request_timeout_s": 1e6},
            "dataset": [{"path": "rows.jsonl"}],
        }
    )
    return Deployment("small", settings, cost, Work(lengths, 4, 1 << 20), None, 1, 2, measured)


def test_a_synchronous_step_takes_what_its_parts_take() -> None:
    """Version heard 0.25, load 3, heard 0.25, prefill 4 / 2, 10 tokens of 2 requests at 2 s, heard 0.25, train 5, out
    1."""
    case = _deployment(mode="sync")
    tape = run(Job(case, Split(1), 0))
    steps = [step.at for step in tape.steps]
    period = 0.25 + 3 + 0.25 + 2 + 20 + 0.25 + 5 + 1
    assert [after - before for before, after in pairwise(steps)] == pytest.approx([period] * 5)
    found = figures(case, Split(1), serially)
    assert found.step_minutes == pytest.approx(period / 60, abs=1e-3)
    assert found.tokens_per_second == pytest.approx(20 / period, abs=0.05)
    assert found.rollout_only_share == pytest.approx(1 - 5 / period, abs=1e-3)
    assert found.idle_share == pytest.approx(1 - 25 / period, abs=1e-3)
    assert found.lag == {"0": 8}
    assert found.work_bound_minutes == pytest.approx(20 / 60, abs=1e-3)


def test_with_the_trainer_as_the_bottleneck_a_step_is_a_step_of_the_trainer() -> None:
    case = _deployment(engines=4, cost=COST.model_copy(update={"train_s": 200.0}))
    found = figures(case, Split(4), serially)
    assert found.step_minutes == pytest.approx((200 + 1 + 0.25) / 60, rel=0.01)
    assert found.rollout_only_share < 0.01


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_step_is_faster_than_its_work_bound_and_no_lag_is_above_k(staleness: int) -> None:
    lengths = Lognormal(20.0, 1.0)
    case = _deployment(engines=3, seats=4, groups=6, staleness=staleness, lengths=lengths, measured=12)
    found = figures(case, Split(3), serially)
    assert found.step_minutes >= found.work_bound_minutes * 0.95
    assert max(map(int, found.lag)) <= staleness
    assert sum(found.lag.values()) == 12 * 6 * 2


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    case = _deployment(engines=2, seats=4, groups=4, lengths=Lognormal(20.0, 1.0))
    ats = [[step.at for step in run(Job(case, Split(2), seed)).steps] for seed in (5, 5, 6)]
    assert ats[0] == ats[1] != ats[2]


def test_engines_that_fail_and_responses_that_fail_cost_time_and_the_run_goes_on() -> None:
    lengths = Lognormal(20.0, 1.0)
    well = _deployment(engines=3, seats=4, groups=6, lengths=lengths, measured=8)
    ill = changed(well, {"cost.engine_mtbf_s": 300.0, "cost.engine_restart_s": 30.0, "cost.failure_share": 0.05})
    assert figures(ill, Split(3), serially).step_minutes > figures(well, Split(3), serially).step_minutes


def test_a_run_that_ends_is_simulated_to_its_end() -> None:
    case = _deployment(engines=2, seats=4, groups=2, steps=4, measured=2)
    assert len(run(Job(case, Split(2), 0)).steps) == 4


@pytest.mark.parametrize("name", NAMES)
def test_splits_that_are_tried_lie_around_the_best_work_bound(name: str) -> None:
    tried = list(candidates(in_mode(preset(name), "dora")))
    assert tried == list(range(tried[0], tried[-1] + 1))
    assert all(0.1 < rollout / (preset(name).engines_total or 1) < 0.9 for rollout in tried)


def test_the_split_that_is_found_is_the_best_of_all_or_as_good(tmp_path: Path) -> None:
    shared = (a_config(tmp_path, steps=20), *SAID, *LONG, "--set", "engines_total=6", "--modes", "dora")
    found = _json(*shared)["modes"]["dora"]
    minutes = [_json(*shared, "--rollout", str(n))["modes"]["dora"]["step_minutes"] for n in range(1, 6)]
    assert minutes[found["engines_rollout"] - 1] == found["step_minutes"]
    assert found["step_minutes"] <= 1.05 * min(minutes)


def test_modes_that_need_less_warm_up_are_compared_and_drawn_too() -> None:
    case = replace(_deployment(engines=3, seats=4, groups=4, staleness=3), warm_up=3, measured=2, engines_total=3)
    found = compare(case, ["sync", "one_step", "partial", "dora"], None, print)
    assert [one.warm_up for one in found.values()] == [1, 2, 3, 3]
    assert {"dora", "sync"} <= {part[4:-5] for part in of_modes(found)}
    assert found["sync"].figures.engines_rollout == 3 > found["dora"].figures.engines_rollout


# --- the command ------------------------------------------------------------------------------


def dora(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["simulate", *(str(argument) for argument in arguments)])


def _json(*arguments: str | Path) -> dict[str, Any]:
    done = dora(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_json_has_the_modes_with_their_figures(tmp_path: Path) -> None:
    config = a_config(tmp_path, steps=6, staleness_max=2)
    said = _json(config, *SAID, *LONG, "--modes", "sync,dora")
    assert said["cost_model"]["t0_s"] == 0.02
    assert list(said["modes"]) == ["sync", "dora"]
    names = "step_minutes tokens_per_second work_bound_minutes rollout_only_share idle_share"
    names += " blocked_by_oldest_seconds lag moves engines_rollout paper"
    assert set(names.split()) <= set(said["modes"]["dora"])
    assert list(said["modes"]["sync"]["lag"]) == ["0"]


def test_people_get_a_table_and_progress_beside_it(tmp_path: Path) -> None:
    done = dora(a_config(tmp_path, steps=6), *SAID, *LONG)
    assert done.exit_code == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["mode", "sync", "dora"]
    assert "dora: 2 engines for rollout" in done.stderr


def test_a_page_has_a_gantt_with_each_version_for_each_mode(tmp_path: Path) -> None:
    done = dora(a_config(tmp_path, steps=6), *SAID, *LONG, "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.count("engines by version") == 2
    assert all(f"version {version}," in page for version in range(6))
    assert "trajectories by lag" in page
    done = dora(a_config(tmp_path, steps=6), *SAID, *LONG, "--html", tmp_path / "none/page.html")
    assert (done.exit_code, "there is no folder" in done.stderr) == (2, True)


def test_a_sweep_has_a_row_for_each_value(tmp_path: Path) -> None:
    said = _json(a_config(tmp_path, steps=6), *SAID, *LONG, "--sweep", "staleness_max=0,1,2", "--modes", "dora")
    assert [row["value"] for row in said["sweep"]["rows"]] == [0, 1, 2]
    minutes = [row["modes"]["dora"]["step_minutes"] for row in said["sweep"]["rows"]]
    assert minutes[0] >= minutes[2]


def test_advice_is_the_least_staleness_within_two_percent_of_the_best(tmp_path: Path) -> None:
    said = _json(a_config(tmp_path, steps=12), *SAID, *LONG, "--advise")["advice"]
    best = min(row["step_minutes"] for row in said["tried"])
    assert said["step_minutes"] <= 1.02 * best
    lower = [row for row in said["tried"] if row["staleness_max"] < said["staleness_max"]]
    assert all(row["step_minutes"] > 1.02 * best for row in lower)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "cost.t0_s: what it takes is not known"),
        ((*SAID,), "work.median: how long responses are is not known"),
        ((*SAID, *LONG, "--set", "cost.t0_s=-1"), "cost.t0_s: Input should be greater than 0, not -1"),
        ((*SAID, *LONG, "--set", "cost.load_s=-0.5"), "cost.load_s: Input should be greater than or equal to 0"),
        ((*SAID, *LONG, "--set", "cost.lod_s=1"), "unknown key cost.lod_s"),
        ((*SAID, *LONG, "--set", "cost.load_s=inf"), "cost.load_s: Input should be a finite number, not inf"),
        ((*SAID, *LONG, "--set", "work.kv_tokens=9"), "work.kv_tokens = 9: an engine's KV cannot hold one prompt"),
        ((*SAID, *LONG, "--set", "sampling.max_new_tokens=5000"), "an engine's KV cannot hold"),
        ((*SAID, *LONG, "--set", "work.sigma=-1"), "work.sigma: 0 to 5, not -1"),
        ((*SAID, *LONG, "--set", "work.length=1"), "unknown key work.length"),
        ((*SAID, *LONG, "--set", "staleness_max=2"), "staleness_max = 2 with steps = 2: no step could ever train"),
        ((*SAID, *LONG, "--set", "scheduling.live_facto=2"), "did you mean scheduling.live_factor?"),
        ((*SAID, *LONG, "--set", "engines_total=1"), "engines_total = 1"),
        ((*SAID, *LONG, "--modes", "dorra"), "did you mean dora"),
        ((*SAID, *LONG, "--sweep", "staleness_max"), "write key=a,b,c"),
        ((*SAID, *LONG, "--rollout", "1"), "--rollout 1: the trainer has accelerators of its own; set engines_total"),
        ((*SAID, *LONG, "--set", "engines_total=4", "--rollout", "4"), "--rollout 4: 1 to 3"),
        ((*SAID, *LONG, "--seeds", "0"), "--seeds 0: 1 to"),
        ((*SAID, *LONG, "--advise", "--sweep", "staleness_max=1,2"), "one of the two"),
        (("--preset", "paper-64"), "one of the two"),
    ],
)
def test_what_cannot_be_is_refused_with_key_and_reason(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = dora(a_config(tmp_path, staleness_max=1), *arguments)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_presets_that_are_not_there_are_named(tmp_path: Path) -> None:
    done = dora("--preset", "paper-65")
    assert (done.exit_code, "paper-64, paper-128, paper-4096" in done.stderr) == (2, True)
    done = dora("--preset", "paper-64", "--calibrate-from", tmp_path)
    assert done.exit_code == 2
