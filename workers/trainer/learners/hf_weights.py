"""Weights between a Hugging Face folder and a Megatron-core model, both ways, bit for bit.

Rule 1: one table says which Hugging Face tensors make a Megatron tensor; reading joins them, export takes them apart.
Rule 2: a tied head exists once, as the embedding (the last of several pipeline stages has a copy of its own).
Rule 3: what has no place is refused by name, but for rotary frequencies: they are computed.
Rule 4: tensor parallel cuts each Hugging Face tensor evenly along its rule's `cut`; a rank joins its own parts as if
   they were the whole model's.

Layouts: `linear_qkv` is ordered by query group (the group's queries, its key, its value); `linear_fc1` is gate over up.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from workers.runtime.errors import BadInput
from workers.transport.weights.manifest import RawTensor

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
_TIED_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_COMPUTED = ".rotary_emb.inv_freq"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_ATTENTION, _MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, query groups (key and value heads); of one rank, if the model is cut."""

    heads: int
    groups: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Tensor parallel: this is part `part` of `parts`."""

    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Rule:
    """Hugging Face names of one Megatron tensor. `layout`: same, qkv (by query group), stacked (one over the other).
    `cut`: the dimension that tensor parallel cuts, None = every rank has all of it."""

    names: tuple[str, ...]
    layout: str = "same"
    cut: int | None = None


def _qkv(kind: str) -> Rule:
    return Rule(tuple(f"{_ATTENTION}{letter}_proj.{kind}" for letter in "qkv"), "qkv", cut=0)


_TOP = {
    _EMBEDDING: Rule(("model.embed_tokens.weight",), cut=0),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
    _TIED_HEAD: Rule(("lm_head.weight",), cut=0),
}
_PER_LAYER = {
    "input_layernorm.weight": Rule(("model.layers.{i}.input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Rule(("model.layers.{i}.post_attention_layernorm.weight",)),
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": Rule((_ATTENTION + "q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule((_ATTENTION + "k_norm.weight",)),
    "self_attention.linear_proj.weight": Rule((_ATTENTION + "o_proj.weight",), cut=1),
    "mlp.linear_fc1.weight": Rule((_MLP + "gate_proj.weight", _MLP + "up_proj.weight"), "stacked", cut=0),
    "mlp.linear_fc2.weight": Rule((_MLP + "down_proj.weight",), cut=1),
}


def rule_of(name: str) -> Rule:
    """The rule of a Megatron parameter of the whole model, its names filled in. KeyError if it has none."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return _TOP[name]
    rule = _PER_LAYER[match[2]]
    return replace(rule, names=tuple(pattern.format(i=match[1]) for pattern in rule.names))


def join(parts: list[torch.Tensor], layout: str, shape: Heads) -> torch.Tensor:
    """Hugging Face tensors -> one Megatron tensor."""
    if layout == "same":
        (only,) = parts
        return only
    if layout == "stacked":
        return torch.cat(parts)
    grouped = [part.reshape(shape.groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])


def split(tensor: torch.Tensor, layout: str, shape: Heads) -> list[torch.Tensor]:
    """One Megatron tensor -> Hugging Face tensors; the inverse of `join`."""
    if layout == "same":
        return [tensor]
    if layout == "stacked":
        return list(tensor.chunk(2))
    per_group = shape.heads // shape.groups
    grouped = tensor.reshape(shape.groups, per_group + 2, -1, *tensor.shape[1:])
    parts = grouped.split([per_group, 1, 1], dim=1)
    return [part.reshape(-1, *tensor.shape[1:]) for part in parts]


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files. BadInput if there are none."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise BadInput(f"model: {folder / name} is missing")
        with safe_open(folder / name, framework="pt") as file:
            tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (no mapping)
    return tensors


@torch.no_grad()
def load(model: Any, tensors: Mapping[str, torch.Tensor], cut: Cut = Cut()) -> None:
    """Fill a Megatron model: this rank's stage, its part. BadInput if a tensor is missing or has another shape."""
    shape = _heads(model, cut)
    for name, parameter in _parameters(model):
        tied = name == _TIED_HEAD and model.share_embeddings_and_output_weights
        rule = _TOP[_EMBEDDING] if tied else rule_of(name)
        if missing := [key for key in rule.names if key not in tensors]:
            raise BadInput(f"model: no tensor {missing[0]} in the folder")
        mine = join([_part(tensors[key], rule, cut) for key in rule.names], rule.layout, shape)
        if mine.shape != parameter.shape:
            raise BadInput(f"model: {rule.names[0]} makes {tuple(mine.shape)}, config.json {tuple(parameter.shape)}")
        parameter.copy_(mine)
        if rule.cut is not None:
            _mark_as_cut(parameter, rule.cut)
    if strange := sorted(name for name in set(tensors) - _known(model) if not name.endswith(_COMPUTED)):
        raise BadInput(f"model: tensor {strange[0]} has no place in the model ({len(strange)} such)")


def _mark_as_cut(parameter: Any, dimension: int) -> None:
    """Megatron marks what it initialises itself; its gradient norm counts what has no mark on one rank only."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dimension, 1


def _known(model: Any) -> set[str]:
    """Names of all tensors that the whole model may have; a tied head may lie in the folder too."""
    local = {match[2] for name, _ in model.named_parameters() if (match := _LAYER.fullmatch(name))}
    layers = range(model.config.num_layers)
    names = [*_TOP, *(f"decoder.layers.{number}.{name}" for number in layers for name in local)]
    return {key for name in names for key in rule_of(name).names}


def _part(tensor: torch.Tensor, rule: Rule, cut: Cut) -> torch.Tensor:
    return tensor if rule.cut is None else tensor.chunk(cut.parts, dim=rule.cut)[cut.part]


def _heads(model: Any, cut: Cut) -> Heads:
    return Heads(model.config.num_attention_heads // cut.parts, model.config.num_query_groups // cut.parts)


def _parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of this stage by the names that they have in the whole model."""
    for name, parameter in model.named_parameters():
        if match := _LAYER.fullmatch(name):
            number = model.decoder.layers[int(match[1])].layer_number - 1
            yield f"decoder.layers.{number}.{match[2]}", parameter
        else:
            yield name, parameter


@torch.no_grad()
def export(model: Any, dtype: torch.dtype, cut: Cut = Cut()) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """(Hugging Face name, this rank's part in `dtype`, the dimension it was cut along), each once."""
    shape = _heads(model, cut)
    for name, parameter in _parameters(model):
        if name == _TIED_HEAD and model.share_embeddings_and_output_weights:
            continue
        rule = rule_of(name)
        for key, part in zip(rule.names, split(parameter.detach(), rule.layout, shape), strict=True):
            yield key, part.to(dtype).contiguous(), rule.cut


def raw(name: str, tensor: torch.Tensor) -> RawTensor:
    """A host tensor as bytes, without a copy."""
    data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    return RawTensor(name, DTYPES[tensor.dtype], tuple(tensor.shape), data)
