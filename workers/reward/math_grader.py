"""`math_verify`: mathematical equality by the math-verify package. The only file that imports it.

Its own limits are signal alarms, which work in main threads only: they are off, the pool kills what hangs.
"""

import logging
from typing import Any

import math_verify as door

from workers.reward.verdict import GradeInput

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its alarms are off


def math_verify(item: GradeInput) -> float:
    """1 if the response states the answer's value (in a box, as LaTeX or plain), else 0."""
    wanted = _parse(item.answer) or _parse(f"${item.answer}$")
    if not wanted:
        raise ValueError(f"answer {item.answer!r} is no mathematical expression")
    found = _parse(item.text)
    return float(bool(found) and door.verify(wanted, found, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    found: list[Any] = door.parse(text, parsing_timeout=None)
    return found
