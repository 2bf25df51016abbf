"""Cold and warm page cache, and what the drive gives at the size of a record."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...io.drive import measure
from ...io.records import PAGE, Record
from .padding import Throttle

BLOCK = 8 << 20
PROBES = 128
"""Pages that are looked for in the page cache (arbitrary)."""

WARM_ENOUGH = 0.95

SECONDS = 0.7
"""Each measurement of the drive (arbitrary: doctor takes 0.4 for each of many)."""


def record_files(records: Iterable[Record]) -> list[Path]:
    """The files that hold the experts."""
    return sorted({component.path for record in records for component in record.components})


def buffered_files(records: Iterable[Record]) -> list[Path]:
    """Those of them that are read, in part, through the page cache whatever is asked for."""
    return sorted({run.path for record in records for run in record.runs if not run.direct})


def direct_share(records: Sequence[Record]) -> float:
    """Share of the experts' bytes that direct I/O can read."""
    runs = [run for record in records for run in record.runs]
    return sum(run.nbytes for run in runs if run.direct) / sum(run.nbytes for run in runs)


def drop(paths: Iterable[Path]) -> bool:
    """Drop files from the page cache; False where the system offers no way."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def touch(paths: Iterable[Path]) -> None:
    """Read every byte through the page cache."""
    buffer = bytearray(BLOCK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_share(paths: Sequence[Path]) -> float | None:
    """Share of the files that is in the page cache, by a sample; None where nobody can tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    sizes = [path.stat().st_size for path in paths]
    numbers, there = random.Random(0), 0
    for path in numbers.choices(paths, sizes, k=PROBES):
        offset = numbers.randrange(max(path.stat().st_size // PAGE, 1)) * PAGE
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Else each question would have the pages around it read.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            there += os.preadv(descriptor, [bytearray(PAGE)], offset, os.RWF_NOWAIT) > 0
        except BlockingIOError:  # would have to wait for the drive
            pass
        except OSError:  # no such question on this file system
            return None
        finally:
            os.close(descriptor)
    return there / PROBES


def drive_bandwidth(records: Sequence[Record], *, lanes: int, throttle: float | None) -> float:
    """Bytes per second of the drive, as ``moestream doctor`` measures it, at the size of a record.

    Args:
        records: the largest of their files is read.
        lanes: reads in flight at once.
        throttle: bytes per second that the drive gives at most.
    """
    path = max(record_files(records), key=lambda path: path.stat().st_size)
    size = min(_read_size(records), path.stat().st_size // PAGE * PAGE)
    depth = max(min(lanes, path.stat().st_size // size), 1)
    preadv = os.preadv if throttle is None else Throttle(throttle)
    report = measure(path, sizes=(size,), depths=(depth,), seconds_per_cell=SECONDS, preadv=preadv)
    modes = {cell.mode: cell.bandwidth for cell in report.cells}
    if not report.cache_dropped and len(modes) > 1:
        del modes["buffered"]  # it shows memory
    return max(modes.values())


def cache_bandwidth(records: Sequence[Record], *, lanes: int, throttle: float | None) -> float:
    """The same for files that are in the page cache, read through it."""
    path = max(record_files(records), key=lambda path: path.stat().st_size)
    length = path.stat().st_size
    size = min(_read_size(records), length)
    preadv = os.preadv if throttle is None else Throttle(throttle)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _read_at_random(
            lambda buffer, offset: preadv(descriptor, [buffer], offset),
            blocks=length // size,
            size=size,
            lanes=lanes,
            seconds=SECONDS,
        )
    finally:
        os.close(descriptor)


def _read_size(records: Sequence[Record]) -> int:
    mean = sum(record.stored_bytes for record in records) // len(records)
    return max(mean // PAGE * PAGE, PAGE)


def _read_at_random(
    read: Callable[[memoryview, int], int], *, blocks: int, size: int, lanes: int, seconds: float
) -> float:
    begun = time.perf_counter()
    end = begun + seconds

    def lane(number: int) -> int:
        numbers, buffer, done = random.Random(number), memoryview(bytearray(size)), 0
        while not done or time.perf_counter() < end:
            done += read(buffer, numbers.randrange(blocks) * size)
        return done

    with ThreadPoolExecutor(lanes, thread_name_prefix="moestream-bench") as pool:
        total = sum(pool.map(lane, range(lanes)))
    return total / (time.perf_counter() - begun)
