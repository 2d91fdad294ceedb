"""The scorer: from completions to scored rows, whatever the rows and the graders are like."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas import arrow
from schemas.codec import decode
from schemas.ids import record_id
from schemas.messages import STATUS, DeadLetter, Failed, Scored
from schemas.topics import Topics, score_partition
from tests.unit.reward_rows import Deadline, a_bus, a_process, a_row, complete, records
from workers.reward.service import Scorer, graders_of, serve
from workers.runtime.errors import BadInput
from workers.transport.records.memory_bus import MemoryBus

TOPICS = Topics("r")


@contextmanager
def a_scorer(tmp_path: Path, bus: MemoryBus, **reward: Any) -> Iterator[Scorer]:
    scorer = Scorer(a_process(tmp_path, **reward), bus, 0)
    try:
        yield scorer
    finally:
        scorer.close()


def said(bus: MemoryBus) -> list[Scored | Failed]:
    return [decode(STATUS, record.value, record.headers) for record in records(bus, TOPICS.status)]  # type: ignore[misc]


def turn_until(scorer: Scorer, bus: MemoryBus, count: int) -> list[Scored | Failed]:
    """Turn until `count` words stand on status and all offsets are committed."""
    deadline = Deadline()
    while len(said(bus)) < count or not committed(bus):
        deadline.check(said(bus))
        scorer.turn()
    return said(bus)


def committed(bus: MemoryBus) -> bool:
    return bus.committed(TOPICS.group("reward"), TOPICS.completions) == bus.end_offsets(TOPICS.completions)


def test_a_group_with_a_member_whose_grading_never_ends_is_scored_to_the_last_member(tmp_path: Path) -> None:
    """A02, H02: seven members have rewards, the eighth an error; the scored rows lie where `Scored` says."""
    bus = a_bus()
    for index in range(8):
        complete(bus, [a_row(5, index, "hang" if index == 3 else str(index / 8))])
    with a_scorer(tmp_path, bus) as scorer:
        words = turn_until(scorer, bus, 8)
    scored = {word.index: word for word in words if isinstance(word, Scored)}
    assert sorted(scored) == list(range(8))
    assert scored[3].error == "timed out after 1 s"
    assert scored[3].reward is None
    for index, word in scored.items():
        place = next(p for p in records(bus, TOPICS.trajectories) if p.position[1:] == (word.partition, word.offset))
        row = arrow.to_rows(arrow.to_table(place.value))[word.row]
        assert (row["group"], row["index"], row["attempt"]) == (5, index, 0)
        assert place.headers["id"] == record_id("trajectory", 5, index, 0)
        assert place.partition == score_partition(5)
        assert arrow.invalid_reason(row, scored=True) is None
        assert row["reward"] == word.reward == (None if index == 3 else index / 8)
        assert row["response_ids"] == [2, 3]
        assert row["scored_at"] >= row["finished_at"]


def test_rows_of_one_record_are_scored_one_by_one_and_held_out_rows_go_to_evaluations(tmp_path: Path) -> None:
    bus = a_bus()
    held = {"task": "held", "purpose": "eval"}
    complete(bus, [a_row(1, 0, "shaped"), a_row(1, 1, "raise"), a_row(9, 0, "1", **held)])
    with a_scorer(tmp_path, bus) as scorer:
        words = {(w.group, w.index): w for w in turn_until(scorer, bus, 3) if isinstance(w, Scored)}
    shaped, raised, evaluated = words[1, 0], words[1, 1], words[9, 0]
    assert (shaped.reward, shaped.outcome, shaped.error) == (0.25, 1.0, None)
    assert (raised.reward, raised.outcome, raised.error) == (None, None, "KeyError: 'no such cell'")
    assert (evaluated.reward, evaluated.purpose) == (1.0, "eval")
    assert len(records(bus, TOPICS.trajectories)) == 2
    rows = [arrow.to_rows(arrow.to_table(r.value))[0] for r in records(bus, TOPICS.evaluations)]
    assert [row["group"] for row in rows] == [9]
    parts = [arrow.to_rows(arrow.to_table(r.value))[0]["reward_parts"] for r in records(bus, TOPICS.trajectories)]
    assert {"length": -0.75} in parts


def test_bad_rows_are_dead_lettered_and_their_requests_have_failed(tmp_path: Path) -> None:
    bus = a_bus()
    complete(bus, [a_row(1, 0), a_row(1, 1, logprobs=[-1.0]), a_row(2, 0, run="other")])
    complete(bus, [{**a_row(3, 0), "prompt_ids": None, "group": None}])
    bus.producer().send(
        TOPICS.completions, b"no arrow", {"schema": "trajectory/1", "id": record_id("trajectory", 4, 1, 2)}, partition=1
    )
    bus.producer().send(TOPICS.completions, b"nobody's", {})
    complete(bus, [a_row(6, 0, task="unheard")])
    with a_scorer(tmp_path, bus) as scorer:
        words = turn_until(scorer, bus, 5)
    failed = {(w.group, w.index, w.attempt): w.reason for w in words if isinstance(w, Failed)}
    assert sorted(failed) == [(1, 1, 0), (2, 0, 0), (4, 1, 2)]
    assert "row 1: logprobs has 1 entries, response_ids 2" in failed[1, 1, 0]
    assert "it belongs to run 'other'" in failed[2, 0, 0]
    assert "not an Arrow stream" in failed[4, 1, 2]
    scored = {(w.group, w.index): w for w in words if isinstance(w, Scored)}
    assert scored[1, 0].reward == 1.0
    assert scored[6, 0].error == "the configuration has no dataset 'unheard' with purpose 'train'"
    letters = [decode(DeadLetter, r.value, r.headers) for r in records(bus, TOPICS.dead_letters)]
    assert len(letters) == 4
    assert b"nobody's" in [base64.b64decode(letter.value_base64) for letter in letters]


def test_offsets_are_committed_after_the_rows_are_written_and_a_crash_scores_them_again(tmp_path: Path) -> None:
    bus = a_bus()
    complete(bus, [a_row(1, 0)])
    with a_scorer(tmp_path, bus, timeout_s=30.0) as scorer:
        turn_until(scorer, bus, 1)
        complete(bus, [a_row(1, 1, "hang")])
        scorer.turn()
        assert not committed(bus)
    with a_scorer(tmp_path, bus) as scorer:
        words = turn_until(scorer, bus, 2)
    assert [(w.group, w.index) for w in words] == [(1, 0), (1, 1)]


def test_the_stop_signal_scores_what_is_under_way_and_commits(tmp_path: Path) -> None:
    bus = a_bus()
    process = a_process(tmp_path)
    complete(bus, [a_row(1, 0)])
    scorer = Scorer(process, bus, 0)
    scorer.turn()
    scorer.finish()
    scorer.close()
    assert len(said(bus)) == 1
    assert committed(bus)
    process.stopping.set()
    assert serve(process, bus, 0) == 0


def test_each_row_is_graded_by_its_datasets_grader_and_a_misspelt_one_is_refused(tmp_path: Path) -> None:
    settings = a_process(tmp_path).settings
    assert set(graders_of(settings)) == {("rows", "train"), ("held", "eval")}
    wrong = settings.model_copy(update={"dataset": (settings.dataset[0].model_copy(update={"grader": "last_integr"}),)})
    with pytest.raises(BadInput, match="dataset rows: unknown grader 'last_integr': did you mean last_integer"):
        graders_of(wrong)
