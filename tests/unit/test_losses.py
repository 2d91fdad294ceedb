"""The loss on tensors (cases D03, D04, E01 to E03)."""

import itertools
import math

import pytest
import torch

from workers.trainer.losses import Clip, Tokens, entropy_of, figures, join, policy_loss, token_weights

CLIP = Clip(0.2, 0.28)
Sample = tuple[list[float], list[float], list[bool], float]
"""Log-probs now, log-probs as sampled, mask, advantage."""


def on_policy(length: int, advantage: float, mask: list[bool] | None = None) -> Sample:
    return [-1.0] * length, [-1.0] * length, mask or [True] * length, advantage


def run(
    samples: list[Sample], split: list[list[int]], level: str = "token"
) -> tuple[float, list[list[float]], dict[str, float]]:
    """(loss, gradient per token, figures) of samples in the given micro-batches."""
    weights = token_weights([sample[2] for sample in samples], level)
    gradients: list[list[float]] = [[] for _ in samples]
    parts, loss = [], 0.0
    for members in split:
        held = [samples[member] for member in members]
        logprobs_T = torch.tensor([value for sample in held for value in sample[0]], requires_grad=True)
        tokens = Tokens(
            behaviour_T=torch.tensor([value for sample in held for value in sample[1]]),
            advantages_T=torch.tensor([sample[3] for sample in held for _ in sample[0]]),
            weights_T=torch.tensor([share for member in members for share in weights[member]]),
            mask_T=torch.tensor([counts for sample in held for counts in sample[2]]),
        )
        part, sums = policy_loss(logprobs_T, torch.ones(len(logprobs_T)), tokens, CLIP)
        part.backward()
        loss += float(part.detach())
        parts.append({name: float(value) for name, value in sums.items()})
        flat = logprobs_T.grad.tolist()
        for member in members:
            length = len(samples[member][0])
            gradients[member], flat = flat[:length], flat[length:]
    return loss, gradients, figures(join(parts))


@pytest.mark.parametrize("split", [[[0, 1]], [[1, 0]], [[0], [1]], [[1], [0]]])
def test_token_mean_of_lengths_one_and_three_is_the_same_for_every_split(split: list[list[int]]) -> None:
    loss, gradients, said = run([on_policy(1, 1.0), on_policy(3, -1.0)], split)
    assert loss == pytest.approx(0.5)
    assert said["loss"] == pytest.approx(0.5)
    assert gradients == [[pytest.approx(-0.25)], [pytest.approx(0.25)] * 3]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_split_into_micro_batches_has_one_loss_and_one_gradient(level: str) -> None:
    samples = [on_policy(n, a, [i != 1 for i in range(n)]) for n, a in ((1, 1.0), (5, -0.5), (3, 2.0), (2, -1.0))]
    samples = [([v - 0.1 * i for i, v in enumerate(now)], old, mask, a) for now, old, mask, a in samples]
    whole = run(samples, [[0, 1, 2, 3]], level)
    for cut in range(1, 4):
        for order in itertools.permutations(range(4)):
            loss, gradients, said = run(samples, [list(order[:cut]), list(order[cut:])], level)
            assert loss == pytest.approx(whole[0])
            assert [v for g in gradients for v in g] == pytest.approx([v for g in whole[1] for v in g])
            assert said == pytest.approx(whole[2])


def test_sequence_level_weighs_every_sample_alike() -> None:
    loss, gradients, _ = run([on_policy(1, 1.0), on_policy(3, -1.0)], [[0, 1]], "sequence")
    assert loss == pytest.approx(0.0, abs=1e-6)
    assert gradients == [[pytest.approx(-0.5)], [pytest.approx(1 / 6)] * 3]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_batch_with_every_token_masked_is_empty_and_not_nan(level: str) -> None:
    samples = [on_policy(16, 1.0, [False] * 16) for _ in range(4)]
    loss, gradients, said = run(samples, [[0, 1], [2, 3]], level)
    assert loss == 0.0
    assert all(value == 0.0 for gradient in gradients for value in gradient)
    assert said["tokens"] == 0.0
    assert all(math.isfinite(value) for value in said.values())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_masked_sample_counts_in_no_denominator(level: str) -> None:
    """E02: two completions of 10 tokens, one masked: divide by 10."""
    both, gradients, said = run([on_policy(10, 1.0), on_policy(10, 5.0, [False] * 10)], [[0, 1]], level)
    alone, _, _ = run([on_policy(10, 1.0)], [[0]], level)
    assert both == pytest.approx(alone) == pytest.approx(-1.0)
    assert gradients[0] == pytest.approx([-0.1] * 10)
    assert said["tokens"] == 10.0


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_log_ratios_of_a_hundred_and_nan_stay_finite_and_are_reported(advantage: float) -> None:
    now, old = [-1.0, -101.0, math.nan, -1.0], [-101.0, -1.0, -1.0, -1.0]
    loss, gradients, said = run([(now, old, [True] * 4, advantage)], [[0]])
    assert math.isfinite(loss)
    assert all(math.isfinite(value) for value in gradients[0])
    assert all(math.isfinite(value) for value in said.values())
    assert said["nonfinite"] == 1.0
    assert gradients[0][2] == 0.0


def test_the_clip_is_asymmetric_and_only_stops_what_goes_further() -> None:
    def gradient(log_ratio: float, advantage: float) -> float:
        return run([([log_ratio - 1.0], [-1.0], [True], advantage)], [[0]])[1][0][0]

    assert gradient(math.log(1.27), 1.0) == pytest.approx(-1.27)
    assert gradient(math.log(1.29), 1.0) == 0.0
    assert gradient(math.log(0.79), -1.0) == 0.0
    assert gradient(math.log(0.79), 1.0) == pytest.approx(-0.79)
    assert gradient(math.log(1.29), -1.0) == pytest.approx(1.29)


def test_shares_of_clipped_tokens_count_those_that_lost_their_gradient() -> None:
    now = [math.log(1.5) - 1, math.log(0.5) - 1, -1.0, -1.0]
    _, _, up = run([(now, [-1.0] * 4, [True] * 4, 1.0)], [[0]])
    _, _, down = run([(now, [-1.0] * 4, [True] * 4, -1.0)], [[0]])
    assert (up["clip_high_share"], up["clip_low_share"]) == (0.25, 0.0)
    assert (down["clip_high_share"], down["clip_low_share"]) == (0.0, 0.25)


def test_a_hundred_small_differences_mask_no_token() -> None:
    """D03: 100 tokens, each 0.012 apart."""
    _, gradients, said = run([([-0.988] * 100, [-1.0] * 100, [True] * 100, 1.0)], [[0]])
    assert said["ratio_max"] == pytest.approx(math.exp(0.012), rel=1e-5)
    assert said["clip_high_share"] == 0.0
    assert all(value < 0 for value in gradients[0])


def test_effective_sample_size_is_one_on_policy_and_small_with_one_heavy_token() -> None:
    assert run([on_policy(4, 1.0)], [[0]])[2]["ess"] == pytest.approx(1.0)
    heavy = ([9.0, -1.0, -1.0, -1.0], [-1.0] * 4, [True] * 4, 1.0)
    assert run([heavy], [[0]])[2]["ess"] == pytest.approx(0.25, abs=0.01)


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size() -> None:
    assert entropy_of(torch.zeros(700, 32)).tolist() == pytest.approx([math.log(32)] * 700)
    assert entropy_of(torch.tensor([[100.0, 0.0]])).tolist() == pytest.approx([0.0], abs=1e-6)
    assert entropy_of(torch.zeros(0, 4)).tolist() == []
