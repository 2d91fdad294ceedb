"""One process at a time on one output: the others are refused."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.runtime.errors import BadInput


class Taken(BadInput):
    """Another process has it."""


@contextmanager
def alone(lock: Path, refusal: str) -> Iterator[None]:
    """Hold the lock file, made with its folder if need be. It goes with the process, however that ends. Taken, saying
    `refusal`; BadInput if it cannot be written."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise BadInput(f"{lock.parent}: cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Taken(refusal) from None
        yield
