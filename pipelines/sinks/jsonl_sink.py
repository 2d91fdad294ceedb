"""Figures as lines of JSON, `FOLDER/RUN.jsonl`: `offset, at, step, values`; what is not finite is text.

The last whole line says how far it is; a half one at the end is cut off.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from pipelines.sinks.base import Point, not_ours

_BEGIN = b'{"offset": '


class JsonLines:
    def __init__(self, folder: Path, run: str) -> None:
        """BadInput if the file there is something else."""
        path = folder / f"{run}.jsonl"
        self._file = path.open("a+b")
        self._file.seek(0)
        self._position = 0
        whole = 0
        for line in self._file:
            if not line.startswith(_BEGIN[: len(line)]):
                raise not_ours(path, f"a line begins with {line[:20]!r}")
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                self._position = json.loads(line)["offset"] + 1
            except (ValueError, TypeError, KeyError) as error:
                raise not_ours(path, error) from error
        self._file.truncate(whole)

    def position(self) -> int:
        return self._position

    def write(self, points: Sequence[Point]) -> None:
        self._file.write("".join(_line(point) for point in points).encode())
        self._file.flush()
        self._position = points[-1].offset + 1

    def close(self) -> None:
        self._file.close()


def _line(point: Point) -> str:
    values = {name: value if math.isfinite(value) else str(value) for name, value in point.values.items()}
    return json.dumps({"offset": point.offset, "at": point.at, "step": point.step, "values": values}) + "\n"
