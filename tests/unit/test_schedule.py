"""The learning rate of each step."""

import pytest

from schemas.settings import Settings
from workers.trainer.schedule import learning_rate, renews_reference


def rates(steps: int, **training: object) -> list[float]:
    tree = {"model": "m", "steps": steps, "dataset": [{"path": "rows.jsonl"}]}
    settings = Settings.model_validate(tree | {"training": {"learning_rate": 0.8, **training}})
    return [learning_rate(step, settings) for step in range(steps)]


def test_without_a_schedule_every_step_has_the_learning_rate() -> None:
    assert rates(4) == [0.8] * 4


def test_it_rises_over_the_warm_up_and_its_last_step_has_all_of_it() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_linear_falls_by_the_same_each_step_and_trains_the_last_one_too() -> None:
    assert rates(4, schedule="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    said = rates(4, schedule="cosine")
    assert said == pytest.approx([0.8, 0.4 + 0.4 * 0.5**0.5, 0.4, 0.4 - 0.4 * 0.5**0.5])


def renewed(**training: object) -> list[int]:
    tree = {"model": "m", "steps": 9, "dataset": [{"path": "rows.jsonl"}], "training": {"kl_coef": 0.1, **training}}
    settings = Settings.model_validate(tree)
    return [step for step in range(9) if renews_reference(step, settings)]


def test_the_reference_is_version_0_a_pinned_one_or_one_of_every_few() -> None:
    assert renewed() == []
    assert renewed(kl_version=5) == [5]
    assert renewed(kl_refresh_steps=4) == [4, 8]
