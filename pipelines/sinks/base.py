"""Where a run's figures go besides its archive. A sink keeps with its output how far it is, so that one that was killed
and is started again loses and doubles nothing.

Implementations: `jsonl_sink.py`, `tensorboard_sink.py`, `wandb_sink.py`, `mlflow_sink.py`. One test for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.runtime.errors import BadInput

OFFSET = "dora/offset"
"""A figure of every point in the outputs that have figures only: its offset in the topic `metrics`."""


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one moment: a record of the topic `metrics`. `at`: microseconds since 1970. `step`: its own; where it
    has none, the newest one that was trained by then. `values` by `source/name`."""

    offset: int
    at: int
    step: int
    values: dict[str, float]


class Sink(Protocol):
    """An output of one run, opened by one process at a time."""

    def position(self) -> int:
        """The offset after the last point that is in the output whole; what comes before it must not be given again."""

    def write(self, points: Sequence[Point]) -> None:
        """Add them, in ascending order of their offsets."""

    def close(self) -> None: ...


def missing(error: ImportError, sink: str) -> BadInput:
    """What to say of a library that is not installed."""
    library = (error.name or sink).split(".", maxsplit=1)[0]
    return BadInput(f"{sink}: the library {library} is not installed: pip install 'dora-rl[sinks]'")


def not_ours(path: Path, why: object) -> BadInput:
    """What to say of an output that something else has written."""
    return BadInput(f"{path}: not written by `dora metrics` ({why}): name another folder")
