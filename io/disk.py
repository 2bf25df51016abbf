"""Writing files so that a kill or a full drive at any moment leaves nothing that looks whole."""

from __future__ import annotations

import fcntl
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self


class Disk:
    """The system calls that change a drive; tests put faults here."""

    def create(self, path: Path) -> int:
        """Open an empty file for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(path, flags, 0o666)

    def append(self, path: Path) -> int:
        """Open a file for writing at its end."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of the data; returns how much."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Wait until what was written is on the drive."""
        if sys.platform == "darwin":  # whose fsync leaves it in the drive's own memory
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name, in one step."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the drive."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)


class FileWriter:
    """Writes one file from front to back.

    Attributes:
        nbytes: written so far.
        checksums: CRC-32 of the blocks written so far, the last one perhaps unfinished; empty where
            no ``block`` was given.
    """

    def __init__(self, disk: Disk, path: Path, *, block: int | None = None) -> None:
        self._disk = disk
        self._block = block
        self._descriptor = disk.create(path)
        self.nbytes = 0
        self.checksums: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._disk.sync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of the data, which is plain bytes.

        Raises:
            OSError: the drive is full or fails; the file then ends anywhere.
        """
        data = memoryview(data)
        if self._block is not None:
            self._count(data, self._block)
        self.nbytes += len(data)
        write_all(self._disk, self._descriptor, data)

    def _count(self, data: memoryview, block: int) -> None:
        at, end = self.nbytes, self.nbytes + len(data)
        while at < end:
            if at % block == 0:
                self.checksums.append(0)
            stop = min((at // block + 1) * block, end)
            piece = data[at - self.nbytes : stop - self.nbytes]
            self.checksums[-1] = zlib.crc32(piece, self.checksums[-1])
            at = stop


def write_all(disk: Disk, descriptor: int, data: memoryview) -> None:
    """Write all of the data, however often the system takes less."""
    while len(data):
        data = data[disk.write(descriptor, data) :]


def write_file(
    disk: Disk, path: Path, chunks: Iterable[bytes | memoryview], *, block: int | None = None
) -> FileWriter:
    """Write a whole file; returns the closed writer with its size and checksums."""
    with FileWriter(disk, path, block=block) as file:
        for chunk in chunks:
            file.add(chunk)
    return file
