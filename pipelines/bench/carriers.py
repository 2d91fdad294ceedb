"""What the carriers of KV move per second, beside a plain socket: from the memory of one process to that of another on
this machine, by turns. A carrier's seconds are those of its whole way: a file is written, claimed, (by Flight) fetched,
checked, and read. The socket checks nothing.
"""

import multiprocessing
import os
import socket
import statistics
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workers.runtime import clock
from workers.transport.kv import shared_memory
from workers.transport.kv.flight import Flight
from workers.transport.kv.handoff import Header, Kind
from workers.transport.kv.shared_memory import SharedMemory, folder_of

MIB = 45
"""KV of 2,000 tokens of SmolLM2."""
SIZE = MIB << 20
TURNS = 7
LIMIT_S = 60.0
LOOPBACK = "127.0.0.1"
_HEADER = Header(
    kind=Kind(model="", fingerprint="", layout="", dtype="", block_tokens=1), tokens=1, prefix="", size=SIZE
)


def rows(root: Path) -> list[dict[str, Any]]:
    """One for each: the median of its turns. `root`: an empty folder, only its name is used."""
    data = memoryview(os.urandom(1 << 20) * MIB)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        receiver = context.Process(target=_receive, args=(theirs, root, listening.getsockname()[1]), daemon=True)
        receiver.start()
        theirs.close()
        stack.callback(receiver.join, LIMIT_S)
        stack.callback(pipe.close)
        listening.settimeout(LIMIT_S)
        plain = stack.enter_context(listening.accept()[0])
        senders = _carriers(root, 0)
        for sender in senders.values():
            stack.callback(sender.close)
        seconds: dict[str, list[float]] = {name: [] for name in (*senders, "socket")}
        for turn in range(TURNS + 1):
            for name, taken in seconds.items():
                began = clock.monotonic_s()
                _send(senders.get(name), plain, pipe, turn, data)
                if not pipe.poll(LIMIT_S):
                    raise RuntimeError(f"{name}: nothing came in {LIMIT_S:g} s")
                pipe.recv()
                if turn:  # the first one connects
                    taken.append(clock.monotonic_s() - began)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return [
        {"carrier": name, "mib": MIB, "seconds": round(took, 4), "mib_per_s": round(MIB / took, 1)}
        for name, took in medians.items()
    ]


def _carriers(root: Path, number: int) -> dict[str, SharedMemory]:
    """Of a host: by shared memory both have one folder, by Flight each has its own."""
    now = clock.now_us()
    return {
        "shared_memory": SharedMemory(folder_of("bench-one", root), number, now),
        "flight": Flight(folder_of(f"bench-{number}", root), number, now, LOOPBACK),
    }


def _send(sender: SharedMemory | None, plain: socket.socket, pipe: Connection, turn: int, data: memoryview) -> None:
    if sender is None:
        pipe.send(("socket", ""))
        plain.sendall(data)
        return
    name = sender.name(turn, 0, 0)
    shared_memory.write(sender.path(name), _HEADER, [[data]])
    pipe.send(("flight" if isinstance(sender, Flight) else "shared_memory", sender.location(name)))


def _receive(pipe: Connection, root: Path, port: int) -> None:
    """The other process, until the pipe is closed."""
    carriers, into = _carriers(root, 1), memoryview(bytearray(SIZE))
    with socket.create_connection((LOOPBACK, port)) as plain:
        while True:
            try:
                name, location = pipe.recv()
            except EOFError:
                break
            if name == "socket":
                _read(plain, into)
                pipe.send(name)
                continue
            path = carriers[name].claim(location, SIZE)
            shared_memory.read_header(path)
            shared_memory.read(path, 0, [into])
            pipe.send(name)
            carriers[name].release(path)
    for carrier in carriers.values():
        carrier.close()


def _read(plain: socket.socket, into: memoryview) -> None:
    while into:
        count = plain.recv_into(into)
        if not count:
            raise RuntimeError("the sender is gone")
        into = into[count:]
