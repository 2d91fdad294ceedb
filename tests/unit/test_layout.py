"""Which rank computes what, and which layouts are refused before anything starts."""

import random
from pathlib import Path
from typing import Any

import pytest

from pipelines import config_file, needs
from pipelines.model_folder import ModelFolder
from schemas.settings import Settings
from workers.runtime.errors import BadInput
from workers.trainer.learners.layout import Layout, Together, layout_of, micro_batches, refuse_impossible, shares
from workers.trainer.packing import pack, pad

CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "num_hidden_layers": 4,
}
SHARED, OVERLAP = {"use_distributed_optimizer": True}, {"overlap_grad_reduce": True, "overlap_param_gather": True}


def settings_of(megatron: dict[str, Any] | None = None, **training: Any) -> Settings:
    tree = {"model": "m", "dtype": "float32", "steps": 1, "group_size": 4, "groups_per_batch": 2}
    return Settings.model_validate(
        tree | {"training": training, "megatron": megatron or {}, "dataset": [{"path": "rows.jsonl"}]}
    )


def test_the_layout_is_the_product_of_its_sizes() -> None:
    assert layout_of(settings_of()) == Layout()
    assert Layout().ranks == 1
    cut = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}
    layout = layout_of(settings_of(cut, data_parallel=4))
    assert layout == Layout(2, 3, 4)
    assert layout.ranks == 24


@pytest.mark.parametrize(
    ("megatron", "training", "said"),
    [
        ({"tensor_model_parallel_size": 0}, {}, "megatron.tensor_model_parallel_size = 0: use a whole number"),
        ({"tensor_model_parallel_size": "2"}, {}, "use a whole number"),
        ({"tensor_model_parallel_size": 3}, {}, "does not divide the model's num_attention_heads = 4"),
        ({"tensor_model_parallel_size": 4}, {}, "does not divide the model's num_key_value_heads = 2"),
        ({"pipeline_model_parallel_size": 3}, {}, "does not divide the model's 4 layers"),
        ({"context_parallel_size": 2}, {}, "megatron.context_parallel_size = 2 is not supported"),
        ({"expert_model_parallel_size": 2}, {}, "no model that can be trained has experts"),
        ({"virtual_pipeline_model_parallel_size": 2}, {}, "a rank holds one stage"),
        ({"sequence_parallel": True}, {}, "sequence_parallel = True is not supported, on a CPU or a GPU: norms"),
        ({}, {"data_parallel": 9}, "training.data_parallel = 9, but an optimizer update has 8 trajectories"),
        ({}, {"data_parallel": 5, "updates_per_step": 2}, "has 4 trajectories"),
        ({}, {"data_parallel": 2, "kind": "paced"}, "training.kind = paced has one process"),
        (OVERLAP, {}, "overlap_param_gather needs"),
        ({"optimizer": "muon"}, {}, "use adam or sgd"),
        ({"optimizer": "sgd"} | SHARED, {}, "works with Adam only"),
    ],
)
def test_impossible_layouts_are_refused_with_key_and_reason(
    megatron: dict[str, Any], training: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        refuse_impossible(settings_of(megatron, **training), CONFIG)


def test_possible_layouts_are_not_refused() -> None:
    refuse_impossible(settings_of({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}), CONFIG)
    uneven = {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 2}
    refuse_impossible(settings_of(SHARED | OVERLAP | uneven, data_parallel=8), CONFIG)


def test_words_that_cannot_be_cut_evenly_are_refused() -> None:
    with pytest.raises(BadInput, match="does not divide the model's vocab_size = 513"):
        refuse_impossible(settings_of({"tensor_model_parallel_size": 2}), CONFIG | {"vocab_size": 513})


@pytest.mark.parametrize("together", [pack, pad])
@pytest.mark.parametrize("seed", range(20))
def test_every_sample_has_one_copy_of_the_model_and_the_copies_have_about_the_same(
    seed: int, together: Together
) -> None:
    dice = random.Random(seed)
    prompts = [[group] * dice.randint(1, 9) for group in range(dice.randint(1, 6)) for _ in range(4)]
    responses = [dice.randint(1, 40) for _ in prompts]
    copies, tokens_max = dice.randint(1, 4), dice.randint(1, 200)
    micros = micro_batches(together, prompts, responses, tokens_max, copies)
    held = shares(micros, copies)
    assert sorted(member for share in held for micro in share for member in micro.members) == list(range(len(prompts)))
    sizes = [sum(micro.tokens for micro in share) for share in held]
    assert max(sizes) - min(sizes) <= max(micro.tokens for micro in micros)
    if copies == 1:
        assert micros == together(prompts, responses, tokens_max)


def test_a_batch_of_one_micro_batch_is_split_for_all_copies() -> None:
    prompts, responses = [[1, 2]] * 8, [10] * 8
    assert len(micro_batches(pack, prompts, responses, 4096, 1)) == 1
    assert [len(share) for share in shares(micro_batches(pack, prompts, responses, 4096, 4), 4)] == [1, 1, 1, 1]


def test_a_resumed_run_may_have_another_layout() -> None:
    before = settings_of()
    config_file.refuse_changes(before, settings_of({"tensor_model_parallel_size": 2}, data_parallel=2))
    with pytest.raises(BadInput, match="bias_swiglu_fusion"):
        config_file.refuse_changes(before, settings_of({"bias_swiglu_fusion": True}))


def test_memory_counts_copies_of_the_model_and_processes() -> None:
    model = ModelFolder(Path("m"), {}, 10**9)
    alone = needs.memory_of(settings_of(), model).trainer
    both = needs.memory_of(settings_of(data_parallel=2), model).trainer
    cut = needs.memory_of(settings_of({"tensor_model_parallel_size": 2}), model).trainer
    assert both == pytest.approx(2 * alone)
    assert cut == pytest.approx(alone + needs.TRAINER_GIB)
