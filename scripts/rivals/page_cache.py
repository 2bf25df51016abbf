"""The page cache: dropping files from it, reading them in; the kernel's counters of reads."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BLOCK = 8 << 20


@dataclass(frozen=True, slots=True)
class Counters:
    """Of this process since its start.

    Attributes:
        device_bytes: fetched from the drive, page cache misses and direct reads alike; None where
            the system does not say.
        major_faults: page faults that had to wait for the drive.
    """

    device_bytes: int | None
    major_faults: int


def counters(process: Path = Path("/proc/self/io")) -> Counters:
    """Read the counters."""
    nbytes = None
    if process.exists():
        fields = dict(line.split(": ") for line in process.read_text().splitlines())
        nbytes = int(fields["read_bytes"])
    return Counters(nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_majflt)


def drop(files: Iterable[Path]) -> bool:
    """Drop files from the page cache; False where the system offers no way.

    Pages that a process has mapped stay, so this comes before a model is mapped.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # what is not written yet cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def read_in(files: Iterable[Path]) -> None:
    """Read files once, so that they are in the page cache where it has room for them."""
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(BLOCK):
                pass


def readahead_bytes(file: Path, devices: Path = Path("/sys/class/bdi")) -> int | None:
    """What the kernel reads around a page fault or ahead of a buffered read; None if unknown."""
    number = file.stat().st_dev
    setting = devices / f"{os.major(number)}:{os.minor(number)}" / "read_ahead_kb"
    return int(setting.read_text()) * 1024 if setting.exists() else None
