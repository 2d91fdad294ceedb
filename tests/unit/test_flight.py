"""KV that is fetched from another host: the owner's file byte for byte, or a reason. Two folders are two hosts."""

import os
import re
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from pipelines.workers_entry import own_address
from tests.unit.test_shared_memory import DATA, HEADER, PARTS
from workers.runtime import clock
from workers.runtime.errors import BadInput
from workers.transport.kv import shared_memory
from workers.transport.kv.flight import PIECE_BYTES, RELEASE, Flight
from workers.transport.kv.handoff import LEASE_US, SECOND_US, State, Unusable
from workers.transport.kv.shared_memory import CLAIMED, HEAD_BYTES, OFFERED, SharedMemory, folder_of

ROOM = 1 << 30


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for host in ("a", "b"):
        (tmp_path / host).mkdir()
    return [tmp_path / host / folder_of("unit", tmp_path).name for host in ("a", "b")]


@pytest.fixture
def owner(folders: list[Path]) -> Iterator[Flight]:
    made = Flight(folders[0], 1, clock.now_us(), "127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def other(folders: list[Path]) -> Iterator[Flight]:
    made = Flight(folders[1], 2, clock.now_us(), "127.0.0.1")
    yield made
    made.close()


def _offer(owner: SharedMemory, group: int = 7) -> str:
    name = owner.name(group, 0, 0)
    shared_memory.write(owner.path(name), HEADER, PARTS)
    return name


def _reason(files: SharedMemory, location: str, room: int = ROOM) -> str:
    with pytest.raises(Unusable) as caught:
        files.claim(location, room)
    return caught.value.reason


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def test_what_is_offered_on_one_host_is_fetched_to_the_other_and_released(
    owner: Flight, other: Flight, folders: list[Path]
) -> None:
    name = _offer(owner)
    there = (folders[0] / (name + OFFERED)).read_bytes()
    path = other.claim(owner.location(name), ROOM)
    assert (owner.state(name), path.parent, path.read_bytes()) == (State.CLAIMED, folders[1], there)
    assert shared_memory.read_header(path).prefix == HEADER.prefix
    other.release(path)
    assert (owner.state(name), _names(folders[0]), _names(folders[1])) == (State.RELEASED, [], [])


def test_a_file_of_many_pieces_is_whole(owner: Flight, other: Flight) -> None:
    data = os.urandom(2 * PIECE_BYTES + 12_345)
    name = owner.name(1, 0, 0)
    shared_memory.write(owner.path(name), HEADER.model_copy(update={"size": len(data)}), [[memoryview(data)]])
    path = other.claim(owner.location(name), ROOM)
    assert shared_memory.read_header(path).size == len(data)
    assert path.read_bytes()[HEAD_BYTES:] == data


def test_an_engine_takes_back_its_own_and_those_of_its_host_without_a_copy(owner: Flight, folders: list[Path]) -> None:
    name = _offer(owner)
    assert owner.claim(owner.location(name), 0) == folders[0] / (name + CLAIMED)


def test_what_a_receiver_fetched_before_it_died_or_handed_on_can_be_fetched_by_the_next(
    owner: Flight, other: Flight, folders: list[Path]
) -> None:
    location = owner.location(_offer(owner))
    path = other.claim(location, ROOM)
    other.hand_on(path)
    assert _names(folders[1]) == []
    assert other.claim(location, ROOM) == path


def test_without_the_token_and_of_other_names_nothing_is_to_be_had(
    owner: Flight, other: Flight, folders: list[Path]
) -> None:
    name = _offer(owner)
    (folders[0] / "secret.claimed").write_text("s")
    location = owner.location(name)
    at, token = re.fullmatch(r"grpc://(.+)/(.+)/.+", location).groups()  # type: ignore[union-attr]
    for wrong in (f"grpc://{at}/{'0' * 32}/{name}", f"grpc://{at}/{token}/9.9.9.9", f"grpc://{at}/x", "", "shm:x/1"):
        assert _reason(other, wrong) == "gone"
    with flight.connect(f"grpc://{at}") as client:
        for ticket in (f"{token}/secret", f"{token}/../b/x", f"/{name}", name, ""):
            with pytest.raises(KeyError, match="gone"):
                client.do_get(flight.Ticket(ticket.encode())).read_all()
            with pytest.raises(KeyError, match="gone"):
                list(client.do_action(flight.Action(RELEASE, ticket.encode())))
        with pytest.raises(KeyError, match="drop"):
            list(client.do_action(flight.Action("drop", f"{token}/{name}".encode())))
    assert owner.state(name) is State.OFFERED
    assert (folders[0] / "secret.claimed").exists()


def test_an_engine_that_is_gone_is_unreachable(owner: Flight, other: Flight) -> None:
    location = owner.location(_offer(owner))
    owner.close()
    assert _reason(other, location) == "unreachable"


def test_a_receiver_whose_owner_died_meanwhile_releases_without_it(
    owner: Flight, other: Flight, folders: list[Path]
) -> None:
    path = other.claim(owner.location(_offer(owner)), ROOM)
    owner.close()
    other.release(path)
    assert _names(folders[1]) == []


def test_one_who_accepts_and_says_nothing_is_asked_once(other: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 requests whose KV is there wait for its host once and not 50 times."""
    monkeypatch.setattr("workers.transport.kv.flight.FETCH_S_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        location = f"grpc://127.0.0.1:{silent.getsockname()[1]}/{'0' * 32}/1.2.3.4"
        began = clock.monotonic_s()
        assert [_reason(other, location) for _ in range(50)] == ["unreachable"] * 50
        assert clock.monotonic_s() - began < 5


def test_what_was_fetched_needs_room_until_it_is_released(owner: Flight, other: Flight, folders: list[Path]) -> None:
    first, second = (owner.location(_offer(owner, group)) for group in (1, 2))
    assert _reason(other, first, len(DATA) - 1) == "budget"
    path = other.claim(first, len(DATA))
    assert _reason(other, second, len(DATA)) == "budget"
    assert len(_names(folders[1])) == 1
    other.release(path)
    other.claim(second, len(DATA))


def test_a_cut_file_and_a_flipped_bit_come_as_they_are_and_are_seen(
    owner: Flight, other: Flight, folders: list[Path]
) -> None:
    cut, flipped = (_offer(owner, group) for group in (1, 2))
    os.truncate(folders[0] / (cut + OFFERED), HEAD_BYTES + 100)
    with (folders[0] / (flipped + OFFERED)).open("r+b") as file:
        file.seek(HEAD_BYTES + 5)
        file.write(bytes([DATA[5] ^ 4]))
    for name, reason in ((cut, "truncated"), (flipped, "checksum")):
        with pytest.raises(Unusable, match=reason):
            shared_memory.read_header(other.claim(owner.location(name), ROOM))


def test_what_was_fetched_is_kept_alive_by_its_receiver_and_goes_with_it(
    owner: Flight, other: Flight, folders: list[Path]
) -> None:
    path = other.claim(owner.location(_offer(owner)), ROOM)
    later = clock.now_us() + LEASE_US + SECOND_US
    other.sweep(later)
    SharedMemory(folders[1], 3, later).sweep(later)
    assert path.exists()
    other.close()
    assert not folders[1].exists()


def test_a_transfer_that_is_cut_off_leaves_nothing(
    owner: Flight, other: Flight, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> Iterator[pa.RecordBatch]:
        column = pa.array([1, 2, 3], pa.uint8())
        yield pa.RecordBatch.from_arrays([column], schema=pa.schema([("bytes", pa.uint8())]))
        raise flight.FlightServerError("cut")

    location = owner.location(_offer(owner))
    monkeypatch.setattr("workers.transport.kv.flight._pieces", breaks)
    assert _reason(other, location) == "unreachable"
    assert _names(folders[1]) == []


def test_a_receiver_whose_shared_memory_is_full_has_no_space_and_goes_on(
    owner: Flight, other: Flight, folders: list[Path]
) -> None:
    """The limit on a file's size says what a full file system would."""
    location = owner.location(_offer(owner))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEAD_BYTES, hard))
    try:
        assert _reason(other, location) == "no_space"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert _names(folders[1]) == []
    assert other.claim(location, ROOM).exists(), "its owner was not taken for dead"


class _Stranger(flight.FlightServerBase):  # type: ignore[misc]
    def do_get(self, context: object, ticket: flight.Ticket) -> flight.RecordBatchStream:  # noqa: ARG002
        return flight.RecordBatchStream(pa.table({"bytes": ["a", "b"]}))


def test_what_a_stranger_sends_is_unreadable(other: Flight, folders: list[Path]) -> None:
    with _Stranger(("127.0.0.1", 0)) as stranger:
        assert _reason(other, f"grpc://127.0.0.1:{stranger.port}/{'0' * 32}/1.2.3.4") == "unreadable"
        stranger.shutdown()
    assert _names(folders[1]) == []


def test_its_address_is_that_of_the_way_to_the_log() -> None:
    assert own_address("127.0.0.1:9092,10.0.0.1:9092") == "127.0.0.1"
    for wrong in ("", "[::1]:9092"):
        with pytest.raises(BadInput, match="kv_carrier = flight: no way over IPv4"):
            own_address(wrong)
