"""Which benchmarks there are: `dora bench NAME` calls `measure` of the file of that name."""

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from workers.runtime.errors import BadInput

NAMES: dict[str, str] = {
    "decide": "how long the orchestrator thinks about one event, by engines and live requests",
    "tap": "tokens/s of a run with two taps over the same run without them",
}


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured: `rows` one by one, `figures` what came of them."""

    rows: list[dict[str, Any]]
    figures: dict[str, float | int]


def measure(name: str) -> dict[str, Any]:
    """What `--json` prints: `name`, `machine`, `rows`, `figures`. BadInput names the nearest benchmark."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        raise BadInput(f"no benchmark {name!r}; {f'did you mean {near[0]}?' if near else f'there are {sorted(NAMES)}'}")
    from pipelines.device import machine

    found: Bench = import_module(f"pipelines.bench.{name}").measure()
    return {"name": name, "machine": machine(), "rows": found.rows, "figures": found.figures}
