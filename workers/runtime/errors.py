"""The world's faults. Our bugs are `assert`s, a person's input is a `ValueError` (or `BadInput`)."""


class DoraError(Exception):
    """Base of faults that a process reports in one line and ends with (exit code 1)."""


class BadInput(DoraError, ValueError):
    """A person's configuration, dataset or model is wrong; the text names file, key or row and what to do (exit 2)."""


class WeightsUnavailable(DoraError):
    """A version's files are missing or do not hash to their manifest."""


class ProbeMismatch(DoraError):
    """An engine computes other log-probs than the manifest says: it serves stale or broken weights."""
