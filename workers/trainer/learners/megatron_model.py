"""A Hugging Face model folder as a Megatron-core GPT model: Llama, Qwen2 and Qwen3 (dense).

Rule 1: a row of tokens is what `packing.py` says: trees of one prompt and its responses, side by side, unpadded.
   Rotary positions are those that each response would have alone; attention never crosses from one response to another
   (`tree_attention.py`).
Rule 2: logits are made only at positions that predict a response token.

Shapes: S = tokens of the row, T = response tokens, V = words.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from workers.runtime.errors import BadInput
from workers.trainer.learners import megatron_optimizer
from workers.trainer.learners.fast_layers import GatedSilu, RMSNorm
from workers.trainer.learners.hf_config import rope_of
from workers.trainer.learners.layout import PIPELINE
from workers.trainer.learners.tree_attention import Rotary, TreeAttention
from workers.trainer.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors of a micro-batch. ids_S and positions_S int64; shape: per tree prompt length, number of responses, their
    lengths; predictors_T: the place in the row whose logits predict each response token; targets_T those tokens."""

    ids_S: torch.Tensor
    positions_S: torch.Tensor
    shape: torch.Tensor
    predictors_T: torch.Tensor
    targets_T: torch.Tensor

    def to(self, device: torch.device) -> "Row":
        """On the device; `shape` stays on the host, where it is read."""
        held = (self.ids_S, self.positions_S, self.predictors_T, self.targets_T)
        ids_S, positions_S, predictors_T, targets_T = (tensor.to(device) for tensor in held)
        return Row(ids_S, positions_S, self.shape, predictors_T, targets_T)


def row_of(micro: MicroBatch, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Row:
    """The row of a micro-batch of samples with these ids."""
    ids: list[int] = []
    positions: list[int] = []
    shape: list[int] = []
    predictors: list[int] = []
    targets: list[int] = []
    for tree in micro.trees:
        last = len(ids) + tree.prompt - 1
        ids += prompts[tree.members[0]]
        positions += range(tree.prompt)
        shape += [tree.prompt, len(tree.responses), *tree.responses]
        for member, length in zip(tree.members, tree.responses, strict=True):
            start = len(ids)
            predictors += [last, *range(start, start + length - 1)]
            targets += responses[member]
            ids += responses[member]
            positions += range(tree.prompt, tree.prompt + length)
        if micro.width:  # one sequence that ends in filling, which nothing before it sees and nothing predicts
            filling = micro.width - tree.tokens
            ids += [0] * filling
            positions += range(tree.tokens, micro.width)
            shape[-3:] = [micro.width, 0]
    assert len(targets) == len(predictors)
    tensors = [torch.tensor(numbers, dtype=torch.int64) for numbers in (ids, positions, shape, predictors, targets)]
    return Row(*tensors)


class TreeGPT(GPTModel):  # type: ignore[misc]
    """GPT model on one row of trees. Its attention gives the rotary positions; Megatron's own layers give none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rotary = Rotary(self.rotary_pos_emb)
        for layer in self.decoder.layers:
            layer.self_attention.core_attention.rotary = rotary

    def forward(
        self, ids_S: torch.Tensor, positions_S: torch.Tensor, shape: torch.Tensor, predictors_T: torch.Tensor
    ) -> torch.Tensor:
        """Logits [T, V] that predict the response tokens (hidden states on a stage that is not the last)."""
        hidden = self.embedding(ids_S[None], positions_S[None]) if self.pre_process else None
        hidden = self.decoder(hidden_states=hidden, attention_mask=shape)
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden.squeeze(1)[predictors_T][:, None], weight=weight)
        return logits.squeeze(1)


def transformer_config(config: Mapping[str, Any], dtype: torch.dtype, overrides: Mapping[str, Any]) -> Any:
    """TransformerConfig of a Hugging Face config. `overrides` is `[megatron]`; BadInput for a name it does not have."""
    heads = config["num_attention_heads"]
    fields: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_te_activation_func": True,  # the layer spec's: `fast_layers.py`
        "add_bias_linear": False,
        "add_qkv_bias": config["model_type"] == "qwen2",
        "qk_layernorm": config["model_type"] == "qwen3",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # fused kernels exist on a GPU only, and some round the gradient
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "use_cpu_initialization": True,
        "perform_initialization": False,  # every parameter is read from the folder
        "calculate_per_token_loss": True,  # gradients are summed as they are: our weights hold the denominators
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    if overrides.get(PIPELINE, 1) > 1:
        # Rows have their own lengths; Megatron allows that with this dispatcher only, experts or not.
        fields |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    if unknown := sorted(set(overrides) - known - megatron_optimizer.KEYS):
        others = ", ".join(sorted(megatron_optimizer.KEYS))
        raise BadInput(f"[megatron] {', '.join(unknown)}: no field of Megatron's TransformerConfig, nor {others}")
    try:
        return TransformerConfig(**fields | {key: value for key, value in overrides.items() if key in known})
    except (TypeError, ValueError) as error:
        raise BadInput(f"[megatron]: {error}") from error


def build(config: Mapping[str, Any], megatron: Any) -> Any:
    """The model with uninitialised weights, on the stages of this process. `parallel_state` is initialised."""
    local = get_gpt_layer_local_spec(qk_layernorm=megatron.qk_layernorm, normalization="RMSNorm")
    spec = copy.deepcopy(local)
    layer = spec.submodules
    layer.self_attention.submodules.core_attention = TreeAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.mlp.submodules.activation_func = GatedSilu
    return TreeGPT(
        config=megatron,
        transformer_layer_spec=spec,
        vocab_size=config["vocab_size"],
        max_sequence_length=config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
        **rope_of(config),
    )
