"""What the last bit of a training step depends on besides its inputs: threads, CPU features, libraries, devices.

`RUN/environment.jsonl` has a line for each start of the trainer: when, under which `steps`, and the environment.
"""

import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines import device
from schemas.settings import Settings
from workers.runtime import clock

FILE = "environment.jsonl"
_FEATURES = ("sse", "avx", "amx", "fma", "f16c", "asimd", "sve", "bf16")
_LIBRARIES = ("torch", "megatron-core")
_SWITCHES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the trainer: `at` in microseconds since 1970, `steps` as the settings said then."""

    at: int
    steps: int
    environment: dict[str, str]


def environment(settings: Settings, cpu_info: Path = device.CPU_INFO) -> dict[str, str]:
    """Of a trainer with these settings in this process' environment, on this machine."""
    flags = sorted(flag for flag in device.cpu_flags(cpu_info) if flag.startswith(_FEATURES))
    said = {
        "threads": str(settings.training.threads),
        "dtype": settings.dtype,
        "cpu features": " ".join(flags),
        "gpus": str(len(device.visible_gpus())),
    }
    said |= {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return said | {name: os.environ[name] for name in _SWITCHES if name in os.environ}


def note(run_dir: Path, settings: Settings) -> None:
    """A trainer of this run starts here and now."""
    line = {"at": clock.now_us(), "steps": settings.steps, "environment": environment(settings)}
    with (run_dir / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def starts(run_dir: Path) -> list[Start]:
    """All of a run, oldest first; lines that a crash cut are left out."""
    file = run_dir / FILE
    found = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            said = json.loads(line)
            found.append(Start(said["at"], said["steps"], said["environment"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not as it was, in words."""
    return [
        f"{name}: {_shorter(before.get(name, ''), now.get(name, ''))}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name, "") != now.get(name, "")
    ]


def _shorter(before: str, now: str) -> str:
    """Of lists only what went and what came."""
    gone, come = set(before.split()) - set(now.split()), set(now.split()) - set(before.split())
    if max(len(before.split()), len(now.split())) > 1:
        return " ".join([*(f"-{word}" for word in sorted(gone)), *(f"+{word}" for word in sorted(come))])
    return f"{before or 'not set'} then, {now or 'not set'} now"
