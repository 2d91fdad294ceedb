"""What runs inside vLLM's worker: swap the weights in place, and hash exactly the bytes that were loaded.

Rule 1: every tensor is copied once; the copy is hashed and the copy is loaded. So the fingerprint is of what is served.
Rule 2: after a reload on a CPU a tied output layer still computes with its old packed copy of the embedding, and
nothing says so. `repack_output_layers` packs it again; the probe of a version is what would notice without it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from workers.transport.weights.manifest import Fingerprint, RawTensor
from workers.transport.weights.store import read_tensors

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def repack_output_layers(model: torch.nn.Module) -> int:
    """Pack the weights of output layers again where a CPU kernel keeps its own copy of them; returns how many."""
    packed = [
        module
        for module in model.modules()
        if hasattr(module, "cpu_linear") and type(module).__name__ == "ParallelLMHead"
    ]
    for module in packed:
        module.quant_method.process_weights_after_loading(module)
    return len(packed)


class WeightsExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`), called by `collective_rpc`."""

    model_runner: Any
    reload_weights: Any

    def load_version(self, folder: str) -> str:
        """Load all tensors of the folder in place; returns their fingerprint. WeightsUnavailable."""
        whole = Fingerprint()
        tensors = _tensors(Path(folder), whole)
        self.reload_weights(weights_iterator=tensors)
        for name, _ in tensors:
            raise AssertionError(f"vLLM did not load {name}")
        repack_output_layers(self.model_runner.model)
        return whole.hexdigest()


def _tensors(folder: Path, whole: Fingerprint) -> Iterator[tuple[str, torch.Tensor]]:
    for raw in read_tensors(folder):
        data = bytearray(raw.data)
        whole.add(RawTensor(raw.name, raw.dtype, raw.shape, memoryview(data)))
        yield raw.name, torch.frombuffer(data, dtype=_DTYPES[raw.dtype]).view(raw.shape)
