"""`group_policy = "partial"`: a group goes on without a sample that failed too often, if two others are left."""

from typing import Any

from schemas import messages as m
from schemas.ids import RequestKey
from schemas.settings import Settings
from tests.unit.mind_driver import Driver, settings_of


def partial(**scheduling: Any) -> Settings:
    """Two groups of three per step, one failure is allowed."""
    changes = {"group_policy": "partial", "failures_max": 1, **scheduling}
    return settings_of(group_size=3, engines={"count": 2, "seats": 8}, scheduling=changes)


def fail(driver: Driver, group: int, index: int) -> list[m.Effect]:
    """The sample fails as often as it may, and once more."""
    said: list[m.Effect] = []
    for _ in range(driver.settings.scheduling.failures_max + 1):
        (key,) = [key for key in driver.out if (key.group, key.index) == (group, index)]
        issue = driver.out.pop(key)
        said = driver.say(m.Failed(**driver.about(issue), reason="no"))
    return said


def test_a_group_is_complete_when_all_but_the_lost_sample_are_scored_and_trains_those() -> None:
    driver = Driver(partial())
    said = fail(driver, 0, 1)
    assert driver.said(m.SampleLost, said) == [m.SampleLost(group=0, index=1, version=0, reason="no")]
    driver.complete(0)
    driver.complete(1, (0.0, 1.0, 1.0))
    (batch,) = driver.said(m.BatchRecord)
    assert [(member.group, member.index) for member in batch.members] == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert driver.said(m.VoidGroup) == []
    assert driver.mind.figures()["requests_waiting"] == 0


def test_the_last_sample_to_be_lost_completes_the_group() -> None:
    driver = Driver(partial())
    for index in (0, 2):
        driver.finish(RequestKey(0, index, 0))
        driver.score(RequestKey(0, index, 0), float(index), 0)
    assert driver.mind.figures()["groups_complete"] == 0
    fail(driver, 0, 1)
    assert driver.mind.figures()["groups_complete"] == 1


def test_a_group_that_would_be_left_with_one_sample_is_void() -> None:
    driver = Driver(partial())
    fail(driver, 0, 1)
    assert driver.said(m.VoidGroup) == []
    said = fail(driver, 0, 0)
    assert [(void.group, void.reason) for void in driver.said(m.VoidGroup, said)] == [(0, "failed")]
    assert driver.said(m.SampleLost, said) == []
    assert driver.said(m.Stop, said)[0].requests == (RequestKey(0, 2, 0),)


def test_groups_are_all_or_nothing_by_default_and_so_are_evaluations() -> None:
    driver = Driver(partial(group_policy="all"))
    fail(driver, 0, 1)
    assert [void.group for void in driver.said(m.VoidGroup)] == [0]
    changes: dict[str, Any] = {"group_policy": "partial", "failures_max": 1}
    driver = Driver(settings_of(evaluation={"samples": 3}, group_size=3, scheduling=changes), rows=0)
    driver.prompts(1, "eval")
    driver.prompts(1)
    fail(driver, 0, 1)
    assert [void.group for void in driver.said(m.VoidGroup)] == [0]
    assert driver.said(m.SampleLost) == []


def test_signal_is_looked_for_among_the_samples_that_are_left() -> None:
    driver = Driver(partial(dynamic_sampling=True))
    fail(driver, 0, 0)
    driver.complete(0, (1.0, 1.0))
    fail(driver, 1, 0)
    driver.complete(1, (0.0, 1.0))
    assert [(void.group, void.reason) for void in driver.said(m.VoidGroup)] == [(0, "no_signal")]
    assert driver.mind.figures()["groups_complete"] == 1


def test_words_about_a_lost_sample_change_nothing_and_its_seat_is_free() -> None:
    driver = Driver(partial())
    free = driver.mind.figures()["seats_free"]
    fail(driver, 0, 1)
    assert driver.mind.figures()["seats_free"] == free + 1
    before = driver.mind.figures()
    for attempt in (0, 1):
        driver.score(RequestKey(0, 1, attempt), 1.0, 0)
    assert driver.mind.figures() == before


def test_an_engine_that_still_has_a_lost_sample_is_told_to_stop_it() -> None:
    """The verdict is missing before the engine says that it has finished."""
    driver = Driver(partial())
    driver.score(RequestKey(0, 1, 0), None, 0)
    (key,) = [key for key in driver.out if (key.group, key.index, key.attempt) == (0, 1, 1)]
    said = driver.score(key, None, 0)
    assert driver.said(m.SampleLost, said)[0].reason == "not scored: no verdict"
    assert [stop.requests for stop in driver.said(m.Stop, said)] == [(key,)]


def test_a_lost_engine_can_lose_several_samples_of_a_group_but_not_too_many() -> None:
    settings = settings_of(
        group_size=4, engines={"count": 2, "seats": 4}, scheduling={"group_policy": "partial", "failures_max": 1}
    )
    driver = Driver(settings)
    for incarnation in (1, 2):
        (engine,) = {issue.engine for key, issue in driver.out.items() if key.group == 0}
        driver.say(m.EngineGone(engine=engine, incarnation=None, reason="killed"))
        driver.join(engine, incarnation + 1)
        driver.host_all()
    assert [(lost.group, lost.index) for lost in driver.said(m.SampleLost)][:2] == [(0, 0), (0, 1)]
    assert [(void.group, void.detail) for void in driver.said(m.VoidGroup)][:1] == [(0, "sample 2: engine 0 was lost")]
