"""Logs are events with fields, a line each: `2026-01-01T00:00:00.000Z INFO rollout-0 swapped version=3 run=my_run-000`.

Time, level and process come first, then the event, then fields as logfmt has them: `name=value`, a value with blanks,
quotes or `=` in JSON's quotes, several values with commas. The last field is the run, of what libraries say, too.
Numbers of a step, version, engine, group, sample (index) and attempt are always called so.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

NOISY = ("kafka", "urllib3", "httpx", "prefect", "vllm", "transformers")
"""Libraries of which only warnings are kept."""
_PLAIN = re.compile(r'[^\s"=]+')


class Line(logging.Formatter):
    def __init__(self, run: str) -> None:
        super().__init__()
        self._last = f" run={run}" if run else ""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = f"{at} {record.levelname} {record.name} {record.getMessage()}{self._last}"
        return text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"


class Log:
    """`log.info("swapped", version=3)`."""

    def __init__(self, process: str) -> None:
        self._logger = logging.getLogger(process)

    def info(self, event: str, **fields: object) -> None:
        self._logger.info(_text(event, fields))

    def warning(self, event: str, **fields: object) -> None:
        self._logger.warning(_text(event, fields))

    def error(self, event: str, **fields: object) -> None:
        self._logger.error(_text(event, fields))

    def exception(self, event: str, **fields: object) -> None:
        self._logger.exception(_text(event, fields))


def _text(event: str, fields: dict[str, object]) -> str:
    return " ".join([event, *(f"{name}={_value(value)}" for name, value in fields.items())])


def _value(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def to_stderr(run: str = "") -> None:
    """Send all logs of this process to stderr (the supervisor keeps it as logs/<process>.log)."""
    _send(logging.StreamHandler(sys.stderr), run)


def to_file(file: Path, run: str) -> None:
    """Send them to the end of a file."""
    _send(logging.FileHandler(file), run)


def _send(handler: logging.Handler, run: str) -> None:
    handler.setFormatter(Line(run))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
