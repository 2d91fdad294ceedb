"""One seed's run, and many of them: on all cores of this machine when they are large.

Rule 1: a run depends on its job alone, so the figures do not depend on who runs it.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pipelines.simulate.cost import Split
from pipelines.simulate.deployment import Deployment
from pipelines.simulate.record import Tape
from pipelines.simulate.world import World
from workers.runtime.collector import no_full_collections

SMALL = 50_000
"""So many responses are simulated in a few seconds: other processes would take as long to start."""


@dataclass(frozen=True, slots=True)
class Job:
    case: Deployment
    split: Split
    seed: int


Many = Callable[[Sequence[Job]], list[Tape]]


def run(job: Job) -> Tape:
    """Warm-up included. StandsStill."""
    case, split = job.case, job.split
    engines = case.settings.engines.model_copy(update={"count": split.rollout})
    settings = case.settings.model_copy(update={"engines": engines})
    with no_full_collections():
        return World(settings, case.cost, split, case.work, job.seed).run(case.warm_up + case.measured)


@contextmanager
def many(deployment: Deployment) -> Iterator[Many]:
    """Runs jobs of this size, in the order in which they are given."""
    cores, settings = len(os.sched_getaffinity(0)), deployment.settings
    steps = deployment.seeds * (deployment.warm_up + deployment.measured)
    if cores == 1 or steps * settings.groups_per_batch * settings.group_size < SMALL:
        yield lambda jobs: [run(job) for job in jobs]
        return
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        yield lambda jobs: list(pool.map(run, jobs))


def sooner(case: Deployment) -> Deployment:
    """With K = 0 or 1 the first step, or the first two, are all that differs."""
    return replace(case, warm_up=min(case.warm_up, case.settings.lag_max + 1))
