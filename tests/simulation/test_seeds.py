"""Two hundred worlds a run. A failure names its seed: `DORA_SEED=<seed> DORA_SEEDS=1` runs that one alone.

It also prints few events that break the rule again (`shrink.py`).
"""

import os

import pytest

from schemas import messages as m
from tests.simulation.draw import draw
from tests.simulation.mutants import MUTANTS, load
from tests.simulation.shrink import explained, line_of, retold
from tests.simulation.world import World

BASE = int(os.environ.get("DORA_SEED", "0"))
COUNT = int(os.environ.get("DORA_SEEDS", "200"))
SHARES = 8
pytestmark = pytest.mark.timeout(300 + COUNT)


@pytest.mark.parametrize("share", range(SHARES))
def test_every_run_ends_and_breaks_no_invariant(share: int) -> None:
    for seed in range(BASE + share, BASE + COUNT, SHARES):
        print(f"seed {seed}")
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(explained(world, error)) from error


def test_without_staleness_a_step_trains_the_groups_that_a_loop_without_versions_trains() -> None:
    """The loop: open the next B rows, replace what fails, train all B, again. It knows only what was void."""
    compared = 0
    for seed in range(BASE, BASE + 60):
        drawn = draw(seed).settings
        if drawn.lag_max or drawn.mode == "oversample":
            continue
        world = World(seed)
        world.run()
        effects = [effect for record in world.journal for effect in record.effects]
        void = {effect.group for effect in effects if isinstance(effect, m.VoidGroup)}
        rows = {e.group: e.prompt_row for e in effects if isinstance(e, m.Issue) and e.purpose == "train"}
        good = sorted(row for group, row in rows.items() if group not in void)
        size = drawn.groups_per_batch
        for number, batch in enumerate(effect for effect in effects if isinstance(effect, m.BatchRecord)):
            assert sorted(rows[group] for group, _ in batch.groups) == good[number * size : (number + 1) * size]
            compared += 1
    assert compared > 10


def test_the_same_seed_tells_the_same_story() -> None:
    """Nothing in the world or the mind depends on the process."""
    first, second = World(BASE + 3), World(BASE + 3)
    first.run()
    second.run()
    assert [record.model_dump_json() for record in first.journal] == [r.model_dump_json() for r in second.journal]


def test_the_story_of_a_broken_rule_is_told_in_few_events() -> None:
    """The broken mind complains at the same line when it hears them alone."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "a finish frees no seat")
    world = World(0, load(mutant))
    with pytest.raises(AssertionError) as caught:
        world.run()
    said = explained(world, caught.value)
    print(said)
    count, _, total, *_ = said.splitlines()[1].split()
    assert int(count) <= 20 < int(total)
    assert retold(world.drawn, world.told, world.code) == line_of(caught.value)
