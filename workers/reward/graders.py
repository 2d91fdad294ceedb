"""Graders by name: from one sampled response to a verdict. Runs inside a grader subprocess (`grader_process.py`).

Rule 1: a grader is a function of a `GradeInput`, pure as far as the pool knows: it may be killed and called again.
Rule 2: text is decoded from `response_ids` for grading only; what is trained on are the sampled ids.
Rule 3: a grader that cannot judge raises. An error is never a reward of 0.

Names: `last_integer`, `math_verify`, `reasoning_gym:<task>`, or your own `module:function`:

    def starts_with_yes(item: GradeInput) -> float:
        return float(item.text.startswith("yes"))
"""

import difflib
import importlib
import json
import math
import re
import sys
import traceback
from functools import lru_cache
from typing import Any

from workers.reward.verdict import GradeInput, Grader, Verdict

HOW_TO = (
    "write last_integer, math_verify, reasoning_gym:<task>, or module:function "
    "for a function of your own (workers.reward.verdict.GradeInput -> float or Verdict)"
)
_BUILT_IN = ("last_integer", "math_verify", "reasoning_gym:<task>", "module:function")
# Digits with groups of three ("1,234") or without, and what follows a point.
_NUMBER = re.compile(r"(?<![0-9.])(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)*")
_MINUS = "-\u2212\u2013"


def is_own(name: str) -> bool:
    """A person's own `module:function`, not one that comes with dora."""
    return ":" in name and not name.startswith(("reasoning_gym:", "workers."))


def place_of(name: str, error: BaseException) -> str:
    """`file:line` of the last frame in the own grader's file, of its module if no frame is there; "" for others."""
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None) if is_own(name) else None
    if file is None:
        return ""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f"{file}:{lines[-1]}" if lines else _defined(name, file)


def _defined(name: str, file: str) -> str:
    code = getattr(load(name), "__code__", None)
    return f"{file}:{code.co_firstlineno}" if code is not None and code.co_filename == file else file


def needs_text(grader: Grader) -> bool:
    return not getattr(grader, "ids_only", False)


def check_name(name: str) -> None:
    """ValueError unless `name` has the form of a grader (imports nothing of it)."""
    kind, colon, rest = name.partition(":")
    if name in ("last_integer", "math_verify") or (kind == "reasoning_gym" and rest):
        return
    if not (colon and re.fullmatch(r"\w+(\.\w+)*", kind) and rest.isidentifier()) or kind == "reasoning_gym":
        raise _unknown(name, _BUILT_IN)


@lru_cache(maxsize=64)
def load(name: str) -> Grader:
    """The grader of that name. ValueError names the nearest and how to write one."""
    check_name(name)
    if name == "last_integer":
        return last_integer
    if name == "math_verify":
        from workers.reward.math_grader import math_verify

        return math_verify
    kind, _, rest = name.partition(":")
    if kind == "reasoning_gym":
        from workers.reward import reasoning_gym

        if rest not in reasoning_gym.tasks():
            raise _unknown(name, [f"reasoning_gym:{task}" for task in reasoning_gym.tasks()])
        return reasoning_gym.grader(rest)
    return _own(name, kind, rest)


def _own(name: str, module: str, function: str) -> Grader:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"grader {name}: {error}; is it on the Python path?") from error
    grader = getattr(found, function, None)
    if not callable(grader):
        known = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
        raise _unknown(name, [f"{module}:{n}" for n in known])
    return grader  # type: ignore[no-any-return]


def _unknown(name: str, known: "list[str] | tuple[str, ...]") -> ValueError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return ValueError(f"unknown grader {name!r}: {hint}{HOW_TO}")


def judge(grader: Grader, item: GradeInput) -> Verdict:
    """The grader's answer as a `Verdict`. TypeError or ValueError if it answers anything but finite numbers."""
    said = grader(item)
    verdict = said if isinstance(said, Verdict) else Verdict(_number(said), _number(said))
    numbers = [verdict.reward, verdict.outcome, *verdict.parts.values()]
    if not all(math.isfinite(_number(number)) and abs(number) < 1e30 for number in numbers):
        raise ValueError(f"the grader returned numbers that are not finite: {verdict}")
    parts = {str(name): float(value) for name, value in verdict.parts.items()}
    return Verdict(float(verdict.reward), float(verdict.outcome), parts)


def _number(value: object) -> float:
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"the grader returned {type(value).__name__}, not a number or Verdict")


def metadata_of(text: str) -> dict[str, Any]:
    """The JSON object of a row's `metadata`. ValueError if it is none."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"metadata is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("metadata is no JSON object")
    return found


def last_integer(item: GradeInput) -> float:
    """1 if the last integer of the text equals the answer, else 0."""
    wanted = integers(item.answer)
    if len(wanted) != 1:
        raise ValueError(f"answer {item.answer!r} is not one integer")
    found = integers(item.text)
    return float(bool(found) and found[-1] == wanted[0])


def integers(text: str) -> list[str]:
    """All integers in `text` in normal form (`-12`, `0`): thousands separators dropped, `3.0` is 3, `3.5` is none.

    Strings, not ints: a response may hold more digits than Python converts.
    """
    found = []
    for match in _NUMBER.finditer(text):
        whole, _, fraction = match.group().replace(",", "").partition(".")
        if fraction.strip("0"):
            continue
        digits = whole.lstrip("0") or "0"
        found.append("-" + digits if digits != "0" and _negative(text, match.start()) else digits)
    return found


def _negative(text: str, start: int) -> bool:
    """A minus right before the number counts as its sign unless an operand stands right before the minus."""
    if start == 0 or text[start - 1] not in _MINUS:
        return False
    before = text[start - 2] if start > 1 else ""
    return not (before.isalnum() or before in tuple(")]}"))
