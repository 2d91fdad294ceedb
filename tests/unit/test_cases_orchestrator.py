"""Faults that users of such systems met, with their numbers, as the mind must answer them (cases A01 to G03)."""

import pytest

from schemas import messages as m
from schemas.ids import Position, RequestKey
from tests.unit.mind_driver import Driver, settings_of

PATIENT = {"timeout_s": 100_000.0, "request_timeout_s": 10.0}
"""Engines are never silent for too long; a request is on an engine for at most 10 s."""


def finish_all(driver: Driver, but: set[tuple[int, int]]) -> None:
    """Every running request ends and is scored, apart from the samples named."""
    while keys := sorted(key for key in driver.out if (key.group, key.index) not in but):
        for key in keys:
            version = driver.out[key].version
            driver.finish(key)
            driver.score(key, float(key.index % 2), version)


def opened_rows(driver: Driver) -> list[int]:
    first = [issue for issue in driver.said(m.Issue) if (issue.index, issue.attempt) == (0, 0)]
    return [issue.prompt_row for issue in first]


def test_a01_of_128_requests_3_never_return_a_deadline_says_so_and_their_groups_recover() -> None:
    settings = settings_of(group_size=8, groups_per_batch=8, engines={"count": 2, "seats": 64, **PATIENT})
    driver = Driver(settings, rows=16)
    assert len(driver.out) == 128
    lost = {(2, 1), (5, 7), (11, 0)}
    finish_all(driver, but=lost)
    assert {(key.group, key.index) for key in driver.out} == lost
    driver.wait(10)
    assert driver.said(m.Stop) == [], "not before the limit"
    driver.wait(1)
    stopped = {(key.group, key.index, key.attempt) for stop in driver.said(m.Stop) for key in stop.requests}
    assert stopped == {(*sample, 0) for sample in lost}
    assert set(driver.out) == {RequestKey(*sample, 1) for sample in lost}, "each is issued again"
    driver.train()
    driver.host_all()
    finish_all(driver, but=set())
    batches = driver.said(m.BatchRecord)
    assert [len(batch.members) for batch in batches] == [64, 64]
    assert sorted(group for batch in batches for group, _ in batch.groups) == list(range(16))
    assert driver.mind.figures()["requests_running"] == 0
    assert driver.mind.figures()["groups_live"] == 0


def test_a01_requests_that_never_return_at_any_attempt_end_their_groups_with_the_reason() -> None:
    engines = {"count": 2, "seats": 64, **PATIENT}
    driver = Driver(settings_of(group_size=8, groups_per_batch=8, engines=engines, scheduling={"failures_max": 2}), 16)
    lost = {(2, 1), (5, 7), (11, 0)}
    finish_all(driver, but=lost)
    driver.wait(33)
    assert [(void.group, void.reason, void.detail) for void in driver.said(m.VoidGroup)] == [
        (2, "failed", "sample 1: took too long on an engine"),
        (5, "failed", "sample 7: took too long on an engine"),
        (11, "failed", "sample 0: took too long on an engine"),
    ]
    assert driver.out == {}, "every request has ended"
    assert driver.mind.figures()["seats_free"] == 128
    assert driver.mind.figures()["groups_live"] == 5, "the second batch waits for more rows"


def test_a08_endless_requests_give_their_slots_back_at_the_limit_and_a_raising_member_is_no_silent_loss() -> None:
    """32 slots, 8 groups of 4; 11 samples never end, and one sample of group 7 raises whenever it is tried."""
    settings = settings_of(
        group_size=4,
        groups_per_batch=4,
        engines={"count": 1, "seats": 32, **PATIENT},
        scheduling={"failures_max": 1},
    )
    driver = Driver(settings, rows=8)
    assert len(driver.out) == 32
    endless = {(group, index) for group in range(3) for index in range(4)} - {(2, 3)}
    assert len(endless) == 11
    for attempt in (0, 1):
        issue = driver.out.pop(RequestKey(7, 2, attempt))
        driver.say(m.Failed(**driver.about(issue), reason="the grader raised"))
    finish_all(driver, but=endless)
    assert [(void.group, void.detail) for void in driver.said(m.VoidGroup)] == [(7, "sample 2: the grader raised")]
    assert driver.mind.figures()["seats_free"] == 32 - 11
    driver.wait(11)
    assert len([key for stop in driver.said(m.Stop) for key in stop.requests if key.group < 3]) == 11
    driver.wait(11)
    assert driver.mind.figures()["seats_free"] == 32, "all slots are back"
    assert [void.group for void in driver.said(m.VoidGroup)] == [7, 0, 1, 2]
    (batch,) = driver.said(m.BatchRecord)
    assert [group for group, _ in batch.groups] == [3, 4, 5, 6], "the others train"


def test_b03_a_sample_stopped_under_versions_2_and_4_goes_on_under_its_own_and_trains_as_one_of_version_2() -> None:
    """K = 4: a sample of version 2 is stopped twice and ends when version 6 is out. All its stays are of version 2."""
    driver = Driver(settings_of(staleness_max=4, scheduling={"live_factor": 3.0}, engines={"count": 3, "seats": 4}))
    slow: RequestKey | None = None
    while driver.mind.published < 6 or driver.said(m.BatchRecord)[-1].step != 5:
        for group in driver.running():
            opened = min(issue.version for key, issue in driver.out.items() if key.group == group)
            if opened == 2 and slow is None:
                slow = RequestKey(group, 0, 0)
            if slow is None or group != slow.group:
                driver.complete(group)
        if slow is not None and driver.mind.published in (2, 4):
            (key,) = [key for key in driver.out if (key.group, key.index) == (slow.group, slow.index)]
            driver.partial(driver.out[key], at=driver.mind.published)
        driver.train()
        driver.host_all()
    assert slow is not None
    issues = [issue for issue in driver.said(m.Issue) if (issue.group, issue.index) == (slow.group, slow.index)]
    assert {issue.version for issue in issues} == {2}
    assert len(issues) >= 3
    assert Position("partials", 0, 4) in [issue.partial for issue in issues]
    driver.complete(slow.group)
    (batch,) = [b for b in driver.said(m.BatchRecord) if slow.group in dict(b.groups)]
    assert (batch.step, dict(batch.groups)[slow.group]) == (6, 2)
    driver.host_all()
    other = next(iter(driver.out.values()))
    wrong = {**driver.about(other), "version": other.version - 2, "reason": "moved", "tokens": 3}
    with pytest.raises(AssertionError, match="has version"):
        driver.say(m.PartialArrived(**wrong, at=Position("partials", 0, 99)))


def test_b06_with_k_1_one_more_version_comes_then_the_trainer_waits_and_the_slow_ones_version_stays() -> None:
    driver = Driver(settings_of(scheduling={"live_factor": 3.0, "weights_keep": 1}))
    slow = RequestKey(0, 0, 0)
    driver.say(m.CheckpointSaved(version=0, kept=()))

    def all_but_the_slow_one() -> None:
        driver.host_all()
        finish_all(driver, but={(0, 0)})

    all_but_the_slow_one()
    driver.train()
    for _ in range(3):
        all_but_the_slow_one()
        driver.tick(5)
    assert [effect.version for effect in driver.said(m.MakeVersion)] == [0, 1], "exactly one more"
    assert [batch.step for batch in driver.said(m.BatchRecord)] == [0], "step 1 waits for the slow sample"
    assert driver.said(m.RetireVersion) == []
    assert driver.said(m.DeleteWeights) == []
    assert [issue.version for key, issue in driver.out.items() if (key.group, key.index) == (0, 0)] == [0]
    (slow,) = driver.out
    driver.finish(slow)
    driver.score(slow, 1.0, 0)
    assert 0 in [group for group, _ in driver.said(m.BatchRecord)[1].groups]
    driver.train()
    driver.host_all()
    assert [effect.version for effect in driver.said(m.RetireVersion)] == [0], "now nothing needs version 0"
    assert [effect.version for effect in driver.said(m.DeleteWeights)] == [0]


def test_g01_of_rows_0_to_7_with_4_generated_and_0_and_1_trained_a_resume_trains_2_and_3() -> None:
    driver = Driver(rows=8)
    for group in range(4):
        driver.complete(group)
    assert opened_rows(driver) == [0, 1, 2, 3]
    assert driver.said(m.BatchRecord)[-1].groups == ((0, 0), (1, 0))
    driver.train()
    driver.say(m.CheckpointSaved(version=1, kept=(1,)))
    driver.restart()
    driver.train()
    assert [[group for group, _ in batch.groups] for batch in driver.said(m.BatchRecord)][:2] == [[0, 1], [2, 3]]
    for _ in range(2):  # first version 1, then the newest
        driver.host_all()
    finish_all(driver, but=set())
    assert opened_rows(driver) == list(range(8)), "and goes on with 4"


@pytest.mark.parametrize("moment", range(5))
def test_g02_over_5_restores_no_prompt_is_skipped_and_none_is_doubled(moment: int) -> None:
    """Each round restores once: at its begin, amid the batch, before or after its training, or after hosting."""
    driver = Driver(settings_of(steps=20), rows=24)

    def maybe_restart(now: int) -> None:
        if now == moment:
            driver.restart()

    for _ in range(5):
        maybe_restart(0)
        for number, group in enumerate(driver.running()):
            driver.complete(group)
            if number == 0:
                maybe_restart(1)
        maybe_restart(2)
        driver.train()
        maybe_restart(3)
        for _ in range(2):
            driver.host_all()
        maybe_restart(4)
    assert len([event for event in driver.events if isinstance(event, m.RunStarted)]) == 5
    rows = opened_rows(driver)
    assert rows == list(range(len(rows)))
    assert len(rows) >= 10
    trained = [group for batch in driver.said(m.BatchRecord) for group, _ in batch.groups]
    assert len(trained) == len(set(trained))


def test_g03_a_dropped_group_is_resolved_also_for_whoever_resumes_it_pins_nothing_and_is_not_trained() -> None:
    driver = Driver(settings_of(scheduling={"dynamic_sampling": True}))
    driver.complete(0, (1.0, 1.0))
    assert [void.group for void in driver.said(m.VoidGroup)] == [0]
    driver.complete(1)
    driver.restart()
    assert 0 not in driver.mind.groups.table
    driver.complete(2)
    driver.train()
    driver.say(m.CheckpointSaved(version=1, kept=(1,)))
    driver.restart()
    driver.host_all()
    driver.complete(3)
    driver.complete(4)
    driver.train()
    driver.host_all()
    trained = [group for batch in driver.said(m.BatchRecord) for group, _ in batch.groups]
    assert trained == [1, 2, 3, 4]
    assert driver.mind.figures()["lag_oldest"] <= 1, "its version holds nothing up"
    assert opened_rows(driver) == list(range(len(opened_rows(driver))))
