"""The mind from the first version to the end: batches, window, evaluation, what may go. One scenario a test."""

from collections.abc import ValuesView

import pytest

from schemas import messages as m
from schemas.ids import RequestKey
from tests.unit.mind_driver import Driver, settings_of
from workers.orchestrator.groups import Group


def test_a06_a_run_starts_at_version_0_with_step_0() -> None:
    driver = Driver()
    assert [effect.kind for effect in driver.effects if effect.kind != "issue"] == [
        "want_prompts",
        "make_version",
        "swap",
        "swap",
    ]
    assert driver.running() == [0, 1, 2, 3], "live_factor 2 x 2 groups"
    assert {issue.version for issue in driver.out.values()} == {0}


def test_siblings_share_an_engine_and_seats_are_never_overbooked() -> None:
    driver = Driver(settings_of(engines={"count": 3, "seats": 3}))
    engines = {key: issue.engine for key, issue in driver.out.items()}
    assert engines[RequestKey(0, 0, 0)] == engines[RequestKey(0, 1, 0)]
    assert [engine.free_seats for engine in driver.mind.fleet.engines.values()] == [0, 0, 1]


def test_a03_surplus_complete_groups_wait_for_the_next_batch() -> None:
    driver = Driver(settings_of(scheduling={"live_factor": 5.0}, staleness_max=4, engines={"count": 2, "seats": 20}))
    for group in (3, 0, 2):
        driver.complete(group)
    (batch,) = driver.said(m.BatchRecord)
    assert batch.groups == ((3, 0), (0, 0)), "in order of completion"
    assert [(member.group, member.index) for member in batch.members] == [(3, 0), (3, 1), (0, 0), (0, 1)]
    driver.complete(1)
    assert len(driver.said(m.BatchRecord)) == 1, "one batch is untrained at most"
    driver.train()
    assert driver.said(m.BatchRecord)[1].groups == ((2, 0), (1, 0))


def test_a04_with_epochs_the_last_step_takes_what_is_left_and_the_run_is_done() -> None:
    driver = Driver(settings_of(epochs=1), rows=3)
    driver.say(m.PromptsEnded(rows=3))
    for group in range(3):
        driver.complete(group)
    driver.train()
    assert [(batch.groups, batch.exhausted) for batch in driver.said(m.BatchRecord)] == [
        (((0, 0), (1, 0)), False),
        (((2, 0),), True),
    ]
    driver.train()
    assert driver.effects[-1] == m.EndRun(outcome="done", reason="2 steps trained")
    assert driver.mind.ended
    assert driver.mind.figures()["groups_live"] == 0


def test_the_end_of_the_prompts_counts_only_when_all_rows_have_arrived() -> None:
    driver = Driver(settings_of(epochs=1), rows=0)
    driver.say(m.PromptsEnded(rows=1))
    assert not driver.mind.ended
    driver.prompts(1)
    driver.complete(0)
    assert [batch.exhausted for batch in driver.said(m.BatchRecord)] == [True]


def test_a05_all_seats_that_drained_are_filled_after_one_tick() -> None:
    """32 seats drain to 0 while nothing may be opened (K = 0, the batch trains); then one event fills all 32."""
    settings = settings_of(mode="sync", groups_per_batch=16, engines={"count": 2, "seats": 16})
    driver = Driver(settings)
    assert len(driver.out) == 32
    for group in range(16):
        driver.complete(group)
    assert driver.out == {}
    driver.tick(1)
    assert driver.out == {}, "version 1 comes first"
    driver.train()
    driver.host_all()
    assert len(driver.out) == 32
    assert {issue.version for issue in driver.out.values()} == {1}


def test_b05_b02_without_staleness_every_group_trains_at_lag_0() -> None:
    """B02: ten steps of K = 0. B05: the limit is one batch, not zero."""
    driver = Driver(settings_of(mode="sync"))
    for step in range(10):
        assert driver.running() == [2 * step, 2 * step + 1]
        for group in driver.running():
            driver.complete(group)
        batch = driver.said(m.BatchRecord)[-1]
        assert (batch.step, {version for _, version in batch.groups}) == (step, {step})
        driver.train()
        driver.host_all()
    assert driver.effects[-1] == m.EndRun(outcome="done", reason="10 steps trained")


def test_b06_a_request_that_outlives_the_next_step_lets_one_more_version_come_and_then_blocks() -> None:
    driver = Driver(settings_of(scheduling={"live_factor": 3.0}))
    driver.finish(RequestKey(0, 1, 0))
    driver.complete(1)
    driver.complete(2)
    assert [batch.step for batch in driver.said(m.BatchRecord)] == [0]
    driver.train()
    driver.host_all()
    for group in [number for number in driver.running() if number != 0]:
        driver.complete(group)
    driver.tick(2)
    driver.tick(3)
    assert [batch.step for batch in driver.said(m.BatchRecord)] == [0], "step 1 must train the slow group: K = 1"
    assert driver.mind.blocked_by_oldest_s == pytest.approx(5.0)
    (slow,) = [key for key in driver.out if (key.group, key.index) == (0, 0)]
    assert driver.said(m.RetireVersion) == []
    assert driver.said(m.DeleteWeights) == []
    issue = driver.out[slow]
    assert (issue.version, issue.attempt, issue.partial is None) == (0, 1, False), "it went on elsewhere"
    driver.finish(slow)
    driver.score(slow, 1.0, 0)
    driver.score(RequestKey(0, 1, 0), 0.0, 0)
    assert driver.said(m.BatchRecord)[1].groups == ((3, 0), (0, 0))


class Watched(dict[int, Group]):
    """The complete groups; `gathered` counts how often all of them were looked at."""

    gathered = 0

    def values(self) -> ValuesView[Group]:
        self.gathered += 1
        return super().values()


def test_while_the_oldest_blocks_a_group_that_ends_costs_no_look_at_the_others() -> None:
    driver = Driver(settings_of(staleness_max=1, scheduling={"live_factor": 8.0}, engines={"count": 8, "seats": 4}))
    complete = driver.mind.groups.complete = Watched(driver.mind.groups.complete)
    driver.finish(RequestKey(0, 1, 0))
    for step in (0, 1):
        for group in [number for number in driver.running() if number != 0]:
            driver.complete(group)
        if step == 0:
            driver.train()
            driver.host_all()
    assert [batch.step for batch in driver.said(m.BatchRecord)] == [0], "step 1 must train group 0"
    assert driver.mind.blocked
    assert (len(complete), complete.gathered) == (3, 1)


def test_a07_groups_without_signal_are_sampled_past_until_the_limit_then_the_run_stops_with_the_reason() -> None:
    driver = Driver(settings_of(scheduling={"dynamic_sampling": True, "voids_in_row_max": 6}))
    driver.complete(0, (1.0, 1.0))
    driver.complete(1, (0.0, 1.0))
    for group in range(2, 8):
        assert not driver.mind.ended
        driver.complete(group, (0.4, 0.4))
    end = driver.said(m.EndRun)[0]
    assert end.outcome == "failed"
    assert "6 groups in a row" in end.reason
    assert "no_signal" in end.reason
    assert driver.said(m.BatchRecord) == []
    assert [void.group for void in driver.said(m.VoidGroup)] == [0, 2, 3, 4, 5, 6, 7]


def test_f05_outcomes_all_0_4_are_void_and_f04_one_different_outcome_keeps_the_whole_group() -> None:
    settings = settings_of(group_size=8, engines={"count": 4, "seats": 8}, scheduling={"dynamic_sampling": True})
    driver = Driver(settings)
    driver.complete(0, (0.4,) * 8)
    driver.complete(1, (0.0, *[0.95] * 7))
    driver.complete(2, (0.0, *[1.0] * 7))
    assert [(void.group, void.reason) for void in driver.said(m.VoidGroup)] == [(0, "no_signal")]
    (batch,) = driver.said(m.BatchRecord)
    assert [group for group, _ in batch.groups] == [1, 2]
    assert len(batch.members) == 16


def test_g03_a_voided_group_is_resolved_it_pins_nothing_and_is_not_trained() -> None:
    driver = Driver(settings_of(scheduling={"dynamic_sampling": True}))
    driver.complete(0, (1.0, 1.0))
    driver.complete(1)
    driver.complete(2)
    driver.train()
    driver.host_all()
    driver.complete(3)
    driver.complete(4)
    driver.train()
    assert [group for batch in driver.said(m.BatchRecord) for group, _ in batch.groups] == [1, 2, 3, 4]
    driver.say(m.CheckpointSaved(version=2, kept=(2,)))
    assert driver.mind.figures()["lag_oldest"] <= 1
    late = driver.score(RequestKey(0, 0, 0), 1.0, 0)
    assert driver.said(m.BatchRecord, late) == []
    opened = [issue.prompt_row for issue in driver.said(m.Issue) if (issue.index, issue.attempt) == (0, 0)]
    assert opened == sorted(set(opened)), "no row twice, none skipped"


def test_evaluation_rounds_at_the_first_and_the_last_version_only() -> None:
    driver = Driver(settings_of(steps=1, evaluation={"samples": 2}), rows=0)
    driver.prompts(2, "eval")
    assert driver.out == {}, "more evaluation rows may come"
    driver.prompts(8)
    assert [issue.purpose for issue in driver.out.values()].count("eval") == 4
    for group in (0, 1, 2, 3):
        driver.complete(group)
    assert [group for batch in driver.said(m.BatchRecord) for group, _ in batch.groups] == [2, 3]
    driver.train()
    assert not driver.mind.ended
    driver.host_all()
    assert {(issue.version, issue.purpose) for issue in driver.out.values()} == {(1, "eval")}
    for group in driver.running():
        driver.complete(group, (1.0, 1.0))
    assert driver.said(m.EndRun)[0].outcome == "done"


def test_a_version_with_evaluation_requests_is_not_retired() -> None:
    driver = Driver(settings_of(mode="sync", evaluation={"samples": 1}, engines={"count": 2, "seats": 8}), rows=0)
    driver.prompts(1, "eval")
    driver.prompts(20)
    for _ in range(3):
        for group in [number for number in driver.running() if number != 0]:
            driver.complete(group)
        driver.train()
        driver.host_all()
    assert 0 not in [effect.version for effect in driver.said(m.RetireVersion)]
    driver.finish(RequestKey(0, 0, 0))
    driver.score(RequestKey(0, 0, 0), 1.0, 0, "eval")
    driver.tick(6)
    driver.host_all()
    assert 0 in [effect.version for effect in driver.said(m.RetireVersion)]


def test_weights_go_when_the_window_and_checkpoints_have_passed_them() -> None:
    driver = Driver(settings_of(mode="sync"))
    for _ in range(4):
        for group in driver.running():
            driver.complete(group)
        driver.train()
        driver.host_all()
    assert [effect.version for effect in driver.said(m.DeleteWeights)] == [1, 2], "0: no checkpoint yet; 3, 4: kept"
    driver.say(m.CheckpointSaved(version=4, kept=(4,)))
    assert [effect.version for effect in driver.said(m.DeleteWeights)] == [1, 2, 0]


def test_every_third_version_stays_for_whoever_evaluates_it_later() -> None:
    driver = Driver(settings_of(mode="sync", steps=9, scheduling={"weights_keep_every": 3}))
    driver.say(m.CheckpointSaved(version=0, kept=()))
    for _ in range(8):
        for group in driver.running():
            driver.complete(group)
        driver.train()
        driver.host_all()
    assert [effect.version for effect in driver.said(m.DeleteWeights)] == [1, 2, 4, 5], "7 and 8: weights_keep"


def test_prompts_are_wanted_ahead_and_each_demand_is_said_once() -> None:
    driver = Driver(rows=0)
    assert [want.rows for want in driver.said(m.WantPrompts)] == [8]
    driver.prompts(7)
    assert len(driver.said(m.WantPrompts)) == 1
    driver.prompts(1)
    assert [want.rows for want in driver.said(m.WantPrompts)] == [8], "4 are open, 4 unread: enough"
    driver.complete(0)
    driver.complete(1)
    driver.train()
    driver.host_all()
    assert [want.rows for want in driver.said(m.WantPrompts)] == [8, 16]


def test_people_stop_a_run_and_nothing_said_meanwhile_is_lost_when_it_goes_on() -> None:
    driver = Driver(settings_of(steps=2))
    for group in (0, 1):
        driver.complete(group)
    assert driver.say(m.StopRun(reason="enough")) == [m.EndRun(outcome="cancelled", reason="enough")]
    assert driver.train() == [], "heard, but nothing is said"
    assert driver.mind.figures()["version"] == 1
    said = driver.say(m.RunStarted(steps=2))
    assert driver.said(m.MakeVersion, said)[0].version == 1
    assert not driver.mind.ended
    driver.complete(2)
    driver.complete(3)
    assert driver.train()[-1] == m.EndRun(outcome="done", reason="2 steps trained")
    assert driver.say(m.RunStarted(steps=2))[-1] == m.EndRun(outcome="done", reason="2 steps trained")
    assert driver.said(m.EndRun, driver.say(m.RunStarted(steps=3))) == [], "steps may grow"
    driver.host_all()
    driver.host_all()
    assert {issue.version for issue in driver.out.values()} == {2}
