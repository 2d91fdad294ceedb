"""A request on one engine: what it had when it came, what it got here, and the records that this becomes.

Rule 1: pure; times are given. `queued_at` is never renewed, and queued <= started <= finished whatever clocks say.
Rule 2: a stay in `engine_path` is made only where tokens were added; a request that never ran leaves its path alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from schemas.ids import RequestKey
from schemas.messages import Heartbeat, KvHandle, Moves, PartialRecord, RequestRecord, Stay, StopReason
from workers.rollout.engines.base import Prefill, Tokens


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request ran: the engine's number and incarnation, and the fingerprint that it served."""

    engine: int
    incarnation: int
    fingerprint: str


@dataclass(slots=True)
class Running:
    """`ids` and `logprobs`: this stay's tokens, one log-prob each. `kept`: one each where top-p or top-k truncate.
    `prefill`: what the first of them took. `snapshot`: how many of them are in `partials`."""

    request: RequestRecord
    started_at: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    prefill: Prefill | None = None
    snapshot: int = 0

    @property
    def key(self) -> RequestKey:
        return self.request.key


def begin(request: RequestRecord, now: int) -> Running:
    """Taken up at `now`; a request that goes on keeps the time at which it first started."""
    started_at = now if request.started_at is None else request.started_at
    return Running(request, max(started_at, request.queued_at))


def path(one: Running, place: Place) -> tuple[Stay, ...]:
    """The request's stays, this one too. Of a request that goes on: the tokens whose KV came along, and those that were
    computed again."""
    request = one.request
    if not one.ids:
        return request.engine_path
    goes_on = one.prefill if request.response_ids else None
    stay = Stay(
        engine=str(place.engine),
        version=request.host_version,
        fingerprint=place.fingerprint,
        tokens=len(one.ids),
        kv_reused=0 if goes_on is None else goes_on.carried,
        kv_recomputed=0 if goes_on is None else goes_on.computed,
    )
    return (*request.engine_path, stay)


def to_partial(one: Running, place: Place, reason: StopReason, kv: KvHandle | None = None) -> PartialRecord:
    """The request stops here to go on elsewhere. `kv`: where its KV can be had; one that got no token here has what it
    came with."""
    request = one.request
    truncates = request.top_p < 1.0 or request.top_k > 0
    return PartialRecord(
        run=request.run,
        group=request.group,
        index=request.index,
        attempt=request.attempt,
        version=request.version,
        engine=place.engine,
        incarnation=place.incarnation,
        reason=reason,
        response_ids=(*request.response_ids, *one.ids),
        logprobs=(*request.logprobs, *one.logprobs),
        kept_logmass=(*(request.kept_logmass or ()), *one.kept) if truncates else None,
        loss_mask=(*request.loss_mask, *(True for _ in one.ids)),
        engine_path=path(one, place),
        started_at=one.started_at,
        kv=kv if one.ids else one.request.kv,
    )


def counted(moves: Moves, one: Running, prefill: Prefill) -> Moves:
    """The engine's figures after a request got its first token here; new requests do not count."""
    if not one.request.response_ids:
        return moves
    carried = prefill.carried > 0
    reprefills = dict(moves.reprefills)
    if not carried:
        reprefills[prefill.reason] = reprefills.get(prefill.reason, 0) + 1
    return Moves(
        taken=moves.taken + 1,
        carried=moves.carried + carried,
        tokens_carried=moves.tokens_carried + prefill.carried,
        tokens_recomputed=moves.tokens_recomputed + prefill.computed,
        size=moves.size + prefill.size,
        reprefill_s=moves.reprefill_s,
        reprefills=reprefills,
    )


def computed_again(step: Iterable[tuple[Running, Tokens]]) -> float:
    """Of the tokens that an engine step computed, the share of those that had been computed before: of each request
    that went on without its KV, all but the newest."""
    computed = again = 0
    for one, part in step:
        tokens = 1 if part.prefill is None else part.prefill.computed
        computed += tokens
        again += tokens - 1 if one.request.response_ids else 0
    return again / computed if computed else 0.0


def to_row(one: Running, place: Place, finish_reason: str, now: int) -> dict[str, Any]:
    """The row of `completions` (schemas.arrow.COMPLETION) of a request that ended at `now`."""
    request = one.request
    partial = to_partial(one, place, "moved")
    return {
        "run": request.run,
        "task": request.task,
        "purpose": request.purpose,
        "version": request.version,
        "group": request.group,
        "prompt_row": request.prompt_row,
        "index": request.index,
        "attempt": request.attempt,
        "prompt_ids": list(request.prompt_ids),
        "response_ids": list(partial.response_ids),
        "answer": request.answer,
        "logprobs": list(partial.logprobs),
        "kept_logmass": None if partial.kept_logmass is None else list(partial.kept_logmass),
        "loss_mask": list(partial.loss_mask),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "finish_reason": finish_reason,
        "engine_path": [stay.model_dump() for stay in partial.engine_path],
        "queued_at": request.queued_at,
        "started_at": one.started_at,
        "finished_at": max(now, one.started_at),
        "scored_at": None,
        "reward": None,
        "outcome": None,
        "reward_parts": {},
        "score_error": None,
        "attachments": {},
        "metadata": request.metadata,
    }


def figures_of(heartbeat: Heartbeat) -> dict[str, float]:
    """What an engine says of itself, as figures: sums since its process started, but for what it holds now."""
    said = heartbeat.model_dump(exclude={"kind", "engine", "incarnation", "moves"}, exclude_none=True)
    moves = heartbeat.moves.model_dump(exclude={"reprefills"})
    return said | {f"moves_{name}": value for name, value in moves.items()}
