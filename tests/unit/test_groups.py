"""The life of groups and requests: the tables, and the figures that are kept at each move."""

import pytest

from schemas.messages import Scored
from workers.orchestrator.groups import Group, Groups, Place, Request, Stage


def opened(groups: Groups, version: int = 0, purpose: str = "train", size: int = 2) -> Group:
    eval_or_train = "eval" if purpose == "eval" else "train"
    return groups.open(version, eval_or_train, prompt_row=0, size=size, tokens_max=10, queued_at=5)  # type: ignore[arg-type]


def score(request: Request, outcome: float) -> Scored:
    names = {"group": request.group, "index": request.index, "attempt": request.attempt, "version": request.version}
    verdict = {"reward": outcome, "outcome": outcome, "error": None}
    return Scored.model_validate({**names, **verdict, "purpose": "train", "partition": 0, "offset": 0, "row": 0})


def issue(groups: Groups, request: Request) -> None:
    request.attempt += 1
    groups.move(request, Place.ENGINE)


def give(groups: Groups, group: Group, *outcomes: float) -> bool:
    last = False
    for request, outcome in zip(group.requests, outcomes, strict=True):
        issue(groups, request)
        last = groups.scored(group, request, score(request, outcome))
    return last


def test_groups_count_up_from_0_for_training_and_evaluation_alike() -> None:
    groups = Groups()
    assert [opened(groups).number, opened(groups, purpose="eval").number, opened(groups).number] == [0, 1, 2]
    assert (groups.live, groups.evaluating) == (2, 1)


def test_a_word_about_an_older_attempt_finds_nothing() -> None:
    groups = Groups()
    request = opened(groups).requests[1]
    issue(groups, request)
    groups.move(request, Place.WAITING)
    issue(groups, request)
    assert groups.find(0, 1, 0) is None
    assert groups.find(0, 1, 1) is not None
    assert groups.find(0, 2, 0) is None
    assert groups.find(9, 0, 0) is None


def test_figures_follow_every_move() -> None:
    groups = Groups()
    group = opened(groups, version=3)
    books = groups.of(3)
    assert (books.live, books.unsampled, books.waiting, books.tokens) == (1, 2, 2, 20)
    first, second = group.requests
    issue(groups, first)
    assert (books.unsampled, books.waiting) == (2, 1)
    groups.move(first, Place.STOPPING)
    groups.move(first, Place.WAITING)
    assert (books.unsampled, books.waiting) == (2, 2)
    issue(groups, first)
    groups.move(first, Place.FINISHED)
    assert (books.unsampled, books.waiting, books.tokens) == (1, 1, 10)
    assert not groups.drained
    issue(groups, second)
    groups.scored(group, second, score(second, 1.0))
    assert (books.unsampled, books.tokens, groups.drained) == (0, 0, True)


def test_requests_wait_in_order_and_one_that_ended_meanwhile_is_passed_over() -> None:
    groups = Groups()
    group = opened(groups, size=3)
    issue(groups, group.requests[0])
    groups.move(group.requests[0], Place.WAITING)
    groups.move(group.requests[1], Place.SCORED)
    found = [groups.waiting(0)]
    issue(groups, group.requests[0])
    found.append(groups.waiting(0))
    assert [request.index for request in found if request is not None] == [0, 2]


def test_a_group_completes_with_its_last_score_and_is_chosen_and_trained_once() -> None:
    groups = Groups()
    group = opened(groups)
    assert give(groups, group, 0.0, 1.0)
    groups.end(group, Stage.COMPLETE)
    assert (groups.live, group.completed, list(groups.complete)) == (1, 0, [0])
    groups.end(group, Stage.CHOSEN)
    assert (groups.live, list(groups.complete)) == (0, [])
    groups.end(group, Stage.TRAINED)
    assert groups.table == {}
    with pytest.raises(AssertionError, match="TRAINED -> CHOSEN"):
        groups.end(group, Stage.CHOSEN)


def test_a_step_that_the_tables_do_not_know_is_our_bug() -> None:
    groups = Groups()
    group = opened(groups)
    with pytest.raises(AssertionError, match="OPEN -> CHOSEN"):
        groups.end(group, Stage.CHOSEN)
    with pytest.raises(AssertionError, match="WAITING -> STOPPING"):
        groups.move(group.requests[0], Place.STOPPING)
    with pytest.raises(AssertionError, match="is train"):
        groups.end(group, Stage.EVALUATED)


def test_f05_constant_rewards_that_are_neither_0_nor_1_carry_no_signal() -> None:
    groups = Groups()
    group = opened(groups, size=8)
    give(groups, group, *[0.4] * 8)
    assert not group.outcomes_vary


def test_f04_one_different_outcome_is_signal_for_the_whole_group() -> None:
    groups = Groups()
    group = opened(groups, size=8)
    give(groups, group, 0.0, *[0.95] * 7)
    assert group.outcomes_vary


def test_a_version_in_use_is_not_forgotten() -> None:
    groups = Groups()
    opened(groups)
    with pytest.raises(AssertionError, match="in use"):
        groups.forget(0)
