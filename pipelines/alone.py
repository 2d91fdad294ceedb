"""One process at a time on one output: the others are refused."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.runtime.errors import BadInput


@contextmanager
def alone(lock: Path, refusal: str) -> Iterator[None]:
    """Hold the lock file, made with its folder if need be. It goes with the process, however that ends. BadInput, with
    `refusal` if another process has it."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise BadInput(f"{lock.parent}: cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(refusal) from None
        yield
