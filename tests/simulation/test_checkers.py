"""Stories in which a true mind is right, told to the checkers. They are rare: one world in thousands has them."""

import dataclasses

from schemas import messages as m
from schemas.ids import RequestKey
from schemas.settings import Settings
from tests.simulation.checkers import Checker
from tests.simulation.draw import draw
from tests.unit.mind_driver import Driver, S, settings_of

LIMIT = 60
"""Tokens of an engine's KV, and of the longest request."""


class Judged(Driver):
    """A driver whose checker looks at every word."""

    def __init__(self, settings: Settings) -> None:
        drawn = dataclasses.replace(draw(0), settings=settings, eval_rows=0, tokens_per_request_max=LIMIT)
        self.checker = Checker(drawn)
        super().__init__(settings, rows=0, engines=0)
        for number in range(settings.engines.count):
            self.join(number, 1, kv_tokens=LIMIT)
        self.host_all()

    def say(self, event: m.Event) -> list[m.Effect]:
        self.checker.heard(event)
        said = super().say(event)
        self.checker.said(said)
        return said

    def settled(self) -> None:
        self.checker.settled(self.now / S)


def test_a_lost_samples_earlier_attempt_may_still_have_a_seat_that_its_engines_word_will_free() -> None:
    """Both attempts were scored `not scored` before their engines said that they are done."""
    scheduling = {"failures_max": 1, "group_policy": "partial"}
    driver = Judged(settings_of(group_size=3, groups_per_batch=1, scheduling=scheduling))
    driver.prompts(1)
    first = driver.out[RequestKey(0, 0, 0)]
    driver.score(RequestKey(0, 0, 0), None, 0)
    driver.finish(RequestKey(0, 0, 1))
    said = driver.score(RequestKey(0, 0, 1), None, 0)
    assert [lost.index for lost in driver.said(m.SampleLost, said)] == [0]
    assert driver.said(m.Stop) == [], "nothing of it runs"
    driver.say(m.Finished(**driver.about(first), tokens=5, finish_reason="stop"))


def test_a_stop_that_was_decided_after_the_end_of_a_run_may_be_too_late_when_the_run_goes_on() -> None:
    driver = Judged(settings_of(scheduling={"failures_max": 1}))
    driver.prompts(2)
    driver.finish(RequestKey(0, 0, 0))
    driver.score(RequestKey(0, 0, 0), None, 0)
    driver.say(m.StopRun(reason="enough"))
    about = {"group": 0, "index": 0, "attempt": 1}
    assert driver.say(m.Failed(engine=None, incarnation=None, **about, reason="bad row")) == []
    driver.finish(RequestKey(0, 1, 0))
    said = driver.say(m.RunStarted(steps=10))
    assert [void.group for void in driver.said(m.VoidGroup, said)] == [0]
    stopped = (RequestKey(0, 0, 1), RequestKey(0, 1, 0))
    assert [stop.requests for stop in driver.said(m.Stop, said)] == [stopped], "sample 1 is done, and no harm is done"


def test_a_request_whose_partial_never_came_may_wait_for_room_that_a_new_group_cannot_have_first() -> None:
    """Both engines leave version 0; the second one hands nothing back, and gets a new group before that is known."""
    scheduling = {"live_factor": 9.0}
    driver = Judged(settings_of(mode="partial", groups_per_batch=1, staleness_max=3, scheduling=scheduling))
    driver.prompts(2, tokens=40)
    driver.complete(0)
    driver.prompts(1, tokens=25)
    swaps = {swap.engine: swap for swap in driver.said(m.Swap, driver.train())}
    assert [issue.group for issue in driver.said(m.Issue, driver.host(swaps[0]))] == [1]
    assert [issue.group for issue in driver.said(m.Issue, driver.host(swaps[1], partials=False))] == [2, 2]
    driver.wait(3)
    driver.prompts(1, tokens=9)
    driver.settled()
    assert driver.running() == [1, 2], "group 1 waits for its second sample's room, so group 3 is not opened"
