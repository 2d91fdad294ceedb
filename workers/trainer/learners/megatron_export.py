"""The whole weights on rank 0, one tensor at a time: no rank ever holds more than its own and the one that travels."""

from collections.abc import Iterator
from typing import Any

import torch

from workers.trainer.learners import hf_weights
from workers.trainer.learners.megatron_world import World


def whole_tensors(model: Any, dtype: torch.dtype, world: World) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor in `dtype` on the host) on rank 0, stage after stage; nothing on other ranks, which
    give their parts while they go through it. Collective."""
    if world.copy != 0:
        return
    for stage in range(world.layout.pipeline):
        first = stage * (world.layout.ranks // world.layout.pipeline)  # the rank that has this stage's tensors whole
        if world.stage == stage:
            yield from _own(model, dtype, world, first)
        elif world.rank == 0:
            yield from _heard(world, first)


def _own(model: Any, dtype: torch.dtype, world: World, first: int) -> Iterator[tuple[str, torch.Tensor]]:
    cut = hf_weights.Cut(world.tensor_rank, world.layout.tensor)
    for name, part, dim in hf_weights.export(model, dtype, cut):
        whole = world.on_first_of_tensor(part, dim)
        if whole is None:
            continue
        whole = whole.cpu()
        if world.rank == 0:
            yield name, whole
        else:
            world.send([name, str(whole.dtype).removeprefix("torch."), list(whole.shape)], [whole], 0)
    if world.rank == first and first:
        world.send(None, [], 0)


def _heard(world: World, first: int) -> Iterator[tuple[str, torch.Tensor]]:
    while (words := world.hear(first)) is not None:
        name, dtype, shape = words
        yield name, world.hear_tensor(first, getattr(torch, dtype), shape)
