"""What a version's files are: `manifest.json` beside them, and the fingerprint of the tensors themselves.

fingerprint = sha256 over the tensors sorted by Hugging Face name of (name, dtype, shape, bytes). Whoever serves a
version hashes what it loaded and must come to the same one.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes: safetensors dtype (`BF16`, `F32`), shape, row-major little-endian data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


def fingerprint(tensors: Iterable[RawTensor]) -> str:
    """Hex sha256 of the tensors, in whatever order they come."""
    raise NotImplementedError
