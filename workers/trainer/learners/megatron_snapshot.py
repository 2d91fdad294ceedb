"""A checkpoint of Megatron's that is written while training goes on.

    learner's thread   plan (collective), small common state ... next forward and backward ... optimizer step, finish
    writing thread                      copy of every tensor ->| ... files, synced

Rule 1: weights and moments change in an optimizer step alone. So the copy is made beside the next forward and backward
   pass, and the learner waits for it before that step (`wait_until_copied`).
Rule 2: no fork and no collective in the writing thread: Megatron's own asynchronous saving forks a process that has
   threads, and keeps a server process that outlives a killed trainer. Its format, plan and metadata are taken.
"""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch.distributed.checkpoint.api import CheckpointException

from workers.runtime import clock


class MegatronSnapshot:
    """Files of a sharded state in a new `folder`. Made, and finished, by every rank."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        """Collective. The small part that is the same on all ranks is written here. OSError."""
        folder.mkdir(exist_ok=True)
        self._copied = threading.Event()
        self.waited_s = 0.0  # by the learner, for the copy
        filesystem_async._results_queue = queue.Queue()  # results pass within this process
        self._request: Any = dist_checkpointing.save(state, str(folder), async_sharded_save=True)

    def write(self) -> None:
        """Copy this rank's tensors to the host, then write them. OSError."""
        try:
            self._request.async_fn(self._copied.set)
        finally:
            self._copied.set()

    def wait_until_copied(self) -> None:
        began = clock.monotonic_s()
        self._copied.wait()
        self.waited_s += clock.monotonic_s() - began

    def finish(self) -> None:
        """Collective. What lies in which file, then Megatron's own description of the format. OSError."""
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except (CheckpointException, CheckpointingException) as error:
            raise OSError(f"the checkpoint's metadata cannot be written: {error}") from error


class _LateWriter(filesystem_async.FileSystemWriterAsync):  # type: ignore[misc]
    """Megatron's writer, but nothing is copied while the saving is planned, and one thread writes all files."""

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        self._late = plan, planner

    def get_save_function_and_args(self) -> tuple[Any, Any, list[Any]]:
        return self._write_all, None, []

    def _write_all(self, copied: Callable[[], None]) -> None:
        super().prepare_write_data(*self._late)
        buckets = [_copy(bucket) for bucket in self.write_buckets]
        copied()
        if buckets:  # else other ranks have all there is
            transforms = [self.transforms] if hasattr(self, "transforms") else []
            self.results_queue.put({place: _write(transforms, place, bucket) for place, bucket in enumerate(buckets)})


strategies.FileSystemWriterAsync = _LateWriter


def _copy(bucket: Any) -> Any:
    """A bucket is (file, its name in the metadata, (bytes, tensors)); all tensors are copied to the host."""
    file, name, (raw, tensors) = bucket
    return file, name, (raw, [(item, tensor.detach().to("cpu", copy=True)) for item, tensor in tensors])


def _write(transforms: list[Any], place: int, bucket: Any) -> Any:
    """One file, synced; where each item lies in it. OSError."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _LateWriter.write_preloaded_data(transforms, place, bucket, said, _NobodyCounts(), use_fsync=True)
    _, written = said.get()
    if isinstance(written, OSError):
        raise written
    if isinstance(written, RuntimeError):  # torch's writer, of a file that took less than it was given
        raise OSError(f"{bucket[0]}: {written}") from written
    if isinstance(written, Exception):
        raise written
    return written


class _NobodyCounts:
    """Megatron counts the processes that write; here is one thread."""

    def get(self) -> None:
        pass

    def task_done(self) -> None:
        pass
