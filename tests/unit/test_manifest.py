"""Fingerprint and probe: what counts as the same weights."""

import math
from dataclasses import replace

from workers.transport.weights.manifest import PROBE_TOLERANCE, RawTensor, fingerprint, probe_differs, probe_ids

A = RawTensor("a", "F32", (2,), bytes(8))
B = RawTensor("b", "BF16", (2, 2), bytes(range(8)))


def test_the_order_of_tensors_does_not_change_the_fingerprint() -> None:
    assert fingerprint([A, B]) == fingerprint(iter([B, A]))


def test_every_part_of_a_tensor_changes_the_fingerprint() -> None:
    others = [
        replace(A, name="c"),
        replace(A, dtype="I32"),
        replace(A, shape=(1, 2)),
        replace(A, data=bytes(7) + b"\x01"),
    ]
    assert len({fingerprint([other, B]) for other in (A, *others)}) == 5


def test_bytes_that_move_from_one_tensor_to_the_next_change_the_fingerprint() -> None:
    short, long = RawTensor("a", "U8", (1,), b"x"), RawTensor("b", "U8", (2,), b"yz")
    assert fingerprint([short, long]) != fingerprint([replace(short, data=b"xy"), replace(long, data=b"z")])


def test_a_view_has_the_fingerprint_of_its_bytes() -> None:
    assert fingerprint([replace(B, data=memoryview(bytes(range(8))))]) == fingerprint([B])


def test_probe_ids_are_fixed_and_below_the_vocabulary() -> None:
    assert probe_ids(512) == probe_ids(512)
    assert len(probe_ids(512)) == 64
    assert all(0 <= one < 512 for one in probe_ids(512))
    assert len(set(probe_ids(49152))) > 60


def test_a_probe_within_the_tolerance_of_its_dtype_passes() -> None:
    expected = [-3.0] * 63
    for dtype, tolerance in PROBE_TOLERANCE.items():
        assert probe_differs(expected, [-3.0 + 0.9 * tolerance] * 63, dtype) is None
        assert probe_differs(expected, [-3.0 - 1.1 * tolerance] * 63, dtype) is not None


def test_a_probe_that_is_short_or_not_finite_differs() -> None:
    assert probe_differs([-1.0] * 3, [-1.0] * 2, "float32") is not None
    assert probe_differs([-1.0], [math.nan], "float32") is not None
    assert probe_differs([-math.inf], [-math.inf], "bfloat16") is not None
