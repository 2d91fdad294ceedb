"""The garbage collector of a process that keeps very many objects for long.

A full collection looks at every object that lives: with 100,000 live requests, or with torch and Megatron loaded, it
takes about half a second, in the middle of whatever comes then. Young objects are still looked at, so circles that die
young are found.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1_000_000_000


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Objects that have become old are freed by their counts alone: for a process that keeps no circles."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)


def set_aside() -> None:
    """What lives now lives as long as the process (libraries, a model): no collection looks at it again."""
    gc.collect()
    gc.freeze()
