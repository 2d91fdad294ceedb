"""Full collections do not come in the middle of an event; young circles are found all the same."""

import gc
import weakref

from workers.runtime.collector import no_full_collections, set_aside

MANY = 1_000_000


def collections(during: int) -> tuple[int, int]:
    """Of young and of all objects, while so many more lists live."""
    before = [generation["collections"] for generation in gc.get_stats()]
    kept: list[list[int]] = [[] for _ in range(during)]
    after = [generation["collections"] for generation in gc.get_stats()]
    assert len(kept) == during
    return after[0] - before[0], after[2] - before[2]


def test_objects_that_have_become_old_are_not_looked_at_while_it_is_forbidden() -> None:
    before = gc.get_threshold()
    with no_full_collections():
        young, full = collections(MANY)
        assert young > 0
        assert full == 0
    assert gc.get_threshold() == before
    assert collections(MANY)[1] > 0


def test_what_was_set_aside_is_not_looked_at_and_what_comes_later_is() -> None:
    class Ring:
        def __init__(self) -> None:
            self.itself = self

    try:
        before = Ring()
        aside = weakref.ref(before)
        set_aside()
        del before
        after = Ring()
        later = weakref.ref(after)
        del after
        gc.collect()
        assert aside() is not None
        assert later() is None
    finally:
        gc.unfreeze()
        gc.collect()
    assert aside() is None
