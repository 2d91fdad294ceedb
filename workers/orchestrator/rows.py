"""The rows of `prompts` as the mind sees them: evaluation rows apart, training rows in order until they are opened."""

from collections import deque

from schemas.messages import PromptArrived


def tokens_max(row: PromptArrived) -> int:
    """Prompt and the longest response: the KV that each request of the row is booked with."""
    return row.prompt_tokens + row.max_new_tokens


class Rows:
    """Evaluation rows come first in `prompts`; so they are complete when the first training row, or the end, is there.

    `PromptsEnded` and the rows lie in different topics: the end counts once all rows that it tells of have arrived.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.evaluation: list[PromptArrived] = []
        self.unread: deque[PromptArrived] = deque()
        self.arrived_rows = 0
        self.wanted = 0
        self.total: int | None = None
        self.trained = False

    def arrived(self, row: PromptArrived) -> None:
        """Take a row; one that was heard of before is ignored."""
        if row.row < self.arrived_rows:
            return
        self.arrived_rows = row.row + 1
        if row.purpose == "train":
            self.unread.append(row)
            self.trained = True
        else:
            assert not self.trained, f"evaluation row {row.row} after training rows"
            self.evaluation.append(row)

    def skip(self, row: int) -> None:
        """The row is there, but nobody can read it."""
        self.arrived_rows = max(self.arrived_rows, row + 1)

    def end(self, rows: int) -> None:
        self.total = rows

    @property
    def ended(self) -> bool:
        return self.total is not None and self.arrived_rows >= self.total

    @property
    def exhausted(self) -> bool:
        """No row is left to open, and none will come."""
        return self.ended and not self.unread

    @property
    def eval_complete(self) -> bool:
        return self.trained or self.ended

    def want(self) -> int | None:
        """A new demand: so many rows there must be. None while the last one is not met, or enough is unread."""
        if self.total is not None or self.wanted > self.arrived_rows or len(self.unread) >= self.ahead:
            return None
        self.wanted = self.arrived_rows + 2 * self.ahead
        return self.wanted
