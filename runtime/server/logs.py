"""Structured logs: one JSON object a line. Never any text of prompts or answers."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TextIO

logger = logging.getLogger("moestream.server")

FIELDS = "fields"
"""Attribute of a log record that holds the figures of an event."""

MOST_RECORDS = 10_000
"""Records that may wait to be written."""

CLOSE_SECONDS = 2.0
"""How long the end waits for the rest of them."""


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


class _Writer(logging.Handler):
    """Writes records on a thread of its own; drops them where that one is far behind."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_RECORDS)
        # Left behind at the end of the process when it hangs in a pipe that nobody empties.
        self._thread = threading.Thread(target=self._write, name="moestream-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits: a reader of the log that hangs is no reason for the server to."""
        with suppress(queue.Full):
            self._lines.put_nowait(self.format(record))

    def close(self) -> None:
        """Write what is left, for a moment at most."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError, ValueError):  # nobody reads any more
                self._stream.write(line + "\n")
                self._stream.flush()


@contextmanager
def logging_to(stream: TextIO, level: int = logging.INFO) -> Iterator[None]:
    """Send the records of moestream and uvicorn to a stream. For a process of its own.

    A thread writes them, since a pipe that nobody empties blocks its writer.
    """
    writer = _Writer(stream)
    # What uvicorn says of starting and stopping, the server says itself.
    levels = {"moestream": level, "uvicorn": logging.WARNING}
    for name, least in levels.items():
        logging.getLogger(name).addHandler(writer)
        logging.getLogger(name).setLevel(least)
    try:
        yield
    finally:
        for name in levels:
            logging.getLogger(name).removeHandler(writer)
            logging.getLogger(name).setLevel(logging.NOTSET)
        writer.close()
