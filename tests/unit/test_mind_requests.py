"""The mind and its requests: what is lost, late, refused, moved. One scenario a test."""

from schemas import messages as m
from schemas.ids import Position, RequestKey
from tests.unit.mind_driver import Driver, settings_of


def test_score_may_come_before_finish_which_then_only_frees_the_seat() -> None:
    driver = Driver(settings_of(engines={"count": 1, "seats": 2}))
    keys = sorted(driver.out)
    for key in keys:
        driver.score(key, float(key.index), 0)
    assert driver.mind.figures()["groups_complete"] == 1
    assert driver.mind.figures()["seats_free"] == 0
    issues = driver.said(m.Issue, [effect for key in keys for effect in driver.finish(key)])
    assert [(issue.group, issue.index) for issue in issues] == [(1, 0), (1, 1)]


def test_a_score_twice_is_taken_once() -> None:
    driver = Driver()
    keys = sorted(driver.out)[:2]
    driver.score(keys[0], 1.0, 0)
    driver.score(keys[0], 0.0, 0)
    driver.score(keys[1], 0.0, 0)
    driver.score(keys[1], 0.0, 0)
    driver.complete(1)
    (batch,) = driver.said(m.BatchRecord)
    assert [member.offset for member in batch.members] == [1, 3, 5, 6]


def test_late_words_of_a_lost_engine_free_no_seat_and_its_requests_go_elsewhere() -> None:
    driver = Driver()
    lost = [issue for issue in driver.out.values() if issue.engine == 0]
    said = driver.say(m.EngineGone(engine=0, incarnation=1, reason="killed"))
    assert driver.said(m.EngineLost, said)[0].engine == 0
    assert driver.said(m.Issue, said) == [], "engine 1 is full"
    driver.finish(RequestKey(lost[0].group, lost[0].index, 0))
    assert driver.mind.figures()["requests_waiting"] == len(lost)
    driver.join(0, 2)
    issued = driver.said(m.Issue, driver.host_all())
    assert [(issue.group, issue.index, issue.attempt) for issue in issued] == [(i.group, i.index, 1) for i in lost]
    assert {issue.incarnation for issue in issued} == {2}


def test_a_run_that_is_stopped_and_resumed_again_and_again_voids_nothing() -> None:
    """G02. Each stop takes the engines along: that is no failure of what they had."""
    driver = Driver()
    waits = driver.mind.figures()["requests_running"]
    for incarnation in range(2, 8):
        said = driver.say(m.RunStarted(steps=4))
        for engine in (0, 1):
            said += driver.say(m.EngineGone(engine=engine, incarnation=None, reason="stopped", stopped=True))
        assert [lost.stopped for lost in driver.said(m.EngineLost, said)] == [True, True]
        for engine in (0, 1):
            driver.join(engine, incarnation)
        assert len(driver.said(m.Issue, driver.host_all())) == waits
    assert driver.said(m.VoidGroup) == []


def test_a_row_that_was_scored_while_its_request_waits_again_is_taken() -> None:
    driver = Driver()
    lost = [issue for issue in driver.out.values() if issue.engine == 0]
    driver.say(m.EngineGone(engine=0, incarnation=None, reason="killed"))
    driver.score(RequestKey(lost[0].group, lost[0].index, 0), 1.0, 0)
    assert driver.mind.figures()["requests_waiting"] == len(lost) - 1


def test_an_engine_that_says_nothing_is_lost_but_not_when_the_mind_itself_was_away() -> None:
    driver = Driver()
    driver.tick(500)
    assert driver.said(m.EngineLost) == []
    for _ in range(59):
        driver.tick(1)
        driver.say(m.Heartbeat(engine=1, incarnation=1, version=0, running=0, waiting=0, kv_tokens=0))
    (lost,) = driver.said(m.EngineLost)
    assert (lost.engine, lost.reason) == (0, "said nothing for 60 s")


def test_an_engine_that_never_loads_is_lost() -> None:
    driver = Driver(settings_of(engines={"count": 2, "seats": 4, "start_timeout_s": 20.0}), engines=1)
    driver.join(1, 1)
    driver.wait(21)
    assert [(lost.engine, lost.reason) for lost in driver.said(m.EngineLost)] == [(1, "did not load version 0 in 20 s")]


def test_a_newer_incarnation_replaces_the_older_one() -> None:
    driver = Driver()
    assert driver.said(m.EngineLost, driver.join(0, 7))[0].incarnation == 1
    assert driver.join(0, 7) == []
    assert driver.join(0, 3) == []


def test_a_request_that_hangs_fails_is_issued_again_and_at_last_voids_its_group() -> None:
    settings = settings_of(
        engines={"count": 2, "seats": 4, "request_timeout_s": 10.0, "timeout_s": 1000.0}, scheduling={"failures_max": 2}
    )
    driver = Driver(settings)
    for group in (0, 1, 2):
        driver.complete(group)
    hung = [key for key in driver.out if key.group == 3]
    driver.finish(hung[1])
    driver.score(hung[1], 1.0, 0)
    driver.wait(11)
    (stop,) = driver.said(m.Stop)
    assert (stop.requests, stop.keep) == ((hung[0],), False)
    assert RequestKey(3, 0, 1) in driver.out
    driver.wait(22)
    void = driver.said(m.VoidGroup)[0]
    assert (void.group, void.reason, void.detail) == (3, "failed", "sample 0: took too long on an engine")
    assert driver.said(m.Stop)[2].requests == (RequestKey(3, 0, 2),)


def test_a_voided_groups_other_requests_are_stopped() -> None:
    driver = Driver(settings_of(scheduling={"failures_max": 1}))
    for attempt in (0, 1):
        issue = driver.out.pop(RequestKey(0, 1, attempt))
        driver.say(m.Failed(**driver.about(issue), reason="no"))
    assert driver.said(m.VoidGroup)[0].group == 0
    assert driver.said(m.Stop)[0].requests == (RequestKey(0, 0, 0),)


def test_a_refused_request_is_issued_again_and_is_no_failure() -> None:
    driver = Driver(settings_of(scheduling={"failures_max": 1}))
    for attempt in range(5):
        issue = driver.out.pop(RequestKey(0, 1, attempt))
        driver.say(m.Refused(**driver.about(issue), reason="another version"))
    assert RequestKey(0, 1, 5) in driver.out
    assert driver.said(m.VoidGroup) == []


def test_a_sample_whose_row_was_bad_or_of_another_version_is_issued_again() -> None:
    driver = Driver()
    driver.finish(RequestKey(0, 0, 0))
    names = {"engine": None, "incarnation": None, "group": 0, "index": 0}
    driver.say(m.Failed(**names, attempt=0, reason="bad row: logprobs[0] is nan"))
    assert RequestKey(0, 0, 1) in driver.out
    driver.finish(RequestKey(0, 0, 1))
    driver.score(RequestKey(0, 0, 1), 1.0, version=7)
    assert RequestKey(0, 0, 2) in driver.out
    assert driver.said(m.VoidGroup) == []
    for index in (0, 1):
        key = RequestKey(0, index, 2 if index == 0 else 0)
        driver.finish(key)
        driver.score(key, float(index), version=0)
    driver.complete(1)
    (batch,) = driver.said(m.BatchRecord)
    assert {(one.group, one.index, one.attempt) for one in batch.members if one.group == 0} == {(0, 0, 2), (0, 1, 0)}


def test_a_row_that_no_engine_can_hold_voids_its_group_with_the_reason() -> None:
    driver = Driver(rows=0)
    driver.prompts(1, tokens=1025)
    driver.prompts(3)
    (void,) = driver.said(m.VoidGroup)
    assert (void.group, void.reason) == (0, "failed")
    assert "1025 tokens" in void.detail
    assert driver.running() == [1, 2, 3]


def test_a_train_row_without_a_verdict_is_sampled_again_and_an_eval_row_is_not() -> None:
    driver = Driver(settings_of(evaluation={"samples": 1}), rows=0)
    driver.prompts(1, "eval")
    driver.prompts(1)
    assert [issue.purpose for issue in driver.out.values()] == ["eval", "train", "train"]
    driver.finish(RequestKey(0, 0, 0))
    driver.score(RequestKey(0, 0, 0), None, 0, "eval")
    assert driver.mind.figures()["groups_evaluating"] == 0
    driver.finish(RequestKey(1, 0, 0))
    driver.score(RequestKey(1, 0, 0), None, 0)
    assert RequestKey(1, 0, 1) in driver.out


def test_a_swap_takes_requests_along_with_the_tokens_they_had() -> None:
    """One engine: version 0 still runs when version 1 comes; a second engine takes it over and the first one loads."""
    driver = Driver(settings_of(scheduling={"live_factor": 2.0}))
    for group in (0, 1):
        driver.complete(group)
    said = driver.train()
    moved = driver.said(m.Swap, said)
    assert [(swap.version, swap.after_sequence >= 0) for swap in moved] == [(1, True)]
    issues = [issue for issue in driver.out.values() if issue.engine == moved[0].engine]
    again = [issue for issue in driver.said(m.Issue, driver.host(moved[0])) if issue.version == 0]
    assert [(i.group, i.index, i.attempt, i.partial) for i in again] == [
        (issue.group, issue.index, 1, Position("partials", 0, place)) for place, issue in enumerate(issues, 1)
    ]


def test_a_partial_that_never_comes_is_waited_for_only_so_long_after_hosting() -> None:
    driver = Driver()
    for group in (0, 1):
        driver.complete(group)
    (swap,) = driver.said(m.Swap, driver.train())
    left = [issue for issue in driver.out.values() if issue.engine == swap.engine]
    said = driver.host(swap, partials=False)
    assert [issue for issue in driver.said(m.Issue, said) if issue.version == 0] == []
    again = driver.said(m.Issue, driver.wait(3))
    assert [(i.group, i.index, i.attempt, i.partial) for i in again if i.version == 0] == [
        (issue.group, issue.index, 1, None) for issue in left
    ]


def test_a_snapshot_is_what_a_lost_request_goes_on_from() -> None:
    driver = Driver(settings_of(engines={"count": 3, "seats": 4}))
    issue = driver.out[RequestKey(0, 0, 0)]
    driver.partial(issue, at=9, reason="snapshot")
    said = driver.say(m.EngineGone(engine=issue.engine, incarnation=None, reason="killed"))
    again = {(i.group, i.index): i.partial for i in driver.said(m.Issue, said)}
    assert again[0, 0] == Position("partials", 0, 9)
    assert again[0, 1] is None


def test_a_finish_of_what_was_given_up_and_waits_lets_the_next_group_open_at_once() -> None:
    """KV for two of three samples. Two are given up and one of them waits, when its finish is heard after all."""
    engines = {"count": 1, "seats": 4, "timeout_s": 100_000.0, "request_timeout_s": 10.0}
    driver = Driver(settings_of(group_size=3, engines=engines), rows=0, engines=0)
    driver.join(0, 1, kv_tokens=100)
    driver.host_all()
    driver.prompts(1, tokens=45)
    driver.prompts(1, tokens=9)
    assert sorted(driver.out) == [RequestKey(0, 0, 0), RequestKey(0, 1, 0)]
    late = driver.about(driver.out[RequestKey(0, 1, 0)])
    driver.wait(11)
    assert sorted(driver.out) == [RequestKey(0, 0, 1), RequestKey(0, 2, 0)], "sample 1 waits"
    said = driver.say(m.Finished(**late, tokens=5, finish_reason="stop"))
    assert [issue.group for issue in driver.said(m.Issue, said)] == [1]


def test_a_score_of_what_was_given_up_and_waits_lets_the_next_group_open_at_once() -> None:
    """KV for two of three samples: the third, that waits again, keeps the next group from being opened."""
    driver = Driver(settings_of(group_size=3, engines={"count": 1, "seats": 4}), rows=0, engines=0)
    driver.join(0, 1, kv_tokens=100)
    driver.host_all()
    driver.prompts(1, tokens=45)
    driver.finish(RequestKey(0, 0, 0))
    late = RequestKey(0, 0, 0)
    assert sorted(driver.out) == [RequestKey(0, 1, 0), RequestKey(0, 2, 0)]
    driver.say(m.Failed(engine=None, incarnation=None, **late._asdict(), reason="bad row"))
    driver.prompts(1, tokens=9)
    assert driver.running() == [0], "sample 0 waits for room"
    said = driver.score(late, 1.0, 0)
    assert [issue.group for issue in driver.said(m.Issue, said)] == [1]
