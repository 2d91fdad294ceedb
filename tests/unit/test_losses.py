"""The loss on tensors, by cases worked out by hand (D02 to D04, E01 to E03)."""

import itertools
import math
from typing import Any

import pytest
import torch

from schemas.settings import Training
from tests.unit.objective_reference import LIMIT, Response, our_loss
from workers.trainer.losses import K3_MAX, entropy_of, k3, token_weights

LEVELS = ("token", "sequence", "constant")
EVERY_TERM = {"kl_coef": 0.1, "entropy_coef": 0.1}


def on_policy(length: int, advantage: float, mask: list[bool] | None = None) -> Response:
    return Response([-1.0] * length, [-1.0] * length, mask or [True] * length, advantage)


def run(
    samples: list[Response], split: list[list[int]] | None = None, **objective: Any
) -> tuple[float, list[list[float]], dict[str, float]]:
    """(loss, gradient per token, figures), in float32 as the learner has them."""
    return our_loss(samples, split or [list(range(len(samples)))], Training(**objective), torch.float32)


def one(log_ratios: list[float], advantage: float, **objective: Any) -> tuple[list[float], dict[str, float]]:
    """(gradient, figures) of one response whose log-probs have moved by so much."""
    response = Response(
        [value - 1.0 for value in log_ratios], [-1.0] * len(log_ratios), [True] * len(log_ratios), advantage
    )
    _, (gradient,), said = run([response], **objective)
    return gradient, said


@pytest.mark.parametrize("split", [[[0, 1]], [[1, 0]], [[0], [1]], [[1], [0]]])
def test_token_mean_of_lengths_one_and_three_is_the_same_for_every_split(split: list[list[int]]) -> None:
    """E03."""
    loss, gradients, said = run([on_policy(1, 1.0), on_policy(3, -1.0)], split)
    assert loss == pytest.approx(0.5)
    assert said["loss"] == pytest.approx(0.5)
    assert gradients == [[pytest.approx(-0.25)], [pytest.approx(0.25)] * 3]


@pytest.mark.parametrize("level", LEVELS)
def test_every_split_into_micro_batches_has_one_loss_and_one_gradient(level: str) -> None:
    samples = [on_policy(n, a, [i != 1 for i in range(n)]) for n, a in ((1, 1.0), (5, -0.5), (3, 2.0), (2, -1.0))]
    samples = [Response([v - 0.1 * i for i, v in enumerate(s.now)], s.sampled, s.mask, s.advantage) for s in samples]
    whole = run(samples, loss_level=level)
    for cut in range(1, 4):
        for order in itertools.permutations(range(4)):
            loss, gradients, said = run(samples, [list(order[:cut]), list(order[cut:])], loss_level=level)
            assert loss == pytest.approx(whole[0])
            assert [v for g in gradients for v in g] == pytest.approx([v for g in whole[1] for v in g])
            assert said == pytest.approx(whole[2])


def test_sequence_level_weighs_every_sample_alike() -> None:
    loss, gradients, _ = run([on_policy(1, 1.0), on_policy(3, -1.0)], loss_level="sequence")
    assert loss == pytest.approx(0.0, abs=1e-6)
    assert gradients == [[pytest.approx(-0.5)], [pytest.approx(1 / 6)] * 3]


def test_constant_level_divides_by_samples_and_the_limit_of_a_response() -> None:
    loss, gradients, _ = run([on_policy(1, 1.0), on_policy(3, -1.0)], loss_level="constant")
    assert loss == pytest.approx((-1 + 3) / (2 * LIMIT))
    assert gradients == [[pytest.approx(-1 / 2 / LIMIT)], [pytest.approx(1 / 2 / LIMIT)] * 3]


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_with_every_token_masked_is_empty_and_not_nan(level: str) -> None:
    """E01: 4 x 16 completions."""
    samples = [on_policy(16, 1.0, [False] * 16) for _ in range(64)]
    loss, gradients, said = run(samples, [list(range(32)), list(range(32, 64))], loss_level=level)
    assert loss == 0.0
    assert all(value == 0.0 for gradient in gradients for value in gradient)
    assert said["tokens"] == 0.0
    assert all(math.isfinite(value) for value in said.values())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_masked_sample_counts_in_no_denominator(level: str) -> None:
    """E02: two completions of 10 tokens, one masked: divide by 10."""
    both, gradients, said = run([on_policy(10, 1.0), on_policy(10, 5.0, [False] * 10)], loss_level=level)
    alone, _, _ = run([on_policy(10, 1.0)], loss_level=level)
    assert both == pytest.approx(alone) == pytest.approx(-1.0)
    assert gradients[0] == pytest.approx([-0.1] * 10)
    assert said["tokens"] == 10.0


def test_weights_of_all_levels_count_counted_tokens_alone() -> None:
    masks = [[True, False, True], [False], [True]]
    assert token_weights(masks, "token", LIMIT) == [[1 / 3, 0.0, 1 / 3], [0.0], [1 / 3]]
    assert token_weights(masks, "sequence", LIMIT) == [[1 / 4, 0.0, 1 / 4], [0.0], [1 / 2]]
    assert token_weights(masks, "constant", LIMIT) == [[1 / 32, 0.0, 1 / 32], [0.0], [1 / 32]]


@pytest.mark.parametrize("ratio", ["token", "sequence", "cispo"])
@pytest.mark.parametrize("weight", ["none", "token", "sequence", "geometric"])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_log_ratios_of_a_hundred_and_nan_stay_finite_and_are_reported(
    ratio: str, weight: str, advantage: float
) -> None:
    """D04."""
    now, old = [-1.0, -101.0, math.nan, -1.0], [-101.0, -1.0, -1.0, math.nan]
    weighted = {} if weight == "none" else {"decoupled": True, "tis_cap": 2.0, "tis_level": weight}
    for proximal in (None, [-50.0, -2.0, -1.0, -1.0]):
        response = Response(now, old, [True] * 4, advantage, proximal, [-101.0, -1.0, -1.0, -1.0], [1.0] * 4)
        loss, (gradient,), said = run([response], ratio=ratio, **EVERY_TERM, **weighted)
        assert math.isfinite(loss)
        assert all(math.isfinite(value) for value in gradient)
        assert all(math.isfinite(value) for value in said.values())
        assert said["nonfinite"] == 2.0
        assert gradient[2:] == [0.0, 0.0]


def test_k3_is_a_distance_bounded_on_both_sides() -> None:
    """D04: 100 and -100 are more than it says, and pull no more."""
    apart = torch.tensor([0.0, 0.5, -0.5, 20.0, -20.0], requires_grad=True)
    said = k3(apart)
    said.sum().backward()
    assert said.tolist() == pytest.approx([0.0, math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5, K3_MAX, K3_MAX])
    assert apart.grad.tolist() == pytest.approx([0.0, math.exp(0.5) - 1, math.exp(-0.5) - 1, 0.0, 0.0])


def test_the_clip_is_asymmetric_and_only_stops_what_goes_further() -> None:
    def gradient(log_ratio: float, advantage: float) -> float:
        return one([log_ratio], advantage)[0][0]

    assert gradient(math.log(1.27), 1.0) == pytest.approx(-1.27)
    assert gradient(math.log(1.29), 1.0) == 0.0
    assert gradient(math.log(0.79), -1.0) == 0.0
    assert gradient(math.log(0.79), 1.0) == pytest.approx(-0.79)
    assert gradient(math.log(1.29), -1.0) == pytest.approx(1.29)


def test_the_dual_clip_bounds_what_a_bad_token_that_became_likely_may_push() -> None:
    assert one([math.log(2.9)], -1.0, clip_dual=3.0)[0] == [pytest.approx(2.9)]
    gradient, said = one([math.log(3.1)], -1.0, clip_dual=3.0)
    assert gradient == [0.0]
    assert (said["clip_dual_share"], said["loss"]) == (1.0, pytest.approx(3.0))
    assert one([math.log(3.1)], -1.0)[0] == [pytest.approx(3.1)]


def test_cispo_cuts_the_ratio_and_leaves_every_token_its_gradient() -> None:
    gradient, said = one([math.log(2.0), math.log(0.5), 0.0], 1.0, ratio="cispo")
    assert gradient == pytest.approx([-1.28 / 3, -0.8 / 3, -1 / 3])
    assert said["clip_high_share"] == said["clip_low_share"] == pytest.approx(1 / 3)


def test_a_sequence_has_the_geometric_mean_of_its_ratios_for_all_its_tokens() -> None:
    """GSPO: 1.5 and 0.9 alone would be clipped above and not at all; their mean, 1.162, is inside."""
    gradient, said = one([math.log(1.5), math.log(0.9)], 1.0, ratio="sequence")
    assert gradient == pytest.approx([-math.sqrt(1.35) / 2] * 2)
    assert said["ratio_max"] == pytest.approx(math.sqrt(1.35))
    assert said["clip_high_share"] == 0.0


def test_the_first_update_of_a_decoupled_step_is_at_its_own_anchor() -> None:
    """What sampled differs by a factor of 2, and neither clips nor weighs unless a cap asks for it."""
    gradient, said = one([math.log(2.0)], 1.0, decoupled=True)
    assert (gradient, said["ratio_mean"]) == ([pytest.approx(-1.0)], 1.0)
    assert said["mismatch_kl"] == pytest.approx(2.0 - 1.0 - math.log(2.0))
    assert one([math.log(2.0)], 1.0, decoupled=True, tis_cap=1.5)[0] == [pytest.approx(-1.5)]
    assert one([math.log(2.0)], 1.0, decoupled=True, tis_cap=3.0)[0] == [pytest.approx(-2.0)]


def test_shares_of_clipped_tokens_count_those_that_lost_their_gradient() -> None:
    moved = [math.log(1.5), math.log(0.5), 0.0, 0.0]
    _, up = one(moved, 1.0)
    _, down = one(moved, -1.0)
    assert (up["clip_high_share"], up["clip_low_share"]) == (0.25, 0.0)
    assert (down["clip_high_share"], down["clip_low_share"]) == (0.0, 0.25)


@pytest.mark.parametrize(
    ("level", "weight", "cut"),
    [("token", math.exp(0.012), 0.0), ("sequence", math.exp(1.2), 1.0), ("geometric", math.exp(0.012), 0.0)],
)
def test_a_hundred_small_differences_are_much_for_a_sequence_and_little_for_a_token(
    level: str, weight: float, cut: float
) -> None:
    """D03: 100 tokens, each 0.012 apart, cap 3: the sequence's weight is 3.32. The share that was cut is said."""
    correction = {"decoupled": True, "tis_cap": 3.0, "tis_level": level}
    gradient, said = one([0.012] * 100, 1.0, **correction)
    assert gradient == pytest.approx([-min(weight, 3.0) / 100] * 100, rel=1e-5)
    assert (said["tis_cut_share"], said["tis_mean"]) == (cut, pytest.approx(min(weight, 3.0), rel=1e-5))
    gradient, said = one([0.012] * 100, 1.0, **correction, tis_mask=True)
    assert gradient == pytest.approx([0.0 if cut else -weight / 100] * 100, rel=1e-5)
    assert said["tis_cut_share"] == cut


def test_a_mask_leaves_out_what_became_unlikely_too() -> None:
    gradient, said = one([math.log(0.3), 0.0], 1.0, decoupled=True, tis_cap=2.0, tis_mask=True)
    assert gradient == [0.0, pytest.approx(-0.5)]
    assert said["tis_cut_share"] == 0.5


def test_a_hundred_small_differences_clip_no_token() -> None:
    gradient, said = one([0.012] * 100, 1.0)
    assert said["ratio_max"] == pytest.approx(math.exp(0.012), rel=1e-5)
    assert said["clip_high_share"] == 0.0
    assert all(value < 0 for value in gradient)


def test_effective_sample_size_is_one_on_policy_and_small_with_one_heavy_token() -> None:
    assert one([0.0] * 4, 1.0)[1]["ess"] == pytest.approx(1.0)
    assert one([10.0, 0.0, 0.0, 0.0], 1.0)[1]["ess"] == pytest.approx(0.25, abs=0.01)


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size() -> None:
    assert entropy_of(torch.zeros(700, 32)).tolist() == pytest.approx([math.log(32)] * 700)
    assert entropy_of(torch.tensor([[100.0, 0.0]])).tolist() == pytest.approx([0.0], abs=1e-6)
    assert entropy_of(torch.zeros(0, 4)).tolist() == []
