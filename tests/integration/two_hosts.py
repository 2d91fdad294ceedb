"""Two hosts on one machine: network namespaces with a cable between them (Linux, root)."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Place:
    """Where a process runs: a network namespace (empty = this one), and its address there."""

    namespace: str
    address: str

    def enter(self) -> None:
        """By the calling thread and those that it starts."""
        if self.namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/var/run/netns/{self.namespace}") as handle:
                if libc.setns(handle.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")

    def plug(self, up: str) -> None:
        """`up` or `down`: its end of the cable."""
        _ip("-n", self.namespace, "link", "set", self.namespace, up)


LOOPBACK = Place("", "127.0.0.1")


@contextmanager
def two_hosts() -> Iterator[tuple[Place, Place]]:
    """Skips, and says why, where they are not permitted."""
    places = (Place(f"dora{os.getpid()}a", "10.83.0.1"), Place(f"dora{os.getpid()}b", "10.83.0.2"))
    ends = [place.namespace for place in places]
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces: there is no command ip")
    try:
        try:
            for name in ends:
                _ip("netns", "add", name)
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr.strip()}")
        for place, name in zip(places, ends, strict=True):
            _ip("link", "set", name, "netns", name)
            _ip("-n", name, "addr", "add", f"{place.address}/24", "dev", name)
            _ip("-n", name, "link", "set", "lo", "up")
            place.plug("up")
        yield places
    finally:
        for name in ends:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*said: str) -> None:
    subprocess.run(["ip", *said], check=True, capture_output=True, text=True)
