"""What this machine computes with, seen without torch: the one place that chooses for `dtype = "auto"`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

CPU_INFO = Path("/proc/cpuinfo")
GPU_DEVICE = Path("/dev/nvidiactl")
GPU_LIST = Path("/proc/driver/nvidia/gpus")
_FAST_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""x86 flags of bfloat16 products; without them such a product costs about seven float32 ones (measured on AVX2)."""


def best_dtype(cpu_info: Path = CPU_INFO, gpu: Path = GPU_DEVICE) -> Literal["bfloat16", "float32"]:
    """`bfloat16` where it is fast (a GPU, or a CPU with instructions for it), else `float32`."""
    return "bfloat16" if gpu.exists() or _FAST_BFLOAT16 & cpu_flags(cpu_info) else "float32"


def cpu_flags(cpu_info: Path = CPU_INFO) -> set[str]:
    """Flags of the first processor; none where the system does not say."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def machine(cpu_info: Path = CPU_INFO) -> str:
    """The processor's name, how many of its cores are ours, the fast dtype; what a measurement was made on."""
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {best_dtype(cpu_info)}"


def visible_gpus(listed: Path = GPU_LIST) -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, else the numbers of all GPUs of this machine."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number in range(len(list(listed.iterdir())))] if listed.is_dir() else []


def gpus_of(kind: str, number: int, gpus: Sequence[str], per_engine: int = 1, of_trainer: int = 1) -> list[str]:
    """The GPUs of a worker: the trainer has the last `of_trainer`, engines take turns on the others, `per_engine` each.
    Empty = as it is: there is one GPU for all, or none, or the worker needs none."""
    if len(gpus) < 2 or kind not in ("trainer", "rollout"):
        return []
    if kind == "trainer":
        return list(gpus[-of_trainer:])
    places = (len(gpus) - of_trainer) // per_engine
    first = number % places * per_engine if places > 0 else 0
    return list(gpus[first : first + per_engine]) if places > 0 else []
