"""KV between engines of one host: a file in shared memory for each stopped request.

    NAME.part ----rename----> NAME.offered ----rename----> NAME.claimed ----> (deleted)
     owner writes               owner                       receiver

The file is a header (`HEAD_BYTES`, JSON) and the blocks of all layers, one layer after the other.

Rule 1: a file is whole or has no name that anybody claims: header and checksum are written last, then it is renamed.
Rule 2: a folder belongs to one run. Names begin with the engine's number: what an engine left behind when it was
killed is deleted when it starts again, or by whoever sees its lease (the file's time) run out.
Rule 3: bytes go through the kernel's own copy, straight between the blocks and the file, and never through a mapping:
each page of one would cost a fault, and a full shared memory would be a dead process instead of an error.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import crc32c
from pydantic import ValidationError

from workers.transport.kv.handoff import LEASE_US, SECOND_US, Header, State, Unusable

ROOT = Path("/dev/shm")
PREFIX = "dora-kv-"
SCHEME = "shm:"
HEAD_BYTES = 4096
CHECK_BYTES = 1 << 20
VIEWS_MAX = 512
PART, OFFERED, CLAIMED = ".part", ".offered", ".claimed"


def folder_of(run: str, run_dir: Path) -> Path:
    """Of the run: two runs of one name lie in two folders."""
    place = hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=6).hexdigest()
    return ROOT / f"{PREFIX}{run}-{place}"


def write(path: Path, header: Header, blocks: Iterable[Sequence[memoryview]]) -> None:
    """Make `path` + `.offered`: the header with its checksum, and the blocks, copied once. Unusable (`no_space`) if
    shared memory is full; whatever fails, nothing is left."""
    part = path.with_name(path.name + PART)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise Unusable("no_space") from error
    try:
        place, checksum = HEAD_BYTES, 0
        for some in blocks:
            for one in some:
                checksum = crc32c.crc32c(one, checksum)
            place = _copy(os.pwritev, handle, some, place)
        assert place == HEAD_BYTES + header.size, f"{place - HEAD_BYTES} bytes, the header says {header.size}"
        text = header.model_copy(update={"checksum": checksum}).model_dump_json().encode()
        assert len(text) <= HEAD_BYTES, f"a header of {len(text)} bytes"
        _copy(os.pwritev, handle, [memoryview(text.ljust(HEAD_BYTES))], 0)
        part.rename(path.with_name(path.name + OFFERED))
    except OSError as error:
        part.unlink(missing_ok=True)
        raise Unusable("no_space") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def read_header(path: Path) -> Header:
    """Of a claimed file. Unusable: gone, unreadable, truncated, checksum. Reads every byte once."""
    try:
        with path.open("rb", buffering=0) as file:
            try:
                header = Header.model_validate_json(file.read(HEAD_BYTES).decode())
            except (ValidationError, UnicodeDecodeError) as error:
                raise Unusable("unreadable") from error
            if os.fstat(file.fileno()).st_size != HEAD_BYTES + header.size:
                raise Unusable("truncated")
            checksum, piece = 0, bytearray(CHECK_BYTES)
            while count := file.readinto(piece):
                checksum = crc32c.crc32c(memoryview(piece)[:count], checksum)
    except OSError as error:
        raise Unusable("gone") from error
    if checksum != header.checksum:
        raise Unusable("checksum")
    return header


def read(path: Path, start: int, into: Sequence[memoryview]) -> None:
    """Of the blocks of a claimed file, the bytes from `start` on, copied once. OSError, also if there are too few."""
    with path.open("rb", buffering=0) as file:
        _copy(os.preadv, file.fileno(), into, HEAD_BYTES + start)


def _copy(move: Callable[..., int], handle: int, views: Sequence[memoryview], place: int) -> int:
    """All of them at `place` of the file; returns the place behind them. OSError."""
    for start in range(0, len(views), VIEWS_MAX):
        some = views[start : start + VIEWS_MAX]
        size = sum(one.nbytes for one in some)
        if move(handle, some, place) != size:
            raise OSError(f"fewer than {size} bytes at {place}")
        place += size
    return place


class SharedMemory:
    """The files of one run, as one engine sees them."""

    def __init__(self, folder: Path, owner: int, now: int) -> None:
        """Deletes what earlier incarnations of this engine left, and what dead engines of any run did."""
        self._folder, self._owner = folder, owner
        for path in folder.glob(f"{owner}.*"):
            path.unlink(missing_ok=True)
        self.sweep(now)

    def path(self, name: str) -> Path:
        """To write to; see `write`."""
        return self._folder / name

    def name(self, group: int, index: int, attempt: int) -> str:
        return f"{self._owner}.{group}.{index}.{attempt}"

    def location(self, name: str) -> str:
        return f"{SCHEME}{self._folder.name}/{name}"

    def claim(self, location: str, room: int) -> Path:  # noqa: ARG002
        """Take what is offered there, or what a receiver that died had claimed. Unusable (`gone`). `room`: bytes of
        blocks that the receiver's host still has for KV; here they stay in the owner's."""
        name = location.removeprefix(f"{SCHEME}{self._folder.name}/")
        if name == location or "/" in name:
            raise Unusable("gone")
        return self.take(name)

    def take(self, name: str) -> Path:
        """Claim a file of this host. Unusable (`gone`)."""
        offered, claimed = (self._folder / (name + end) for end in (OFFERED, CLAIMED))
        try:
            offered.rename(claimed)
        except OSError as error:
            if not claimed.exists():
                raise Unusable("gone") from error
        return claimed

    def release(self, claimed: Path) -> None:
        """It was loaded, or will not be."""
        claimed.unlink(missing_ok=True)

    def hand_on(self, claimed: Path) -> None:
        """It was not loaded and goes on elsewhere: whoever comes next claims it at the same location."""

    def state(self, name: str) -> State:
        """What became of an own offer."""
        if (self._folder / (name + OFFERED)).exists():
            return State.OFFERED
        return State.CLAIMED if (self._folder / (name + CLAIMED)).exists() else State.RELEASED

    def renew(self, name: str, now: int) -> None:
        for end in (OFFERED, CLAIMED):
            with contextlib.suppress(OSError):
                os.utime(self._folder / (name + end), (now / SECOND_US, now / SECOND_US))

    def delete(self, name: str) -> None:
        for end in (PART, OFFERED, CLAIMED):
            (self._folder / (name + end)).unlink(missing_ok=True)

    def sweep(self, now: int) -> int:
        """Delete what nobody renewed, of any run; returns how many."""
        swept = 0
        for path in self._folder.parent.glob(f"{PREFIX}*/*"):
            with contextlib.suppress(OSError):
                if now / SECOND_US - path.stat().st_mtime > LEASE_US / SECOND_US:
                    path.unlink()
                    swept += 1
        for folder in self._folder.parent.glob(f"{PREFIX}*"):
            if folder != self._folder:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return swept

    def close(self) -> None:
        """The engine ends, and with it what it offered."""
        for path in self._folder.glob(f"{self._owner}.*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
