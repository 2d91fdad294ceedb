"""What runs of the kill tests are made of: as real as the question needs.

QUICK has no model, TRAINED has the Megatron trainer on the tiny model; REAL has everything real (marked full).
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.whole_run import Running, dora_run

LIMIT_S = 600.0
"""A trainer that dies twice starts three times: on a busy machine half a minute each."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A configuration, what is changed in it, how many steps are trained."""

    config: str
    steps: int
    overrides: tuple[str, ...] = ()

    def run(self, folder: Path, *more: str, **options: Any) -> contextlib.AbstractContextManager[Running]:
        changed = ("prefect.enabled=false", f"steps={self.steps}", *self.overrides, *more)
        return dora_run(self.config, folder, *changed, **options)


QUICK = Parts("paced", 10)
TRAINED = Parts("tiny", 8, ("engines.kind=paced",))
REAL = Parts("tiny", 8, ("engines.count=3",))
full = pytest.param(REAL, marks=pytest.mark.full, id="real")
quick = pytest.mark.parametrize("parts", [pytest.param(QUICK, id="quick"), full])
trained = pytest.mark.parametrize("parts", [pytest.param(TRAINED, id="trained"), full])
real_engines = pytest.mark.parametrize("parts", [pytest.param(Parts("tiny", 6), id="two"), full])


def process_of(running: Running, *words: str) -> psutil.Process:
    """The process of this run whose command line has these words."""
    (found,) = [p for p in running.processes() if all(word in " ".join(p.cmdline()) for word in words)]
    return found
