"""The figures of a run under way: what a real mind heard and said, and metric points, folded."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.snapshot import EngineView
from pipelines.tally import RATE_WINDOW_US, Tally
from schemas import messages as m
from tests.unit.mind_driver import Driver, S
from tests.unit.pipeline_parts import some_settings


def _tally(driver: Driver) -> Tally:
    """The fold of all that the mind heard and said: each event with the effects that came of it."""
    tally = Tally()
    again = type(driver.mind)(driver.settings)
    for sequence, event in enumerate(driver.events):
        effects = tuple(again.on(event))
        record = m.JournalRecord(run="unit", sequence=sequence, inputs={}, events=(event,), effects=effects)
        tally.take(json.loads(record.model_dump_json()))
    tally.take_point({"source": "orchestrator", "values": driver.mind.figures()})
    return tally


def test_figures_of_the_mind_are_the_queues_and_lags_of_the_view() -> None:
    driver = Driver()
    driver.complete(0)
    driver.complete(1)
    driver.train()
    driver.host_all()
    driver.complete(2)
    now = _tally(driver).snapshot(driver.settings, 10)
    assert (now.step, now.version, now.step_next, now.window_from, now.staleness_max) == (1, 1, 1, 0, 1)
    assert now.lag == {0: 4}
    assert now.queues.groups_live == sum(now.lag_live.values()) == driver.mind.groups.live
    assert (now.queues.groups_complete, now.lag_complete) == (1, {1: 1})
    assert now.queues.requests_running == len(driver.out)
    assert now.queues.groups_live_max == 4
    assert {number: (view.version, view.seats, view.kv_tokens_max) for number, view in now.engines.items()} == {
        number: (engine.version, engine.seats, engine.kv_tokens_max)
        for number, engine in driver.mind.fleet.engines.items()
    }


def test_an_engine_that_was_told_to_swap_is_loading_until_it_hosts() -> None:
    driver = Driver(engines=0)
    driver.join(0, 1)
    (swap,) = driver.said(m.Swap)
    assert _tally(driver).engine_views()[0] == EngineView(None, 0, 4, 0, 0, 0, 10_000)
    driver.host(swap)
    beat = {"engine": 0, "incarnation": 1, "version": 0, "running": 3, "waiting": 1, "kv_tokens": 70}
    driver.say(m.Heartbeat(**beat))
    assert _tally(driver).engine_views()[0] == EngineView(0, None, 4, 3, 1, 70, 10_000)
    driver.join(0, 2)
    assert _tally(driver).engine_views()[0].running == 0, "the beats of a former incarnation are not its own"
    driver.say(m.EngineGone(engine=0, incarnation=2, reason="killed"))
    assert _tally(driver).engine_views() == {}


def test_a_moved_request_is_counted_with_the_tokens_that_its_engine_prefilled_again() -> None:
    driver = Driver()
    issue = next(iter(driver.out.values()))
    driver.partial(issue, at=77)
    beat = {"engine": 0, "incarnation": 1, "version": 0, "running": 1, "waiting": 0, "kv_tokens": 70}
    for computed, reason in ((11, "gone"), (12, "gone")):
        driver.say(m.Heartbeat(**beat, moves=m.Moves(taken=1, tokens_recomputed=computed, reprefills={reason: 1})))
    tally = _tally(driver)
    assert tally.moves == 1
    assert dict(tally.engine_moves()) == {
        "taken": 1,
        "carried": 0,
        "tokens_carried": 0,
        "tokens_recomputed": 12,
        "size": 0,
        "reprefill_s": 0.0,
        "reprefills/gone": 1,
    }


def _record(at_s: float, *events: m.Event) -> dict[str, Any]:
    record = m.JournalRecord(run="r", sequence=0, inputs={}, events=(m.Tick(now=int(at_s * S)), *events), effects=())
    said: dict[str, Any] = json.loads(record.model_dump_json())
    return said


def _beat(tokens: int) -> m.Heartbeat:
    return m.Heartbeat(engine=0, incarnation=1, version=0, running=0, waiting=0, kv_tokens=0, tokens=tokens)


def test_rates_are_of_the_last_half_minute_and_silence_brings_them_down() -> None:
    tally = Tally()
    for second in range(0, 60, 2):
        tally.take(_record(second, _beat(100 * second)))
    assert tally.tokens_per_second == pytest.approx(100, rel=0.05)
    for second in range(60, 75):
        tally.take(_record(second))
    assert 0 < tally.tokens_per_second < 70
    for second in range(75, 80 + RATE_WINDOW_US // S):
        tally.take(_record(second))
    assert tally.tokens_per_second == 0.0


def test_the_trainers_time_is_trained_published_or_waited(tmp_path: Path) -> None:
    tally = Tally()
    versions = [m.WeightsArrived(version=version, groups=(), fingerprint="f") for version in range(3)]
    for at_s, events in ((0, ()), (10, versions[:1]), (14, versions[1:2]), (20, versions[2:])):
        tally.take(_record(at_s, *events))
    for step in range(2):
        values = {"gather_s": 0.5, "train_s": 1.5, "publish_s": 0.25, "tokens_per_second": 100.0 + step}
        tally.take_point({"source": "trainer", "step": step, "values": values})
    tally.take_point({"source": "orchestrator", "values": {"blocked_by_oldest_s": 5.0}})
    tally.take_point({"source": "supervisor", "values": {"restarts": 1.0, "restarts/reward-0": 1.0}})
    now = tally.snapshot(some_settings(tmp_path), 2)
    assert (now.trainer_train_share, now.trainer_publish_share, now.trainer_wait_share) == (0.4, 0.05, 0.55)
    assert (now.last_step_s, now.steps_per_minute, now.trainer_tokens_per_second) == (6.0, 12.0, 101.0)
    assert (now.blocked_by_oldest_s, now.blocked_share, now.restarts) == (5.0, 0.25, 1)


def test_engines_that_were_stopped_with_the_run_are_no_fault() -> None:
    driver = Driver()
    driver.say(m.EngineGone(engine=0, incarnation=1, reason="stopped", stopped=True))
    assert _tally(driver).engines_lost == 0
    driver.say(m.EngineGone(engine=1, incarnation=1, reason="killed"))
    assert _tally(driver).engines_lost == 1
