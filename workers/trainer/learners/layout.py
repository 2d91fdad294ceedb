"""How the trainer's processes (ranks) share the work: tensor, pipeline and data parallel. Pure numbers, no tensor.

    [training] data_parallel            copies of the model, each on its own micro-batches
    [megatron] tensor_model_parallel_size     each matrix is cut over so many ranks
               pipeline_model_parallel_size   the layers are cut into so many stages

Rule 1: what cannot be is refused before anything starts, with the key and the reason.
Rule 2: which rank computes which micro-batch is a function of the batch and the layout alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.settings import Settings
from workers.runtime.errors import BadInput
from workers.trainer.packing import MicroBatch

Together = Callable[[Sequence[Sequence[int]], Sequence[int], int], list[MicroBatch]]
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_WHOLE_ROW = "attention over trees of prompts needs a whole row on one rank, so each would count the same tokens"
_NO_EXPERTS = "no model that can be trained has experts"
_OTHER_WAYS = {
    "context_parallel_size": _WHOLE_ROW,
    "hierarchical_context_parallel_sizes": _WHOLE_ROW,
    "expert_model_parallel_size": _NO_EXPERTS,
    "expert_tensor_parallel_size": _NO_EXPERTS,
    "virtual_pipeline_model_parallel_size": "a rank holds one stage",
}
"""What Megatron can and this learner cannot, on a CPU or a GPU (docs/ALGORITHM.md, Layouts), and why."""
_UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout")


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes. Megatron numbers the ranks: tensor fastest, then data, then pipeline."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data


def layout_of(settings: Settings) -> Layout:
    """BadInput if a size is no positive integer."""
    sizes = {}
    for key in (TENSOR, PIPELINE):
        size = settings.megatron.get(key, 1)
        if not isinstance(size, int) or size < 1:
            raise BadInput(f"megatron.{key} = {size!r}: use a whole number from 1")
        sizes[key] = size
    return Layout(sizes[TENSOR], sizes[PIPELINE], settings.training.data_parallel)


def refuse_impossible(settings: Settings, config: Mapping[str, Any]) -> None:
    """BadInput if a model with this config.json cannot be trained in the settings' layout."""
    layout, given = layout_of(settings), settings.megatron
    if settings.training.kind != "megatron":
        if layout.ranks > 1:
            raise BadInput(
                f"training.kind = {settings.training.kind} has one process: leave training.data_parallel out"
            )
        return
    other = {key: why for key, why in _OTHER_WAYS.items() if given.get(key) not in (None, 1)}
    if given.get("sequence_parallel"):
        other["sequence_parallel"] = "norms and the choice of the tokens that are predicted work on whole rows"
    for key, why in other.items():
        raise BadInput(
            f"megatron.{key} = {given[key]!r} is not supported, on a CPU or a GPU: {why}; leave it out, and cut by "
            f"megatron.{TENSOR}, megatron.{PIPELINE} or training.data_parallel"
        )
    heads = config.get("num_attention_heads")
    cut = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": config.get("intermediate_size"),
        "vocab_size": config.get("vocab_size"),
    }
    for name, size in cut.items():
        if isinstance(size, int) and size % layout.tensor:
            raise BadInput(f"megatron.{TENSOR} = {layout.tensor} does not divide the model's {name} = {size}")
    layers = config.get("num_hidden_layers")
    uneven = any(given.get(key) for key in _UNEVEN)
    if isinstance(layers, int) and layers % layout.pipeline and not uneven:
        raise BadInput(f"megatron.{PIPELINE} = {layout.pipeline} does not divide the model's {layers} layers")
    samples = settings.groups_per_batch * settings.group_size // settings.training.updates_per_step
    if layout.data > samples:
        raise BadInput(
            f"training.data_parallel = {layout.data}, but an optimizer update has {samples} trajectories "
            "(groups_per_batch x group_size / training.updates_per_step): lower it"
        )
    _refuse_optimizer(given)


def _refuse_optimizer(given: Mapping[str, Any]) -> None:
    shared = given.get("use_distributed_optimizer")
    if given.get("overlap_param_gather") and not (shared and given.get("overlap_grad_reduce")):
        raise BadInput(
            "megatron.overlap_param_gather needs megatron.use_distributed_optimizer = true and "
            "megatron.overlap_grad_reduce = true"
        )
    if given.get("optimizer", "adam") not in ("adam", "sgd"):
        raise BadInput(f"megatron.optimizer = {given['optimizer']!r} is not supported: use adam or sgd")
    if shared and given.get("optimizer", "adam") != "adam":
        raise BadInput("megatron.use_distributed_optimizer works with Adam only: leave megatron.optimizer out")


def micro_batches(
    together: Together, prompts: Sequence[Sequence[int]], responses: Sequence[int], tokens_max: int, copies: int
) -> list[MicroBatch]:
    """As `together` (`pack` or `pad`) makes them; if those are fewer than copies of the model, about one for each."""
    made = together(prompts, responses, tokens_max)
    if len(made) >= copies:
        return made
    share = -(-sum(micro.tokens for micro in made) // copies)
    twice = max(len(prompt) for prompt in prompts)  # a tree that is split has its prompt twice
    return together(prompts, responses, share + twice)


def shares(micros: Sequence[MicroBatch], copies: int) -> list[list[MicroBatch]]:
    """The micro-batches of each copy of the model, about the same number of tokens for each. Some may have none."""
    held: list[list[MicroBatch]] = [[] for _ in range(copies)]
    sizes = [0] * copies
    for micro in sorted(micros, key=lambda one: (-one.tokens, one.members)):
        least = sizes.index(min(sizes))
        held[least].append(micro)
        sizes[least] += micro.tokens
    return held
