"""How a batch is cut into forward passes changes neither loss nor gradient: order, micro-batches, filling, packing.
A tiny model, one process, float32; differences are of rounding, at most 1e-6."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.helpers_megatron import learner_of, samples_of, write_family
from workers.trainer.learners.base import Sample
from workers.trainer.learners.megatron_model import row_of
from workers.trainer.packing import MicroBatch, pack, pad

pytestmark = pytest.mark.integration
BOUND = 1e-6
OBJECTIVES: list[dict[str, Any]] = [{}, {"loss_level": "sequence", "entropy_coef": 0.1, "kl_coef": 0.1}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_family(made, "qwen2.5-untied")
    return made


def step_of(folder: Path, samples: Sequence[Sample], **training: Any) -> tuple[dict[str, float], torch.Tensor]:
    """Figures and the whole gradient of one step; nothing is clipped by its norm."""
    learner = learner_of(folder, clip_grad=1e9, **training)
    figures = learner.train(samples)
    return figures, torch.cat([buffer.grad_data.clone() for buffer in learner._ddp.buffers])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["token", "sequence"])
def test_order_split_filling_and_packing_give_one_loss_and_one_gradient(
    folder: Path, objective: dict[str, Any]
) -> None:
    """Samples in three orders; budgets from one sample a pass over a few to all in one; packed and padded."""
    samples = samples_of(21)
    straight, gradient = step_of(folder, samples, **objective)
    assert float(gradient.abs().max()) > 0.01
    orders = [samples, samples[::-1], random.Random(5).sample(samples, len(samples))]
    passes = set()
    for packing in (True, False):
        for budget, order in ((1, orders[0]), (30, orders[1]), (64, orders[2]), (4096, orders[2])):
            settings = {"micro_batch_tokens": budget, "packing": packing, **objective}
            said, found = step_of(folder, order, **settings)
            lengths = [len(one.response_ids) for one in order]
            passes.add(len((pack if packing else pad)([one.prompt_ids for one in order], lengths, budget)))
            assert said == pytest.approx(straight, rel=1e-5, abs=BOUND), (packing, budget)
            assert abs(said["loss"] - straight["loss"]) <= BOUND
            assert float((found - gradient).abs().max()) <= BOUND, (packing, budget)
    assert {1, len(samples)} < passes


def test_filling_of_any_width_changes_no_loss_and_no_gradient(folder: Path) -> None:
    samples = samples_of(22)[:5]
    prompts, responses = [one.prompt_ids for one in samples], [one.response_ids for one in samples]
    (micro,) = pad(prompts, [len(one) for one in responses], 4096)
    found = []
    for width in (micro.width, micro.width + 1, micro.width + 40):
        model = learner_of(folder)._model
        row = row_of(dataclasses.replace(micro, width=width), prompts, responses)
        assert row.ids_S.numel() == width * len(samples)
        logits = model(row.ids_S, row.positions_S, row.shape, row.predictors_T)
        loss = -logits.log_softmax(-1).gather(1, row.targets_T[:, None]).mean()
        loss.backward()
        # The buffers of Megatron's data parallelism take a gradient as it is made.
        found.append((float(loss.detach()), torch.cat([one.main_grad.flatten() for one in model.parameters()])))
    (loss_there, gradient), *others = found
    assert float(gradient.abs().max()) > 0.01
    for wider, same in others:
        assert abs(wider - loss_there) <= BOUND
        assert float((same - gradient).abs().max()) <= BOUND


def test_packed_and_padded_rows_give_every_sample_the_log_probs_it_has_alone(folder: Path) -> None:
    samples = samples_of(23)
    alone = [learner_of(folder).logprobs([one])[0] for one in samples]
    for packing in (True, False):
        for found, expected in zip(learner_of(folder, packing=packing).logprobs(samples), alone, strict=True):
            assert found == pytest.approx(expected, abs=1e-5)


def test_a_padded_micro_batch_holds_one_sequence_a_sample_and_a_packed_one_the_prompt_once() -> None:
    prompts, responses = [[1, 2], [1, 2]], [[3], [4, 5]]
    (packed,), (padded,) = pack(prompts, [1, 2], 99), pad(prompts, [1, 2], 99)
    assert isinstance(packed, MicroBatch)
    one, other = row_of(packed, prompts, responses), row_of(padded, prompts, responses)
    assert (one.ids_S.tolist(), one.shape.tolist()) == ([1, 2, 3, 4, 5], [2, 2, 1, 2])
    assert (other.ids_S.tolist(), other.shape.tolist()) == ([1, 2, 4, 5, 1, 2, 3, 0], [4, 0, 4, 0])
    assert (other.positions_S.tolist(), other.predictors_T.tolist()) == ([0, 1, 2, 3] * 2, [1, 2, 5])
    assert other.targets_T.tolist() == [4, 5, 3]
