"""`python -m workers.trainer.learners.rank N`: rank N of a learner of several processes. It does what rank 0 does.

Rule 1: calls come on stdin, a JSON line each; the first says settings, model and where to meet. At its end this ends.
Rule 2: whatever goes wrong ends the process (exit code 2: bad input): rank 0 watches.
"""

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.settings import Settings
from workers.runtime.errors import BadInput
from workers.runtime.log import Log, to_stderr
from workers.runtime.process import die_with_parent
from workers.trainer.learners.base import Learner, Sample


def main() -> int:
    rank = int(sys.argv[1])
    to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for rank 0
    die_with_parent()
    from workers.trainer.learners import megatron_learner, megatron_world

    call, first = _next() or ("", {})
    if not call:
        return 0
    assert call == "join", call
    settings = Settings.model_validate(first["settings"])
    place = megatron_world.Place(rank, megatron_world.open_store(first["ranks"], first["port"]))
    try:
        learner = megatron_learner.MegatronLearner(settings, Path(first["model"]), place)
    except BadInput as error:
        Log(f"trainer-rank-{rank}").error("bad_input", error=error)
        return 2
    while (said := _next()) is not None:
        _follow(learner, *said)
    return 0


def _next() -> tuple[str, dict[str, Any]] | None:
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return None
    call, arguments = json.loads(line)
    return call, arguments


def _follow(learner: Learner, call: str, arguments: Mapping[str, Any]) -> None:
    """What it gives is rank 0's to use."""
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
        case "save":
            learner.save(Path(arguments["folder"]), {})
        case "restore":
            learner.restore(Path(arguments["folder"]))
        case _:
            raise AssertionError(call)


if __name__ == "__main__":
    sys.exit(main())
