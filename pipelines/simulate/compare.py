"""Modes side by side: each at its best split of engines, each figure the mean of several seeds.

Rule 1: a split is looked for on a smaller copy of the deployment (fewer seats and groups, the same load on each seat),
among those whose work bound is near the best. The copy has fewer of the very longest responses, so from there the whole
deployment is tried with more engines for rollout as long as that makes a step clearly shorter.
Rule 2: all modes get the same groups with the same lengths.
Rule 3: each mode is looked at in a thread of its own, which waits for its runs (`runs.py`): all cores have work.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from pipelines.simulate.cost import Split, bound_s
from pipelines.simulate.deployment import Deployment
from pipelines.simulate.record import Tape
from pipelines.simulate.runs import Job, Many, many, sooner
from schemas.settings import Settings

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "one_step": {"mode": "one_step"},
    "partial": {"mode": "partial"},
    "oversample": {"mode": "oversample"},
    "dora": {"mode": "dora"},
    "dora_k2": {"mode": "dora", "staleness_max": 2},
}
"""What a mode changes in the settings; `dora` and `partial` keep the deployment's K (3 in the presets)."""
BOUND_OVER_BEST_MAX = 1.35
"""Splits whose work bound is further from the best one are not tried."""
TRIED_MAX = 7
"""So many splits are tried at first; then those between the best and its neighbours."""
PROMISING = 2
"""Of these, so many with the least work bound are tried before the others, which are tried only if they could win."""
FINE = 100
"""Engines that are less than one in so many of all make no difference."""
GAIN = 0.01
"""More engines for rollout are tried as long as the last ones made a step shorter by so much of it."""
COPY = 8
"""Seats and groups of the smaller copy are so many times fewer."""
COPY_GROUPS_MIN = 64
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the steps after the warm-up, seeds together. Shares are of time; `idle_share`: engines that run no request (of
    the time in which the trainer does not use the same accelerators); `seats_share`: seats that decode. `lag` counts
    trajectories; `moves` and `blocked_by_oldest_seconds` are per step. `seeds`: step minutes of each."""

    step_minutes: float
    tokens_per_second: float
    work_bound_minutes: float
    rollout_only_share: float
    idle_share: float
    blocked_by_oldest_seconds: float
    lag: dict[str, int]
    moves: float
    engines_rollout: int
    paper: dict[str, float]
    seats_share: float
    seeds: list[float]


@dataclass(frozen=True, slots=True)
class Found:
    """Of one mode: its figures, the run of the first seed with the steps that were warm-up there, and minutes a step of
    splits on the smaller copy."""

    figures: Figures
    tape: Tape
    warm_up: int
    tried: dict[int, float]

    def as_json(self, paper: Mapping[str, float]) -> dict[str, Any]:
        return asdict(self.figures) | {"paper": dict(paper)}


def compare(deployment: Deployment, modes: list[str], rollout: int | None, say: Say) -> dict[str, Found]:
    """Each mode at its best split (or with `rollout` engines). StandsStill."""

    def one(mode: str) -> Found:
        case = sooner(in_mode(deployment, mode))
        fixed = rollout is not None and case.settings.lag_max > 0
        if fixed and rollout:
            tried = {rollout: 0.0}
        else:
            tried = best_splits(case, together, lambda text: say(f"{mode}, {text}"))
        found = at_best(case, tried, together)
        say(f"{mode}: {found.figures.engines_rollout} engines for rollout, {case.seeds} seed(s)")
        return found

    with many(deployment) as together, ThreadPoolExecutor(len(modes)) as threads:
        return dict(zip(modes, threads.map(one, modes), strict=True))


def in_mode(deployment: Deployment, mode: str) -> Deployment:
    return replace(deployment, settings=with_changes(deployment.settings, MODES[mode]))


def with_changes(settings: Settings, changes: dict[str, Any]) -> Settings:
    """Checked again as a whole."""
    return Settings.model_validate(settings.model_dump() | changes)


def at_best(case: Deployment, tried: dict[int, float], together: Many) -> Found:
    """At the best split that was tried, or with more engines for rollout if the first seed's step is shorter so."""
    tapes: dict[int, Tape] = {}
    minutes: dict[int, float] = {}
    coming = ranked(tried)[:1]
    while coming:
        before = min(minutes.values(), default=math.inf)
        jobs = [Job(case, Split(rollout, case.engines_total), 0) for rollout in coming]
        tapes.update(zip(coming, together(jobs), strict=True))
        minutes |= {
            job.split.rollout: _figures(case, job.split, [tapes[job.split.rollout]]).step_minutes for job in jobs
        }
        best = ranked(minutes)[0]
        shorter = minutes[best] < (1 - GAIN) * before
        coming = _upwards(case, best, minutes[best]) if len(tried) > 1 and shorter else []
    split = Split(best, case.engines_total)
    others = together([Job(case, split, seed) for seed in range(1, case.seeds)])
    mine = _figures(case, split, [tapes[best], *others])
    return Found(mine, tapes[best], case.warm_up, tried if len(tried) > 1 else {})


def _upwards(case: Deployment, rollout: int, minutes: float) -> list[int]:
    """The next two numbers of engines for rollout whose work bound lets a step be shorter than `minutes`."""
    splits = [Split(rollout + more * _fine(case), case.engines_total) for more in (1, 2)]
    there = [split for split in splits if split.rollout < (case.engines_total or 0)]
    seats = case.settings.engines.seats
    return [split.rollout for split in there if bound_s(case.cost, split, case.step_tokens, seats) < 60 * minutes]


def _fine(case: Deployment) -> int:
    """A difference of engines that matters."""
    return 1 + (case.engines_total or 0) // FINE


def ranked(tried: dict[int, float]) -> list[int]:
    """Engines for rollout, the shortest step first."""
    return sorted(tried, key=lambda rollout: (tried[rollout], rollout))


def best_splits(case: Deployment, together: Many, say: Say) -> dict[int, float]:
    """Engines for rollout -> minutes a step on the smaller copy. A trainer of its own, or all in turn (K = 0), leave
    none to choose: then there is one, and 0."""
    if case.engines_total is None:
        return {case.settings.engines.count: 0.0}
    if case.settings.lag_max == 0:
        return {case.engines_total: 0.0}
    small, near = copy_of(case), candidates(case)
    tried: dict[int, float] = {}

    def look(rollouts: list[int]) -> int:
        """The best of all so far."""
        jobs = [Job(small, Split(rollout, case.engines_total), 0) for rollout in rollouts]
        for job, tape in zip(jobs, together(jobs), strict=True):
            minutes = tried[job.split.rollout] = _figures(small, job.split, [tape]).step_minutes
            say(f"{job.split.rollout} of {case.engines_total} engines: {minutes:.2f} min a step (smaller copy)")
        return ranked(tried)[0]

    stride = -(-len(near) // TRIED_MAX)
    first = sorted(list(near)[::stride], key=lambda rollout: near[rollout])
    best = look(first[:PROMISING])
    best = look([rollout for rollout in first[PROMISING:] if near[rollout] < 60 * tried[best]])
    while stride > _fine(case):
        stride = -(-stride // 2)
        best = look([rollout for rollout in (best - stride, best + stride) if rollout in near and rollout not in tried])
    return tried


def candidates(case: Deployment) -> dict[int, float]:
    """Numbers of rollout engines worth trying, in order, each with its work bound in seconds."""
    assert case.engines_total is not None
    settings = case.settings
    bounds = {}
    for rollout in range(-(-settings.group_size // settings.engines.seats), case.engines_total):
        split = Split(rollout, case.engines_total)
        bounds[rollout] = bound_s(case.cost, split, case.step_tokens, settings.engines.seats)
    best = min(bounds.values())
    return {rollout: bound for rollout, bound in bounds.items() if bound <= BOUND_OVER_BEST_MAX * best}


def copy_of(case: Deployment) -> Deployment:
    """The same deployment with fewer seats and groups; each running request weighs more in a decoding step."""
    settings = case.settings
    factor = max(1, min(COPY, settings.groups_per_batch // COPY_GROUPS_MIN, settings.engines.seats))
    smaller = {
        "groups_per_batch": settings.groups_per_batch // factor,
        "engines": settings.engines.model_dump() | {"seats": settings.engines.seats // factor},
    }
    cost = case.cost.model_copy(update={"t1_s": case.cost.t1_s * factor})
    room = case.work.prompt + settings.sampling.max_new_tokens
    work = replace(case.work, kv_tokens=max(case.work.kv_tokens // factor, room))
    return replace(case, settings=with_changes(settings, smaller), cost=cost, work=work, seeds=1)


def figures(case: Deployment, split: Split, together: Many) -> Figures:
    """StandsStill if a seed's run comes to no step."""
    return _figures(case, split, together([Job(case, split, seed) for seed in range(case.seeds)]))


@dataclass(slots=True)
class _Sums:
    """Of the measured steps of all seeds."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    train_s: float = 0.0
    used_s: float = 0.0
    seat_s: float = 0.0
    blocked_s: float = 0.0
    moves: int = 0


def _figures(case: Deployment, split: Split, tapes: list[Tape]) -> Figures:
    sums, lag, each = _Sums(), Counter[int](), list[float]()
    for tape in tapes:
        spent = tape.since(case.warm_up)
        count = len(tape.steps) - case.warm_up
        each.append(round(spent.at / count / 60, 4))
        sums.seconds += spent.at
        sums.steps += count
        sums.tokens += spent.tokens
        sums.train_s += spent.train_s
        sums.used_s += spent.decode_s + spent.stall_s + spent.load_s
        sums.seat_s += spent.seat_s
        sums.blocked_s += spent.blocked_s
        sums.moves += spent.moves
        lag.update(spent.lag)
    seats = case.settings.engines.seats
    engine_s = split.rollout * (sums.seconds - sums.train_s if split.in_turn else sums.seconds)
    bound = bound_s(case.cost, split, sums.tokens / sums.steps, seats)
    return Figures(
        step_minutes=round(fmean(each), 3),
        tokens_per_second=round(sums.tokens / sums.seconds, 1),
        work_bound_minutes=round(bound / 60, 3),
        rollout_only_share=round(max(0.0, 1 - sums.train_s / sums.seconds), 4),
        idle_share=round(max(0.0, 1 - sums.used_s / engine_s), 4),
        blocked_by_oldest_seconds=round(sums.blocked_s / sums.steps, 2),
        lag={str(age): lag[age] * case.settings.group_size for age in sorted(lag)},
        moves=round(sums.moves / sums.steps, 1),
        engines_rollout=split.rollout,
        paper={},
        seats_share=round(sums.seat_s / (engine_s * seats), 4),
        seeds=each,
    )
