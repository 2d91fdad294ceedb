"""What a model folder holds, looked at without loading it: its configuration, and that its weights are all there.

Rule 1: what would stop an engine or the trainer at its start is said here, with the file and what to do.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from schemas.settings import Settings
from workers.runtime.errors import BadInput
from workers.trainer.learners.hf_config import refusal

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEADER_BYTES_MAX = 100 << 20


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`parameters` is 0 if no part of the run needs weights."""

    folder: Path
    config: dict[str, Any]
    parameters: int


def look(folder: Path, settings: Settings) -> ModelFolder:
    """BadInput says what is missing or broken."""
    config = _json(folder / "config.json")
    _refuse_short_context(settings, folder, config)
    parameters = 0
    if settings.training.kind == "megatron" and (reason := refusal(config)):
        raise BadInput(f"model: {folder / 'config.json'}: {reason}")
    if settings.engines.kind == "vllm" or settings.training.kind == "megatron":
        parameters = sum(_parameters(file) for file in _weight_files(folder))
    return ModelFolder(folder, config, parameters)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"model: {file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BadInput(f"model: {file} holds no JSON object")
    return found


def _refuse_short_context(settings: Settings, folder: Path, config: dict[str, Any]) -> None:
    """An engine's longest request must fit the positions that the model knows."""
    known = config.get("max_position_embeddings")
    if isinstance(known, int) and settings.engines.tokens_per_request_max > known:
        raise BadInput(
            f"engines.tokens_per_request_max = {settings.engines.tokens_per_request_max}, but the model in {folder} "
            f"knows {known} positions: lower it"
        )


def _weight_files(folder: Path) -> list[Path]:
    names = [SINGLE]
    if (folder / INDEX).is_file():
        named = _json(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise BadInput(f"model: {folder / INDEX} has no weight_map")
        names = sorted({str(name) for name in named.values()})
    missing = [folder / name for name in names if not (folder / name).is_file()]
    if missing:
        others = [file.name for pattern in ("*.bin", "*.pt", "*.gguf") for file in folder.glob(pattern)]
        hint = f"it has {others[0]}: save it again as safetensors" if others else "copy the whole folder"
        raise BadInput(f"model: {missing[0]} is missing; {hint}")
    return [folder / name for name in names]


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file, by its header; BadInput if the file is not whole."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(HEADER_BYTES_MAX, size):
                raise ValueError("it has no header")
            header = json.loads(opened.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
        if end != size:
            raise ValueError(f"it has {size} bytes, its header speaks of {end}")
        return sum(prod(entry["shape"]) for entry in tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"model: {file} is no whole safetensors file: {error}; copy it again") from error
