"""Logs are events with fields, a line each: `2026-01-01T00:00:00.000Z INFO rollout-0 swapped version=3 load_s=0.41`."""

import logging
import sys
from datetime import UTC, datetime


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = f"{at} {record.levelname} {record.name} {record.getMessage()}"
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
    return " ".join([event, *(f"{name}={value!s}" for name, value in fields.items())])


def to_stderr() -> None:
    """Send all logs of this process to stderr (the supervisor keeps it as logs/<process>.log)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("kafka", "urllib3", "httpx", "prefect", "vllm", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
