"""What things take in the simulator: a few numbers of one deployment, and the arithmetic on them.

Rule 1: pure arithmetic; the law of decoding is `t0_s + t1_s x b` seconds for one token of each of b requests.
Rule 2: where engines and trainer share accelerators, a step on a part of them takes longer in proportion.
"""

from dataclasses import dataclass

from pydantic import ConfigDict, Field

from pipelines.simulate.lengths import Lengths
from schemas.settings import Section


class CostModel(Section):
    """Times of one deployment, seconds and tokens."""

    model_config = ConfigDict(allow_inf_nan=False)

    t0_s: float = Field(gt=0, description="One decoding step of an engine, the part that does not grow.")
    t1_s: float = Field(ge=0, description="What each running request adds to it.")
    t0_busy_s: float | None = Field(None, gt=0, description="The same while the trainer trains; not set = no other.")
    t1_busy_s: float | None = Field(None, ge=0, description="The same while the trainer trains; not set = no other.")
    prefill_tokens_per_s: float = Field(20_000.0, gt=0, description="Prompt tokens that an engine computes.")
    kv_tokens_per_s: float = Field(0.0, ge=0, description="KV that a move carries; 0 = it is computed again.")
    load_s: float = Field(2.0, ge=0, description="An engine loads a version.")
    publish_s: float = Field(2.0, ge=0, description="From the last gradient of a step to the announced version.")
    train_s: float = Field(gt=0, description="A step of the trainer, on all accelerators where they are shared.")
    score_s: float = Field(0.5, ge=0, description="From a finished response to its score.")
    poll_s: float = Field(0.5, gt=0, description="From a word on the log until the orchestrator has read it.")
    engine_mtbf_s: float = Field(0.0, ge=0, description="Mean time between failures of one engine; 0 = never.")
    engine_restart_s: float = Field(120.0, ge=0, description="From an engine's end until it has joined again.")
    failure_share: float = Field(0.0, ge=0, lt=1, description="Share of responses that end in a failure.")

    def token_s(self, running: int, busy: bool = False) -> float:
        """Seconds per token of each of `running` requests in one engine. `busy`: the trainer trains."""
        t0_s = self.t0_busy_s if busy and self.t0_busy_s is not None else self.t0_s
        t1_s = self.t1_busy_s if busy and self.t1_busy_s is not None else self.t1_s
        return t0_s + t1_s * running

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s

    def carry_s(self, tokens: int) -> float:
        """What it takes an engine to get the KV of `tokens` from another engine of the same version."""
        return tokens / self.kv_tokens_per_s if self.kv_tokens_per_s else self.prefill_s(tokens)


@dataclass(frozen=True, slots=True)
class Split:
    """`rollout` engines generate. `total`: engines' worth of accelerators that rollout and trainer share, None = the
    trainer has its own. All for rollout: both use the same accelerators in turn."""

    rollout: int
    total: int | None = None

    @property
    def in_turn(self) -> bool:
        return self.rollout == self.total

    def train_s(self, cost: CostModel) -> float:
        """Seconds of a trainer's step."""
        if self.total is None or self.in_turn:
            return cost.train_s
        return cost.train_s * self.total / (self.total - self.rollout)


@dataclass(frozen=True, slots=True)
class Work:
    """What requests are made of. `prompt` tokens each; `kv_tokens` = KV capacity of one engine."""

    lengths: Lengths
    prompt: int
    kv_tokens: int


def packed_s(cost: CostModel, tokens: float, engines: int, seats: int) -> float:
    """Seconds for `tokens` response tokens with every seat taken all the time."""
    return tokens * cost.token_s(seats) / (seats * engines)


def bound_s(cost: CostModel, split: Split, tokens: float, seats: int) -> float:
    """Work bound of a step of `tokens`: with this split no order of the same work is faster. In turn both add up."""
    rollout, train = packed_s(cost, tokens, split.rollout, seats), split.train_s(cost)
    return rollout + train if split.in_turn else max(rollout, train)
