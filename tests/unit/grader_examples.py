"""Own graders, as a person would write them, that behave badly. Used by name: `tests.unit.grader_examples:<name>`."""

import os
import threading
from typing import Any

from workers.reward.verdict import GradeInput, Verdict, ids_only

_for_ever = threading.Event()


@ids_only
def by_answer(item: GradeInput) -> Any:
    """Does what the row's answer says."""
    match item.answer:
        case "hang":
            _for_ever.wait(1e6)
        case "raise":
            raise KeyError("no such cell")
        case "die":
            os.kill(os.getpid(), 9)
        case "eat":
            return float(len(bytearray(8 << 30)))
        case "print":
            print('{"id": 0, "reward": 9, "outcome": 9, "parts": {}}', flush=True)
            return 0.5
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "shaped":
            return Verdict(0.25, 1.0, {"length": -0.75})
    return float(item.answer)


@ids_only
def endless_sleep(item: GradeInput) -> float:
    """Sleeps 1e9 s for every response but those whose answer is a number."""
    if not item.answer:
        _for_ever.wait(1e9 if threading.TIMEOUT_MAX > 1e9 else threading.TIMEOUT_MAX)
    return float(item.answer)


def text_length(item: GradeInput) -> float:
    return float(len(item.text))
