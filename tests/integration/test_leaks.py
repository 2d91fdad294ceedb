"""What moves, swaps and deaths leave behind: nothing. Two engines on a tiny model, each in a process of its own."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.helpers_vllm import Host, RemoteEngine, open_host
from tests.integration.kv_two import EMPTY, Sample, Two, decode, go_on, open_two, settings, stop, wanted
from workers.transport.kv.shared_memory import CLAIMED, OFFERED, folder_of

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

TURNS, EACH, WARM = 100, 5, 20
"""Of a turn: `EACH` moves and a swap of both engines. Memory is compared from after `WARM` turns on."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Two]:
    with open_two(tmp_path_factory.mktemp("leaks"), getattr(request, "param", "shared_memory")) as opened:
        yield opened


@pytest.mark.parametrize("two", ["shared_memory", "flight"], indirect=True)
def test_five_hundred_moves_and_a_hundred_swaps_leak_nothing(two: Two) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    before: list[float] = []
    for turn in range(TURNS):
        version, here, there = turn % 2, two.engines[turn % 2], two.engines[(turn + 1) % 2]
        _swap(two, turn, version)
        samples = [
            Sample(wanted(index, new=40).request.model_copy(update={"version": version})) for index in range(EACH)
        ]
        for one in samples:
            here.add(one.request)
        decode(here, samples, rng.randrange(1, 30))
        stop(here, samples)
        go_on(there, samples)
        decode(there, samples)
        assert {one.prefills[-1].computed for one in samples} == {1}
        for number, host in enumerate(two.hosts):
            two.engines[number].tend()
            assert host.call("held", f"engine{number}") == EMPTY, f"engine {number}, turn {turn}"
        assert two.files() == []
        if turn == WARM:
            before = [host.call("resident_mib") for host in two.hosts]
    for number, host in enumerate(two.hosts):
        after = host.call("resident_mib")
        print(f"engine {number}: {before[number]:.1f} MiB after {WARM} turns, {after:.1f} MiB after {TURNS}")
        assert after < 1.02 * before[number]


def _swap(two: Two, turn: int, version: int) -> None:
    """Both; every other one is prepared first."""
    for engine in two.engines:
        while turn % 2 and not engine.prepare(two.weights[version]):
            engine.step()
        engine.load(two.weights[version])


def test_whoever_is_killed_nothing_is_left_in_shared_memory_once_it_started_again(two: Two, tmp_path: Path) -> None:
    """The receiver dies with a claim, then the sender with an offer, then both at once; a claim of a dead one is taken
    over by the next."""
    folder = folder_of("killed", tmp_path)
    with open_host() as first, open_host() as second:
        sender, receiver = _born(two, first, folder, 0), _born(two, second, folder, 1)
        claimed, offered = _offered(sender, 0), _offered(sender, 1)
        go_on(receiver, [claimed])
        second.kill()
        assert _ends(folder) == [CLAIMED, OFFERED]
        with open_host() as third:
            receiver = _born(two, third, folder, 1)
            go_on(receiver, [claimed])
            decode(receiver, [claimed])
            assert claimed.prefills[-1].computed == 1
            assert _ends(folder) == [OFFERED]
            first.kill()
            with open_host() as fourth:
                sender = _born(two, fourth, folder, 0)
                assert _ends(folder) == []
                go_on(receiver, [offered])
                decode(receiver, [offered])
                assert offered.prefills[-1].reason == "gone"
                _offered(receiver, 3)
                go_on(receiver, [_offered(sender, 2)])
                assert _ends(folder) == [CLAIMED, OFFERED]
                third.kill()
                fourth.kill()
    with open_host() as fifth:
        both = [_born(two, fifth, folder, number) for number in range(2)]
        assert _ends(folder) == []
        for engine in both:
            engine.close()
    assert not folder.exists()


def _born(two: Two, host: Host, folder: Path, number: int) -> RemoteEngine:
    """An engine that serves version 0."""
    engine = RemoteEngine(host, f"engine{number}", settings(two.model), two.model, kv_folder=folder, number=number)
    engine.load(two.weights[0])
    return engine


def _offered(engine: RemoteEngine, index: int) -> Sample:
    """A request that was stopped there after 20 tokens."""
    sample = wanted(index)
    engine.add(sample.request)
    decode(engine, [sample], 20)
    stop(engine, [sample])
    return sample


def _ends(folder: Path) -> list[str]:
    """Of the files in shared memory."""
    return sorted(path.suffix for path in folder.glob("*"))
