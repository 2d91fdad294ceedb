"""KV files of one host: whole or not there, taken once, and nothing left of the dead."""

import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.runtime import clock
from workers.transport.kv import shared_memory
from workers.transport.kv.handoff import LEASE_US, SECOND_US, Header, Kind, State, Unusable, prefix_hash
from workers.transport.kv.shared_memory import (
    CHECK_BYTES,
    CLAIMED,
    HEAD_BYTES,
    OFFERED,
    VIEWS_MAX,
    SharedMemory,
    folder_of,
)

DATA = os.urandom(CHECK_BYTES + 1000)
HEADER = Header(
    kind=Kind(model="m", fingerprint="f", layout="l", dtype="d", block_tokens=32),
    tokens=3,
    prefix=prefix_hash((1, 2, 3)),
    size=len(DATA),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Not in shared memory itself: there are runs on this machine, and these tests sweep at other times."""
    return tmp_path / folder_of("unit", tmp_path).name


@pytest.fixture
def owner(folder: Path) -> SharedMemory:
    return SharedMemory(folder, 1, clock.now_us())


@pytest.fixture
def other(folder: Path, owner: SharedMemory) -> SharedMemory:
    del owner  # it starts first
    return SharedMemory(folder, 2, clock.now_us())


PARTS = [[memoryview(DATA)[:1000], memoryview(DATA)[1000:1001]], [], [memoryview(DATA)[1001:]]]


def _offer(owner: SharedMemory, group: int = 7) -> str:
    name = owner.name(group, 0, 0)
    shared_memory.write(owner.path(name), HEADER, PARTS)
    return name


def _reason(path: Path) -> str:
    with pytest.raises(Unusable) as caught:
        shared_memory.read_header(path)
    return caught.value.reason


def test_what_is_offered_is_claimed_read_and_released(owner: SharedMemory, other: SharedMemory) -> None:
    name = _offer(owner)
    assert owner.state(name) is State.OFFERED
    path = other.claim(owner.location(name), 0)
    assert owner.state(name) is State.CLAIMED
    header = shared_memory.read_header(path)
    assert (header.kind, header.tokens, header.prefix) == (HEADER.kind, 3, HEADER.prefix)
    found = bytearray(len(DATA))
    shared_memory.read(path, 0, [memoryview(found)])
    assert found == DATA
    other.release(path)
    assert owner.state(name) is State.RELEASED


def test_any_bytes_of_the_blocks_are_read_into_many_places(owner: SharedMemory, other: SharedMemory) -> None:
    path = other.claim(owner.location(_offer(owner)), 0)
    found = bytearray(2 * VIEWS_MAX + 1)
    shared_memory.read(path, 17, [memoryview(found)[place : place + 1] for place in range(len(found))])
    assert found == DATA[17 : 17 + len(found)]
    with pytest.raises(OSError, match="fewer than 2 bytes"):
        shared_memory.read(path, len(DATA) - 1, [memoryview(found)[:2]])


def test_kv_that_a_receiver_claimed_before_it_died_can_be_claimed_by_the_next(
    owner: SharedMemory, other: SharedMemory, folder: Path
) -> None:
    location = owner.location(_offer(owner))
    first = other.claim(location, 0)
    third = SharedMemory(folder, 3, clock.now_us())
    assert third.claim(location, 0) == first


@pytest.mark.parametrize(
    "location", ["", "shm:elsewhere/1.7.0.0", "shm:{}/../{}/1.7.0.0", "shm:{}/none", "grpc://h:1/x"]
)
def test_what_is_not_in_the_runs_folder_is_gone(owner: SharedMemory, folder: Path, location: str) -> None:
    _offer(owner)
    with pytest.raises(Unusable, match="gone"):
        owner.claim(location.format(folder.name, folder.name), 0)


@pytest.mark.parametrize("end", [HEAD_BYTES + len(DATA) - 1, HEAD_BYTES + len(DATA) + 1, HEAD_BYTES])
def test_a_file_of_another_length_is_truncated(owner: SharedMemory, end: int) -> None:
    path = owner.claim(owner.location(_offer(owner)), 0)
    os.truncate(path, end)
    assert _reason(path) == "truncated"


@pytest.mark.parametrize("place", [0, CHECK_BYTES - 1, CHECK_BYTES, len(DATA) - 1])
def test_one_flipped_bit_anywhere_in_the_blocks_is_seen(owner: SharedMemory, place: int) -> None:
    path = owner.claim(owner.location(_offer(owner)), 0)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as whole:
        whole[HEAD_BYTES + place] ^= 4
    assert _reason(path) == "checksum"


@pytest.mark.parametrize("start", [b"", b"{}", b"\xff\xfe", b'{"format":1}'])
def test_a_header_that_is_none_is_unreadable(owner: SharedMemory, start: bytes) -> None:
    path = owner.claim(owner.location(_offer(owner)), 0)
    path.write_bytes(start.ljust(HEAD_BYTES) + DATA)
    assert _reason(path) == "unreadable"


def test_a_claimed_file_that_was_deleted_meanwhile_is_gone(owner: SharedMemory) -> None:
    path = owner.claim(owner.location(_offer(owner)), 0)
    path.unlink()
    assert _reason(path) == "gone"


def test_a_write_that_fails_leaves_nothing(owner: SharedMemory, folder: Path) -> None:
    def fails() -> Iterator[list[memoryview]]:
        yield PARTS[0]
        raise RuntimeError("no copy")

    with pytest.raises(RuntimeError, match="no copy"):
        shared_memory.write(owner.path("1.0.0.0"), HEADER, fails())
    assert list(folder.iterdir()) == []


def test_a_full_shared_memory_is_an_error_and_not_a_dead_process(owner: SharedMemory, folder: Path) -> None:
    """The limit on a file's size says what a full file system would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEAD_BYTES, hard))
    try:
        with pytest.raises(Unusable, match="no_space"):
            shared_memory.write(owner.path("1.0.0.0"), HEADER, PARTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(folder.iterdir()) == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit import test_shared_memory as t
from workers.transport.kv import shared_memory
from workers.transport.kv.shared_memory import SharedMemory
owner = SharedMemory(Path(sys.argv[1]), 1, t.clock.now_us())
t._offer(owner, 1)
owner.claim(owner.location(t._offer(owner, 2)), 0)
shared_memory.write(owner.path("1.3.0.0"), t.HEADER, (os.kill(os.getpid(), signal.SIGKILL) for _ in t.PARTS))
"""


def test_what_a_killed_engine_left_is_deleted_when_it_starts_again_and_nobody_elses(
    owner: SharedMemory, other: SharedMemory, folder: Path
) -> None:
    """Killed between a `.part` and its name, with an offer and a claim of its own."""
    del owner
    kept = _offer(other)
    died = subprocess.run([sys.executable, "-c", _KILLED, str(folder)], check=False, cwd=Path(__file__).parents[2])
    assert died.returncode == -signal.SIGKILL
    assert {path.name for path in folder.iterdir()} == {
        "1.1.0.0.offered",
        "1.2.0.0.claimed",
        "1.3.0.0.part",
        kept + OFFERED,
    }
    SharedMemory(folder, 1, clock.now_us())
    assert [path.name for path in folder.iterdir()] == [kept + OFFERED]


def test_a_lease_that_ran_out_is_swept_and_a_renewed_one_is_not(owner: SharedMemory, other: SharedMemory) -> None:
    dead, alive, claimed = (_offer(owner, group) for group in (1, 2, 3))
    other.claim(owner.location(claimed), 0)
    later = clock.now_us() + LEASE_US + SECOND_US
    owner.renew(alive, later)
    owner.renew(claimed, later)
    other.sweep(later)
    assert [owner.state(name) for name in (dead, alive, claimed)] == [State.RELEASED, State.OFFERED, State.CLAIMED]


def test_an_engine_that_ends_takes_its_offers_along_and_the_last_one_the_folder(
    owner: SharedMemory, other: SharedMemory, folder: Path
) -> None:
    _offer(owner)
    name = _offer(other)
    owner.close()
    assert [path.name for path in folder.iterdir()] == [name + OFFERED]
    other.close()
    assert not folder.exists()


def test_a_delete_takes_whatever_state_it_is_in(owner: SharedMemory, folder: Path) -> None:
    first, second = _offer(owner, 1), _offer(owner, 2)
    owner.claim(owner.location(second), 0)
    assert (folder / (second + CLAIMED)).exists()
    owner.delete(first)
    owner.delete(second)
    assert list(folder.iterdir()) == []


def test_two_runs_of_one_name_lie_in_two_folders(tmp_path: Path) -> None:
    assert folder_of("r", tmp_path / "a") != folder_of("r", tmp_path / "b")
    assert folder_of("r", tmp_path / "a") == folder_of("r", tmp_path / "b" / ".." / "a")
