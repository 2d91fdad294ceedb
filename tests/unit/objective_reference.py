"""The objectives once more, straight from the papers: one float64 after the other, no tensor. And random batches.

`held` are the log-probs now wherever a paper stops the gradient: finite differences move `now` and leave `held`.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from schemas.settings import Training
from workers.trainer.loss_figures import figures, join
from workers.trainer.losses import Tokens, policy_loss, token_weights

LIMIT = 16
"""Of a response, in tokens: the denominator of `constant`."""


@dataclass(frozen=True)
class Response:
    """A response's log-probs: now, as sampled, under the version at the start of the step (None: now), under the
    reference; entropies, mask, advantage, lag."""

    now: list[float]
    sampled: list[float]
    mask: list[bool]
    advantage: float
    proximal: list[float] | None = None
    reference: list[float] | None = None
    entropy: list[float] = field(default_factory=list)
    lag: int = 0


def reference_loss(batch: Sequence[Response], objective: Training, held: Sequence[Sequence[float]]) -> float:
    """The loss of an update: the sum over its counted tokens."""
    counted = [[place for place, counts in enumerate(one.mask) if counts] for one in batch]
    tokens, samples = sum(map(len, counted)), sum(1 for places in counted if places)
    total = 0.0
    for one, places, frozen in zip(batch, counted, held, strict=True):
        anchor = one.sampled
        if objective.decoupled:
            anchor = one.proximal or list(frozen)
        for place in places:
            share = {
                "token": 1 / tokens,
                "sequence": 1 / samples / len(places),
                "constant": 1 / samples / LIMIT,
            }[objective.loss_level]
            gain = _gain(one, anchor, place, places, objective, held=frozen[place])
            gain *= _importance(one, anchor, place, places, objective)
            total -= share * gain
            if one.reference is not None:
                apart = one.reference[place] - one.now[place]
                total += objective.kl_coef * share * (math.exp(apart) - apart - 1)
            total -= objective.entropy_coef * share * one.entropy[place]
    return total


def _gain(
    one: Response, anchor: list[float], place: int, places: list[int], objective: Training, *, held: float
) -> float:
    low, high, advantage = 1 - objective.clip_low, 1 + objective.clip_high, one.advantage
    if objective.ratio == "cispo":
        weight = math.exp(held - anchor[place])
        return min(max(weight, low), high) * advantage * one.now[place]
    ratio = _ratio(one, anchor, place, places, objective)
    gain = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if objective.clip_dual and advantage < 0:
        gain = max(gain, objective.clip_dual * advantage)
    return gain


def _ratio(one: Response, anchor: list[float], place: int, places: list[int], objective: Training) -> float:
    if objective.ratio == "sequence":
        return math.prod(math.exp(one.now[p] - anchor[p]) for p in places) ** (1 / len(places))
    return math.exp(one.now[place]) / math.exp(anchor[place])


def _importance(one: Response, anchor: list[float], place: int, places: list[int], objective: Training) -> float:
    if not objective.tis_cap:
        return 1.0
    weight = _weight(one, anchor, place, places, objective)
    if not objective.tis_mask:
        return min(weight, objective.tis_cap)
    return weight if 1 / objective.tis_cap <= weight <= objective.tis_cap else 0.0


def _weight(one: Response, anchor: list[float], place: int, places: list[int], objective: Training) -> float:
    ratios = [math.exp(anchor[p] - one.sampled[p]) for p in places]
    return {
        "token": math.exp(anchor[place] - one.sampled[place]),
        "sequence": math.prod(ratios),
        "geometric": math.prod(ratios) ** (1 / len(ratios)),
    }[objective.tis_level]


def on_an_edge(batch: Sequence[Response], objective: Training, near: float = 1e-4) -> bool:
    """Whether a finite difference would step over a corner: a ratio or weight lies where something is cut."""
    edges = [1 - objective.clip_low, 1 + objective.clip_high, objective.clip_dual]
    caps = [objective.tis_cap, 1 / objective.tis_cap] if objective.tis_cap else []
    for one in batch:
        anchor = (one.proximal or one.now) if objective.decoupled else one.sampled
        places = [place for place, counts in enumerate(one.mask) if counts]
        for place in places:
            ratio, weight = (f(one, anchor, place, places, objective) for f in (_ratio, _weight))
            apart = [abs(ratio - edge) for edge in edges] + [abs(weight - cap) for cap in caps]
            if min(apart) < near:
                return True
    return False


def reference_gradients(batch: Sequence[Response], objective: Training, step: float = 1e-6) -> list[list[float]]:
    """Central differences of `reference_loss` by every log-prob now; of what is not counted they are 0."""
    held = [one.now for one in batch]

    def moved(number: int, place: int, by: float) -> float:
        now = [value + by * (p == place) for p, value in enumerate(batch[number].now)]
        changed = [*batch[:number], dataclasses.replace(batch[number], now=now), *batch[number + 1 :]]
        return reference_loss(changed, objective, held)

    return [
        [(moved(number, place, step) - moved(number, place, -step)) / (2 * step) for place in range(len(one.now))]
        for number, one in enumerate(batch)
    ]


def our_loss(
    batch: Sequence[Response], split: Sequence[Sequence[int]], objective: Training, dtype: torch.dtype = torch.float64
) -> tuple[float, list[list[float]], dict[str, float]]:
    """(loss, gradient per log-prob, figures) of `losses.py`, in these micro-batches."""
    weights = token_weights([one.mask for one in batch], objective.loss_level, LIMIT)
    gradients: list[list[float]] = [[] for _ in batch]
    parts, loss = [], 0.0
    for members in split:
        held = [batch[member] for member in members]
        logprobs_T = torch.tensor([v for one in held for v in one.now], dtype=dtype, requires_grad=True)
        entropy_T = torch.tensor([v for one in held for v in one.entropy or [1.0] * len(one.now)], dtype=dtype)
        tokens = tokens_of(held, [weights[member] for member in members], objective, dtype)
        part, sums = policy_loss(logprobs_T, entropy_T, tokens, objective)
        part.backward()
        loss += float(part.detach())
        parts.append({name: float(value) for name, value in sums.items()})
        flat = logprobs_T.grad.tolist()
        for member in members:
            length = len(batch[member].now)
            gradients[member], flat = flat[:length], flat[length:]
    return loss, gradients, figures(join(parts))


def tokens_of(
    held: Sequence[Response], weights: Sequence[Sequence[float]], objective: Training, dtype: torch.dtype
) -> Tokens:
    """The tokens of a micro-batch as `policy_loss` wants them."""

    def column(rows: list[list[float] | None]) -> torch.Tensor | None:
        return None if None in rows else torch.tensor([v for row in rows for v in row or []], dtype=dtype)

    def counts(values: list[int]) -> torch.Tensor:
        return torch.tensor([value for value, one in zip(values, held, strict=True) for _ in one.now])

    return Tokens(
        behaviour_T=torch.tensor([v for one in held for v in one.sampled], dtype=dtype),
        advantages_T=torch.tensor([one.advantage for one in held for _ in one.now], dtype=dtype),
        weights_T=torch.tensor([share for row in weights for share in row], dtype=dtype),
        mask_T=torch.tensor([counts for one in held for counts in one.mask]),
        sample_T=counts(list(range(len(held)))),
        lag_T=counts([one.lag for one in held]),
        proximal_T=column([one.proximal for one in held]),
        reference_T=column([one.reference for one in held]) if objective.kl_coef else None,
    )


def random_batch(chance: random.Random, objective: Training, samples: int = 5, first: bool = False) -> list[Response]:
    """Ragged, a token masked here and there, one sample wholly. `first`: the first update of a step."""
    batch = [_random_sequence(chance, first, masked=number == 1) for number in range(samples)]
    return batch if not on_an_edge(batch, objective) else random_batch(chance, objective, samples, first)


def _random_sequence(chance: random.Random, first: bool, masked: bool) -> Response:
    now = [-0.05 - chance.expovariate(0.6) for _ in range(chance.randrange(1, 9))]
    start = [value + chance.gauss(0, 0.25) for value in now]
    return Response(
        now=now,
        sampled=[value + chance.gauss(0, 0.25) for value in start],
        mask=[not masked and chance.random() > 0.15 for _ in now],
        advantage=chance.gauss(0, 1),
        proximal=None if first else start,
        reference=[value + chance.gauss(0, 0.5) for value in now],
        entropy=[chance.uniform(0, 2) for _ in now],
        lag=chance.randrange(3),
    )


def every_objective() -> list[Training]:
    """Each ratio with each loss level and each importance weight; the other terms come and go with them."""
    weights: list[dict[str, object]] = [{}, {"decoupled": True}]
    for level in ("token", "sequence", "geometric"):
        for mask in (False, True):
            weights.append({"decoupled": True, "tis_cap": 1.3, "tis_level": level, "tis_mask": mask})
    made = []
    for number, weight in enumerate(weights):
        for ratio in ("token", "sequence", "cispo"):
            for level in ("token", "sequence", "constant"):
                terms = {
                    "kl_coef": (0.0, 0.3)[number % 2],
                    "entropy_coef": (0.0, 0.1)[number // 2 % 2],
                    "clip_dual": 0.0 if ratio == "cispo" else (1.4, 0.0)[number % 2],
                }
                made.append(Training.model_validate({"ratio": ratio, "loss_level": level, **terms, **weight}))
    return made
