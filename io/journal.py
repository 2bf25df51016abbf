"""The record of what is finished, by which interrupted work goes on: a line of JSON each."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .disk import Disk, write_all


class JournalBusy(Exception):
    """Another process is writing the journal."""


class Journal:
    """A file of lines that are on the drive when ``add`` returns; held by one process at a time.

    A line that a kill has cut off is dropped at the next opening.

    Attributes:
        entries: what the file held when it was opened, and what was added since.

    Raises:
        JournalBusy: another process has it open.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._descriptor = disk.append(path)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.entries, length = _read(path)
            os.ftruncate(self._descriptor, length)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise JournalBusy from error
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def add(self, entry: dict[str, Any]) -> None:
        """Append a line and wait until it is on the drive."""
        line = json.dumps(entry).encode() + b"\n"
        write_all(self._disk, self._descriptor, memoryview(line))
        self._disk.sync(self._descriptor)
        self.entries.append(entry)


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of the file, up to the first that makes no sense, and their length."""
    entries: list[dict[str, Any]] = []
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(entry, dict):
            break
        entries.append(entry)
        length += len(line)
    return entries, length
