"""config.json of a model folder: which models can be trained, said before anything is built. No tensor, no torch.

Rule 1: what would change a log-prob and is not computed here is refused, with the file, the key and what is known.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.runtime.errors import BadInput

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Hugging Face's `model_type`. Qwen2.5 is `qwen2`."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-core's own constants of Llama 3 rope scaling; only `factor` can be set."""
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model that can be trained. BadInput says which key cannot."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"model: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BadInput(f"model: {path} holds no JSON object")
    if reason := refusal(config):
        raise BadInput(f"model: {path}: {reason}")
    return config


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model of this configuration cannot be trained, by its key; None if it can."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"model_type {family!r} cannot be trained; known are {', '.join(FAMILIES)}"
    for key in _SIZES:
        if not isinstance(config.get(key), int) or config[key] < 1:
            return f"{key} is {config.get(key)!r}, and not a whole number above 0"
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(key):
            return f"{key} = {config[key]}: only models without one can be trained"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act {config['hidden_act']!r}: only silu is known"
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if heads % groups:
        return f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {groups}"
    return _attention(config) or _rope(config)


def _attention(config: Mapping[str, Any]) -> str | None:
    """Every layer sees the whole sequence. Qwen's `sliding_window` is off unless `use_sliding_window` says so."""
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        return f"layer_types has {kinds[0]}: only full_attention is known"
    if config.get("use_sliding_window"):
        return "use_sliding_window = true: attention sees the whole sequence here; set it to false"
    if config["model_type"] == "mistral" and config.get("sliding_window", 4096) is not None:
        return (
            f"sliding_window = {config.get('sliding_window', 4096)}: attention sees the whole sequence here; set it to "
            "null, which changes nothing for sequences that are no longer than that"
        )
    return None


def _rope(config: Mapping[str, Any]) -> str | None:
    key, rope = _rope_section(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        return "partial_rotary_factor: only 1.0 is known"
    if kind == "default":
        return None
    known = "known are default, and llama3 with " + ", ".join(f"{name} {value}" for name, value in LLAMA3_ROPE.items())
    if kind != "llama3":
        return f"{key}: rope_type {kind!r} cannot be trained; {known}"
    if not isinstance(rope.get("factor"), int | float):
        return f"{key}: rope_type llama3 has no factor"
    for name, value in LLAMA3_ROPE.items():
        if rope.get(name) != value:
            return f"{key}: {name} is {rope.get(name)!r}; {known}"
    return None


def _rope_section(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(key, its table). transformers 5 writes `rope_parameters`, earlier ones `rope_scaling`."""
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            return key, config[key]
    return "rope_parameters", {}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """GPTModel's rotary arguments of a configuration that is not refused."""
    _, rope = _rope_section(config)
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    said: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": theta}
    if rope.get("rope_type", rope.get("type", "default")) == "llama3":
        said |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return said
