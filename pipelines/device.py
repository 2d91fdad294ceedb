"""What this machine computes with, seen without torch: the one place that chooses for `dtype = "auto"`."""

from pathlib import Path
from typing import Literal

CPU_INFO = Path("/proc/cpuinfo")
GPU_DEVICE = Path("/dev/nvidiactl")
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
