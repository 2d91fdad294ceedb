"""Weights between a Hugging Face folder and a Megatron-core model, both ways, bit for bit.

Rule 1: one table says which Hugging Face tensors make a Megatron tensor; reading joins them, export takes them apart.
Rule 2: a tied head exists once, as the embedding.
Rule 3: what has no place is refused by name, but for rotary frequencies: they are computed.

Layouts: `linear_qkv` is ordered by query group (the group's queries, its key, its value); `linear_fc1` is gate over up.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from workers.runtime.errors import BadInput
from workers.transport.weights.manifest import RawTensor

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
_TIED_HEAD = "output_layer.weight"
_COMPUTED = ".rotary_emb.inv_freq"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_ATTENTION, _MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, query groups (key and value heads)."""

    heads: int
    groups: int


@dataclass(frozen=True, slots=True)
class Rule:
    """Hugging Face names of one Megatron tensor. `layout`: same, qkv (by query group), stacked (one over the other)."""

    names: tuple[str, ...]
    layout: str = "same"


def _qkv(kind: str) -> Rule:
    return Rule(tuple(f"{_ATTENTION}{letter}_proj.{kind}" for letter in "qkv"), "qkv")


_TOP = {
    "embedding.word_embeddings.weight": Rule(("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
    _TIED_HEAD: Rule(("lm_head.weight",)),
}
_PER_LAYER = {
    "input_layernorm.weight": Rule(("model.layers.{i}.input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Rule(("model.layers.{i}.post_attention_layernorm.weight",)),
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": Rule((_ATTENTION + "q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule((_ATTENTION + "k_norm.weight",)),
    "self_attention.linear_proj.weight": Rule((_ATTENTION + "o_proj.weight",)),
    "mlp.linear_fc1.weight": Rule((_MLP + "gate_proj.weight", _MLP + "up_proj.weight"), "stacked"),
    "mlp.linear_fc2.weight": Rule((_MLP + "down_proj.weight",)),
}


def rule_of(name: str) -> Rule:
    """The rule of a Megatron parameter, its names filled in. KeyError if it has none."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return _TOP[name]
    rule = _PER_LAYER[match[2]]
    return Rule(tuple(pattern.format(i=match[1]) for pattern in rule.names), rule.layout)


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
def load(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill a Megatron model (one process holds all of it). BadInput if a tensor is missing or has another shape."""
    shape = Heads(model.config.num_attention_heads, model.config.num_query_groups)
    used = {"lm_head.weight"} if model.share_embeddings_and_output_weights else set()
    for name, parameter in model.named_parameters():
        rule = rule_of(name)
        if missing := [key for key in rule.names if key not in tensors]:
            raise BadInput(f"model: no tensor {missing[0]} in the folder")
        full = join([tensors[key] for key in rule.names], rule.layout, shape)
        if full.shape != parameter.shape:
            raise BadInput(f"model: {rule.names[0]} makes {tuple(full.shape)}, config.json {tuple(parameter.shape)}")
        parameter.copy_(full)
        used.update(rule.names)
    strange = sorted(name for name in set(tensors) - used if not name.endswith(_COMPUTED))
    if strange:
        raise BadInput(f"model: tensor {strange[0]} has no place in the model ({len(strange)} such)")


@torch.no_grad()
def export(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor in `dtype` on the host), each once."""
    shape = Heads(model.config.num_attention_heads, model.config.num_query_groups)
    for name, parameter in model.named_parameters():
        rule = rule_of(name)
        parts = split(parameter.detach(), rule.layout, shape)
        yield from zip(rule.names, (part.to("cpu", dtype).contiguous() for part in parts), strict=True)


def raw(name: str, tensor: torch.Tensor) -> RawTensor:
    """A host tensor as bytes, without a copy."""
    data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    return RawTensor(name, DTYPES[tensor.dtype], tuple(tensor.shape), data)
