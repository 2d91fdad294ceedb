"""`dora replay` for people and programs: what it prints, and what comes of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines import environment, replay_decisions, replay_group, replay_regenerate, replay_to
from pipelines.replay import Compared, Replay, StepAgain, Value, replay
from workers.runtime.errors import BadInput

_SHOWN = ("loss", "grad_norm")


@dataclass(frozen=True, slots=True)
class Ask:
    """What of a run is to be played again: one of `step` (a number or `all`), `decisions`, `group` (with `regenerate`:
    sampled again); with `to` none but `step`, which then is a range. `until`: the last event of `decisions`."""

    step: str | None = None
    decisions: bool = False
    what_if: tuple[str, ...] = ()
    group: int | None = None
    regenerate: bool = False
    to: replay_to.Wanted | None = None
    until: str = ""

    def __post_init__(self) -> None:
        """BadInput."""
        if self.regenerate and self.group is None:
            raise BadInput("--regenerate samples a group again: say which with --group G")
        if self.to is not None:
            if self.decisions or self.what_if or self.group is not None:
                raise BadInput("--to says records again: of --step, --since, --until; not --decisions or --group")
            return
        if (self.step is not None) + (self.decisions or bool(self.what_if)) + (self.group is not None) != 1:
            raise BadInput(
                "replay what? Give one of --step N, --step all, --decisions [--what-if a.b=c], --group G, --to BROKER"
            )
        if self.until and not (self.until.isascii() and self.until.isdigit() and int(self.until)):
            raise BadInput(f"--until {self.until}: with --decisions the number of an event, from 1 on")


def play(run_dir: Path, ask: Ask, *, as_json: bool) -> bool:
    """Do it and print; False if a comparison differs. BadInput."""
    if ask.to is not None:
        again = replay_to.say_again(run_dir, ask.to)
        print(json.dumps(replay_to.as_dict(again)) if as_json else replay_to.as_text(again))
        return True
    if ask.step is not None:
        return _steps(run_dir, ask.step, as_json=as_json)
    if ask.group is not None:
        return _group(run_dir, ask.group, ask.regenerate, as_json=as_json)
    decisions = replay_decisions.decide_again(run_dir, ask.what_if, int(ask.until) if ask.until else None)
    print(json.dumps(replay_decisions.as_dict(decisions)) if as_json else replay_decisions.as_text(decisions))
    return decisions.same or bool(ask.what_if)


def _group(run_dir: Path, group: int, again: bool, *, as_json: bool) -> bool:
    life = replay_group.life_of(run_dir, group)
    said = replay_regenerate.regenerate(run_dir, group) if again else None
    if as_json:
        more = {} if said is None else {"regenerated": replay_regenerate.as_dict(said)}
        print(json.dumps(replay_group.as_dict(life) | more))
    else:
        print(replay_group.as_text(life))
        if said is not None:
            print(replay_regenerate.as_text(said))
    return said is None or said.same


def _steps(run_dir: Path, step: str, *, as_json: bool) -> bool:
    if step != "all" and not (step.isascii() and step.isdigit()):
        raise BadInput(f"--step {step}: a step's number from 0 on, or `all`")
    wanted = None if step == "all" else int(step)
    if as_json:
        said = replay(run_dir, wanted)
        print(json.dumps(as_dict(said)))
        return said.same
    print(heading())
    said = replay(run_dir, wanted, lambda one: print(line(one), flush=True))
    print(ending(said))
    return said.same


def as_dict(said: Replay) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "run": said.run,
        "same": said.same,
        "start": {
            "version": said.start,
            "checkpoint": None if said.checkpoint is None else str(said.checkpoint),
            "weights": _pair(said.weights),
        },
        "machine": said.machine,
        "steps": [
            {"step": one.step, "same": one.same, "trajectories": one.trajectories}
            | {name: _pair(value) for name, value in one.compared.items()}
            for one in said.steps
        ],
    }


def _pair(value: Compared) -> dict[str, object]:
    return {"recorded": value.recorded, "again": value.again, "same": value.same}


def line(one: StepAgain) -> str:
    """A row of the table, and below it what differs."""
    values = one.compared
    cells = [f"{one.step:>6}", f"{one.trajectories:>13}", *(f"{_short(values[name].again):>14}" for name in _SHOWN)]
    cells += [f"{_short(values['weights'].again):>18}", "same" if one.same else "DIFFERS"]
    texts = ["  ".join(cells)]
    texts += [
        f"        {name}: recorded {value.recorded}, now {value.again}"
        for name, value in values.items()
        if not value.same
    ]
    return "\n".join(texts)


def heading() -> str:
    return "  ".join(
        [f"{'step':>6}", f"{'trajectories':>13}", f"{'loss':>14}", f"{'grad_norm':>14}", f"{'weights':>18}", "recorded"]
    )


def ending(said: Replay) -> str:
    """What came of it, in sentences."""
    place = "the initial weights" if said.checkpoint is None else f"{said.checkpoint.name} of its checkpoints"
    different = [one.step for one in said.steps if not one.same]
    texts = [f"{len(said.steps)} steps again, from {place}: {_verdict(said, different)}"]
    if not said.weights.same:
        texts.append(f"the start itself differs: weights {said.weights.again}, recorded {said.weights.recorded}")
    if said.machine is None:
        texts.append(f"the run has no {environment.FILE}: whether this machine computes alike is not known")
    elif said.machine:
        texts.append("not as when the run trained, so the last bits may differ: " + "; ".join(said.machine))
    return "\n".join(texts)


def _verdict(said: Replay, different: Sequence[int]) -> str:
    if said.same:
        return "loss, gradient norm and weights are those that were recorded, to the last bit"
    return f"steps {', '.join(map(str, different))} differ" if different else "all steps as recorded"


def _short(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.8g}"
    return "none" if value is None else value[:16]
