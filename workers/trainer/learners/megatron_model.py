"""A Hugging Face model folder as a Megatron-core GPT model: Llama, Qwen2 and Qwen3 (dense).

Rule 1: nothing here is bound to a device: attention is torch's own, which picks a kernel.
Rule 2: a row of tokens is what `packing.py` says: trees of one prompt and its responses, side by side, unpadded.
   Rotary positions are those that each response would have alone; attention never crosses from one response to another.
Rule 3: logits are made only at positions that predict a response token.

Shapes: S = tokens of the row, T = response tokens, H = attention heads, G = query groups, D = head size, V = words.
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
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.utils.rnn import pad_sequence

from workers.runtime.errors import BadInput
from workers.trainer.learners import megatron_optimizer
from workers.trainer.learners.hf_config import rope_of
from workers.trainer.learners.layout import PIPELINE
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


class TreeAttention(MegatronModule):  # type: ignore[misc]
    """Core attention over trees. `attention_mask` is `Row.shape`; None = one causal sequence."""

    def __init__(self, config: Any, layer_number: int, *_args: Any, softmax_scale: Any = None, **_kwargs: Any) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1
        assert config.attention_dropout == 0.0, "training on sampled log-probs goes without dropout"
        self.layer_number = layer_number
        self.scale = softmax_scale
        self.grouped = config.num_attention_heads != config.num_query_groups

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """query [S, 1, H, D], key and value [S, 1, G, D] -> [S, 1, H * D]."""
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        shape = [q.size(0), 0] if attention_mask is None else attention_mask.tolist()
        if not any(shape[1::2]) and len(set(shape[::2])) == 1:  # sequences of one length, without branches
            rows = [x.reshape(-1, shape[0], *x.shape[1:]) for x in (q, k, v)]
            return self._attend(rows[0], rows[1], rows[2], None).reshape(q.size(0), 1, -1)
        pieces: list[torch.Tensor] = []
        start = place = 0
        while place < len(shape):
            prompt, count = shape[place : place + 2]
            lengths = shape[place + 2 : place + 2 + count]
            end = start + prompt + sum(lengths)
            pieces.append(self._tree(q[start:end], k[start:end], v[start:end], prompt, lengths))
            start, place = end, place + 2 + count
        out = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return out.reshape(out.size(0), 1, -1)

    def _tree(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prompt: int, lengths: list[int]) -> torch.Tensor:
        """One tree, [tokens, heads, D]. Inside, responses are padded on the right, which a causal row never sees."""
        if len(lengths) <= 1:
            return self._attend(q[None], k[None], v[None], None)[0]
        trunk = self._attend(q[None, :prompt], k[None, :prompt], v[None, :prompt], None)[0]
        padded = [pad_sequence(list(x[prompt:].split(lengths)), batch_first=True) for x in (q, k, v)]
        count, longest = padded[0].shape[:2]
        whole_k, whole_v = (
            torch.cat([x[None, :prompt].expand(count, -1, -1, -1), tail], dim=1)
            for x, tail in zip((k, v), padded[1:], strict=True)
        )
        sees = torch.ones(longest, prompt + longest, dtype=torch.bool, device=q.device).tril(prompt)
        branches = self._attend(padded[0], whole_k, whole_v, sees)
        return torch.cat([trunk, *(branch[:length] for branch, length in zip(branches, lengths, strict=True))])

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor | None) -> torch.Tensor:
        """[B, tokens, heads, D] -> the same shape.

        On a CPU in float32: torch's bfloat16 kernel has a backward pass that is about four times slower there.
        """
        kept = torch.float32 if q.device.type == "cpu" else q.dtype
        q_, k_, v_ = (x.transpose(1, 2).to(kept) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q_, k_, v_, attn_mask=sees, is_causal=sees is None, scale=self.scale, enable_gqa=self.grouped
        )
        return out.transpose(1, 2).to(q.dtype)


class TreeGPT(GPTModel):  # type: ignore[misc]
    """GPT model on one row of trees."""

    def forward(
        self, ids_S: torch.Tensor, positions_S: torch.Tensor, shape: torch.Tensor, predictors_T: torch.Tensor
    ) -> torch.Tensor:
        """Logits [T, V] that predict the response tokens (hidden states on a stage that is not the last)."""
        hidden = self.embedding(ids_S[None], positions_S[None]) if self.pre_process else None
        rotary = self.rotary_pos_emb(_rounded(int(positions_S.max()) + 1))[positions_S]
        hidden = self.decoder(hidden_states=hidden, attention_mask=shape, rotary_pos_emb=rotary)
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden.squeeze(1)[predictors_T][:, None], weight=weight)
        return logits.squeeze(1)


def _rounded(length: int) -> int:
    """Up to a multiple of 256: few different lengths, so that the model's own cache of rotary angles holds them."""
    return -(-length // 256) * 256


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
    spec.submodules.self_attention.submodules.core_attention = TreeAttention
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
