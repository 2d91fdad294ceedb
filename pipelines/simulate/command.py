"""`dora simulate`: from what is asked to what is printed. Progress goes to stderr."""

import json
import sys
from pathlib import Path
from typing import Any

from pipelines.simulate import ask as asking
from pipelines.simulate import page, show
from pipelines.simulate.advise import advise
from pipelines.simulate.ask import Ask
from pipelines.simulate.compare import compare
from pipelines.simulate.deployment import Deployment
from workers.runtime.errors import BadInput


def simulate(ask: Ask, *, advice: bool, as_json: bool, html: Path | None) -> None:
    """BadInput, StandsStill."""
    if advice and ask.sweep:
        raise BadInput("--advise and --sweep: one of the two")
    if html is not None and not html.resolve().parent.is_dir():
        raise BadInput(f"--html {html}: there is no folder {html.parent}")
    deployment = asking.deployment_of(ask)
    said: dict[str, Any] = {"preset": deployment.name, "cost_model": show.cost_of(deployment)}
    if ask.sweep:
        text, parts = _sweep(ask, deployment, said)
    elif advice:
        said["advice"] = advise(deployment, _say)
        text, parts = show.advice_text(said["advice"]), page.of_advice(said["advice"]["tried"])
    else:
        text, parts = _modes(ask, deployment, said)
    if html is not None:
        page.write(html, f"dora simulate {deployment.name}", text, parts)
    print(json.dumps(said) if as_json else text)


def _modes(ask: Ask, deployment: Deployment, said: dict[str, Any]) -> tuple[str, list[str]]:
    found = compare(deployment, asking.modes_of(ask), ask.rollout, _say)
    said["modes"] = {mode: one.as_json(deployment.paper.get(mode, {})) for mode, one in found.items()}
    return show.table(said["modes"]), page.of_modes(found)


def _sweep(ask: Ask, deployment: Deployment, said: dict[str, Any]) -> tuple[str, list[str]]:
    modes, rows, key = asking.modes_of(ask), [], ""
    for key, value, one in asking.sweep_of(ask, deployment):
        _say(f"{key} = {value}")
        found = compare(one, modes, ask.rollout, _say)
        rows.append({"value": value, "modes": {mode: part.as_json({}) for mode, part in found.items()}})
    said["sweep"] = {"key": key, "rows": rows}
    return show.sweep_table(key, rows), page.of_sweep(key, rows)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
