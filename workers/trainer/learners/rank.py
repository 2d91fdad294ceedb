"""`python -m workers.trainer.learners.rank N`: rank N of a learner of several processes. It does what rank 0 does.

Rule 1: calls come on stdin, a JSON line each; the first says settings, model and where to meet. At its end this ends.
   On stdout it says `written` for every snapshot of which it has written its part; all else that is printed goes to
   stderr.
Rule 2: whatever goes wrong ends the process (exit code 2: bad input): rank 0 watches.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from schemas.settings import Settings
from workers.runtime.collector import set_aside
from workers.runtime.errors import BadInput
from workers.runtime.log import Log, to_stderr
from workers.runtime.process import die_with_parent
from workers.trainer.learners.base import Learner, Sample, Snapshot
from workers.trainer.learners.ranks import WRITTEN


def main() -> int:
    rank = int(sys.argv[1])
    to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for rank 0
    die_with_parent()
    says = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from workers.trainer.learners import megatron_learner, megatron_world

    call, first = _next() or ("", {})
    if not call:
        return 0
    assert call == "join", call
    settings = Settings.model_validate(first["settings"])
    to_stderr(settings.name)
    place = megatron_world.Place(rank, megatron_world.open_store(first["ranks"], first["port"]))
    try:
        learner = megatron_learner.MegatronLearner(settings, Path(first["model"]), place)
    except BadInput as error:
        Log(f"trainer-rank-{rank}").error("bad_input", error=error)
        return 2
    follower = _Follower(learner, says, Log(f"trainer-rank-{rank}"))
    set_aside()
    while (said := _next()) is not None:
        follower.follow(*said)
    return 0


def _next() -> tuple[str, dict[str, Any]] | None:
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return None
    call, arguments = json.loads(line)
    return call, arguments


class _Follower:
    """Makes each call. What it gives is rank 0's to use."""

    def __init__(self, learner: Learner, says: int, log: Log) -> None:
        self._learner, self._says, self._log = learner, says, log
        self._snapshot: Snapshot | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def follow(self, call: str, arguments: Mapping[str, Any]) -> None:
        learner = self._learner
        match call:
            case "train":
                learner.train([Sample(*one) for one in arguments["samples"]], arguments["step"])
            case "logprobs":
                learner.logprobs([Sample(*one) for one in arguments["samples"]])
            case "probe":
                learner.probe(arguments["ids"])
            case "export":
                for _ in learner.export():
                    raise AssertionError("weights are whole on rank 0 alone")
            case "snapshot":
                self._snapshot = learner.snapshot(Path(arguments["folder"]))
                self._writing = self._thread.submit(self._snapshot.write)
                self._writing.add_done_callback(self._written)
            case "finish":
                assert self._snapshot is not None, "no snapshot was begun"
                assert self._writing is not None
                self._writing.result()
                self._snapshot.finish()
            case "restore":
                learner.restore(Path(arguments["folder"]))
            case _:
                raise AssertionError(call)

    def _written(self, writing: Future[None]) -> None:
        if error := writing.exception():
            self._log.error("not_written", error=error)
            os._exit(1)
        os.write(self._says, WRITTEN)


if __name__ == "__main__":
    sys.exit(main())
