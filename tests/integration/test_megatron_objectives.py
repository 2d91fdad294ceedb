"""Objectives inside the Megatron learner: loss and gradient against the straight reference through transformers, the
reference model, the version at the start of a step, the schedule. Tiny models, one process."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.models import write_tiny
from schemas.settings import Training
from tests.integration.helpers_megatron import learner_of, samples_of, save, straight_logprobs
from tests.unit.objective_reference import LIMIT, Response, reference_gradients, reference_loss
from workers.trainer.learners.base import Sample
from workers.trainer.losses import token_weights
from workers.transport.weights.manifest import fingerprint

pytestmark = pytest.mark.integration
SAMPLING = {"max_new_tokens": LIMIT}
OBJECTIVES: list[dict[str, Any]] = [
    {"ratio": "sequence", "loss_level": "sequence", "clip_low": 0.01, "clip_high": 0.02},
    {"ratio": "cispo", "loss_level": "constant", "entropy_coef": 0.3},
    {"clip_dual": 1.5, "loss_level": "constant"},
    {"decoupled": True, "tis_cap": 1.1, "tis_level": "sequence", "loss_level": "sequence"},
    {"decoupled": True, "tis_cap": 1.2, "tis_mask": True, "entropy_coef": 0.1},
    {"decoupled": True, "tis_cap": 1.05, "tis_level": "geometric", "ratio": "sequence"},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny(folder)
    return folder


def close_samples(llama: Path, seed: int) -> list[Sample]:
    """What sampled was a model not far from the one in the folder."""
    chance = random.Random(seed)
    samples = samples_of(seed, temperature=0.9)
    return [
        dataclasses.replace(
            one, logprobs=[v + chance.gauss(0, 0.2) if c else 0.0 for v, c in zip(now, one.loss_mask, strict=True)]
        )
        for one, now in zip(samples, learner_of(llama).logprobs(samples), strict=True)
    ]


def responses_of(samples: Sequence[Sample], now: Sequence[list[float]], **columns: Sequence[Any]) -> list[Response]:
    return [
        Response(
            values, list(one.logprobs), list(one.loss_mask), one.advantage, **{k: v[place] for k, v in columns.items()}
        )
        for place, (one, values) in enumerate(zip(samples, now, strict=True))
    ]


def straight_step(llama: Path, samples: Sequence[Sample], objective: Training) -> tuple[float, float]:
    """(loss, gradient norm): the reference's differences by every log-prob, and transformers' gradient of those."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    logprobs = [straight_logprobs(model, one) for one in samples]
    entropies = [straight_entropies(model, one) for one in samples]
    batch = responses_of(samples, [one.tolist() for one in logprobs], entropy=[one.tolist() for one in entropies])
    pushes = reference_gradients(batch, objective)
    shares = token_weights([one.mask for one in batch], objective.loss_level, LIMIT)
    chained = torch.zeros(())
    for values, entropy, push, share in zip(logprobs, entropies, pushes, shares, strict=True):
        chained = chained + (values * torch.tensor(push)).sum()
        chained = chained - objective.entropy_coef * (entropy * torch.tensor(share)).sum()
    chained.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
    return reference_loss(batch, objective, [one.now for one in batch]), float(norm)


def straight_entropies(model: Any, sample: Sample) -> Any:
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].float() / sample.temperature
    return torch.distributions.Categorical(logits=logits).entropy()


@pytest.mark.parametrize("training", OBJECTIVES, ids=lambda one: "-".join(map(str, one.values())))
def test_loss_and_gradient_of_a_model_are_those_of_the_reference(llama: Path, training: dict[str, Any]) -> None:
    samples = close_samples(llama, 11)
    said = learner_of(llama, sampling=SAMPLING, micro_batch_tokens=60, **training).train(samples)
    loss, norm = straight_step(llama, samples, Training(**training))
    assert said["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert said["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("training", [*OBJECTIVES[:2], {**OBJECTIVES[3], "kl_coef": 0.2, "entropy_coef": 0.1}], ids=str)
def test_micro_batches_and_the_order_of_rows_change_nothing(llama: Path, training: dict[str, Any]) -> None:
    samples = close_samples(llama, 12)
    shuffled = samples[8:] + samples[3::-1] + samples[7:3:-1]
    whole = learner_of(llama, sampling=SAMPLING, **training).train(samples)
    for budget, order in ((1, samples), (50, samples), (4096, shuffled), (50, shuffled)):
        said = learner_of(llama, sampling=SAMPLING, micro_batch_tokens=budget, **training).train(order)
        assert said == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_the_ratio_of_a_decoupled_step_is_to_the_version_before_its_first_update(llama: Path) -> None:
    """Two updates: the second one's ratio is to the weights before the first, its weight that version's over what
    sampled."""
    training = {"decoupled": True, "tis_cap": 1.2, "learning_rate": 1e-2}
    samples = close_samples(llama, 13)[:8]
    said = learner_of(llama, updates_per_step=2, **training).train(samples)
    fresh, half = learner_of(llama), learner_of(llama, **training)
    start, later = fresh.logprobs(samples), samples[4:]
    first = half.train(samples[:4])["loss"]
    batch = responses_of(later, half.logprobs(later), proximal=start[4:], entropy=[[0.0] * 20] * 4)
    second = reference_loss(batch, Training(**training), [one.now for one in batch])
    assert max(abs(a - b) for one in batch for a, b in zip(one.now, one.proximal or [], strict=True)) > 0.01
    assert said["loss"] == pytest.approx((first + second) / 2, rel=1e-4)


def test_the_kl_is_to_version_0_also_after_a_resume(llama: Path, tmp_path: Path) -> None:
    training = {"kl_coef": 0.5, "learning_rate": 1e-2}
    learner = learner_of(llama, **training)
    samples = close_samples(llama, 14)
    for one in (learner, learner_of(llama, dtype="bfloat16", **training)):
        assert one.train(samples)["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    save(learner, tmp_path / "saved")
    start, now = learner_of(llama).logprobs(samples), learner.logprobs(samples)
    batch = responses_of(samples, now, reference=start, entropy=[[0.0] * 20] * len(samples))
    expected = reference_loss(batch, Training(**training), [one.now for one in batch])
    resumed = learner_of(llama, **training)
    resumed.restore(tmp_path / "saved")
    for one in (learner, resumed):
        said = one.train(samples)
        assert said["reference_kl"] > 1e-3
        assert said["loss"] == pytest.approx(expected, rel=1e-4)
    assert fingerprint(learner.export()) == fingerprint(resumed.export())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_renewed_every_two_steps_also_after_a_resume(llama: Path, tmp_path: Path, dtype: str) -> None:
    training = {"kl_coef": 0.5, "kl_refresh_steps": 2, "learning_rate": 1e-2}
    samples = close_samples(llama, 18)
    learner = learner_of(llama, dtype=dtype, **training)
    kls = [learner.train(samples, step)["reference_kl"] for step in range(3)]
    assert kls[0] == kls[2] == pytest.approx(0.0, abs=1e-9), "to version 0, and to version 2"
    assert kls[1] > 1e-3
    save(learner, tmp_path / "saved")
    resumed = learner_of(llama, dtype=dtype, **training)
    resumed.restore(tmp_path / "saved")
    for step in (3, 4, 5):
        said = learner.train(samples, step)
        assert (said["reference_kl"] > 1e-3) is (step != 4)
        assert resumed.train(samples, step) == said
    assert fingerprint(resumed.export()) == fingerprint(learner.export())


def test_a_pinned_version_is_the_reference_from_its_step_on_also_after_a_resume(llama: Path, tmp_path: Path) -> None:
    training = {"kl_coef": 0.5, "kl_version": 2, "learning_rate": 1e-2, "steps": 5}
    samples = close_samples(llama, 19)
    learner = learner_of(llama, **training)
    kls, pinned = [], None
    for step in range(3):
        pinned = learner.logprobs(samples)
        kls.append(learner.train(samples, step)["reference_kl"])
    assert kls[0] == kls[2] == pytest.approx(0.0, abs=1e-9), "to version 0, and to version 2"
    save(learner, tmp_path / "saved")
    resumed = learner_of(llama, **training)
    resumed.restore(tmp_path / "saved")
    for step in (3, 4):
        batch = responses_of(samples, learner.logprobs(samples), reference=pinned, entropy=[[0.0] * 20] * len(samples))
        expected = reference_loss(batch, learner._settings.training, [one.now for one in batch])
        said = learner.train(samples, step)
        assert said["loss"] == pytest.approx(expected, rel=1e-4)
        assert resumed.train(samples, step) == said


def test_a_step_has_the_learning_rate_of_its_number_also_after_a_resume(llama: Path, tmp_path: Path) -> None:
    samples = samples_of(15)
    warm, slow = learner_of(llama, warmup_steps=4, steps=8), learner_of(llama, learning_rate=0.5e-3)
    assert warm.train(samples, 1)["learning_rate"] == slow.train(samples)["learning_rate"] == 0.5e-3
    assert fingerprint(warm.export()) == fingerprint(slow.export())
    save(warm, tmp_path / "saved")
    resumed = learner_of(llama, warmup_steps=4, steps=8)
    resumed.restore(tmp_path / "saved")
    assert resumed.train(samples, 2) == warm.train(samples, 2)
    assert fingerprint(resumed.export()) == fingerprint(warm.export())


def test_a_gradient_whose_norm_overflows_changes_nothing_even_with_momentum(llama: Path) -> None:
    """Its numbers are finite, their squares are not: clipped by such a norm, AdamW would move by its momentum."""
    learner = learner_of(llama)
    samples = samples_of(16)
    learner.train(samples)
    before = fingerprint(learner.export())
    said = learner.train([dataclasses.replace(one, advantage=1e25 * one.advantage) for one in samples])
    assert said["updates_skipped"] == 1.0
    assert fingerprint(learner.export()) == before


def test_figures_of_every_lag_are_reported(llama: Path) -> None:
    samples = [dataclasses.replace(one, lag=one.group) for one in samples_of(17)]
    said = learner_of(llama, micro_batch_tokens=50).train(samples)
    names = ("ratio_mean", "ratio_max", "ess", "clip_low_share", "clip_high_share", "mismatch_kl", "entropy")
    assert {f"lag_{lag}_{name}" for lag in range(3) for name in names} <= set(said)
    assert sum(said[f"lag_{lag}_tokens"] for lag in range(3)) == said["tokens"]
    assert max(said[f"lag_{lag}_ratio_max"] for lag in range(3)) == said["ratio_max"]
