"""Grader subprocesses that can be killed: submit items, collect verdicts, never wait for a hung one.

    starting -> idle -> sent -> grading -> idle ...
    any of them -> killed at its limit, or dead by itself -> replaced by a new process

Rule 1: every item comes back exactly once: a verdict, or an error that says why there is none.
Rule 2: the limit of a grading counts from the moment the grader is called; starting and loading have their own.
Rule 3: an item whose process dies before its grading began is given to another one, at most `TRIES_MAX` times.
Rule 4: one thread uses a pool (a child dies with the thread that started it).
"""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workers.reward.verdict import Verdict
from workers.runtime import clock
from workers.runtime.errors import BadInput, DoraError

START_LIMIT_S = 120.0
LOAD_LIMIT_S = 120.0
TRIES_MAX = 3
STARTS_FAILED_MAX = 3
_EXIT_LIMIT_S = 1.0
_READ_BYTES = 1 << 16
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "2",
    "PYTHONUNBUFFERED": "1",
}
"""One thread each: graders share the machine, and every thread costs address space."""


class GradersUnavailable(DoraError):
    """Grader processes end before they are ready."""


@dataclass(frozen=True, slots=True)
class Item:
    """A response to grade. `key` is the caller's own."""

    key: int
    grader: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    answer: str
    metadata: str = "{}"


@dataclass(frozen=True, slots=True)
class Graded:
    """What became of an item: a verdict or an error. `place` is file:line where an own grader raised, or ""."""

    key: int
    verdict: Verdict | None
    error: str | None
    place: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of one grading, MiB of address space of one process."""

    timeout_s: float
    memory_mib: int


@dataclass(eq=False)
class _Child:
    process: "subprocess.Popen[bytes]"
    deadline: float
    state: Literal["starting", "idle", "sent", "grading"] = "starting"
    item: Item | None = None
    unread: bytes = b""
    unsent: bytes = b""

    @property
    def read_fd(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def write_fd(self) -> int:
        assert self.process.stdin is not None
        return self.process.stdin.fileno()


class Pool:
    """`size` grader processes."""

    def __init__(self, size: int, limits: Limits, model: Path, graders: Sequence[str] = (), *, path: str = "") -> None:
        """`graders` are loaded ahead; BadInput comes from `collect` if one of them cannot be. Modules in the folder
        `path` are found first."""
        self._limits = limits
        self._command = [sys.executable, "-W", "ignore", "-m", "workers.reward.grader_process"]
        self._command += ["--model", str(model), "--memory-mib", str(limits.memory_mib), "--path", path, "--", *graders]
        self._selector = selectors.DefaultSelector()
        self._queue: deque[Item] = deque()
        self._tries: dict[int, int] = {}
        self._done: list[Graded] = []
        self._starts_failed = 0
        self._children: set[_Child] = set()
        for _ in range(size):
            self._start()

    @property
    def pending(self) -> int:
        """Items submitted and not collected yet."""
        return len(self._tries) + len(self._done)

    def submit(self, item: Item) -> None:
        assert item.key not in self._tries, item.key
        self._tries[item.key] = 0
        self._queue.append(item)

    def collect(self, timeout_s: float) -> list[Graded]:
        """What is done by now; waits up to `timeout_s` for the first. BadInput, GradersUnavailable."""
        end = clock.monotonic_s() + timeout_s
        while True:
            self._assign()
            self._enforce_limits()
            now = clock.monotonic_s()
            wait = 0.0 if self._done else max(0.0, min([end, *(c.deadline for c in self._children)]) - now)
            ready = self._selector.select(wait)
            for key, _ in ready:
                self._serve(key.fileobj, key.data)
            if not ready and (self._done or now >= end):
                done, self._done = self._done, []
                return done

    def close(self) -> None:
        """Kill all, whatever they do."""
        for child in list(self._children):
            self._end(child)
        self._selector.close()

    def _start(self) -> None:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        child = _Child(process, clock.monotonic_s() + START_LIMIT_S)
        os.set_blocking(child.read_fd, False)
        os.set_blocking(child.write_fd, False)
        self._selector.register(child.read_fd, selectors.EVENT_READ, child)
        self._children.add(child)

    def _end(self, child: _Child) -> str:
        """Kill the process and all that it started; how it ended."""
        self._children.remove(child)
        self._selector.unregister(child.read_fd)
        if child.unsent:
            self._selector.unregister(child.write_fd)
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        code = child.process.wait()
        for pipe in (child.process.stdin, child.process.stdout):
            assert pipe is not None
            pipe.close()
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def _assign(self) -> None:
        for child in self._children:
            if not self._queue:
                return
            if child.state == "idle":
                item = self._queue.popleft()
                self._tries[item.key] += 1
                child.item, child.state = item, "sent"
                child.deadline = clock.monotonic_s() + LOAD_LIMIT_S
                request = {
                    "id": item.key,
                    "grader": item.grader,
                    "prompt_ids": list(item.prompt_ids),
                    "response_ids": list(item.response_ids),
                    "answer": item.answer,
                    "metadata": item.metadata,
                }
                child.unsent = json.dumps(request).encode() + b"\n"
                self._selector.register(child.write_fd, selectors.EVENT_WRITE, child)

    def _enforce_limits(self) -> None:
        now = clock.monotonic_s()
        for child in [child for child in self._children if now >= child.deadline]:
            self._end(child)
            if child.state == "grading":
                self._finish(child, error=f"timed out after {self._limits.timeout_s:g} s")
            elif child.state == "sent":
                self._finish(child, error=f"the grader was not loaded after {LOAD_LIMIT_S:g} s")
            else:
                self._count_failed_start(f"not ready after {START_LIMIT_S:g} s")
            self._start()

    def _serve(self, fd: object, child: _Child) -> None:
        if child not in self._children:
            return  # it ended in this round
        if fd == child.read_fd:
            self._read(child)
        else:
            self._write(child)

    def _write(self, child: _Child) -> None:
        try:
            sent = os.write(child.write_fd, child.unsent)
        except BrokenPipeError:
            sent = len(child.unsent)  # it is dead: reading says so
        child.unsent = child.unsent[sent:]
        if not child.unsent:
            self._selector.unregister(child.write_fd)

    def _read(self, child: _Child) -> None:
        data = os.read(child.read_fd, _READ_BYTES)
        if not data:
            self._died(child)
            return
        *lines, child.unread = (child.unread + data).split(b"\n")
        for line in lines:
            said = _parsed(line)
            if said is None or said.get("id") != (child.item and child.item.key):
                self._end(child)
                self._finish(child, error="the grader wrote into the channel of its process")
                self._start()
                return
            self._hear(child, said)

    def _hear(self, child: _Child, said: dict[str, Any]) -> None:
        if "problem" in said:
            raise BadInput(self._with_limit(said["problem"]))
        if "ready" in said:
            self._starts_failed = 0
            child.state, child.deadline = "idle", float("inf")
            return
        if "grading" in said:
            child.state, child.deadline = "grading", clock.monotonic_s() + self._limits.timeout_s
            return
        error = said.get("error")
        verdict = None if error else Verdict(said["reward"], said["outcome"], said["parts"])
        self._finish(child, verdict, self._with_limit(error) if error else None, said.get("place", ""))
        child.state, child.deadline = "idle", float("inf")

    def _with_limit(self, error: str) -> str:
        memory = "MemoryError" in error
        return f"{error} (reward.memory_mib = {self._limits.memory_mib})" if memory else error

    def _finish(self, child: _Child, verdict: Verdict | None = None, error: str | None = None, place: str = "") -> None:
        if child.item is None:
            return  # it was idle
        self._done.append(Graded(child.item.key, verdict, error, place))
        del self._tries[child.item.key]
        child.item = None

    def _died(self, child: _Child) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(_EXIT_LIMIT_S)
        how = self._end(child)
        if child.state == "starting":
            self._count_failed_start(how)
        elif child.item is not None:
            if child.state == "sent" and self._tries[child.item.key] < TRIES_MAX:
                self._queue.appendleft(child.item)
            else:
                memory = f"reward.memory_mib = {self._limits.memory_mib}"
                self._finish(child, error=f"the grader process ended: {how} ({memory})")
        self._start()

    def _count_failed_start(self, how: str) -> None:
        self._starts_failed += 1
        if self._starts_failed > STARTS_FAILED_MAX:
            raise GradersUnavailable(
                f"{self._starts_failed} grader processes in a row ended before they were ready ({how}); "
                f"see this log above, and whether reward.memory_mib = {self._limits.memory_mib} is too little"
            )


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None
