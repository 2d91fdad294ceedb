"""Faults of the people's side, and which exit code a fault means. Light: what goes well pays for no names of faults."""

from workers.runtime.errors import DoraError


class ServiceFailed(DoraError):
    """A local service did not start."""


class StartStopped(ServiceFailed):
    """Somebody does not want the service any more before it answers."""


def exit_code_of(error: BaseException) -> int | None:
    """2 = a person's mistake, 1 = the world's fault, None = our own bug."""
    from schemas.settings import SettingsError
    from workers.runtime.errors import BadInput
    from workers.transport.records.bus import BusUnavailable

    if isinstance(error, BadInput | SettingsError):
        return 2
    return 1 if isinstance(error, DoraError | BusUnavailable) else None


def sentence(error: BaseException) -> str:
    """As it is said to a person."""
    return f"dora: {error}" if exit_code_of(error) == 2 else f"dora: {type(error).__name__}: {error}"
