"""A rollout engine as the rollout service sees it: a few calls, all from one thread.

Implementations: `vllm_engine.py` (real), `paced_engine.py` (a cost table). One contract suite.
"""

from dataclasses import dataclass
from typing import Protocol

from schemas.ids import RequestKey
from schemas.messages import KvHandle, RequestRecord, WeightsRecord


@dataclass(frozen=True, slots=True)
class Prefill:
    """What it took to take a request up: `computed` tokens of its prompt and response so far were computed; the KV of
    `carried` came along with it, in `size` bytes. `reason`: why the KV of a request that goes on did not."""

    computed: int
    carried: int = 0
    size: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that a request got in one engine step. `finish` is None while it goes on.

    `logprobs` are of the sampled distribution (temperature, top-p and top-k applied), one per id. `kept`: the log of
    the mass that top-p and top-k kept, one per id; None where the request has neither. `prefill` comes with the first.
    """

    key: RequestKey
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None
    kept: tuple[float, ...] | None = None
    prefill: Prefill | None = None


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

    def prepare(self, weights: WeightsRecord) -> bool:
        """Get ready to load these, beside the steps; asked again and again. True once nothing is left to prepare."""

    def load(self, weights: WeightsRecord) -> None:
        """Swap weights in place, between steps; the engine is empty. Hashes what it loads, resets the prefix cache,
        runs the probe. WeightsUnavailable, ProbeMismatch: it then serves nothing."""

    def add(self, request: RequestRecord) -> None:
        """Take a request of the served version; `max_new_tokens` counts its `response_ids` so far. They are prefilled
        again unless the KV that `kv` names is good and the engine can take it; either way it goes on as if it had never
        stopped. ValueError if it is longer than `tokens_per_request_max`."""

    def step(self) -> list[Tokens]:
        """One decode (or prefill) step of all requests. Empty when there is nothing to do."""

    def stop(self, keys: tuple[RequestKey, ...], *, offer: bool = False) -> dict[RequestKey, KvHandle]:
        """Take requests out; tokens reported so far are the caller's. With `offer` they go on elsewhere: returns where
        their KV can be had, for those that have some and for an engine that can."""

    def load_now(self) -> Load:
        """What it holds."""

    def tend(self) -> None:
        """About every second: keep alive what it offered, and clear away what nobody wants."""

    def close(self) -> None: ...
