"""No bad row reaches a gradient: not written by the engine's process, not scored, and at last not trained. Each of the
three looks by the same function; who refuses says why, keeps the row as a dead letter, and the request has failed (the
mind then issues it again: `test_mind_requests.py`)."""

import base64
import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas import messages as m
from schemas.codec import decode
from schemas.topics import Topics
from tests.unit.reward_rows import Deadline, a_bus, a_process, a_row, complete, records
from tests.unit.rollout_house import House, settings
from tests.unit.test_rollout_service import hosting_0
from tests.unit.trainer_world import World, row
from workers.reward.service import Scorer
from workers.rollout.engines.base import Tokens
from workers.rollout.engines.paced_engine import VOCABULARY, PacedEngine
from workers.runtime.process import Process
from workers.trainer.learners.base import Sample
from workers.trainer.learners.paced_learner import PacedLearner
from workers.trainer.service import serve

TOPICS = Topics("r")
KNOWN = 512
BAD: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": [-1.0]}, "logprobs has 1 entries"),
    ({"loss_mask": [True] * 4}, "loss_mask has 4 entries"),
    ({"logprobs": [math.nan, -1.0, -1.0]}, r"logprobs\[0\] is nan"),
    ({"logprobs": [-1.0, -math.inf, -1.0]}, r"logprobs\[1\] is -inf"),
    ({"logprobs": [-1.0, -1.0, 0.5]}, r"logprobs\[2\] is 0.5"),
    ({"kept_logmass": [-0.1, math.nan, -0.1]}, r"kept_logmass\[1\] is nan"),
    ({"response_ids": [1, KNOWN, 3]}, f"response_ids has {KNOWN}, ids are 0 .. {KNOWN - 1}"),
    ({"prompt_ids": [1, -1]}, "prompt_ids has -1"),
    ({"run": "another"}, "another"),
    ({"version": 1}, "version"),
]
"""Columns of a row of three response tokens, run `r` and version 0, of a model that knows KNOWN tokens."""


class Spoilt(PacedEngine):
    """An engine whose tokens are changed on their way out."""

    def __init__(self, change: Callable[[Tokens], Tokens]) -> None:
        super().__init__(settings(), pace=0)
        self._change = change

    def step(self) -> list[Tokens]:
        return [self._change(part) for part in super().step()]


def a_model(folder: Path, vocabulary: int = KNOWN) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    return str(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda part: dataclasses.replace(part, logprobs=(math.nan,)), "logprobs[0] is nan"),
        (lambda part: dataclasses.replace(part, logprobs=(0.25,)), "logprobs[0] is 0.25"),
        (lambda part: dataclasses.replace(part, logprobs=()), "logprobs has 0 entries, response_ids 8"),
        (lambda part: dataclasses.replace(part, ids=(VOCABULARY,)), f"response_ids has {VOCABULARY}, ids are 0 .. 255"),
        (lambda part: dataclasses.replace(part, ids=(-1,)), "response_ids has -1, ids are 0 .. 255"),
    ],
    ids=["nan", "positive", "lengths", "vocabulary", "negative"],
)
def test_an_engine_that_computes_nonsense_writes_no_row(
    tmp_path: Path, change: Callable[[Tokens], Tokens], said: str
) -> None:
    model = a_model(tmp_path / "model", VOCABULARY)
    house = hosting_0(House(tmp_path, Spoilt(change), model=model))
    house.issue(1, 0, 0)
    house.until(lambda: bool(house.of(m.Failed) and house.of(m.DeadLetter)))
    (failed,), (letter,) = house.of(m.Failed), house.of(m.DeadLetter)
    assert (failed.group, failed.index, failed.attempt) == (1, 0, 0)
    assert failed.reason == f"bad row: {said}"
    assert (letter.topic, letter.offset, letter.reason) == (house.topics.completions, -1, said)
    assert json.loads(base64.b64decode(letter.value_base64))["group"] == 1
    assert house.of(dict) == house.of(m.Finished) == []
    assert not house.service._running, "its seat is free again"


@pytest.mark.parametrize(("changes", "said"), BAD, ids=lambda one: None if isinstance(one, str) else next(iter(one)))
def test_a_bad_completion_is_a_dead_letter_and_never_a_trajectory(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    a_model(tmp_path)
    three = {"response_ids": [2, 3, 4], "logprobs": [-0.5] * 3, "loss_mask": [True] * 3}
    good = a_row(5, 1, **three)
    good["engine_path"][0]["tokens"] = 3
    bad = a_row(5, 0, **three)
    bad["engine_path"][0]["tokens"] = 3
    bus = a_bus()
    complete(bus, [bad | changes])
    complete(bus, [good])
    scorer = Scorer(a_process(tmp_path), bus, 0)
    deadline = Deadline()
    while not (records(bus, TOPICS.trajectories) and records(bus, TOPICS.dead_letters)):
        deadline.check(said)
        scorer.turn()
    scorer.close()
    words = [decode(m.STATUS, one.value, one.headers) for one in records(bus, TOPICS.status)]
    (failed,) = [word for word in words if isinstance(word, m.Failed)]
    assert (failed.group, failed.index, failed.attempt) == (5, 0, 0)
    (letter,) = [decode(m.DeadLetter, one.value, one.headers) for one in records(bus, TOPICS.dead_letters)]
    assert re.search(said, failed.reason)
    assert re.search(said, letter.reason)
    assert [(word.group, word.index) for word in words if isinstance(word, m.Scored)] == [(5, 1)]


class Watched(PacedLearner):
    """Remembers whether it was asked to train."""

    trained = False

    def train(self, samples: list[Sample], step: int = 0) -> dict[str, float]:  # type: ignore[override]
        self.trained = True
        return super().train(samples, step)


@pytest.mark.parametrize(("changes", "said"), BAD, ids=lambda one: None if isinstance(one, str) else next(iter(one)))
def test_a_bad_row_in_a_batch_stops_the_trainer_before_the_gradient(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    world = World(tmp_path)
    record = world.batch(0)
    first = record.members[0]
    world.send_batch(
        record.model_copy(update={"members": (world.add_row(spoilt(first, changes)), *record.members[1:])})
    )
    process = Process("trainer", world.settings, tmp_path)
    learner = Watched(world.settings, pace=0)
    with pytest.raises(AssertionError, match=said):
        serve(process, world.bus, learner)
    assert not learner.trained
    assert [one.version for one in world.weights()] == [0]


def spoilt(member: m.Member, changes: dict[str, Any]) -> dict[str, Any]:
    return row(member.group, member.index, 0) | changes


def test_a_batch_of_another_run_stops_the_trainer(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send_batch(world.batch(0).model_copy(update={"run": "another"}))
    with pytest.raises(AssertionError, match="belongs to run 'another'"):
        serve(Process("trainer", world.settings, tmp_path), world.bus, PacedLearner(world.settings, pace=0))
