"""What is simulated: settings of a run, a cost model, a load, and where the engines are; and how people change it.

Rule 1: keys are those of the settings (`scheduling.live_factor`), or `cost.<name>`, `work.<name>`, `engines_total`.
Rule 2: what cannot be is refused here, before anything is simulated, with the key and the reason.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from pipelines.simulate.cost import CostModel, Work
from pipelines.simulate.lengths import Lognormal
from schemas.settings import Settings, SettingsError, parse_settings
from workers.runtime.errors import BadInput

WORK_KEYS = ("median", "sigma", "prompt", "kv_tokens")
SEEDS_MAX = 100
LENGTH_MAX = 1 << 30
SIGMA_MAX = 5


@dataclass(frozen=True, slots=True)
class Deployment:
    """`engines_total`: engines' worth of accelerators that rollout and trainer share, None = the trainer has its own.
    Figures are means over `seeds` runs and the `measured` steps after `warm_up`. `paper`: mode -> figures."""

    name: str
    settings: Settings
    cost: CostModel
    work: Work
    engines_total: int | None
    seeds: int
    warm_up: int
    measured: int
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def step_tokens(self) -> float:
        """Response tokens of a step, on average."""
        settings = self.settings
        mean = self.work.lengths.mean(settings.sampling.max_new_tokens)
        return mean * settings.groups_per_batch * settings.group_size


def changed(base: Deployment, pairs: Mapping[str, Any]) -> Deployment:
    """With other values (as TOML has them). BadInput names the key."""
    cost: dict[str, Any] = {}
    work = base.work
    overrides = []
    for key, value in pairs.items():
        if key.startswith("cost."):
            cost[key.removeprefix("cost.")] = value
        elif key.startswith("work."):
            work = _work(work, key.removeprefix("work."), value)
        elif key == "engines_total":
            base = replace(base, engines_total=_whole(key, value))
        else:
            overrides.append((key, value))
    settings = _settings(base.settings, overrides)
    return replace(base, settings=settings, cost=_cost(base.cost.model_dump() | cost), work=work)


def value_of(text: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def cost_model(tree: Mapping[str, Any]) -> CostModel:
    """BadInput names the key."""
    return _cost(tree)


def _cost(tree: Mapping[str, Any]) -> CostModel:
    known = ", ".join(CostModel.model_fields)
    for key in tree:
        if key not in CostModel.model_fields:
            raise BadInput(f"unknown key cost.{key}; there are {known}")
    try:
        return CostModel.model_validate(tree)
    except ValidationError as error:
        raise BadInput(_said("cost.", error)) from error


def _said(prefix: str, error: ValidationError) -> str:
    lines = []
    for fault in error.errors(include_url=False):
        where = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "missing":
            said = "what it takes is not known; set it, or take it from a run with --calibrate-from RUN"
        else:
            said = f"{fault['msg'].removeprefix('Value error, ')}, not {fault['input']!r}"
        lines.append(f"{prefix}{where}: {said}" if where else said)
    return "\n".join(lines)


def _work(work: Work, key: str, value: Any) -> Work:
    if key not in WORK_KEYS:
        raise BadInput(f"unknown key work.{key}; there are {', '.join(f'work.{name}' for name in WORK_KEYS)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"work.{key}: a number, not {value!r}")
    if key == "prompt":
        return replace(work, prompt=_whole("work.prompt", value))
    if key == "kv_tokens":
        return replace(work, kv_tokens=_whole("work.kv_tokens", value))
    law = work.lengths if isinstance(work.lengths, Lognormal) else Lognormal(1.0, 1.0)
    if key == "median":
        if not 0 < value < LENGTH_MAX:
            raise BadInput(f"work.median: above 0 and below {LENGTH_MAX}, not {value!r}")
        return replace(work, lengths=replace(law, median=float(value)))
    if not 0 <= value <= SIGMA_MAX:
        raise BadInput(f"work.sigma: 0 to {SIGMA_MAX}, not {value!r}")
    return replace(work, lengths=replace(law, sigma=float(value)))


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(f"{key}: a whole number of 1 or more, not {value!r}")
    return value


def _settings(base: Settings, overrides: list[tuple[str, Any]]) -> Settings:
    import tomli_w

    if not overrides:
        return base
    texts = [f"{key}={tomli_w.dumps({'v': value}).removeprefix('v = ').strip()}" for key, value in overrides]
    try:
        return parse_settings(tomli_w.dumps(base.model_dump(mode="json")), "simulate", texts)
    except SettingsError as error:
        raise BadInput(str(error)) from error


def check(deployment: Deployment) -> None:
    """BadInput if the run that is described could not be."""
    settings, work = deployment.settings, deployment.work
    engines, new_max = settings.engines, settings.sampling.max_new_tokens
    longest = work.prompt + new_max
    if longest > work.kv_tokens:
        raise BadInput(
            f"work.kv_tokens = {work.kv_tokens}: an engine's KV cannot hold one prompt ({work.prompt} tokens) and a "
            f"response of sampling.max_new_tokens = {new_max}: {longest}"
        )
    if longest > engines.tokens_per_request_max:
        raise BadInput(
            f"engines.tokens_per_request_max = {engines.tokens_per_request_max}: a prompt ({work.prompt} tokens) and a "
            f"response of sampling.max_new_tokens = {new_max} are {longest}"
        )
    if settings.steps and settings.lag_max >= settings.steps:
        raise BadInput(
            f"staleness_max = {settings.lag_max} with steps = {settings.steps}: no step could ever train a version so "
            f"old, the bound would mean nothing; use at most {settings.steps - 1}, or more steps"
        )
    if not 1 <= deployment.seeds <= SEEDS_MAX:
        raise BadInput(f"--seeds {deployment.seeds}: 1 to {SEEDS_MAX}")
    total = deployment.engines_total
    if total is not None and (total < 2 or (total - 1) * engines.seats < settings.group_size):
        raise BadInput(
            f"engines_total = {total}: at least one engine's worth is the trainer's, the others must seat a group "
            f"(group_size = {settings.group_size}, engines.seats = {engines.seats})"
        )
