"""Whatever is wrong with the KV of a request that moved: the same ids as if it had stayed, and the reason is counted.
Never a wrong token, a lost request or a dead engine. Tiny models, real engines in processes of their own.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.helpers_vllm import RemoteEngine, open_host, run_all
from tests.integration.kv_two import (
    WAYS,
    Sample,
    Two,
    claimed,
    decode,
    emptied,
    ends_as_if_it_had_stayed,
    go_on,
    left,
    offered,
    open_two,
    settings,
    stayed,
    stop,
    wanted,
)
from workers.transport.kv.handoff import CLAIM_US_MAX, LEASE_US, OFFER_US_MAX, SECOND_US
from workers.transport.kv.shared_memory import CLAIMED, HEAD_BYTES, OFFERED

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", params=WAYS)
def two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Two]:
    with open_two(tmp_path_factory.mktemp("kv"), request.param) as opened:
        yield opened


@pytest.fixture(autouse=True)
def empty(two: Two) -> Iterator[None]:
    with emptied(two):
        yield


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as whole:
        whole[place] ^= 1


def reason_after(two: Two, sample: Sample) -> str:
    found = ends_as_if_it_had_stayed(two, sample, wanted().request)
    assert found.carried == 0
    return found.reason


def test_without_a_handle_the_seeded_noise_goes_on_all_the_same(two: Two) -> None:
    """Its engine died: the ids of a partial are all there is."""
    sample = left(two, wanted())
    sample.handle = None
    assert reason_after(two, sample) == "no_handle"


@pytest.mark.parametrize("place", [HEAD_BYTES, HEAD_BYTES + 12_345, -1])
def test_a_flipped_bit_is_prefilled_again(two: Two, place: int) -> None:
    sample = left(two, wanted())
    flip(offered(two, sample), place if place >= 0 else offered(two, sample).stat().st_size - 1)
    assert reason_after(two, sample) == "checksum"


def test_a_truncated_file_is_prefilled_again(two: Two) -> None:
    sample = left(two, wanted())
    with offered(two, sample).open("r+b") as file:
        file.truncate(HEAD_BYTES + 100)
    assert reason_after(two, sample) == "truncated"


def test_a_broken_header_is_prefilled_again(two: Two) -> None:
    sample = left(two, wanted())
    flip(offered(two, sample), 0)
    assert reason_after(two, sample) == "unreadable"


def test_kv_of_another_version_is_not_used(two: Two) -> None:
    sample, first = left(two, wanted()), wanted().request
    for engine in two.engines:
        engine.load(two.weights[1])
    later = sample.again().model_copy(update={"under": 1})
    sample.request = later
    two.engines[1].add(later)
    decode(two.engines[1], [sample])
    assert (sample.prefills[-1].carried, sample.prefills[-1].reason) == (0, "version")
    rest = {"response_ids": tuple(sample.ids[:20]), "logprobs": tuple(sample.logprobs[:20]), "loss_mask": (True,) * 20}
    again = first.model_copy(update={**rest, "under": 1, "attempt": 99})
    assert sample.ids[20:] == run_all(two.engines[0], [again])[again.key][0]


def test_kv_of_another_requests_ids_is_not_used(two: Two) -> None:
    other, sample = left(two, wanted(1)), left(two, wanted())
    sample.handle = other.handle
    assert reason_after(two, sample) == "tokens"


def test_an_offer_that_is_too_old_is_gone(two: Two) -> None:
    sample = left(two, wanted())
    two.hosts[0].call("tend_later", "engine0", OFFER_US_MAX / SECOND_US + 1)
    assert not offered(two, sample).exists()
    assert reason_after(two, sample) == "gone"


def test_a_renewed_offer_outlives_its_first_lease(two: Two) -> None:
    sample = left(two, wanted())
    two.hosts[0].call("tend_later", "engine0", LEASE_US / SECOND_US - 1)
    two.hosts[1].call("tend_later", "engine1", LEASE_US / SECOND_US + 100)
    assert ends_as_if_it_had_stayed(two, sample, wanted().request).computed == 1


def test_a_claim_that_was_never_loaded_is_cleared_away(two: Two) -> None:
    """Its receiver died. A third engine could have claimed it until then."""
    sample = left(two, wanted())
    path = offered(two, sample)
    taken = path.rename(path.with_name(path.name.removesuffix(OFFERED) + CLAIMED))
    two.engines[0].tend()
    assert taken.exists()
    two.hosts[0].call("tend_later", "engine0", CLAIM_US_MAX / SECOND_US + 1)
    assert not taken.exists()
    assert reason_after(two, sample) == "gone"


def test_beyond_the_budget_no_kv_is_offered(two: Two) -> None:
    """1 MiB holds five times eleven blocks, not eight times."""
    samples = [wanted(index, prompt=(*range(index, index + 330),), new=30 + index) for index in range(8)]
    firsts = [one.request.model_copy(update={"attempt": 99}) for one in samples]
    for one in samples:
        two.engines[0].add(one.request)
    decode(two.engines[0], samples, 6)
    stop(two.engines[0], samples)
    size = sum(path.stat().st_size - HEAD_BYTES for path in two.folders[0].glob("*" + OFFERED))
    assert 0.8 * 2**20 < size <= 2**20
    go_on(two.engines[1], samples)
    decode(two.engines[1], samples)
    for one, (ids, _) in zip(samples, stayed(two.engines[0], firsts), strict=True):
        assert one.ids == ids
    assert [one.prefills[-1].reason for one in samples] == [*[""] * 5, *["budget"] * 3]


def test_a_request_that_is_stopped_before_its_kv_was_loaded_keeps_it(two: Two) -> None:
    sample = left(two, wanted())
    handle = sample.handle
    go_on(two.engines[1], [sample])
    stop(two.engines[1], [sample])
    assert sample.handle == handle
    assert ends_as_if_it_had_stayed(two, sample, wanted().request).computed == 1


def test_a_request_that_is_dropped_before_its_kv_was_loaded_leaves_no_file(two: Two) -> None:
    sample = left(two, wanted())
    go_on(two.engines[1], [sample])
    assert two.engines[1].stop((sample.request.key,)) == {}
    assert two.files() == []


def test_a_load_that_fails_in_the_connector_is_computed_again(two: Two) -> None:
    sample = left(two, wanted())
    two.hosts[1].call("break_loads", True)
    try:
        assert reason_after(two, sample) == "load_failed"
    finally:
        two.hosts[1].call("break_loads", False)


def test_a_load_that_fails_among_others_is_the_only_one_computed_again(two: Two) -> None:
    """One of three files is deleted after it was claimed; a sibling that runs shares the prompt's blocks."""
    samples = [wanted(index) for index in range(3)]
    firsts = [one.request.model_copy(update={"attempt": 99}) for one in samples]
    for one in samples:
        two.engines[0].add(one.request)
    decode(two.engines[0], samples, 20)
    stop(two.engines[0], samples)
    go_on(two.engines[1], samples)
    claimed(two, samples[1]).unlink()
    decode(two.engines[1], samples)
    for one, (ids, _) in zip(samples, stayed(two.engines[0], firsts), strict=True):
        assert one.ids == ids
    assert [one.prefills[-1].reason for one in samples] == ["", "load_failed", ""]


@pytest.mark.full
def test_an_engine_that_is_killed_leaves_its_offer_and_its_claim_to_others(two: Two) -> None:
    """Kill -9 after an offer, and after a claim; a restart of the killed engine leaves nothing of it. What it offered
    to other hosts is gone with it."""
    told = {"kv_folder": two.folders[0], "number": 2}
    with open_host(two.hosts[0].place) as host:
        third = RemoteEngine(host, "third", settings(two.model, two.way), two.model, **told)
        third.load(two.weights[0])
        claims, offers, dies = left(two, wanted(0)), wanted(1), wanted(2)
        firsts = [wanted(index).request.model_copy(update={"attempt": 99}) for index in range(2)]
        for one in (offers, dies):
            third.add(one.request)
        decode(third, [offers, dies], 20)
        stop(third, [offers, dies])
        go_on(third, [claims])
        host.kill()
    for one in (claims, offers):
        go_on(two.engines[1], [one])
        decode(two.engines[1], [one])
    assert [one.ids for one in (claims, offers)] == [ids for ids, _ in stayed(two.engines[0], firsts)]
    reasons = ["", "" if two.way == "shared_memory" else "unreachable"]
    assert [one.prefills[-1].reason for one in (claims, offers)] == reasons
    assert [one.prefills[-1].computed == 1 for one in (claims, offers)] == [not reason for reason in reasons]
    assert offered(two, dies).exists()
    with open_host(two.hosts[0].place) as host:
        RemoteEngine(host, "third", settings(two.model, two.way), two.model, **told).close()
    assert list(two.folders[0].glob("2.*")) == []


@pytest.mark.full
def test_a_host_that_is_cut_off_costs_its_requests_their_kv_and_nothing_else(two: Two) -> None:
    """The last one here: engine 1 does not ask engine 0 again for a minute."""
    if two.way != "two_hosts":
        pytest.skip(f"{two.way}: one host has no cable")
    sample = left(two, wanted())
    two.hosts[0].place.plug("down")
    try:
        assert reason_after(two, sample) == "unreachable"
    finally:
        two.hosts[0].place.plug("up")
