"""A rollout engine as the rollout service sees it: a few calls, all from one thread, no threads of its own.

Implementations: `vllm_engine.py` (real), `paced_engine.py` (a cost table). One contract suite.
"""

from dataclasses import dataclass
from typing import Protocol

from schemas.ids import RequestKey
from schemas.messages import RequestRecord, WeightsRecord


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that a request got in one engine step. `finish` is None while it goes on.

    `logprobs` are of the sampled distribution (temperature, top-p and top-k applied), one per id. `kept`: the log of
    the mass that top-p and top-k kept, one per id; None where the request has neither.
    """

    key: RequestKey
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None
    kept: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """A request taken out of the engine; its tokens were all reported by `step` before."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Load:
    running: int
    waiting: int
    kv_tokens: int


class Engine(Protocol):
    """One replica. It serves nothing until the first `load`."""

    seats: int
    kv_tokens_max: int
    tokens_per_request_max: int

    @property
    def version(self) -> int | None:
        """The version it serves, None before the first load or after a failed one."""

    @property
    def fingerprint(self) -> str:
        """Its own hash of the weights that it serves."""

    def load(self, weights: WeightsRecord) -> None:
        """Swap weights in place, between steps; the engine is empty. Hashes what it loads, resets the prefix cache,
        runs the probe. WeightsUnavailable, ProbeMismatch: it then serves nothing."""

    def add(self, request: RequestRecord) -> None:
        """Take a request of the served version; `response_ids` so far are prefilled, `max_new_tokens` counts them.
        ValueError if it is longer than `tokens_per_request_max`."""

    def step(self) -> list[Tokens]:
        """One decode (or prefill) step of all requests. Empty when there is nothing to do."""

    def stop(self, keys: tuple[RequestKey, ...]) -> None:
        """Take requests out; tokens reported so far are the caller's."""

    def load_now(self) -> Load:
        """What it holds."""

    def close(self) -> None: ...
