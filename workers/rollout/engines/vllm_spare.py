"""The weights of a coming version, made ready beside the model that serves, so that a swap only exchanges them.

    folder --hashes checked--> tensors --hashed, loaded, packed--> Spare --put_in--> the model serves them

Rule 1: every tensor is copied once; the copy is hashed and the copy is loaded. So the fingerprint is of what is served.
Rule 2: a spare is made in a thread of its own and touches nothing of the model. `put_in` is called between two steps.
Rule 3: on a CPU the spare is a second set of the model's layers, filled by vLLM's own loaders and packed by vLLM's own
kernels; `put_in` moves data pointers and packed copies over, layer by layer. That covers a tied output layer, whose
packed copy of the embedding vLLM's reload would leave as it was.
Rule 4: elsewhere (a GPU, several workers, a quantized model, adapters) the spare is the hashed tensors in memory, and
`put_in` is vLLM's reload of them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs, sanitize_layer_refs

from schemas.messages import WeightsRecord
from workers.runtime.errors import WeightsUnavailable
from workers.transport.weights.manifest import Fingerprint, Manifest, RawTensor
from workers.transport.weights.store import Store, read_tensors

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
_TREE = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Spare:
    """A version that is ready. `fingerprint` is of the tensors that were loaded."""

    fingerprint: str
    manifest: Manifest
    put_in: Callable[[], None]


class Spares:
    """Of one worker: at most one is ready or being made, in one thread."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, "spare")
        self._record: WeightsRecord | None = None
        self._coming: Future[Spare] | None = None

    def prepare(self, record: WeightsRecord) -> bool:
        """Begin with this version, or go on; one of another version is finished first and dropped. True once it is
        ready, or it is known that it cannot be: `take` says why."""
        if self._coming is not None and not self._coming.done():
            return False
        if self._record != record:
            self._coming = None  # its memory goes before the next one is made
            self._record, self._coming = record, self._thread.submit(make, self._worker, record)
            return False
        return True

    def take(self, record: WeightsRecord) -> Spare:
        """It, as soon as it is ready. WeightsUnavailable."""
        if self._coming is not None and self._record != record:
            self._coming.exception()  # of another version: its end comes first
        self.prepare(record)
        assert self._coming is not None
        coming, self._record, self._coming = self._coming, None, None
        return coming.result()

    def close(self) -> None:
        self._thread.shutdown()


def make(worker: Any, record: WeightsRecord) -> Spare:
    """The spare of an announced version for vLLM's worker. WeightsUnavailable."""
    folder, manifest = Store.open(record)
    whole = Fingerprint()
    tensors = tensors_of(folder, whole)
    put_in = _packed(worker.model_runner.model, tensors) if _can_pack(worker) else _held(worker, list(tensors))
    for name, _ in tensors:
        raise AssertionError(f"vLLM did not load {name}")
    return Spare(whole.hexdigest(), manifest, put_in)


def tensors_of(folder: Path, whole: Fingerprint) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of a folder's tensors, in order of their names, each added to `whole`. WeightsUnavailable."""
    for raw in read_tensors(folder):
        data = bytearray(raw.data)
        whole.add(RawTensor(raw.name, raw.dtype, raw.shape, memoryview(data)))
        yield raw.name, torch.frombuffer(data, dtype=_DTYPES[raw.dtype]).view(raw.shape)


def _can_pack(worker: Any) -> bool:
    config = worker.vllm_config
    plain = config.model_config.quantization is None and config.lora_config is None
    return plain and worker.device.type == "cpu" and config.parallel_config.world_size == 1


def _held(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> Callable[[], None]:
    def put_in() -> None:
        worker.reload_weights(weights_iterator=iter(tensors))
        repack_output_layers(worker.model_runner.model)

    return put_in


def repack_output_layers(model: torch.nn.Module) -> None:
    """After vLLM's reload on a CPU a tied output layer still computes with its old packed copy of the embedding, and
    nothing says so. Pack it again."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


def _packed(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> Callable[[], None]:
    pairs: dict[int, tuple[torch.nn.Module, torch.nn.Module]] = {}
    second = _twin(model, pairs, {})
    with torch.no_grad():
        loaded = second.load_weights(tensors)
        if missing := sorted({name for name, _ in second.named_parameters()} - loaded):
            raise WeightsUnavailable(f"no tensors for {missing[0]} ({len(missing)} of the model's parameters)")
        for module in second.modules():
            if isinstance(method := getattr(module, "quant_method", None), QuantizeMethodBase):
                method.process_weights_after_loading(module)

    def put_in() -> None:
        for layer, twin in pairs.values():
            for name, parameter in twin._parameters.items():
                if parameter is not None:
                    layer._parameters[name].data = parameter.data
            layer.__dict__.update(made_by_packing(layer, twin))

    return put_in


def made_by_packing(layer: torch.nn.Module, twin: torch.nn.Module) -> dict[str, Any]:
    """What a twin has besides tensors and layers that its layer has not."""
    own = layer.__dict__
    return {name: it for name, it in twin.__dict__.items() if name not in _TREE and own.get(name) is not it}


def _twin(
    layer: torch.nn.Module,
    pairs: dict[int, tuple[torch.nn.Module, torch.nn.Module]],
    parameters: dict[int, torch.nn.Parameter],
) -> Any:
    """The same layers with parameters of their own, empty and in the form in which a checkpoint is loaded. What is one
    layer or one parameter in two places is one here. Buffers are not of the weights: they stay shared."""
    if id(layer) in pairs:
        return pairs[id(layer)][1]
    twin = copy.copy(layer)
    pairs[id(layer)] = layer, twin
    for name in _TREE:
        setattr(twin, name, dict(getattr(layer, name)))
    recorded, _ = get_layerwise_info(layer).restore_metadata
    for name, parameter in layer._parameters.items():
        if parameter is None:
            continue
        if id(parameter) not in parameters:
            form = recorded[name] if name in recorded else to_meta_tensor(parameter)
            parameters[id(parameter)] = _with_own_loader(materialize_meta_tensor(form))
        twin._parameters[name] = restore_layer_refs(sanitize_layer_refs(parameters[id(parameter)], layer), twin)
    for name, child in layer._modules.items():
        twin._modules[name] = None if child is None else _twin(child, pairs, parameters)
    return twin


def _with_own_loader(parameter: Any) -> Any:
    """vLLM's reload leaves wrapped loaders in what it recorded; outside of it these load nothing and say nothing."""
    loader: Any = getattr(parameter, "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = parameter.weight_loader = loader.__wrapped__
    return parameter
