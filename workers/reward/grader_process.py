"""One grader subprocess: JSON lines in, JSON lines out, one response at a time. Started and killed by `pool.py`.

    -> {"id", "grader", "prompt_ids", "response_ids", "answer", "metadata"}
    <- {"ready": true} once, or {"problem": text} and the end
    <- {"id", "grading": true}            the grader is loaded and called: its time limit starts here
    <- {"id", "reward", "outcome", "parts"}  or  {"id", "error": text, "place"}

`place` is file:line where an own grader raised, or "".

Rule 1: the channel is a private file descriptor: what a grader prints goes to stderr and harms nothing.
Rule 2: an exception of a grader is an answer (`error`), not a death; only a MemoryError ends the process after it.
"""

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from workers.reward import graders
from workers.reward.verdict import GradeInput, Grader
from workers.runtime.process import die_with_parent

_ERROR_CHARACTERS_MAX = 1000
Decode = Callable[[list[int]], str]


class Caught:
    """Keeps the exception of foreign code, whatever its type: a verdict on that code, for the caller to report."""

    error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None

    def text(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"[:_ERROR_CHARACTERS_MAX]


def decoder(model: Path) -> Decode | None:
    """Ids -> text without special tokens, by the model folder's tokenizer; None if it has none. Imports no torch
    where there is a tokenizer.json."""
    if (model / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(model / "tokenizer.json"))
        return lambda ids: str(fast.decode(ids, skip_special_tokens=True))
    if (model / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(model)
        return lambda ids: str(slow.decode(ids, skip_special_tokens=True))
    return None


class GraderProcess:
    """Answers requests on a channel."""

    def __init__(self, out: BinaryIO, decode: Decode | None, model: Path) -> None:
        self._out = out
        self._decode = decode
        self._model = model

    def say(self, **fields: object) -> None:
        self._out.write(json.dumps(fields).encode() + b"\n")
        self._out.flush()

    def preload(self, names: list[str]) -> bool:
        """Load the graders that the configuration names. False, and the reason said, if one cannot be."""
        for name in names:
            with Caught() as caught:
                self._load(name)
            if caught.error is not None:
                self.say(problem=f"grader {name}: {caught.text()}")
                return False
        return True

    def answer(self, request: dict[str, Any]) -> bool:
        """Grade one response. False if the process should end."""
        with Caught() as caught:
            grader = self._load(request["grader"])
            item = self._item(request)
            self.say(id=request["id"], grading=True)
            verdict = graders.judge(grader, item)
        if caught.error is None:
            parts = dict(verdict.parts)
            self.say(id=request["id"], reward=verdict.reward, outcome=verdict.outcome, parts=parts)
            return True
        self.say(id=request["id"], error=caught.text(), place=graders.place_of(request["grader"], caught.error))
        return not isinstance(caught.error, MemoryError)

    def _load(self, name: str) -> Grader:
        grader = graders.load(name)
        if self._decode is None and graders.needs_text(grader):
            raise ValueError(f"grader {name} reads text, but {self._model} has no tokenizer")
        return grader

    def _item(self, request: dict[str, Any]) -> GradeInput:
        response_ids: list[int] = request["response_ids"]
        return GradeInput(
            prompt_ids=tuple(request["prompt_ids"]),
            response_ids=tuple(response_ids),
            text="" if self._decode is None else self._decode(response_ids),
            answer=request["answer"],
            metadata=graders.metadata_of(request["metadata"]),
        )


def _private_channel() -> tuple[BinaryIO, BinaryIO]:
    """The pipe under other numbers; stdin is empty from now on, stdout goes to stderr."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(source, "rb"), os.fdopen(sink, "wb")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--memory-mib", type=int, required=True)
    parser.add_argument("--path", default="")
    parser.add_argument("graders", nargs="*")
    given = parser.parse_args(argv)
    die_with_parent()
    source, sink = _private_channel()
    limit = given.memory_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if given.path:
        sys.path.insert(0, given.path)
    child = GraderProcess(sink, decoder(given.model), given.model)
    if not child.preload(given.graders):
        return 2
    child.say(ready=True)
    for line in source:
        if not child.answer(json.loads(line)):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
