"""The body of one worker process: its name, its stop signal, its death with its parent.

Exit codes: 0 done, 1 failed, 2 bad input.
"""

import _thread
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from schemas.settings import Settings
from schemas.topics import Topics
from workers.runtime.errors import BadInput, DoraError
from workers.runtime.log import Log, to_stderr
from workers.runtime.metrics import Figures

_PR_SET_PDEATHSIG = 1
ORPHAN_S_MAX = 10.0
"""Who was told to stop by its parent's death has this long: nobody is left to end it, and the log may be gone too."""


@dataclass
class Process:
    """What every service is given. `stopping` is set by SIGTERM or SIGINT: finish the step at hand and return.
    `figures`: what it measures, for Prometheus, where `metrics_port` is not 0. `broker`: host:port of the log."""

    name: str
    settings: Settings
    run_dir: Path
    metrics_port: int = 0
    broker: str = ""
    stopping: threading.Event = field(default_factory=threading.Event)
    figures: Figures = field(default_factory=Figures)

    def __post_init__(self) -> None:
        self.log = Log(self.name)
        self.topics = Topics(self.settings.name)

    @property
    def run(self) -> str:
        return self.settings.name

    @cached_property
    def vocabulary(self) -> int | None:
        """Tokens that the model knows; None where its folder does not say: nothing then computes with them."""
        path = Path(self.settings.model) / "config.json"
        if not path.is_file():
            return None
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["vocab_size"])
        except KeyError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(f"model: {path}: {type(error).__name__}: {error}") from error

    @property
    def weights_dir(self) -> Path:
        return self.run_dir / "weights"


def on_stop_signals(call: Callable[[int], None]) -> None:
    """Call it with the number of SIGTERM or SIGINT, in a thread of its own.

    Python runs a handler between two steps of the main thread. If that was just entering `Event.wait` it holds the
    event's lock, and an `Event.set` in the handler would wait for it for ever.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: _thread.start_new_thread(call, (got,)) and None)


def die_with_parent() -> None:
    """Ask Linux to send SIGTERM when the parent ends, however it ends (elsewhere: nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if _was_orphaned():
            os.kill(os.getpid(), signal.SIGTERM)  # it ended before we asked


def _was_orphaned() -> bool:
    """The parent had ended before this process could look at it."""
    return os.getppid() == 1 and os.environ.get("DORA_PARENT", "1") != "1"


def run_service(process: Process, serve: Callable[[], int]) -> int:
    """Run `serve` with signals, logs and exit codes as every worker has them."""
    to_stderr(process.run)
    parent = os.getppid()
    on_stop_signals(lambda _: _stop(process, parent))
    die_with_parent()
    process.log.info("started", pid=os.getpid())
    _open_figures(process)
    try:
        code = serve()
    except BadInput as error:
        process.log.error("bad_input", error=error)
        return 2
    except DoraError as error:
        process.log.error("failed", error=f"{type(error).__name__}: {error}")
        return 1
    process.log.info("ended", code=code)
    return code


def _open_figures(process: Process) -> None:
    """A port that is taken is no reason not to train."""
    if process.metrics_port:
        try:
            process.figures.open(process.metrics_port, process.run, process.name)
        except OSError as error:
            process.log.warning("no_prometheus_endpoint", port=process.metrics_port, error=error)


def _stop(process: Process, parent: int) -> None:
    """In a thread of its own: what waits for a log that went with the parent would wait for `broker.timeout_s`."""
    process.stopping.set()
    if os.getppid() != parent or _was_orphaned():
        threading.Event().wait(ORPHAN_S_MAX)
        process.log.error("orphan_gave_up", after_s=ORPHAN_S_MAX)
        os._exit(1)
