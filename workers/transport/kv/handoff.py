"""The KV cache of a stopped request: whether it may be used, and how long it is kept.

    OFFERED ----claim----> CLAIMED ----load done----> RELEASED
       |  \\______________ (seen late) ______________/
       '----too old, no room----> EXPIRED <----claimant is gone----'

Rule 1: KV is good for exactly these ids under exactly these weights in exactly this form (`refusal`). What is not
proven is computed again; the reason is counted. A wrong token is never the price of a faster one.
Rule 2: the owner keeps what it offered for `OFFER_US_MAX`, renews its lease meanwhile, and never keeps more than
`bytes_max`. A file whose lease ran out belongs to a process that died: anybody may delete it.
Rule 3: an offer that finds no room takes that of offers with fewer tokens, which are cheaper to compute again: those
with the fewest first, of equals the oldest. If these are too few it is not made. What is claimed stays.
Rule 4: states move by one table and one function. Times are microseconds.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pydantic import BaseModel, ConfigDict

Reason = Literal[
    "no_handle",
    "unsupported",
    "budget",
    "no_space",
    "gone",
    "unreachable",
    "unreadable",
    "truncated",
    "checksum",
    "model",
    "version",
    "layout",
    "dtype",
    "block_size",
    "tokens",
    "load_failed",
]
"""Why tokens are prefilled again: there was no KV (`no_handle`: the request's engine died, or this was off;
`unsupported`, `budget`, `no_space`: its engine could not offer it, or the receiver has no room), it cannot be had
(`gone`; `unreachable`: its host does not answer), it is damaged (`unreadable`, `truncated`, `checksum`), it is of
something else (`model` .. `tokens`), or loading it failed."""

SECOND_US = 1_000_000
OFFER_US_MAX = 600 * SECOND_US
CLAIM_US_MAX = 120 * SECOND_US
LEASE_US = 300 * SECOND_US
RENEW_US = 20 * SECOND_US
FORMAT = 1


class Unusable(Exception):
    """KV that will not be used, and why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class Kind(BaseModel):
    """What an engine's KV is of. Equal kinds have equal bytes for equal ids.

    `model`: of its configuration; `fingerprint`: of its weights; `layout`: of the blocks, with the attention backend
    and its instruction set, which order what is inside a block.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    fingerprint: str
    layout: str
    dtype: str
    block_tokens: int


class Header(BaseModel):
    """What stands before the blocks: their kind, the ids that they are of (`tokens` of them, hashed in `prefix`), how
    many bytes come, and their CRC-32C."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    kind: Kind
    tokens: int
    prefix: str
    size: int
    checksum: int = 0


def prefix_hash(ids: Sequence[int]) -> str:
    """Of token ids, in order."""
    return hashlib.blake2b(struct.pack(f"<{len(ids)}q", *ids), digest_size=16).hexdigest()


def refusal(header: Header, kind: Kind, ids: Sequence[int]) -> Reason | None:
    """Why an engine of `kind` cannot go on from this KV with a request that has `ids`, or None if it can."""
    if header.format != FORMAT:
        return "unreadable"
    if not 0 < header.tokens < len(ids):
        return "tokens"
    theirs = header.kind
    looked_at: tuple[tuple[Reason, bool], ...] = (
        ("model", theirs.model == kind.model),
        ("version", theirs.fingerprint == kind.fingerprint),
        ("dtype", theirs.dtype == kind.dtype),
        ("block_size", theirs.block_tokens == kind.block_tokens),
        ("layout", theirs.layout == kind.layout),
        ("tokens", header.prefix == prefix_hash(ids[: header.tokens])),
    )
    return next((reason for reason, same in looked_at if not same), None)


class State(Enum):
    OFFERED = "offered"
    CLAIMED = "claimed"
    RELEASED = "released"
    EXPIRED = "expired"


_MOVES = {
    State.OFFERED: {State.CLAIMED, State.RELEASED, State.EXPIRED},
    State.CLAIMED: {State.RELEASED, State.EXPIRED},
    State.RELEASED: set(),
    State.EXPIRED: set(),
}


@dataclass(frozen=True, slots=True)
class Offer:
    """The owner would like to keep `size` bytes of `tokens` tokens."""

    name: str
    tokens: int
    size: int
    now: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The state in which others have put it: `claimed` or `released`."""

    name: str
    state: State
    now: int


@dataclass(frozen=True, slots=True)
class Tick:
    now: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Write it: there is room."""

    name: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not write it."""

    name: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Renew:
    """Say that the owner lives."""

    name: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Delete it. `evicted`: for room, before its time."""

    name: str
    evicted: bool


Event = Offer | Seen | Tick
Effect = Keep | Refuse | Renew | Expire


@dataclass(slots=True)
class _Entry:
    name: str
    tokens: int
    size: int
    since: int
    renewed: int
    state: State = State.OFFERED


class Offers:
    """What one engine has offered and is not over yet."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: dict[str, _Entry] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def held(self) -> int:
        """Bytes."""
        return sum(entry.size for entry in self._entries.values())

    def state(self, name: str) -> State | None:
        """None once it is over."""
        entry = self._entries.get(name)
        return None if entry is None else entry.state

    def on(self, event: Event) -> list[Effect]:
        match event:
            case Offer():
                return self._offer(event)
            case Seen():
                self._seen(event)
                return []
            case Tick():
                return self._tick(event.now)

    def _offer(self, event: Offer) -> list[Effect]:
        assert event.name not in self._entries, f"{event.name} is offered already"
        waiting = [entry for entry in self._entries.values() if entry.state is State.OFFERED]
        waiting.sort(key=lambda entry: (entry.tokens, entry.since))
        missing = self.held + event.size - self._bytes_max
        evicted: list[_Entry] = []
        for entry in waiting:
            if missing <= 0 or entry.tokens >= event.tokens:
                break
            evicted.append(entry)
            missing -= entry.size
        if missing > 0:
            return [Refuse(event.name, "budget")]
        for entry in evicted:
            self._move(entry, State.EXPIRED)
        self._entries[event.name] = _Entry(event.name, event.tokens, event.size, event.now, event.now)
        return [*(Expire(entry.name, evicted=True) for entry in evicted), Keep(event.name)]

    def _seen(self, event: Seen) -> None:
        entry = self._entries.get(event.name)
        if entry is not None and entry.state is not event.state:
            entry.since = event.now
            self._move(entry, event.state)

    def _tick(self, now: int) -> list[Effect]:
        effects: list[Effect] = []
        for entry in list(self._entries.values()):
            limit = OFFER_US_MAX if entry.state is State.OFFERED else CLAIM_US_MAX
            if now - entry.since > limit:
                self._move(entry, State.EXPIRED)
                effects.append(Expire(entry.name, evicted=False))
            elif now - entry.renewed >= RENEW_US:
                entry.renewed = now
                effects.append(Renew(entry.name))
        return effects

    def _move(self, entry: _Entry, state: State) -> None:
        assert state in _MOVES[entry.state], f"{entry.name}: {entry.state.value} cannot become {state.value}"
        entry.state = state
        if not _MOVES[state]:
            del self._entries[entry.name]
