"""What a version's files are: `manifest.json` beside them, and the fingerprint of the tensors themselves.

fingerprint = sha256 over the tensors sorted by Hugging Face name of (name, dtype, shape, bytes). Whoever serves a
version hashes what it loaded and must come to the same one.
probe = log-probs of 64 fixed ids under the version, at temperature 1. Whoever serves a version computes them too and
must come within the dtype's tolerance: that catches weights that were loaded but are not used (a stale packed copy).
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["bfloat16", "float32"]
MANIFEST = "manifest.json"
PROBE_TOKENS = 64
PROBE_TOLERANCE: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest mean |difference| of the probe's log-probs, in nats. Measured on a CPU between vLLM and transformers: 9e-6
(float32) and 0.08 (bfloat16) on SmolLM2-135M; a stale tied output layer under strongly changed weights: above 0.6."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes: safetensors dtype (`BF16`, `F32`), shape, row-major little-endian data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


class Manifest(BaseModel):
    """The files of one version. `files` maps a file's name to its sha256; `probe_logprobs` has one entry less than
    `probe_ids` (nothing precedes the first id)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int
    dtype: Dtype
    files: dict[str, str]
    fingerprint: str
    probe_ids: tuple[int, ...]
    probe_logprobs: tuple[float, ...]


class Fingerprint:
    """The fingerprint of tensors that come one by one in ascending order of their names."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._last = ""

    def add(self, tensor: RawTensor) -> None:
        assert tensor.name > self._last, f"{tensor.name} came after {self._last}"
        self._last = tensor.name
        head = json.dumps([tensor.name, tensor.dtype, list(tensor.shape), memoryview(tensor.data).nbytes])
        self._hash.update(head.encode() + b"\n")
        self._hash.update(tensor.data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def fingerprint(tensors: Iterable[RawTensor]) -> str:
    """Hex sha256 of the tensors, in whatever order they come."""
    whole = Fingerprint()
    for tensor in sorted(tensors, key=lambda one: one.name):
        whole.add(tensor)
    return whole.hexdigest()


def probe_ids(vocab_size: int) -> tuple[int, ...]:
    """64 fixed ids below `vocab_size`, the same for every version and process."""
    digests = (hashlib.sha256(f"probe/{place}".encode()).digest() for place in range(PROBE_TOKENS))
    return tuple(int.from_bytes(digest[:8], "big") % vocab_size for digest in digests)


def probe_differs(expected: Sequence[float], got: Sequence[float], dtype: str) -> str | None:
    """Why `got` is no probe of the weights that gave `expected`, or None if it is within the dtype's tolerance."""
    if len(expected) != len(got):
        return f"probe has {len(got)} log-probs, the manifest {len(expected)}"
    if not all(math.isfinite(one) for one in (*expected, *got)):
        return "probe has log-probs that are not finite"
    mean = math.fsum(abs(a - b) for a, b in zip(expected, got, strict=True)) / max(1, len(expected))
    if mean > PROBE_TOLERANCE[dtype]:
        return f"probe differs by {mean:.3g} nats on average, {dtype} allows {PROBE_TOLERANCE[dtype]:g}"
    return None
