"""The modes that DORA is measured against, in the same mind by settings. One scenario a test."""

from schemas import messages as m
from schemas.ids import RequestKey
from tests.unit.mind_driver import Driver, settings_of


def swapped(driver: Driver, effects: list[m.Effect]) -> list[tuple[int, int]]:
    return [(swap.engine, swap.version) for swap in driver.said(m.Swap, effects)]


# --- one_step ---------------------------------------------------------------------------------


def test_one_step_engines_change_version_together_when_the_last_request_of_the_old_one_ends() -> None:
    driver = Driver(settings_of(mode="one_step", staleness_max=7))
    assert driver.running() == [0, 1, 2, 3], "K = 1 whatever staleness_max says: two batches of version 0"
    driver.complete(0)
    driver.complete(1)
    assert swapped(driver, driver.train()) == [], "version 1 is out, groups 2 and 3 run"
    assert swapped(driver, driver.complete(2)) == []
    assert swapped(driver, driver.finish(RequestKey(3, 0, 0))) == []
    assert swapped(driver, driver.wait(12)) == [], "nor does a Tick open the barrier"
    assert sorted(swapped(driver, driver.finish(RequestKey(3, 1, 0)))) == [(0, 1), (1, 1)], "finished, not yet scored"
    driver.score(RequestKey(3, 0, 0), 0.0, 0)
    driver.score(RequestKey(3, 1, 0), 1.0, 0)
    assert driver.said(m.BatchRecord)[1].groups == ((2, 0), (3, 0)), "lag 1"
    driver.host_all()
    assert {(issue.group, issue.version) for issue in driver.out.values()} == {(4, 1), (5, 1)}


def test_one_step_an_engine_that_joins_behind_the_barrier_helps_the_old_version_or_waits() -> None:
    driver = Driver(settings_of(mode="one_step"))
    driver.complete(0)
    driver.complete(1)
    driver.train()
    lost = [key for key, issue in driver.out.items() if issue.engine == 1]
    driver.say(m.EngineGone(engine=1, incarnation=None, reason="killed"))
    for key in lost:
        driver.out.pop(key)
    assert {issue.engine for issue in driver.out.values()} == {0}, "the other one has a seat for each"
    assert swapped(driver, driver.join(1, 2)) == [], "nothing waits: it may not load version 1 yet"
    for group in (2, 3):
        driver.complete(group)
    assert sorted(swapped(driver, driver.effects)[-2:]) == [(0, 1), (1, 1)]


# --- oversample -------------------------------------------------------------------------------


def oversampled(**changes: object) -> Driver:
    scheduling = {"oversample_factor": 1.5, "voids_in_row_max": 1}
    engines = {"count": 2, "seats": 6}
    return Driver(settings_of(mode="oversample", staleness_max=3, scheduling=scheduling, engines=engines, **changes))


def test_oversample_the_first_complete_groups_are_the_batch_and_every_other_one_is_surplus() -> None:
    driver = oversampled()
    assert driver.running() == [0, 1, 2], "1.5 batches of 2"
    driver.complete(2)
    said = driver.complete(0)
    assert [(batch.groups, batch.exhausted) for batch in driver.said(m.BatchRecord, said)] == [
        (((2, 0), (0, 0)), False)
    ]
    assert [(void.group, void.reason) for void in driver.said(m.VoidGroup, said)] == [(1, "surplus")]
    stopped = [key for stop in driver.said(m.Stop, said) for key in stop.requests]
    assert sorted(stopped) == [RequestKey(1, 0, 0), RequestKey(1, 1, 0)]
    assert driver.out == {}, "K = 0: nothing opens while the batch trains"
    assert not driver.mind.ended, "surplus is no sign of a run without signal"
    driver.train()
    driver.host_all()
    assert driver.running() == [3, 4, 5]
    assert {issue.version for issue in driver.out.values()} == {1}


def test_oversample_a_complete_group_that_came_too_late_is_surplus_too_and_rewards_of_it_are_ignored() -> None:
    driver = oversampled(groups_per_batch=4)
    assert driver.running() == [0, 1, 2, 3, 4, 5]
    for group in (0, 1, 2):
        driver.complete(group)
    driver.finish(RequestKey(4, 0, 0))
    driver.finish(RequestKey(4, 1, 0))
    driver.complete(3)
    assert [void.group for void in driver.said(m.VoidGroup)] == [4, 5]
    for index in (0, 1):
        assert driver.score(RequestKey(4, index, 0), 1.0, 0) == []


def test_oversample_the_batch_after_the_last_prompt_is_the_last_one() -> None:
    driver = oversampled(epochs=1)
    driver.say(m.PromptsEnded(rows=40))
    while not driver.mind.ended:
        for group in driver.running()[:2]:
            driver.complete(group)
        driver.train()
        driver.host_all()
    batches = driver.said(m.BatchRecord)
    assert [batch.exhausted for batch in batches] == [False] * 13 + [True], "40 rows are 13 times 3, and 1"
    assert len(batches[-1].groups) == 1
    assert len(driver.said(m.VoidGroup)) == 13


# --- partial ----------------------------------------------------------------------------------


def test_partial_all_requests_stop_at_a_new_version_and_go_on_under_it() -> None:
    driver = Driver(settings_of(mode="partial"))
    driver.complete(0)
    driver.complete(1)
    old = set(driver.out)
    assert sorted(swapped(driver, driver.train())) == [(0, 1), (1, 1)]
    said = driver.host_all()
    again = [issue for issue in driver.said(m.Issue, said) if issue.group in (2, 3)]
    assert {RequestKey(issue.group, issue.index, issue.attempt - 1) for issue in again} == old
    assert {(issue.version, issue.under, issue.host_version) for issue in again} == {(0, 1, 1)}
    assert all(issue.partial is not None for issue in again), "with what they had"
    new = [issue for issue in driver.said(m.Issue, said) if issue.group not in (2, 3)]
    assert {(issue.version, issue.under) for issue in new} == {(1, None)}
    driver.complete(2)
    driver.complete(3)
    assert driver.said(m.BatchRecord)[1].groups == ((2, 0), (3, 0)), "by their opening version: lag 1 = K"


def test_partial_requests_that_wait_come_before_new_groups_whatever_their_version() -> None:
    driver = Driver(settings_of(mode="partial", engines={"count": 1, "seats": 4}))
    driver.complete(0)
    driver.complete(1)
    driver.train()
    said = driver.host_all()
    assert sorted(issue.group for issue in driver.said(m.Issue, said)) == [2, 2, 3, 3]
    assert driver.running() == [2, 3]


def test_partial_an_evaluation_is_sampled_under_one_version() -> None:
    settings = settings_of(mode="partial", evaluation={"samples": 1}, engines={"count": 2, "seats": 8})
    driver = Driver(settings, rows=0)
    driver.prompts(1, purpose="eval")
    driver.prompts(20)
    for group in (1, 2):
        driver.complete(group)
    assert swapped(driver, driver.train()) == [], "held out group 0 runs under version 0"
    driver.finish(RequestKey(0, 0, 0))
    said = driver.score(RequestKey(0, 0, 0), 1.0, 0, purpose="eval")
    assert sorted(swapped(driver, said)) == [(0, 1), (1, 1)]


# --- legacy_fill ------------------------------------------------------------------------------


def filled(k: int, fill: bool) -> list[tuple[int, int]]:
    """(group, version) opened when a group of version 0 ends, version 1 is out and the only engine serves version 0."""
    scheduling = {"live_factor": 9.0, "legacy_fill": fill}
    driver = Driver(settings_of(staleness_max=k, engines={"count": 1, "seats": 8}, scheduling=scheduling))
    for group in (0, 1):
        driver.complete(group)
    driver.train()
    said = driver.complete(driver.running()[0])
    return sorted({(issue.group, issue.version) for issue in driver.said(m.Issue, said)})


def test_idle_seats_of_an_old_version_get_new_groups_of_it_only_where_that_is_asked_for() -> None:
    assert filled(3, fill=False) == []
    assert filled(3, fill=True) == [(6, 0)]


def test_the_oldest_version_of_a_full_window_is_never_filled() -> None:
    """K = 1: when version 1 is out, version 0 must drain."""
    assert filled(1, fill=True) == []


def test_a_row_that_only_an_old_version_has_room_for_makes_way_for_one_that_fits_the_newest() -> None:
    """KV of 60 per engine. A version 1 group and a version 0 sample leave 20 each; rows of 30 and of 10 are next."""
    scheduling = {"live_factor": 9.0, "legacy_fill": True}
    driver = Driver(settings_of(staleness_max=3, scheduling=scheduling), rows=0, engines=0)
    for engine in (0, 1):
        driver.join(engine, 1, kv_tokens=60)
    driver.host_all()
    driver.prompts(3)
    driver.complete(0)
    driver.complete(1)
    driver.train()
    driver.host_all()
    driver.prompts(1)
    assert {(issue.group, issue.version) for issue in driver.out.values()} == {(2, 0), (3, 1)}
    driver.prompts(1, tokens=30)
    driver.prompts(1, tokens=10)
    assert driver.running() == [2, 3], "no engine has room for the row of 30"
    said = driver.finish(min(key for key in driver.out if key.group == 2))
    assert sorted({(issue.group, issue.version) for issue in driver.said(m.Issue, said)}) == [(4, 0), (5, 1)]


# --- open_every -------------------------------------------------------------------------------


def test_a_version_in_between_opens_no_group_and_no_engine_loads_it() -> None:
    driver = Driver(settings_of(staleness_max=3, scheduling={"open_every": 2}))
    for version in (1, 2, 3):
        for group in driver.running()[:2]:
            driver.complete(group)
        driver.train()
        driver.host_all()
        assert driver.mind.published == version
    assert sorted({version for _, version in swapped(driver, driver.effects)}) == [0, 2]
    assert {issue.version for issue in driver.said(m.Issue)} == {0, 2}
    trained = {step.step: {step.step - version for _, version in step.groups} for step in driver.said(m.BatchRecord)}
    assert trained == {0: {0}, 1: {1}, 2: {2}}, "the groups that step 1 left were opened under version 0 too"


def test_the_last_version_is_evaluated_whatever_opens_groups() -> None:
    settings = settings_of(steps=3, staleness_max=2, evaluation={"samples": 1}, scheduling={"open_every": 2})
    driver = Driver(settings, rows=0)
    driver.prompts(1, purpose="eval")
    driver.prompts(20)
    driver.finish(RequestKey(0, 0, 0))
    driver.score(RequestKey(0, 0, 0), 1.0, 0, purpose="eval")
    for _ in range(3):
        for group in driver.running()[:2]:
            driver.complete(group)
        said = driver.train()
        said += driver.host_all()
    said += driver.host_all()  # an engine that was loading when the last version came loads that one after it
    assert [(issue.purpose, issue.version) for issue in driver.said(m.Issue, said)] == [("eval", 3)]


def test_sync_chooses_the_same_groups_as_a_loop_that_knows_nothing_of_versions() -> None:
    """K = 0: each step opens the next B rows, waits for all, trains them in the order in which they were complete."""
    order = [[1, 0], [0, 1], [1, 0], [1, 0], [0, 1]]
    for mode in ("sync", "dora"):
        driver = Driver(settings_of(mode=mode, staleness_max=0, steps=5))
        for step, places in enumerate(order):
            for place in places:
                driver.complete(2 * step + place)
            driver.train()
            driver.host_all()
        chosen = [[group for group, _ in batch.groups] for batch in driver.said(m.BatchRecord)]
        assert chosen == [[2 * step + place for place in places] for step, places in enumerate(order)]
