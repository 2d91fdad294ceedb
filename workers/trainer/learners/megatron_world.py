"""This process among the ranks of a learner: joining them, and plain words between them.

Rule 1: everything here but `join` is collective: every rank calls it, at the same place.
Rule 2: words are JSON (floats come out as they went in), over gloo; tensors go by the world's own backend.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from workers.trainer.learners import megatron_cpu
from workers.trainer.learners.layout import Layout

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank a process is, and the store where all meet."""

    rank: int
    store: dist.Store


class World:
    """The ranks of a layout, seen from one of them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rank: int = dist.get_rank()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.tensor_rank: int = parallel_state.get_tensor_model_parallel_rank()
        self.stage: int = parallel_state.get_pipeline_model_parallel_rank()
        self.copy: int = parallel_state.get_data_parallel_rank()
        self._words = dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else dist.group.WORLD

    @property
    def speaks(self) -> bool:
        """Of the ranks that know the same loss and log-probs of a copy, this is the one that says them."""
        return self.tensor_rank == 0 and self.stage == self.layout.pipeline - 1

    def gather(self, value: object) -> list[Any]:
        """What each rank gives, by rank; on every rank."""
        said = _bytes(value)
        if self.layout.ranks == 1:
            return [_value(said)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.layout.ranks)]
        dist.all_gather(sizes, torch.tensor([said.numel()]), group=self._words)
        longest = max(int(size) for size in sizes)
        padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(padded, torch.cat([said, said.new_zeros(longest - said.numel())]), group=self._words)
        return [_value(one[: int(size)]) for one, size in zip(padded, sizes, strict=True)]

    def wait_for_all(self) -> None:
        if self.layout.ranks > 1:
            dist.barrier(group=self._words)

    def on_first_of_tensor(self, shard: torch.Tensor, dim: int | None) -> torch.Tensor | None:
        """Shards cut along `dim` put together, on the first tensor-parallel rank; None on the others."""
        if dim is None or self.layout.tensor == 1:
            return shard if self.tensor_rank == 0 else None
        first = self.tensor_rank == 0
        raw = shard.contiguous().view(torch.uint8)  # as bytes: no backend has to know the dtype
        parts = [torch.empty_like(raw) for _ in range(self.layout.tensor)] if first else None
        dist.gather(raw, parts, group=self.tensor_group, group_dst=0)
        return None if parts is None else torch.cat([part.view(shard.dtype) for part in parts], dim=dim)

    def send(self, words: object, tensors: Sequence[torch.Tensor], rank: int) -> None:
        said = _bytes(words)
        dist.send(torch.tensor([said.numel()]), rank, group=self._words)
        dist.send(said, rank, group=self._words)
        for tensor in tensors:
            dist.send(_flat(tensor), rank, group=self._words)

    def hear(self, rank: int) -> Any:
        """The words of `send`; its tensors are heard one by one after them."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._words)
        said = torch.zeros(int(size), dtype=torch.uint8)
        dist.recv(said, rank, group=self._words)
        return _value(said)

    def hear_tensor(self, rank: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """On the host."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        dist.recv(_flat(tensor), rank, group=self._words)
        return tensor


def join(place: Place | None, layout: Layout, seed: int) -> World:
    """The world of `layout`; `place` is None for a world of one process. A world of before is left for it."""
    assert (place is None) == (layout.ranks == 1), f"{layout} without a place, or a place for one rank alone"
    if dist.is_initialized() and (place is not None or dist.get_world_size() > 1):
        leave()
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        place = place or Place(0, dist.HashStore())
        if torch.cuda.is_available():
            torch.cuda.set_device(place.rank)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=place.store, rank=place.rank, world_size=layout.ranks)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
    torch.manual_seed(seed)
    # The tracker whose fork() does nothing: there is no dropout, and on a CPU no CUDA generator to fork.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
    megatron_cpu.without_cuda_generators()
    return World(layout)


def leave() -> None:
    """Learners of this world are of no use afterwards."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def open_store(ranks: int, port: int = 0) -> dist.TCPStore:
    """The store of a world on this host. `port` 0 = this process keeps it, on a free port."""
    return dist.TCPStore(HOST, port, ranks, is_master=not port, wait_for_workers=False)


def _bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(said: torch.Tensor) -> Any:
    return json.loads(said.numpy().tobytes())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)
