"""The presets against the paper: calibrated on the sync row alone, everything else is a prediction (PAPER = its steps).

Long: whole presets of 8,192 responses a step."""

import pytest

from pipelines.simulate.compare import at_best, best_splits, in_mode
from pipelines.simulate.presets import preset
from pipelines.simulate.runs import many

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", ["paper-64", "paper-128"])
def test_sync_is_the_row_that_the_preset_was_fitted_to(name: str) -> None:
    case = in_mode(preset(name), "sync")
    with many(case) as together:
        found = at_best(case, best_splits(case, together, print), together).figures
    paper = preset(name).paper["sync"]
    assert found.step_minutes == pytest.approx(paper["step_minutes"], rel=0.02)
    assert found.rollout_only_share == pytest.approx(paper["rollout_only_share"], abs=0.02)


@pytest.mark.parametrize(("name", "speed_up"), [("paper-64", 1.56), ("paper-128", 1.93)])
def test_dora_is_as_much_faster_as_the_paper_says(name: str, speed_up: float) -> None:
    case = in_mode(preset(name), "dora")
    with many(case) as together:
        found = at_best(case, best_splits(case, together, print), together).figures
    assert preset(name).paper["sync"]["step_minutes"] / found.step_minutes >= speed_up
    assert found.step_minutes >= 0.99 * found.work_bound_minutes
