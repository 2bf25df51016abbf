"""Blocking reads of expert records straight into slot rows. Runs in the lane threads only."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypedDict

import numpy as np

from .errors import ChecksumMismatch, ReadFailed, ReadTimeout
from .records import Part, Piece, Record, Run

Preadv = Callable[[int, Sequence[memoryview], int], int]


class Passage(Protocol):
    """The way to the rows of one slot that the drive should not write to itself.

    It goes through memory of the calling lane. What is refused on the way is an OSError whose text
    says what to do.
    """

    def room(self, nbytes: int) -> memoryview:
        """Memory at a page boundary, until the next ``flush`` or ``drop``."""

    def send(self, pieces: Sequence[Piece]) -> None:
        """Distribute what ``room`` gave last over these pieces; it is there after ``flush``."""

    def flush(self) -> None:
        """Wait for what was sent; nothing of it is left, also after an error."""

    def drop(self) -> object:
        """Forget what was sent. Never fails."""


class Place(TypedDict):
    """Where a read has failed, as its errors name it."""

    layer: int
    expert: int
    component: str
    path: Path
    offset: int


CHANGED = "its bytes are not those that were packed"


class RecordReader:
    """Reads the record of one expert into the rows of a slot with ``preadv``.

    No byte is copied on the way, except that what has to be widened (16-bit components of a float32
    pool), or is too odd in size for direct I/O, passes through a scratch buffer of the lane. Any
    number of threads may read at once.

    Args:
        records: one per MoE layer; ``read`` addresses them by index.
        direct: use direct I/O for runs whose alignment allows it, buffered reads for the others.
        preadv: stands in for ``os.preadv`` where faults are tried, see ``faults.FaultyDrive``; may
            be exchanged later.
    """

    def __init__(
        self, records: Sequence[Record], *, direct: bool = True, preadv: Preadv = os.preadv
    ) -> None:
        self._records = tuple(records)
        self.preadv = preadv
        self._lane = threading.local()
        self._reading: dict[tuple[int, int, int], Part] = {}  # (group, expert, job) -> at this part
        self._scratch_bytes = max(
            (part.scratch_bytes for r in records for job in r.jobs for part in job), default=0
        )
        self._buffered: dict[Path, int] = {}
        self._direct: dict[Path, int] = {}
        self._descriptors: list[int] = []
        try:
            for record in records:
                for run in record.runs:
                    self._open(run, direct)
        except BaseException:
            self.close()
            raise

    def _open(self, run: Run, direct: bool) -> None:
        if run.path not in self._buffered:
            descriptor = os.open(run.path, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.append(descriptor)
            self._buffered[run.path] = descriptor
        if direct and run.direct and run.path not in self._direct:
            past_cache = open_direct(run.path)
            if past_cache is not None:
                self._descriptors.append(past_cache)
                self._direct[run.path] = past_cache

    @property
    def direct_files(self) -> frozenset[Path]:
        """Files of which at least some runs are read with direct I/O."""
        return frozenset(self._direct)

    def read(self, group: int, expert: int, rows: Sequence[memoryview]) -> int:
        """Fill the rows of one slot with the bytes of one expert.

        Args:
            group: index of the record (MoE layer).
            expert: index of the expert in its layer.
            rows: one writable byte view per component, each ``pooled_bytes`` long.

        Returns:
            Bytes read from disk.

        Raises:
            ReadFailed: with layer, expert, file and offset; the rows then hold anything.
            ChecksumMismatch: the same for bytes that are not those that were packed.
        """
        jobs = range(len(self._records[group].jobs))
        return sum(self.read_job(group, expert, job, rows) for job in jobs)

    def read_job(
        self,
        group: int,
        expert: int,
        job: int,
        rows: Sequence[memoryview],
        passage: Passage | None = None,
    ) -> int:
        """Fill what one job of ``Record.jobs`` covers; otherwise as ``read``.

        Args:
            group, expert, job: what.
            rows: as for ``read``.
            passage: to the rows; None: the drive writes there.
        """
        record = self._records[group]
        parts = record.jobs[job]
        place = (group, expert, job)
        try:
            for part in parts:
                self._reading[place] = part
                self._read_part(record, part, expert, rows, passage)
            if passage is not None:
                self._flush(passage, group, expert, job)
        except BaseException:
            if passage is not None:
                passage.drop()
            raise
        finally:
            self._reading.pop(place, None)
        return sum(part.nbytes for part in parts)

    def _flush(self, passage: Passage, group: int, expert: int, job: int) -> None:
        try:
            passage.flush()
        except OSError as error:
            raise self.refused(group, expert, job, error) from error

    def refused(self, group: int, expert: int, job: int, error: OSError) -> ReadFailed:
        """The error of a job whose bytes were read and did not get to the slot. Any thread.

        It names the first bytes of the job.

        Args:
            group, expert, job: as for ``read_job``.
            error: says why, and what to do.
        """
        record = self._records[group]
        return self._failure(ReadFailed, record, record.jobs[job][0], expert, _reason(error))

    def timeout(
        self, group: int, expert: int, job: int, seconds: float, *, more: str = ""
    ) -> ReadTimeout:
        """The error of a job that has been waiting for the drive for so long. Any thread.

        Args:
            group, expert, job: as for ``read_job``.
            seconds: how long.
            more: what else is to be said.
        """
        record = self._records[group]
        part = self._reading.get((group, expert, job), record.jobs[job][0])
        return ReadTimeout(**self._place(record, part, expert), seconds=seconds, more=more)

    def warm_job(self, group: int, expert: int, job: int) -> int:
        """Bring what one job covers into the page cache, if the system takes such advice.

        Returns:
            Bytes asked for.
        """
        record = self._records[group]
        parts = record.jobs[job]
        for part in parts:
            offset = record.offset(part, expert)
            if hasattr(os, "posix_fadvise"):
                descriptor = self._buffered[part.run.path]
                os.posix_fadvise(descriptor, offset, part.nbytes, os.POSIX_FADV_WILLNEED)
        return sum(part.nbytes for part in parts)

    def _read_part(
        self,
        record: Record,
        part: Part,
        expert: int,
        rows: Sequence[memoryview],
        passage: Passage | None,
    ) -> None:
        scratch = self._scratch() if part.scratch_bytes else None
        offset = record.offset(part, expert)
        way = passage if part.straight else None
        try:
            if way is None:
                buffers = [rows[piece.member][piece.begin : piece.end] for piece in part.straight]
            else:
                buffers = [way.room(part.nbytes - sum(piece.nbytes for piece in part.staged))]
            if scratch is not None:
                buffers.append(scratch[: part.scratch_bytes])
            self._fill(part, buffers, offset)
        except (OSError, EOFError) as error:
            raise self._failure(ReadFailed, record, part, expert, _reason(error)) from error
        if record.checksums is not None:
            checksum = _checksum(buffers, part.nbytes)
            values = record.checksums.values[expert]
            if checksum != values[part.begin // record.checksums.block]:
                raise self._failure(ChecksumMismatch, record, part, expert, CHANGED)
        if way is not None:
            way.send(part.straight)
        if scratch is not None:
            _distribute(record, part, scratch, rows)

    def _failure(
        self, kind: type[ReadFailed], record: Record, part: Part, expert: int, problem: str
    ) -> ReadFailed:
        return kind(**self._place(record, part, expert), problem=problem)

    @staticmethod
    def _place(record: Record, part: Part, expert: int) -> Place:
        first = (*part.straight, *part.staged)[0].member
        return {
            "layer": record.layer,
            "expert": expert,
            "component": record.components[first].name,
            "path": part.run.path,
            "offset": record.offset(part, expert),
        }

    def _fill(self, part: Part, buffers: list[memoryview], offset: int) -> None:
        run, nbytes = part.run, part.nbytes
        descriptor = self._direct.get(run.path) if run.direct else None
        if descriptor is not None:
            try:
                done = self.preadv(descriptor, buffers, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The drive wants another alignment than we assume: buffered from here on. Other
                # lanes may be inside a read of this descriptor, so it stays open until `close`.
                self._direct.pop(run.path, None)
                done = 0
        else:
            done = self.preadv(self._buffered[run.path], buffers, offset)
        # Short reads are completed through the page cache: a direct remainder is unaligned. The
        # padding may lie behind the end of the file and is not waited for.
        while done < nbytes:
            rest = remaining(buffers, done)
            more = self.preadv(self._buffered[run.path], rest, offset + done)
            if more <= 0:
                raise EOFError(f"the file ends {nbytes - done} bytes early")
            done += more

    def _scratch(self) -> memoryview:
        scratch: memoryview | None = getattr(self._lane, "scratch", None)
        if scratch is None:
            # Of whole pages, which is what direct I/O wants.
            scratch = self._lane.scratch = memoryview(mmap.mmap(-1, self._scratch_bytes))
        return scratch

    def close(self) -> None:
        """Close all descriptors. Idempotent; no read may be running."""
        self._buffered.clear()
        self._direct.clear()
        while self._descriptors:
            os.close(self._descriptors.pop())


def open_direct(path: Path) -> int | None:
    """Open a file for reads past the page cache; None where the file system refuses.

    Raises:
        OSError: no more files can be open at once.
    """
    direct = 0 if sys.platform == "darwin" else os.O_DIRECT
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        except OSError:
            os.close(descriptor)
            return None
    return descriptor


def remaining(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """The parts of ``buffers`` behind the first ``done`` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if done >= len(buffer):
            done -= len(buffer)
        else:
            rest.append(buffer[done:] if done else buffer)
            done = 0
    return rest


def widen_into(source: memoryview, stored: str, row: memoryview) -> None:
    """Widen 16-bit floats to float32, exactly and without allocating.

    Args:
        source: bytes of the stored floats.
        stored: ``BF16`` or ``F16``.
        row: writable bytes of the float32 row, twice as long as ``source``.
    """
    if stored == "BF16":
        bits = np.frombuffer(row, dtype=np.uint32)
        np.copyto(bits, np.frombuffer(source, dtype=np.uint16))
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(np.frombuffer(row, dtype=np.float32), np.frombuffer(source, dtype=np.float16))


def _distribute(
    record: Record, part: Part, scratch: memoryview, rows: Sequence[memoryview]
) -> None:
    """Bring what has passed the scratch buffer into its rows."""
    at = 0
    for piece in part.staged:
        component, row = record.components[piece.member], rows[piece.member]
        source = scratch[at : at + piece.nbytes]
        at += piece.nbytes
        if component.widened:
            widen_into(source, component.stored, row[2 * piece.begin : 2 * piece.end])
        else:
            row[piece.begin : piece.end] = source


def _checksum(buffers: Sequence[memoryview], nbytes: int) -> int:
    """CRC-32 of the first ``nbytes``; other threads run meanwhile."""
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer[:nbytes], value)
        nbytes -= min(len(buffer), nbytes)
    return value


def _reason(error: OSError | EOFError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
