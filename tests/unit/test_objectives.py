"""Every objective against the straight reference, on random ragged batches in float64; each test prints its seed."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from schemas.settings import Training
from tests.unit.objective_reference import (
    LIMIT,
    Response,
    every_objective,
    on_an_edge,
    our_loss,
    random_batch,
    reference_gradients,
    reference_loss,
    tokens_of,
)
from workers.trainer.losses import entropy_of, entropy_with_gradient, policy_loss, token_weights

RATIOS = ("token", "sequence", "cispo")
LIMITS = {"rel": 1e-6, "abs": 1e-12}
WORDS, WIDTH = 5, 3


def drawn() -> random.Random:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return random.Random(seed)


def of_ratio(ratio: str) -> list[Training]:
    return [one for one in every_objective() if one.ratio == ratio]


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("first", [False, True], ids=["later-update", "first-update"])
def test_loss_and_gradient_are_those_of_the_reference(ratio: str, first: bool) -> None:
    chance = drawn()
    for objective in of_ratio(ratio):
        batch = random_batch(chance, objective, first=first)
        loss, gradients, said = our_loss(batch, [range(len(batch))], objective)
        assert loss == pytest.approx(reference_loss(batch, objective, [one.now for one in batch]), **LIMITS), objective
        assert said["loss"] == pytest.approx(loss, **LIMITS)
        expected = flat(reference_gradients(batch, objective))
        assert flat(gradients) == pytest.approx(expected, rel=1e-5, abs=1e-8), objective


@pytest.mark.parametrize("ratio", RATIOS)
def test_micro_batches_and_the_order_of_samples_change_nothing(ratio: str) -> None:
    chance = drawn()
    for objective in of_ratio(ratio):
        batch = random_batch(chance, objective, samples=6)
        whole = our_loss(batch, [range(6)], objective)
        for parts in range(1, 7):
            order = chance.sample(range(6), 6)
            cuts = sorted(chance.sample(range(1, 6), parts - 1))
            split = [order[start:end] for start, end in itertools.pairwise([0, *cuts, 6])]
            loss, gradients, said = our_loss(batch, split, objective)
            assert loss == pytest.approx(whole[0], **LIMITS), (objective, split)
            assert flat(gradients) == pytest.approx(flat(whole[1]), **LIMITS), (objective, split)
            assert said == pytest.approx(whole[2], **LIMITS), (objective, split)


def model_loss(
    parameters: list[torch.Tensor], ids: list[list[int]], batch: list[Response], objective: Training
) -> tuple[list[Response], torch.Tensor]:
    """A model of two layers that predicts each id from the one before it (the first from word 0): the batch with its
    log-probs and entropies in plain numbers, and our loss with its gradient."""
    embedding, inner, outer = parameters
    before = torch.tensor([word for row in ids for word in [0, *row[:-1]]])
    logits_TV = torch.tanh(torch.tanh(embedding[before] @ inner)) @ outer
    targets = torch.tensor(flat([[float(word) for word in row] for row in ids])).long()
    plain, start, made = [[float(v) for v in row] for row in logits_TV.detach().tolist()], 0, []
    for row, one in zip(ids, batch, strict=True):
        norms = [math.log(math.fsum(math.exp(v) for v in plain[start + place])) for place in range(len(row))]
        now = [plain[start + place][word] - norms[place] for place, word in enumerate(row)]
        entropy = [
            -math.fsum(math.exp(v - norm) * (v - norm) for v in plain[start + place])
            for place, norm in enumerate(norms)
        ]
        made.append(dataclasses.replace(one, now=now, entropy=entropy))
        start += len(row)
    weights = token_weights([one.mask for one in batch], objective.loss_level, LIMIT)
    tokens = tokens_of(batch, weights, objective, torch.float64)
    logprobs_T = logits_TV.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return made, policy_loss(logprobs_T, entropy_with_gradient(logits_TV), tokens, objective)[0]


@pytest.mark.parametrize("objective", every_objective()[::5], ids=lambda one: f"{one.ratio}-{one.loss_level}")
def test_gradient_of_a_model_of_two_layers_is_that_of_finite_differences(objective: Training) -> None:
    chance = drawn()
    sizes = ((WORDS, WIDTH), (WIDTH, WIDTH), (WIDTH, WORDS))
    numbers = [[chance.gauss(0, 0.8) for _ in range(a * b)] for a, b in sizes]

    def parameters(number: int = 0, place: int = 0, by: float = 0.0) -> list[torch.Tensor]:
        made = []
        for n, ((rows, columns), values) in enumerate(zip(sizes, numbers, strict=True)):
            moved = [v + by * (n == number and p == place) for p, v in enumerate(values)]
            made.append(torch.tensor(moved, dtype=torch.float64).reshape(rows, columns).requires_grad_())
        return made

    batch = random_batch(chance, objective, samples=3)
    ids = [[chance.randrange(WORDS) for _ in one.now] for one in batch]
    there = model_loss(parameters(), ids, batch, objective)[0]
    near = [one.now for one in there]
    batch = [not_far(one, chance) for one in there]
    while on_an_edge(batch, objective):
        batch = [not_far(one, chance) for one in there]
    ours = parameters()
    model_loss(ours, ids, batch, objective)[1].backward()

    def moved(number: int, place: int, by: float) -> float:
        there = model_loss(parameters(number, place, by), ids, batch, objective)[0]
        return reference_loss(there, objective, near)

    for number, parameter in enumerate(ours):
        expected = [
            (moved(number, place, 1e-6) - moved(number, place, -1e-6)) / 2e-6 for place in range(parameter.numel())
        ]
        assert parameter.grad.flatten().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8)


def not_far(one: Response, chance: random.Random) -> Response:
    """What sampled, and the version at the start of the step, were models not far from this one."""
    sampled, proximal = ([value + chance.gauss(0, 0.2) for value in one.now] for _ in range(2))
    return dataclasses.replace(one, sampled=sampled, proximal=proximal, reference=one.now)


def test_figures_of_a_lag_are_those_of_its_samples_alone() -> None:
    chance = drawn()
    batch = random_batch(chance, Training(), samples=8)
    _, _, said = our_loss(batch, [range(4), range(4, 8)], Training())
    lags = {one.lag for one in batch if any(one.mask)}
    assert {int(name.split("_")[1]) for name in said if name.startswith("lag_")} == lags
    for lag in lags:
        of_lag = [one for one in batch if one.lag == lag]
        _, _, alone = our_loss(of_lag, [range(len(of_lag))], Training())
        for name in ("ratio_mean", "ratio_max", "ess", "mismatch_kl", "entropy", "clip_low_share", "clip_high_share"):
            assert said[f"lag_{lag}_{name}"] == pytest.approx(alone[name], **LIMITS), name
    assert sum(said[f"lag_{lag}_tokens"] for lag in lags) == said["tokens"]


def test_entropy_with_a_gradient_is_entropy() -> None:
    chance = drawn()
    logits = torch.tensor([[chance.gauss(0, 3) for _ in range(40)] for _ in range(7)], dtype=torch.float64)
    logits.requires_grad_()
    entropy = entropy_with_gradient(logits)
    assert entropy.tolist() == pytest.approx(entropy_of(logits.detach(), rows_max=3).tolist(), rel=1e-9)
    entropy.sum().backward()
    probs = logits.detach().softmax(-1)
    expected = -probs * (probs.log() + entropy.detach()[:, None])
    assert torch.allclose(logits.grad, expected, rtol=1e-9, atol=1e-12)
