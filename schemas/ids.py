"""Numbers and places that everything is named by.

Rule 1: versions, steps, groups, samples, attempts, engines and offsets count from 0.
Rule 2: a seed is a pure function of what it seeds: the run's seed, the group and the index (never the engine).
"""

import hashlib
from typing import NamedTuple

SEED_BITS = 63


class RequestKey(NamedTuple):
    """One issue of one sample to an engine. A word about an older `attempt` is ignored."""

    group: int
    index: int  # type: ignore[assignment]  # a tuple's own `index` is never asked
    attempt: int


class Position(NamedTuple):
    """Where a record lies on the log."""

    topic: str
    partition: int
    offset: int


def sampling_seed(run_seed: int, group: int, index: int, token: int = 0) -> int:
    """Seed of the sample (`group`, `index`) from response position `token` on: 0 .. 2**63 - 1.

    Independent of engine, attempt and time; two rows with the same prompt are two groups and differ.
    """
    digest = hashlib.blake2b(f"{run_seed}/{group}/{index}/{token}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def record_id(kind: str, *parts: object) -> str:
    """The `id` header of a record, `kind/1.2.3`: equal for every retry of the same word."""
    return f"{kind}/{'.'.join(str(part) for part in parts)}"
