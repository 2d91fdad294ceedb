"""An engine with a cost table instead of a model: real messages, real KV bookkeeping, no GPU.

Rule 1: a token is a function of the request's seed and its position, so a request that moves goes on as it would have.
Rule 2: a step takes `STEP_S + STEP_PER_REQUEST_S x requests + PREFILL_PER_TOKEN_S x new prompt tokens` seconds.
Rule 3: KV never exceeds its capacity: a request waits until its tokens fit, and the youngest goes back to waiting
(and is prefilled again) when the others grow.
"""

import hashlib
import math
import threading
from collections import deque
from dataclasses import dataclass

from schemas.ids import RequestKey
from schemas.messages import KvHandle, RequestRecord, WeightsRecord
from schemas.settings import Settings
from workers.rollout.engines.base import Load, Prefill, Tokens

VOCABULARY = 256
KV_BYTES_PER_TOKEN = 23_040
STEP_S = 0.002
STEP_PER_REQUEST_S = 0.00005
PREFILL_PER_TOKEN_S = 0.000002
LOAD_S = 0.02


@dataclass(slots=True)
class _Running:
    request: RequestRecord
    tokens: int
    """Response tokens so far, those of earlier stays counted."""
    prefilled: bool = False

    @property
    def kv_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.tokens


class PacedEngine:
    """One replica. `pace` multiplies all waits; 0 = as fast as it goes."""

    def __init__(self, settings: Settings, *, pace: float = 1.0, load_s: float = LOAD_S) -> None:
        self.seats = settings.engines.seats
        self.kv_tokens_max = (settings.engines.kv_mib << 20) // KV_BYTES_PER_TOKEN
        self.tokens_per_request_max = min(settings.engines.tokens_per_request_max, self.kv_tokens_max)
        self._pace = pace
        self._load_s = load_s
        self._version: int | None = None
        self._fingerprint = ""
        self._running: dict[RequestKey, _Running] = {}
        self._waiting: deque[_Running] = deque()

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def prepare(self, weights: WeightsRecord) -> bool:  # noqa: ARG002
        return True

    def load(self, weights: WeightsRecord) -> None:
        assert not self._running, "swap with requests inside"
        assert not self._waiting, "swap with requests inside"
        _wait(self._load_s * self._pace)
        self._version, self._fingerprint = weights.version, weights.fingerprint

    def add(self, request: RequestRecord) -> None:
        assert request.host_version == self._version, (
            f"{request.key} is for {request.host_version}, not {self._version}"
        )
        if len(request.prompt_ids) + request.max_new_tokens > self.tokens_per_request_max:
            raise ValueError(
                f"prompt of {len(request.prompt_ids)} and response of up to {request.max_new_tokens} tokens exceed "
                f"engines.tokens_per_request_max = {self.tokens_per_request_max}"
            )
        so_far = len(request.response_ids)
        if not request.prompt_ids or so_far >= request.max_new_tokens:
            raise ValueError(f"{len(request.prompt_ids)} prompt tokens, {so_far} of {request.max_new_tokens} new ones")
        self._waiting.append(_Running(request, so_far))

    def step(self) -> list[Tokens]:
        self._admit()
        if not self._running:
            return []
        self._make_room()
        batch = list(self._running.values())
        new = sum(one.kv_tokens for one in batch if not one.prefilled)
        _wait((STEP_S + STEP_PER_REQUEST_S * len(batch) + PREFILL_PER_TOKEN_S * new) * self._pace)
        return [self._advance(one) for one in batch]

    def stop(self, keys: tuple[RequestKey, ...], *, offer: bool = False) -> dict[RequestKey, KvHandle]:  # noqa: ARG002
        for key in keys:
            if self._running.pop(key, None) is None:
                kept = [one for one in self._waiting if one.request.key != key]
                assert len(kept) == len(self._waiting) - 1, f"{key} is not inside"
                self._waiting = deque(kept)
        return {}

    def load_now(self) -> Load:
        return Load(len(self._running), len(self._waiting), self._kv_tokens())

    def tend(self) -> None:
        pass

    def close(self) -> None:
        self._running.clear()
        self._waiting.clear()

    def _kv_tokens(self) -> int:
        return sum(one.kv_tokens for one in self._running.values())

    def _admit(self) -> None:
        """In order of arrival while there are seats and the next one's tokens, and a new one for each, fit."""
        held = self._kv_tokens()
        while self._waiting and len(self._running) < self.seats:
            first = self._waiting[0]
            held += first.kv_tokens
            if held + len(self._running) + 1 > self.kv_tokens_max:
                return
            self._running[first.request.key] = self._waiting.popleft()

    def _make_room(self) -> None:
        while self._kv_tokens() + len(self._running) > self.kv_tokens_max:
            _, youngest = self._running.popitem()
            youngest.prefilled = False
            self._waiting.appendleft(youngest)

    def _advance(self, one: _Running) -> Tokens:
        token = _token(one.request.seed, one.tokens)
        prefill = None
        if one.tokens == len(one.request.response_ids):
            prefill = Prefill(one.kv_tokens, reason="unsupported" if one.tokens else "")
        one.tokens += 1
        one.prefilled = True
        key = one.request.key
        finish = "length" if one.tokens == one.request.max_new_tokens else None
        if finish:
            del self._running[key]
        return Tokens(key, (token,), (-math.log(VOCABULARY),), finish, prefill=prefill)


def _token(seed: int, position: int) -> int:
    return hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=1).digest()[0] % VOCABULARY


def _wait(seconds: float) -> None:
    if seconds > 0:
        threading.Event().wait(seconds)
