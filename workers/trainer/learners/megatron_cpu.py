"""Lets Megatron-core train on a build of torch without CUDA. Does nothing where a GPU is there.

Megatron-core 0.16.1 names "cuda" literally in a few places of its schedule, optimizer and checkpointing. Two
mechanisms answer them: functions of `torch.cuda` are replaced, and a torch function mode (the mechanism behind
`torch.set_default_device`) turns a device "cuda" into the CPU and makes `Tensor.type()` answer as the optimizer's
checks expect. The mode belongs to a thread: enter it in every thread that calls Megatron.
"""

import importlib.metadata
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from workers.runtime.errors import BadInput

MEGATRON_VERSION = "0.16.1"
_CPU = torch.device("cpu")
_installed: list[TorchFunctionMode] = []


def install() -> None:
    """Idempotent. BadInput if Megatron-core is of another version than the one whose calls are known."""
    quieten()
    if torch.cuda.is_available() or _installed:
        return
    found = importlib.metadata.version("megatron-core")
    if found != MEGATRON_VERSION:
        raise BadInput(f"megatron-core {found} is installed; without a GPU exactly {MEGATRON_VERSION} is known to work")
    torch.cuda.current_device = lambda: _CPU
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, _does_nothing())
    mode = _CudaMeansCpu()
    mode.__enter__()
    _installed.append(mode)


def quieten() -> None:
    """Each import of Megatron says that Apex and Transformer Engine are missing, and each model what is deprecated."""
    for module in (r"megatron\.", r"torch\.jit\.", r"torch\.distributed\.", "workers.trainer.learners.megatron_cpu"):
        warnings.filterwarnings("ignore", module=module)
    logging.getLogger("megatron").setLevel(logging.ERROR)


def without_cuda_generators() -> None:
    """Recomputed activations want the state of a CUDA generator before and after. Call it once Megatron is imported;
    there is no dropout, so nothing draws from it."""
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(0, dtype=torch.uint8)
    random._set_cuda_rng_state = _does_nothing()


def installed() -> bool:
    return bool(_installed)


def _does_nothing() -> Callable[..., None]:
    """There is no stream to wait for and no cache to empty. A new function each: torch._dynamo wants them distinct."""

    def nothing(*_args: object, **_kwargs: object) -> None:
        pass

    return nothing


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False


class _CudaMeansCpu(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            said: str = func(*args)
            return said if said.startswith("torch.cuda.") else said.replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)
