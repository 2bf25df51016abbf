"""Measures a drive the way moestream uses it: random aligned reads, many lanes at a time.

`measure` fills a table of bandwidths by mode (direct or buffered), size of a read and depth (how
many reads are in flight), from which `DriveReport.choice` picks the mode and the number of lanes.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from typing import Literal

from .errors import MoestreamError

if sys.platform == "darwin":
    import fcntl

Mode = Literal["direct", "buffered"]
Progress = Callable[[int, int], None]
Preadv = Callable[[int, Sequence[memoryview], int], int]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ALIGNMENT = 4096  # of offsets, sizes and buffers: enough for direct I/O on every drive we know of
TYPICAL_READ = 2 * MIB  # the size at which mode and lanes are chosen: about one expert
GOOD_ENOUGH = 0.95  # a bandwidth within 5 % of the best counts as the best
SPARE = 256 * MIB  # left free on a drive, arbitrary: a full system drive hurts more than no figure
WRITE_CHUNK = 32 * MIB
PROBES = 16  # offsets looked at to see whether the page cache was really dropped


class DriveError(MoestreamError):
    """A drive could not be measured."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: reads of `size` bytes, `depth` of them in flight."""

    mode: Mode
    size: int
    depth: int
    bytes_read: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bytes_read / self.seconds


@dataclass(frozen=True, slots=True)
class Choice:
    """How moestream would read from this drive, and why."""

    mode: Mode
    lanes: int
    bandwidth: float
    why: str


@dataclass(frozen=True, slots=True)
class DriveReport:
    """What was measured.

    Attributes:
        path: the directory or file that was asked for.
        file_bytes: the length of the file that was read.
        cells: every measurement.
        direct_refused: why there are no direct reads, or None.
        cache_dropped: whether buffered reads came from the drive; otherwise they show memory.
        skipped_sizes: sizes of which the file has too few blocks to keep all lanes busy.
    """

    path: Path
    file_bytes: int
    cells: tuple[Cell, ...]
    direct_refused: str | None
    cache_dropped: bool
    skipped_sizes: tuple[int, ...] = ()

    def bandwidth(self, mode: Mode, size: int, depth: int) -> float:
        """Bytes per second of one cell; KeyError if it was not measured."""
        for cell in self.cells:
            if (cell.mode, cell.size, cell.depth) == (mode, size, depth):
                return cell.bandwidth
        raise KeyError((mode, size, depth))

    @property
    def choice(self) -> Choice:
        direct, buffered = self._fewest_lanes("direct"), self._fewest_lanes("buffered")
        if direct is None:
            assert buffered is not None, "a report has at least one cell"
            why = f"direct reads are not possible ({self.direct_refused or 'not measured'})"
            if not self.cache_dropped:
                why += " and the page cache could not be dropped: this may be the speed of memory"
            return _choose(buffered, why)
        if buffered is None or not self.cache_dropped:
            return _choose(direct, "the page cache could not be dropped to measure buffered reads")
        if direct.bandwidth >= GOOD_ENOUGH * buffered.bandwidth:
            return _choose(direct, f"buffered reads, which cost memory, reach {_rate(buffered)}")
        return _choose(buffered, f"direct reads reach only {_rate(direct)}")

    def _fewest_lanes(self, mode: Mode) -> Cell | None:
        """Of a mode's cells at the typical size within 5 % of the best, the shallowest."""
        sizes = {cell.size for cell in self.cells if cell.mode == mode}
        if not sizes:
            return None
        size = max((size for size in sizes if size <= TYPICAL_READ), default=min(sizes))
        cells = [cell for cell in self.cells if (cell.mode, cell.size) == (mode, size)]
        best = max(cell.bandwidth for cell in cells)
        good = [cell for cell in cells if cell.bandwidth >= GOOD_ENOUGH * best]
        return min(good, key=lambda cell: cell.depth)

    def to_json(self) -> dict[str, object]:
        """The report as plain values, ready for `json.dumps`."""
        return {
            "path": str(self.path),
            "file_bytes": self.file_bytes,
            "direct_refused": self.direct_refused,
            "cache_dropped": self.cache_dropped,
            "skipped_sizes": list(self.skipped_sizes),
            "cells": [{**asdict(cell), "bandwidth": cell.bandwidth} for cell in self.cells],
            "choice": asdict(self.choice),
        }


def measure(
    directory_or_file: Path,
    *,
    sizes: Sequence[int] = (64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB),
    depths: Sequence[int] = (1, 2, 4, 8, 16),
    seconds_per_cell: float = 0.4,
    file_bytes: int = GIB,
    progress: Progress | None = None,
    preadv: Preadv = os.preadv,
) -> DriveReport:
    """Read at random and time it; blocks for about 20 seconds with the defaults.

    Args:
        directory_or_file: a directory gets a temporary file of incompressible bytes, which has no
            name while it is used and so is gone afterwards, however this ends. A file is only
            read; its pages are dropped from the page cache.
        sizes: bytes of a read, multiples of 4096.
        depths: numbers of reads in flight.
        seconds_per_cell: how long each combination is measured. A buffered one ends sooner when
            it has read everything once: the second time would come from memory.
        file_bytes: length of the temporary file, and the most that a pass over a file reads.
        progress: called with steps done and steps in all.
        preadv: stands in for `os.preadv` in fault tests.

    Raises:
        DriveError: there is nothing to measure, too little space, or the drive fails.
    """
    _check_arguments(sizes, depths, file_bytes)
    scratch = directory_or_file.is_dir()
    steps = _Steps(progress, total=-(-file_bytes // WRITE_CHUNK) if scratch else 0)
    opened = _temporary_file if scratch else _existing_file
    with opened(directory_or_file, file_bytes, steps) as file:
        file.try_direct(preadv)
        usable = tuple(size for size in sizes if file.length >= size * max(depths))
        if not usable:
            raise DriveError(
                f"{directory_or_file} has {_amount(file.length)}; measuring takes a file of "
                f"{_amount(min(sizes) * max(depths))} or more"
            )
        modes: tuple[Mode, ...] = ("buffered",) if file.direct is None else ("direct", "buffered")
        dropped = _really_drops_cache(file)
        steps.total += len(modes) * len(usable) * len(depths)
        cells = []
        with _Lanes(max(depths), max(usable), preadv) as lanes:
            for mode in modes:
                for size in usable:
                    for depth in depths:
                        cells.append(
                            lanes.run(file, mode, size, depth, seconds_per_cell, file_bytes)
                        )
                        steps.done()
        return DriveReport(
            path=directory_or_file,
            file_bytes=file.length,
            cells=tuple(cells),
            direct_refused=file.refused,
            cache_dropped=dropped,
            skipped_sizes=tuple(size for size in sizes if size not in usable),
        )


class _Steps:
    """Counts steps for a progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.total = total
        self._done = 0
        self._progress = progress

    def done(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self.total)


class _File:
    """A file opened for buffered reads and, where that is allowed, for direct ones."""

    def __init__(self, path: Path, asked: Path) -> None:
        self.asked = asked  # named in errors: a temporary file means nothing to anybody
        self.buffered = os.open(path, os.O_RDONLY)
        self.direct: int | None = None
        self.refused: str | None = None
        try:
            self.direct = _open_direct(path)
        except OSError as error:
            self.refused = error.strerror or str(error)

    @property
    def length(self) -> int:
        return os.fstat(self.buffered).st_size

    def descriptor(self, mode: Mode) -> int:
        descriptor = self.direct if mode == "direct" else self.buffered
        assert descriptor is not None
        return descriptor

    def try_direct(self, preadv: Preadv) -> None:
        """Read once: some file systems take the flag and refuse the reads."""
        if self.direct is None or self.length < ALIGNMENT:
            return
        try:
            preadv(self.direct, [_buffer(ALIGNMENT)], 0)
        except OSError as error:
            self.refused = error.strerror or str(error)
            os.close(self.direct)
            self.direct = None

    def close(self) -> None:
        os.close(self.buffered)
        if self.direct is not None:
            os.close(self.direct)


@contextmanager
def _existing_file(path: Path, _file_bytes: int, _steps: _Steps) -> Iterator[_File]:
    try:
        file = _File(path, path)
    except OSError as error:
        raise DriveError(f"cannot open {path}: {error.strerror}") from error
    try:
        yield file
    finally:
        file.close()


@contextmanager
def _temporary_file(directory: Path, file_bytes: int, steps: _Steps) -> Iterator[_File]:
    free = shutil.disk_usage(directory).free
    if free < file_bytes + SPARE:
        raise DriveError(
            f"{directory} has {_amount(free)} free; measuring takes {_amount(file_bytes + SPARE)}. "
            "Free some space, or measure with a large file that is there already"
        )
    try:
        writer, name = tempfile.mkstemp(prefix=".moestream-drive-", dir=directory)
    except OSError as error:
        raise DriveError(f"cannot write to {directory}: {error.strerror}") from error
    try:
        try:
            file = _File(Path(name), directory)
        finally:
            os.unlink(name)
        try:
            _fill(writer, file_bytes, directory, steps)
            yield file
        finally:
            file.close()
    finally:
        os.close(writer)


def _fill(descriptor: int, count: int, directory: Path, steps: _Steps) -> None:
    """Write random bytes through to the drive."""
    try:
        _bypass_cache(descriptor)
        while count:
            chunk = memoryview(os.urandom(min(count, WRITE_CHUNK)))
            count -= len(chunk)
            while chunk:
                chunk = chunk[os.write(descriptor, chunk) :]
            steps.done()
        os.fsync(descriptor)  # dirty pages cannot be dropped from the cache
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DriveError(f"the drive of {directory} is full; free some space") from error
        raise DriveError(f"cannot write to {directory}: {error.strerror}") from error


class _Lanes:
    """Threads that do nothing but `preadv`, each into a buffer of its own."""

    def __init__(self, count: int, size: int, preadv: Preadv) -> None:
        self._preadv = preadv
        self._buffers = [_buffer(size) for _ in range(count)]
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="moestream-drive")

    def __enter__(self) -> _Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # also after an error or Ctrl-C: no lane starts another read
        self._pool.shutdown()

    def run(
        self, file: _File, mode: Mode, size: int, depth: int, seconds: float, pass_bytes: int
    ) -> Cell:
        if mode == "buffered":
            _drop_cache(file.buffered)
        offsets = _Offsets(file.length // size, size, pass_bytes // size, once=mode == "buffered")
        descriptor = file.descriptor(mode)
        start = time.perf_counter()
        lanes = [
            self._pool.submit(self._read, descriptor, buffer[:size], offsets, start + seconds)
            for buffer in self._buffers[:depth]
        ]
        try:
            results = [lane.result() for lane in lanes]
        except OSError as error:
            raise DriveError(f"cannot read {file.asked}: {error.strerror}") from error
        end = max(end for _, end in results)
        return Cell(mode, size, depth, sum(count for count, _ in results), end - start)

    def _read(
        self, descriptor: int, buffer: memoryview, offsets: _Offsets, deadline: float
    ) -> tuple[int, float]:
        """Read until the deadline; returns the bytes and the time of the last one."""
        total, now = 0, time.perf_counter()
        while not self._stop.is_set() and (offset := offsets.take()) is not None:
            count = self._preadv(descriptor, [buffer], offset)
            if count == 0:
                raise DriveError(f"the file became shorter while it was read, at offset {offset}")
            total, now = total + count, time.perf_counter()
            if now >= deadline:
                break
        return total, now


class _Offsets:
    """Deals out the blocks of a file in random order, none twice in a pass; thread-safe."""

    def __init__(self, blocks: int, size: int, per_pass: int, *, once: bool) -> None:
        self._blocks = range(blocks)
        self._size = size
        self._per_pass = max(1, min(blocks, per_pass))
        self._once = once
        self._lock = threading.Lock()
        self._left = self._shuffled()

    def _shuffled(self) -> list[int]:
        return random.sample(self._blocks, self._per_pass)

    def take(self) -> int | None:
        """The next offset; None when a single pass is over."""
        with self._lock:
            if not self._left:
                if self._once:
                    return None
                self._left = self._shuffled()
            return self._left.pop() * self._size


def _check_arguments(sizes: Sequence[int], depths: Sequence[int], file_bytes: int) -> None:
    if not sizes or any(size <= 0 or size % ALIGNMENT for size in sizes):
        raise ValueError(f"sizes must be multiples of {ALIGNMENT}, not {tuple(sizes)}")
    if not depths or min(depths) < 1:
        raise ValueError(f"depths must be 1 or more, not {tuple(depths)}")
    if file_bytes < min(sizes) * max(depths):
        raise ValueError(f"file_bytes must hold {max(depths)} reads of {min(sizes)} bytes")


def _open_direct(path: Path) -> int:
    if sys.platform == "linux":
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not _bypass_cache(descriptor):
            raise OSError(errno.ENOTSUP, f"moestream knows no direct I/O on {sys.platform}")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _bypass_cache(descriptor: int) -> bool:
    """On macOS, keep what goes through this descriptor out of the page cache."""
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return True
    return False


def _drop_cache(descriptor: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _really_drops_cache(file: _File) -> bool:
    """Whether pages are gone after `_drop_cache`: tmpfs takes the call and keeps them."""
    if sys.platform != "linux":
        return False
    _drop_cache(file.buffered)
    blocks = file.length // ALIGNMENT
    offsets = [block * ALIGNMENT for block in random.sample(range(blocks), min(blocks, PROBES))]
    cached = 0
    for offset in offsets:
        try:
            os.preadv(file.buffered, [bytearray(ALIGNMENT)], offset, os.RWF_NOWAIT)
            cached += 1
        except BlockingIOError:  # would have to wait for the drive
            pass
        except OSError:  # no such question on this file system: do not claim what we cannot know
            return False
    return cached <= len(offsets) // 4


def _buffer(size: int) -> memoryview:
    """Page-aligned memory, touched so that no page fault is timed."""
    memory = mmap(-1, size)
    memory.write(bytes(size))
    return memoryview(memory)


def _choose(cell: Cell, why: str) -> Choice:
    lanes = "1 lane" if cell.depth == 1 else f"{cell.depth} lanes"
    sentence = (
        f"{cell.mode} reads of {_amount(cell.size)} reach {_rate(cell)} with {lanes}, "
        f"and no other number of lanes gains more than 5 %; {why}"
    )
    return Choice(cell.mode, cell.depth, cell.bandwidth, sentence)


def _rate(cell: Cell) -> str:
    return f"{cell.bandwidth / 1e9:.2f} GB/s"


def _amount(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} bytes"
