"""Which benchmarks there are: `dora bench NAME` calls `measure` of the file of that name."""

import difflib
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

from workers.runtime.errors import BadInput

NAMES: dict[str, str] = {
    "checkpoint": "how long a checkpoint holds training, beside one that training waits for",
    "decide": "how long the orchestrator thinks about one event, by engines and live requests",
    "kv": "a request that moves with its KV over one that is prefilled again, and whether it goes on the same",
    "learn": "accuracy against steps and minutes, by mode and seed, of whole runs of quickstart's task",
    "parity": "|difference| of engines' and trainer's log-probs, by dtype and lag",
    "train": "tokens/s of a training step over a plain Hugging Face loop's; packed over padded batches",
    "tap": "tokens/s of a run with two taps over the same run without them",
    "weights": "how long a swap of weights stops decoding, over vLLM's own reload of the same tensors from memory",
}


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured: `rows` one by one, `figures` what came of them."""

    rows: list[dict[str, Any]]
    figures: dict[str, float | int]


def measure(name: str, **asked: Any) -> dict[str, Any]:
    """What `--json` prints: `name`, `machine`, `rows`, `figures`. BadInput names the nearest benchmark, or the option
    in `asked` that this one does not have (`None` = not given)."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        raise BadInput(f"no benchmark {name!r}; {f'did you mean {near[0]}?' if near else f'there are {sorted(NAMES)}'}")
    from pipelines.device import machine

    made = import_module(f"pipelines.bench.{name}").measure
    given = {option: value for option, value in asked.items() if value is not None}
    if unknown := sorted(given.keys() - signature(made).parameters.keys()):
        raise BadInput(f"--{unknown[0]}: the benchmark {name} has no such option")
    found: Bench = made(**given)
    return {"name": name, "machine": machine(), "rows": found.rows, "figures": found.figures}
