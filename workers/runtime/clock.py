"""Time. The only file under `workers` that imports `time`."""

import time


def now_us() -> int:
    """Microseconds since 1970-01-01 UTC."""
    return time.time_ns() // 1000


def monotonic_s() -> float:
    """Seconds that never run backwards; only differences mean anything."""
    return time.monotonic()


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    return time.process_time()
