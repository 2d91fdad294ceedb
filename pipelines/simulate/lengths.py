"""How long responses are, in the simulator: a law to draw from, or what a real run's archive had.

Rule 1: the lengths of a group depend on the seed and the group's number alone: every mode and every split of engines
gets the same work.
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist, fmean, median
from typing import Any, Protocol


class Lengths(Protocol):
    """Response tokens. `cap` = the longest response, tokens."""

    def draw(self, seed: int, group: int, size: int, cap: int) -> list[int]:
        """Of the samples of one group, 1 to `cap` each."""

    def mean(self, cap: int) -> float:
        """Tokens of a response on average."""

    def describe(self) -> dict[str, Any]:
        """As `--json` shows it: `kind` and plain numbers."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp of a normal with mean ln(`median`) and deviation `sigma`, rounded. `sigma` = 0: all are alike."""

    median: float
    sigma: float

    def draw(self, seed: int, group: int, size: int, cap: int) -> list[int]:
        rng, mu = random.Random(f"{seed}/{group}"), math.log(self.median)
        return [max(1, min(cap, round(rng.lognormvariate(mu, self.sigma)))) for _ in range(size)]

    def mean(self, cap: int) -> float:
        """E[min(X, cap)] of the law before rounding."""
        if self.sigma == 0:
            return min(self.median, float(cap))
        normal, edge = NormalDist(), math.log(cap / self.median) / self.sigma
        below = self.median * math.exp(self.sigma**2 / 2) * normal.cdf(edge - self.sigma)
        return below + cap * normal.cdf(-edge)

    def describe(self) -> dict[str, Any]:
        return {"kind": "lognormal", "median": self.median, "sigma": self.sigma}


@dataclass(frozen=True, slots=True)
class Empirical:
    """`prompts` = response tokens of the samples of each prompt of an archive. A group takes one prompt, its samples
    draw from what that prompt had: easy and hard prompts keep their own lengths."""

    prompts: tuple[tuple[int, ...], ...]

    def draw(self, seed: int, group: int, size: int, cap: int) -> list[int]:
        rng = random.Random(f"{seed}/{group}")
        return [max(1, min(cap, tokens)) for tokens in rng.choices(rng.choice(self.prompts), k=size)]

    def mean(self, cap: int) -> float:
        return fmean(fmean(min(cap, tokens) for tokens in prompt) for prompt in self.prompts)

    def describe(self) -> dict[str, Any]:
        every = [tokens for prompt in self.prompts for tokens in prompt]
        return {"kind": "empirical", "prompts": len(self.prompts), "median": median(every), "longest": max(every)}
