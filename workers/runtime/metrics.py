"""The figures of one process for Prometheus, `http://127.0.0.1:PORT/metrics`: what it says on the log, as it says it.

A figure `loss` of the trainer is the gauge `dora_trainer_loss{run, process}`; one that is told apart by lag
(`groups_live/lag_2`, `lag_2_ess`) is `dora_orchestrator_groups_live_by_lag{lag="2"}`, `dora_trainer_ess_by_lag`.
Besides: `process_resident_memory_bytes`, `process_cpu_seconds_total` and their like.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

ADDRESS = "127.0.0.1"
_OF_LAG = re.compile(r"(?P<name>.+)/lag_(?P<lag>\d+)|lag_(?P<lag_>\d+)_(?P<name_>.+)")


class Figures:
    """Shown to nobody until `open`."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}
        self._kind = ""
        self._values: Mapping[str, float] = {}

    def open(self, port: int, run: str, process: str) -> None:
        """OSError if the port is taken."""
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        self._labels, self._kind = {"run": run, "process": process}, process.split("-", maxsplit=1)[0]
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        start_http_server(port, ADDRESS, registry)

    def show(self, values: Mapping[str, float]) -> None:
        """What is true now; all that was shown before is forgotten."""
        self._values = dict(values)

    def collect(self) -> Iterator[Any]:
        """For prometheus_client, in a thread of its own."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for figure, value in self._values.items():
            name, more = name_of(self._kind, figure)
            labels = self._labels | more
            if name not in families:
                families[name] = GaugeMetricFamily(name, f"{figure} of {self._kind}", labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()


def name_of(kind: str, figure: str) -> tuple[str, dict[str, str]]:
    """How Prometheus calls a figure of a kind of process, and its labels besides `run` and `process`."""
    match, labels = _OF_LAG.fullmatch(figure), dict[str, str]()
    if match:
        figure = f"{match['name'] or match['name_']}_by_lag"
        labels = {"lag": match["lag"] or match["lag_"]}
    return f"dora_{kind}_{re.sub(r'[^a-zA-Z0-9_]', '_', figure)}", labels
