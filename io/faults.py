"""A drive with faults, for tests and for `moestream doctor --chaos`: replaces ``os.preadv``."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self, get_args

from .errors import ChecksumMismatch, ReadFailed, ReadTimeout
from .reader import Preadv

Kind = Literal["error", "cut", "short", "slow", "hang", "corrupt", "vanished"]
"""What can be wrong with a read.

error: the drive reports an error of its own (EIO).
cut: nothing is read, as where a file ends early.
short: half of what was asked for is read, which is allowed; the reader asks for the rest.
slow: it takes longer than usual, but not too long.
hang: the drive does not answer, until it is told to.
corrupt: a byte is not what was written.
vanished: the file has gone, as a network's file system says it (ESTALE).
"""

KINDS: tuple[Kind, ...] = get_args(Kind)

ERRORS: dict[Kind, type[ReadFailed]] = {
    "error": ReadFailed,
    "cut": ReadFailed,
    "hang": ReadTimeout,
    "corrupt": ChecksumMismatch,
    "vanished": ReadFailed,
}
"""What the request gets that needed the read; of the other kinds it notices nothing."""


class FaultyDrive:
    """Reads like ``os.preadv``, but for the reads for which a fault was planned.

    A context manager: at the end of the block nothing hangs any more.

    Args:
        preadv: does the reads.
        delay: seconds that each read takes longer: a slow drive.
        slow: seconds that a slow read takes longer.
    """

    def __init__(
        self, preadv: Preadv = os.preadv, *, delay: float = 0.0, slow: float = 0.05
    ) -> None:
        self.delay = delay
        self._preadv = preadv
        self._slow = slow
        self._lock = threading.Lock()
        self._planned: dict[int, Kind] = {}
        self._answers = threading.Event()
        self._changed = threading.Condition(self._lock)
        self.reads = 0
        self.hanging = 0
        self.happened: list[Kind] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.forget()
        self.answer()

    def plan(self, kind: Kind, at: int = 1, *, count: int = 1) -> None:
        """Let something be wrong with the ``at``-th read from now on, counted from 1.

        Args:
            kind: what.
            at: which read.
            count: that one and those behind it, so many in all.
        """
        with self._lock:
            for number in range(self.reads + at, self.reads + at + count):
                self._planned[number] = kind

    def forget(self) -> None:
        """No more faults of those that were planned."""
        with self._lock:
            self._planned.clear()

    def answer(self) -> None:
        """Let the reads end that hang at this moment; they read what they should."""
        with self._lock:
            self._answers.set()
            self._answers = threading.Event()

    def wait_hanging(self, count: int, timeout: float) -> bool:
        """Wait until so many reads hang; False if they do not come to that in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.hanging >= count, timeout)

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.reads += 1
            kind = self._planned.pop(self.reads, None)
            if kind is not None:
                self.happened.append(kind)
            answers = self._answers
        if self.delay:
            time.sleep(self.delay)
        if kind is None:
            return self._preadv(descriptor, buffers, offset)
        return self._fault(kind, descriptor, buffers, offset, answers)

    def _fault(
        self,
        kind: Kind,
        descriptor: int,
        buffers: Sequence[memoryview],
        offset: int,
        answers: threading.Event,
    ) -> int:
        if kind in ("error", "vanished"):
            code = errno.EIO if kind == "error" else errno.ESTALE
            raise OSError(code, os.strerror(code))
        if kind == "cut":
            # Not just 0: the reader would ask again, and another read may answer before that.
            raise EOFError("the file ends early")
        if kind == "short":
            return self._half(descriptor, buffers, offset)
        if kind == "slow":
            time.sleep(self._slow)
        elif kind == "hang":
            self._hang(answers)
        done = self._preadv(descriptor, buffers, offset)
        if kind == "corrupt" and done:
            buffers[0][0] ^= 0xFF
        return done

    def _half(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        half = sum(map(len, buffers)) // 2
        try:
            return self._preadv(descriptor, _first(buffers, half), offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0  # of a direct read half a page cannot be asked for

    def _hang(self, answers: threading.Event) -> None:
        with self._changed:
            self.hanging += 1
            self._changed.notify_all()
        answers.wait()
        with self._changed:
            self.hanging -= 1
            self._changed.notify_all()


def _first(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first bytes of some buffers, as buffers."""
    first = []
    for buffer in buffers:
        if nbytes:
            first.append(buffer[:nbytes])
            nbytes -= len(first[-1])
    return first
