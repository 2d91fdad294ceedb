"""Do the checkers bite? Every broken mind must be noticed within 200 seeds; the first that notices is enough."""

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, load
from tests.simulation.world import World

SEEDS = 200


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_mind_is_noticed(mutant: Mutant) -> None:
    code = load(mutant)
    for seed in range(SEEDS):
        try:
            World(seed, code).run()
        except Exception as error:
            assert not isinstance(error, ImportError | NameError | SyntaxError), f"the mutant does not run: {error!r}"
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
            return
    raise AssertionError(f"{SEEDS} seeds noticed nothing: {mutant.name}")
