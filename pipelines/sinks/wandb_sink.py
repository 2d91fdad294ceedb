"""Figures for Weights & Biases without a network: `FOLDER/wandb/offline-run-*`; `wandb sync FOLDER/wandb/offline-run-*`
uploads them as one run, however often the sink was started.

W&B writes in a process of its own, which outlives a sink that is killed for a moment. So the files are read when the
sink starts, once nobody has them open: the last point in any of them says how far it is. A file is 7 bytes, then
LevelDB's log: blocks of 32 KiB with parts of records, each behind crc32, length and kind (whole, first, middle, last).
"""

import contextlib
import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.sinks.base import OFFSET, Point, missing
from workers.runtime import clock
from workers.runtime.errors import BadInput

PROJECT = "dora"
CLOSED_S_MAX = 60.0
_MAGIC, _START, _BLOCK, _HEAD = b":W&B", 7, 1 << 15, 7
_WHOLE, _LAST = 1, 4


class WeightsAndBiases:
    def __init__(self, folder: Path, run: str) -> None:
        """BadInput if the library is not installed."""
        try:
            import wandb
            from wandb.proto import wandb_internal_pb2
        except ImportError as error:
            raise missing(error, "wandb") from error
        files = sorted(folder.glob(f"wandb/offline-run-*/run-{run}.wandb"))  # -{run}, and -{run}-1 within a second
        _wait_until_closed(files)
        said = [_offset(wandb_internal_pb2.Record.FromString(one)) for file in files for one in records(file)]
        self._position = max((offset + 1 for offset in said if offset is not None), default=0)
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
        )
        self._teardown = wandb.teardown
        self._run = wandb.init(mode="offline", dir=str(folder), project=PROJECT, id=run, name=run, settings=quiet)
        self._run.define_metric("*", step_metric="step")

    def position(self) -> int:
        return self._position

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            values = {"step": point.step, OFFSET: point.offset, "_timestamp": point.at / 1e6, **point.values}
            self._run.log(values, step=point.offset)
        self._position = points[-1].offset + 1

    def close(self) -> None:
        self._run.finish()
        self._teardown()


def _wait_until_closed(files: Sequence[Path]) -> None:
    """BadInput if a process does not let go of them."""
    limit, pause, names = clock.monotonic_s() + CLOSED_S_MAX, threading.Event(), {str(file.resolve()) for file in files}
    while names and (process := _holder(names)) is not None:
        if clock.monotonic_s() > limit:
            raise BadInput(f"process {process} still writes W&B's files of this run: end it, or name another folder")
        pause.wait(0.1)


def _holder(names: set[str]) -> str | None:
    """A process that has one of them open."""
    for place in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if os.readlink(place) in names:
                return place.parts[2]
    return None


def records(file: Path) -> Iterator[bytes]:
    """The whole records of a .wandb file, up to the first that is not."""
    data = file.read_bytes()
    at, parts = _START if data.startswith(_MAGIC) else len(data), b""
    while at + _HEAD <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEAD:
            at += left
            continue
        check, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + _HEAD : at + _HEAD + length]
        if zlib.crc32(bytes([kind]) + body) != check or not kind:
            return
        at += _HEAD + length
        parts += body
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""


def _offset(record: Any) -> int | None:
    """Of a point; None of any other record."""
    for item in record.history.item:
        if OFFSET in (item.key, "/".join(item.nested_key)):
            return int(json.loads(item.value_json))
    return None
