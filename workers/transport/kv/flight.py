"""KV between engines of different hosts: the owner's file, fetched over Arrow Flight.

    owner:     NAME.offered --fetch begins--> NAME.claimed --release--> (deleted)
    receiver:  OWNER.from.NAME.part --fetch ends--> OWNER.from.NAME.claimed --load done--> (deleted)

Rule 1: what comes is the owner's file byte for byte, and it is checked as one of this host.
Rule 2: a location has a token that each engine makes anew: who cannot read the run's log gets nothing.
Rule 3: Flight's threads serve; no engine step waits for them. Bytes are read piece by piece, never through a mapping.
Rule 4: a fetch has `FETCH_S_MAX`, and whoever did not answer is not asked again for `SILENT_S`: a host that is gone
costs its requests their KV and the others hardly any time.
Rule 5: what was fetched needs room, and its receiver renews its lease.
"""

import hmac
import os
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import pyarrow as pa
from pyarrow import flight

from workers.runtime import clock
from workers.transport.kv.handoff import SECOND_US, Unusable
from workers.transport.kv.shared_memory import CLAIMED, HEAD_BYTES, PART, SharedMemory

SCHEME = "grpc://"
PIECE_BYTES = 4 << 20
FETCH_S_MAX = 10.0
RELEASE_S_MAX = 1.0
SILENT_S = 60.0
RELEASE = "release"
_LOCATION = re.compile(r"grpc://(?P<at>[^/]+)/(?P<token>[0-9a-f]{32})/(?P<name>\d+\.\d+\.\d+\.\d+)")
_SIZE = b"size"
_SCHEMA = pa.schema([("bytes", pa.uint8())])


@dataclass(frozen=True, slots=True)
class _There:
    """A file of another engine. `at`: host:port."""

    at: str
    token: str
    name: str

    @property
    def ticket(self) -> bytes:
        return f"{self.token}/{self.name}".encode()


class Flight(SharedMemory):
    """The files of one run on one host, as one engine sees them; those of other hosts are fetched."""

    def __init__(self, folder: Path, owner: int, now: int, address: str) -> None:
        """`address`: of this host, as the others reach it."""
        self._fetched: dict[Path, _There] = {}
        super().__init__(folder, owner, now)
        self._token = secrets.token_hex(16)
        self._server = _Server(self, address, self._token)
        self._at = f"{address}:{self._server.port}"
        self._closing = threading.Thread(target=self._server.shutdown, daemon=True)
        self._clients: dict[str, flight.FlightClient] = {}
        self._silent_until: dict[str, float] = {}

    def location(self, name: str) -> str:
        return f"{SCHEME}{self._at}/{self._token}/{name}"

    def claim(self, location: str, room: int) -> Path:
        """Take what is offered there, into a file of this engine. Unusable (`gone`, `unreachable`, `budget`,
        `no_space`)."""
        if not location.startswith(SCHEME):
            return super().claim(location, room)
        found = _LOCATION.fullmatch(location)
        if found is None:
            raise Unusable("gone")
        there = _There(**found.groupdict())
        if there.at == self._at:
            return self.take(there.name)
        if clock.monotonic_s() < self._silent_until.get(there.at, 0.0):
            raise Unusable("unreachable")
        path = self.path(f"{self._owner}.from.{there.name}{CLAIMED}")
        room -= sum(one.stat().st_size for one in self._fetched if one.exists())
        try:
            self._fetch(there, path, room)
        except KeyError as error:
            raise Unusable("gone") from error
        except (pa.ArrowException, OSError) as error:
            self._silence(there.at)
            raise Unusable("unreachable") from error
        self._fetched[path] = there
        return path

    def release(self, claimed: Path) -> None:
        super().release(claimed)
        there = self._fetched.pop(claimed, None)
        if there is not None and clock.monotonic_s() >= self._silent_until.get(there.at, 0.0):
            try:
                options = flight.FlightCallOptions(timeout=RELEASE_S_MAX)
                list(self._client(there.at).do_action(flight.Action(RELEASE, there.ticket), options))
            except (pa.ArrowException, KeyError):
                self._silence(there.at)  # the owner will see that it is too old

    def hand_on(self, claimed: Path) -> None:
        if self._fetched.pop(claimed, None) is not None:
            claimed.unlink(missing_ok=True)

    def sweep(self, now: int) -> int:
        for path in self._fetched:
            if path.exists():
                os.utime(path, (now / SECOND_US, now / SECOND_US))
        return super().sweep(now)

    def close(self) -> None:
        """Who fetches at this moment is waited for, but not long."""
        if self._closing.ident is None:
            self._closing.start()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._closing.join(RELEASE_S_MAX)
        super().close()

    def _fetch(self, there: _There, path: Path, room: int) -> None:
        reader = self._client(there.at).do_get(
            flight.Ticket(there.ticket), flight.FlightCallOptions(timeout=FETCH_S_MAX)
        )
        if not reader.schema.equals(_SCHEMA):
            raise Unusable("unreadable")
        if int(reader.schema.metadata[_SIZE]) - HEAD_BYTES > room:
            raise Unusable("budget")
        part = path.with_suffix(PART)
        try:
            with _new(part) as file:
                for piece in reader:
                    _write(file, memoryview(piece.data.column(0).buffers()[1])[: piece.data.num_rows])
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _client(self, at: str) -> flight.FlightClient:
        if at not in self._clients:
            self._clients[at] = flight.connect(SCHEME + at)
        return self._clients[at]

    def _silence(self, at: str) -> None:
        self._silent_until[at] = clock.monotonic_s() + SILENT_S
        client = self._clients.pop(at, None)
        if client is not None:
            client.close()


def _new(path: Path) -> FileIO:
    """Unusable (`no_space`)."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return path.open("wb", buffering=0)
    except OSError as error:
        raise Unusable("no_space") from error


def _write(file: FileIO, piece: memoryview) -> None:
    """All of it. Unusable (`no_space`)."""
    try:
        while piece:
            piece = piece[file.write(piece) :]
    except OSError as error:
        raise Unusable("no_space") from error


class _Server(flight.FlightServerBase):  # type: ignore[misc]
    """The owner's end. It runs from here on, in threads of its own."""

    def __init__(self, files: SharedMemory, address: str, token: str) -> None:
        super().__init__((address, 0))
        self._files, self._token = files, token

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.GeneratorStream:  # noqa: ARG002
        """Claim it, and its bytes."""
        file = self._claimed(ticket.ticket).open("rb", buffering=0)
        schema = _SCHEMA.with_metadata({_SIZE: str(os.fstat(file.fileno()).st_size)})
        return flight.GeneratorStream(schema, _pieces(file, schema))

    def do_action(self, context: object, action: flight.Action) -> list[bytes]:  # noqa: ARG002
        """Its receiver needs it no more."""
        if action.type != RELEASE:
            raise KeyError(action.type)
        self._files.release(self._claimed(action.body.to_pybytes()))
        return []

    def _claimed(self, ticket: bytes) -> Path:
        token, _, name = ticket.decode().partition("/")
        if not hmac.compare_digest(token, self._token) or not re.fullmatch(r"\d+\.\d+\.\d+\.\d+", name):
            raise KeyError("gone")
        try:
            return self._files.take(name)
        except Unusable as error:
            raise KeyError("gone") from error


def _pieces(file: FileIO, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with file:
        while True:
            piece = pa.allocate_buffer(PIECE_BYTES, resizable=True)
            count = file.readinto(memoryview(piece))
            if not count:
                return
            column = pa.Array.from_buffers(pa.uint8(), count, [None, piece])
            yield pa.RecordBatch.from_arrays([column], schema=schema)
