"""Structured logs: one JSON object a line. Never any text of prompts or answers."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

logger = logging.getLogger("moestream.server")

FIELDS = "fields"
"""Attribute of a log record that holds the figures of an event."""


class JsonLines(logging.Formatter):
    """Formats records as JSON: time, level, logger, event, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": when,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log(event: str, *, level: int = logging.INFO, error: bool = False, **fields: object) -> None:
    """Log an event with its figures.

    Args:
        event: a word or two, always the same for the same thing.
        level: of the logging module.
        error: whether the exception that is being handled belongs to it.
        **fields: figures; those that are None are left out.
    """
    shown = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, event, exc_info=error, extra={FIELDS: shown})


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send the records of moestream and uvicorn to standard error. For a process of its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("moestream", "uvicorn"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    logging.getLogger("moestream").setLevel(level)
    # What it says of starting and stopping, the server says itself.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
