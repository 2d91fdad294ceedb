"""Figures for TensorBoard, an event file in `FOLDER/RUN`: `tensorboard --logdir FOLDER` shows all runs side by side.

One event per point, with its offset as a tensor: the file itself says how far it is. A record of the file is u64
length, its masked crc32c, the event, its masked crc32c; a half one at the end is cut off.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.sinks.base import OFFSET, Point, missing, not_ours

FILE = "events.out.tfevents.0000000000.dora"
VERSION = "brain.Event:2"
_HEAD, _CHECK = 12, 4


class TensorBoard:
    def __init__(self, folder: Path, run: str) -> None:
        """BadInput if the library is not installed, or the file there is something else."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise missing(error, "tensorboard") from error
        self._event, self._value, self._check = event_pb2.Event, summary_pb2.Summary.Value, masked_crc32c
        self._tensor, self._int64 = tensor_pb2.TensorProto, types_pb2.DT_INT64
        self._first = self._event(file_version=VERSION).SerializeToString()
        path = folder / run / FILE
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        whole, self._position = self._read(path, self._file.read())
        self._file.truncate(whole)
        self._writer = RecordWriter(self._file)
        if not whole:
            self._writer.write(self._first)

    def position(self) -> int:
        return self._position

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            event = self._event(wall_time=point.at / 1e6, step=point.step)
            event.summary.value.extend(self._value(tag=tag, simple_value=value) for tag, value in point.values.items())
            offset = self._tensor(dtype=self._int64, int64_val=[point.offset])
            event.summary.value.append(self._value(tag=OFFSET, tensor=offset))
            self._writer.write(event.SerializeToString())
        self._writer.flush()
        self._position = points[-1].offset + 1

    def close(self) -> None:
        self._writer.close()

    def _read(self, path: Path, data: bytes) -> tuple[int, int]:
        """Bytes of whole records, and the offset after the last point in them."""
        ends = [0]
        while (end := self._end(data, ends[-1])) is not None:
            ends.append(end)
        if len(ends) > 1 and not self._is_good(data[ends[-2] : ends[-1]]):
            ends.pop()  # as long as it should be, but not written whole
        if not (data[_HEAD:].startswith(self._first) or self._first.startswith(data[_HEAD:])):
            raise not_ours(path, "its first event is another")
        return ends[-1], self._offset(path, data[ends[-2] : ends[-1]]) + 1 if len(ends) > 2 else 0

    def _end(self, data: bytes, start: int) -> int | None:
        """Of the record from `start` on; None if it is not whole."""
        head = data[start : start + _HEAD]
        if len(head) < _HEAD or struct.unpack("<I", head[8:])[0] != self._check(head[:8]):
            return None
        end: int = start + _HEAD + struct.unpack("<Q", head[:8])[0] + _CHECK
        return end if end <= len(data) else None

    def _is_good(self, record: bytes) -> bool:
        found: int = struct.unpack("<I", record[-_CHECK:])[0]
        return bool(self._check(record[_HEAD:-_CHECK]) == found)

    def _offset(self, path: Path, record: bytes) -> int:
        event: Any = self._event.FromString(record[_HEAD:-_CHECK])
        found = [value.tensor.int64_val for value in event.summary.value if value.tag == OFFSET]
        if len(found) != 1 or len(found[0]) != 1:
            raise not_ours(path, f"its last event has no {OFFSET}")
        return int(found[0][0])
