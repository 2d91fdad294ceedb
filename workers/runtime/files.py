"""Files that survive a power failure: what was written is on the disk before its name says so."""

import os
from pathlib import Path


def write_synced(path: Path, value: bytes) -> None:
    """Write the whole file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
