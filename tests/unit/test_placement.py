"""The books of the engines."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import RequestKey
from schemas.messages import Joined
from workers.orchestrator.placement import Engine, Fleet


def fleet(*versions: int | None, seats: int = 4, kv_tokens: int = 100) -> Fleet:
    """Engines 0, 1, ... that serve these versions."""
    built = Fleet()
    for number, version in enumerate(versions):
        limits = {"seats": seats, "kv_tokens_max": kv_tokens, "tokens_per_request_max": 60}
        built.join(Joined(engine=number, incarnation=10 + number, host="here", **limits), heard=0)
        if version is not None:
            built.swap(built.engines[number], version, since=0)
            built.hosted(built.engines[number])
    return built


def book(books: Fleet, engine: int, group: int, tokens: int = 10) -> int:
    return books.book(books.engines[engine], RequestKey(group, 0, 0), tokens)


def picked(books: Fleet, version: int, tokens: int = 10, siblings: tuple[int, ...] = ()) -> int | None:
    engine = books.pick(version, tokens, siblings)
    return None if engine is None else engine.number


def test_a_request_goes_to_its_siblings_else_to_the_most_free_kv() -> None:
    books = fleet(3, 3, 4)
    book(books, 0, group=1)
    assert picked(books, 3) == 1
    assert picked(books, 3, siblings=(0,)) == 0
    assert picked(books, 3, siblings=(2, 0)) == 0, "engine 2 hosts another version"
    assert picked(books, 5) is None


def test_neither_seats_nor_kv_are_overbooked() -> None:
    books = fleet(0, seats=2)
    book(books, 0, group=1, tokens=55)
    assert picked(books, 0, tokens=46) is None
    assert picked(books, 0, tokens=45) == 0
    book(books, 0, group=2)
    assert picked(books, 0, tokens=1) is None
    assert not books.has_free_seat(0)
    with pytest.raises(AssertionError):
        book(books, 0, group=3)


def test_a_seat_comes_back_once() -> None:
    books = fleet(0, seats=1)
    book(books, 0, group=1)
    assert books.release(books.engines[0], RequestKey(1, 0, 0))
    assert not books.release(books.engines[0], RequestKey(1, 0, 0))
    assert picked(books, 0) == 0


def test_an_engine_that_loads_gets_nothing_and_is_empty_when_it_hosts() -> None:
    books = fleet(0)
    engine = books.engines[0]
    book(books, 0, group=1)
    books.swap(engine, 1, since=7)
    assert picked(books, 0) is None
    assert books.in_use(0), "it still reads requests of version 0"
    assert books.switches({0: 1, 1: 0}) == []
    assert books.hosted(engine) == [RequestKey(1, 0, 0)]
    assert (picked(books, 1), books.in_use(0), engine.free_seats) == (0, False, 4)


def test_sequences_of_an_engine_go_on_with_its_next_incarnation() -> None:
    """A new incarnation has nothing to read to the end; but no number is used twice in one partition."""
    books = fleet(0)
    assert [book(books, 0, group=1), book(books, 0, group=2)] == [0, 1]
    books.lose(books.engines[0])
    assert books.dead == {0: 10}
    limits = {"seats": 4, "kv_tokens_max": 100, "tokens_per_request_max": 60}
    books.join(Joined(engine=0, incarnation=99, host="here", **limits), heard=0)
    assert books.engines[0].issued == -1
    books.swap(books.engines[0], 0, since=0)
    books.hosted(books.engines[0])
    assert book(books, 0, group=3) == 2


def switched(found: list[tuple[Engine, int]]) -> list[tuple[int, int]]:
    return [(engine.number, version) for engine, version in found]


def test_engines_without_a_version_switch_first_then_those_with_the_least_live_kv() -> None:
    books = fleet(0, 0, 0, None)
    book(books, 0, group=1, tokens=30)
    book(books, 2, group=2, tokens=20)
    assert switched(books.switches({0: 1, 1: 3})) == [(3, 1), (1, 1), (2, 1)]


def test_only_over_allocated_versions_give_and_the_oldest_in_need_is_served_first() -> None:
    books = fleet(1, 1, 2, 3)
    book(books, 0, group=1)
    assert switched(books.switches({0: 1, 1: 1, 2: 1, 3: 1})) == [(1, 0)]
    assert switched(books.switches({0: 1, 1: 0, 2: 1, 3: 2})) == [(1, 0), (0, 3)]
    assert switched(books.switches({1: 2, 2: 1, 3: 1})) == []


def test_an_engine_that_still_loads_an_over_allocated_version_is_waited_for() -> None:
    """It is empty, so it is the one to switch; until it hosts, the one with requests keeps them."""
    books = fleet(0, 1)
    book(books, 0, group=1)
    books.swap(books.engines[1], 0, since=0)
    assert switched(books.switches({0: 1, 1: 1})) == []
    books.hosted(books.engines[1])
    assert switched(books.switches({0: 1, 1: 1})) == [(1, 1)]


def test_the_longest_request_that_every_engine_can_hold() -> None:
    assert fleet(0, kv_tokens=40).request_limit() == 40
    assert fleet(0, kv_tokens=400).request_limit() == 60


ENGINE = st.tuples(st.none() | st.integers(0, 4), st.integers(0, 60), st.booleans())
"""Version, KV that is booked, does it load another one?"""


@given(st.lists(ENGINE, min_size=1, max_size=12), st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_whoever_switches_is_over_allocated_and_has_the_least_kv_and_nobody_falls_below_its_share(
    engines: list[tuple[int | None, int, bool]], shares: list[int]
) -> None:
    """`shares` = to which version each engine's place in the targets goes, so their sum is the number of engines."""
    books = fleet(*(version for version, _, _ in engines))
    for number, (version, tokens, loads) in enumerate(engines):
        if version is not None and tokens:
            book(books, number, group=number, tokens=tokens)
        if loads:
            books.swap(books.engines[number], 4, since=0)
    targets = {version: shares[: len(engines)].count(version) for version in range(5)}
    have = Counter(engine.target for engine in books.engines.values())
    found = books.switches(targets)
    left = Counter(engine.version for engine, _ in found if engine.version is not None)
    gained = Counter(version for _, version in found)
    assert len({engine.number for engine, _ in found}) == len(found)
    assert all(engine.loading is None and engine.version != version for engine, version in found)
    assert all(have[version] - left[version] >= targets[version] for version in left)
    assert all(have[version] + gained[version] <= targets[version] for version in gained)
    for engine in books.engines.values():
        stays = engine.loading is None and all(engine is not other for other, _ in found)
        leaving = [other for other, _ in found if other.version == engine.version]
        assert not stays or all((other.tokens, other.number) < (engine.tokens, engine.number) for other in leaving)
    if not any(loads for _, _, loads in engines):
        assert {v: have[v] - left[v] + gained[v] for v in targets} == targets
