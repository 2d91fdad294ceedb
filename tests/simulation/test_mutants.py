"""Do the checkers bite? Every broken mind must be noticed within 200 seeds; the first that notices is enough."""

import pytest

from tests.simulation.draw import draw
from tests.simulation.mutants import MUTANTS, Mutant, load
from tests.simulation.world import Code, World

SEEDS = 200


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_mind_is_noticed(mutant: Mutant) -> None:
    code = load(mutant)
    for seed in range(SEEDS):
        if mutant.mode not in ("", draw(seed).settings.mode):
            continue
        noticed = broken_rule(seed, code)
        if noticed:
            print(f"seed {seed}: {noticed}")
            return
    raise AssertionError(f"{SEEDS} seeds noticed nothing: {mutant.name}")


def broken_rule(seed: int, code: Code) -> str:
    """What was said of this world; empty if nothing was. A mutant that cannot run at all is an error."""
    try:
        World(seed, code).run()
    except (AssertionError, code.recovery.JournalDiffers, KeyError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""
