"""`reasoning_gym:<task>`: the task's own scoring. The only file under `workers` that imports reasoning_gym.

The row's metadata carries the entry that was asked: `{"entry": {"question", "answer", "metadata"}}`.
"""

from collections.abc import Callable
from functools import lru_cache

import reasoning_gym as door
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from workers.reward.verdict import GradeInput


def tasks() -> list[str]:
    return sorted(DATASETS)


@lru_cache(maxsize=16)
def grader(task: str) -> Callable[[GradeInput], float]:
    """The grader of a known task: 0 .. 1 for what stands in <answer></answer>, else for the whole text."""
    dataset = door.create_dataset(task, size=1, seed=0)

    def score(item: GradeInput) -> float:
        entry = item.metadata.get("entry")
        if not isinstance(entry, dict):
            raise ValueError(f"metadata has no `entry` of reasoning_gym:{task}")
        answer = extract_answer(item.text)
        return float(dataset.score_answer(item.text.strip() if answer is None else answer, entry))

    return score
