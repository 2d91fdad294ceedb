"""What a person asks of the simulator, from words of the command line to a deployment that can be."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.config_file import read_settings
from pipelines.simulate.compare import MODES
from pipelines.simulate.cost import Work
from pipelines.simulate.deployment import Deployment, changed, check, cost_model, value_of
from pipelines.simulate.lengths import Lognormal
from pipelines.simulate.presets import preset
from schemas.settings import Settings
from workers.runtime.errors import BadInput

COMPARED = ("sync", "one_step", "partial", "dora", "dora_k2")
"""The modes of the paper's tables."""
STEPS_MAX = 24
"""So many steps of a configuration are simulated at most."""
SWEEP_MAX = 20
NOT_SIMULATED = 1e7
"""Seconds. A simulated engine and a simulated request are never late of themselves, however slow the cost model is."""


@dataclass(frozen=True, slots=True)
class Ask:
    """As it was said. `rollout`: engines for rollout, None = look for the best."""

    config: Path | None = None
    preset: str = ""
    modes: str = ""
    pairs: Sequence[str] = ()
    calibrate_from: Path | None = None
    seeds: int | None = None
    sweep: str = ""
    rollout: int | None = None


def deployment_of(ask: Ask) -> Deployment:
    """Checked. BadInput."""
    if (ask.config is None) == (not ask.preset):
        raise BadInput("simulate a CONFIG or a --preset NAME, one of the two")
    said = dict(_pair(text) for text in ask.pairs)
    if ask.preset:
        found = preset(ask.preset)
        if ask.calibrate_from is not None:
            raise BadInput("--calibrate-from is for a CONFIG; a preset has its own cost model")
    else:
        assert ask.config is not None
        found = _of_config(read_settings(ask.config), ask.calibrate_from, said)
        said = {key: value for key, value in said.items() if key not in _COST_NEEDED}
    if ask.seeds is not None:
        found = replace(found, seeds=ask.seeds)
    found = _steps(changed(found, said))
    check(found)
    if ask.rollout is not None and (found.engines_total is None or not 1 <= ask.rollout < found.engines_total):
        if found.engines_total is None:
            raise BadInput(f"--rollout {ask.rollout}: the trainer has accelerators of its own; set engines_total")
        raise BadInput(
            f"--rollout {ask.rollout}: 1 to {found.engines_total - 1}, the trainer takes at least one of engines_total"
        )
    return found


def modes_of(ask: Ask) -> list[str]:
    """BadInput names the nearest one."""
    if not ask.modes:
        return list(COMPARED) if ask.preset else ["sync", "dora"]
    there = list(MODES)
    modes = [name.strip() for name in ask.modes.split(",")]
    for name in modes:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            raise BadInput(f"--modes {name}: {f'did you mean {near[0]}? ' if near else ''}There are {', '.join(there)}")
    return list(dict.fromkeys(modes))


def sweep_of(ask: Ask, base: Deployment) -> list[tuple[str, Any, Deployment]]:
    """(key, value, deployment) of `--sweep key=a,b,c`; each is checked. BadInput."""
    key, equals, values = ask.sweep.partition("=")
    if not equals or not values:
        raise BadInput(f"--sweep {ask.sweep}: write key=a,b,c, e.g. --sweep staleness_max=1,2,3")
    found = []
    for text in values.split(","):
        value = value_of(text.strip())
        one = changed(base, {key.strip(): value})
        check(one)
        found.append((key.strip(), value, one))
    if len(found) > SWEEP_MAX:
        raise BadInput(f"--sweep {key}: {len(found)} values, at most {SWEEP_MAX}")
    return found


_COST_NEEDED = ("cost.t0_s", "cost.t1_s", "cost.train_s", "work.median", "work.sigma", "work.prompt", "work.kv_tokens")


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f"--set {text}: write key=value, e.g. --set cost.load_s=5")
    return key.strip(), value_of(value)


def _of_config(settings: Settings, run: Path | None, said: dict[str, Any]) -> Deployment:
    """A configuration has no prices: they come from a run, or are said."""
    needed = {key: said[key] for key in _COST_NEEDED if key in said}
    if run is not None:
        from pipelines.simulate.calibrate import calibrate

        cost, work = calibrate(run)
    else:
        prices = {key.removeprefix("cost."): value for key, value in needed.items() if key.startswith("cost.")}
        cost, work = cost_model(prices), _said_work(settings, needed)
    calm = {"timeout_s": NOT_SIMULATED, "request_timeout_s": NOT_SIMULATED, "start_timeout_s": NOT_SIMULATED}
    settings = settings.model_copy(
        update={
            "engines": settings.engines.model_copy(update=calm),
            "evaluation": settings.evaluation.model_copy(update={"samples": 0}),
            "steps": settings.steps or STEPS_MAX,
            "epochs": 0,
        }
    )
    found = Deployment(settings.name or "config", settings, cost, work, None, 3, 0, 0)
    return changed(found, needed)


def _said_work(settings: Settings, said: dict[str, Any]) -> Work:
    new_max, longest = settings.sampling.max_new_tokens, settings.engines.tokens_per_request_max
    if "work.median" not in said and not settings.sampling.ignore_eos:
        raise BadInput(
            "work.median: how long responses are is not known; set work.median and work.sigma (log-normal, tokens), or "
            "take them from a run with --calibrate-from RUN"
        )
    return Work(Lognormal(float(new_max), 0.0), max(1, longest - new_max), settings.engines.seats * longest)


def _steps(found: Deployment) -> Deployment:
    """A configuration is simulated from its first step on; the first one, in which all engines start, is warm-up."""
    if found.measured:
        return found
    steps = min(found.settings.steps, STEPS_MAX)
    warm_up = 1 if steps > 2 else 0
    return replace(found, warm_up=warm_up, measured=steps - warm_up)
