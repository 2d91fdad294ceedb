"""What a grader is given and what it says: the types of `module:function` graders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class GradeInput:
    """One response. `text` is the decoded `response_ids` without special tokens, `metadata` the row's JSON object."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome` is the verdict before shaping (filters look at it), `reward` what is trained on, `parts` for people."""

    reward: float
    outcome: float
    parts: Mapping[str, float] = field(default_factory=dict)


Grader = Callable[[GradeInput], "float | Verdict"]


def ids_only(grader: Grader) -> Grader:
    """Mark a grader that does not read `text`: it works without a tokenizer."""
    grader.ids_only = True  # type: ignore[attr-defined]
    return grader
