"""Experts for a GPU with memory of its own: read into host memory, then copied to the slot.

On CUDA, MLX keeps slot pools in managed memory. Written in place, as unified memory is, each page
of a slot moves to the host when a read begins and back when a kernel first touches it: 0.65 ms of
the evaluation for a record of 2.65 MB (H200, docs/bench). So the pools are kept on the device, and
each lane copies there what it has read. The transfer of such a record takes the link 0.06 ms. To
that come, for each of its three jobs, the calls that start the copies and wait for them; what
Python adds is 3 us a job (measured with a driver that does nothing), not counting the driver's own
time.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import mlx.core as mx

from ..io.records import JOB_BYTES, PAGE, Piece, whole_pages
from .cuda import Copy, first_device

logger = logging.getLogger("moestream")


class Device(Protocol):
    """What is needed of a driver. Any thread.

    What it refuses is an OSError whose text says what to do.
    """

    def prefer(self, address: int, nbytes: int) -> None:
        """Keep this managed memory on the device, and bring it there; a hint."""

    def borrow(self, nbytes: int) -> memoryview:
        """Host memory that the device reads fast, of at least this size, at a page boundary."""

    def give_back(self, memory: memoryview) -> None:
        """Nothing uses this borrowed memory any more."""

    def copy(self, pairs: Sequence[Copy], *, pinned: bool = True) -> None:
        """Copy from host memory; has ended when it returns or raises.

        Args:
            pairs: none of them empty.
            pinned: all sources are borrowed memory.
        """


class _Room:
    """Host memory of one lane; given back when the lane's thread has ended.

    A lane that hangs keeps it, so that nobody else uses what its read may still write to.

    Args:
        device: takes it back.
        memory: borrowed from there.
    """

    def __init__(self, device: Device, memory: memoryview) -> None:
        self._device = device
        self.memory = memory
        self.address = address_of(memory)
        self.last = 0  # where what was asked for last begins
        self.used = 0
        self.pairs: list[Copy] = []

    def __del__(self) -> None:
        self._device.give_back(self.memory)


class DevicePassage:
    """How what lanes read gets into slots that lie on a device.

    Args:
        device: copies.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lane = threading.local()

    def into(self, addresses: Sequence[int]) -> SlotPassage:
        """The way to the slot whose rows begin there, for the calling lane."""
        return SlotPassage(self, addresses)

    def room(self) -> _Room | None:
        """What the calling lane has."""
        return getattr(self._lane, "room", None)

    def enlarge(self, nbytes: int) -> _Room:
        """Give the calling lane that much; what it had has been flushed."""
        # A job's parts, each padded to a page, or a part that cannot be cut.
        size = max(whole_pages(nbytes), JOB_BYTES + 16 * PAGE)
        room = self._lane.room = _Room(self.device, self.device.borrow(size))
        return room

    def copy(self, source: int, rows: Sequence[int], widths: Sequence[int]) -> None:
        """Copy a record from host memory into a slot.

        Args:
            source: where it begins; its components lie there one behind the other.
            rows: where each of them goes.
            widths: bytes of each.

        Raises:
            OSError: the device refused; the rows hold anything.
        """
        begins = accumulate(widths, initial=source)
        ways = zip(rows, begins, widths, strict=False)  # one begin too many: the end
        self.device.copy([way for way in ways if way[2]], pinned=False)


class SlotPassage:
    """The way into one slot, for one job. Implements ``io.reader.Passage``.

    Args:
        passage: has the memory of the calling lane.
        addresses: where the rows of the slot begin.
    """

    __slots__ = ("_addresses", "_passage", "_room")

    def __init__(self, passage: DevicePassage, addresses: Sequence[int]) -> None:
        self._passage = passage
        self._addresses = addresses
        self._room = passage.room()

    def room(self, nbytes: int) -> memoryview:
        """Host memory of the lane, at a page boundary, until the next ``flush`` or ``drop``.

        Raises:
            OSError: the device refused it, or a copy of what had filled it before.
        """
        room = self._room
        if room is not None and room.used + nbytes > len(room.memory):
            self.flush()
        if room is None or nbytes > len(room.memory):
            room = self._room = self._passage.enlarge(nbytes)
        begin = room.last = room.used
        room.used += whole_pages(nbytes)
        return room.memory[begin : begin + nbytes]

    def send(self, pieces: Sequence[Piece]) -> None:
        """Distribute what ``room`` gave last; it is there after the next ``flush``.

        Neighbours are not joined: those of a part go to different rows, and two parts of a row,
        each more than half a job, are never in one job.
        """
        room = self._room
        assert room is not None
        addresses, pairs, at = self._addresses, room.pairs, room.address + room.last
        for piece in pieces:
            begin, nbytes = piece.begin, piece.end - piece.begin
            pairs.append((addresses[piece.member] + begin, at, nbytes))
            at += nbytes

    def flush(self) -> None:
        """Copy what was sent.

        Raises:
            OSError: the device refused; the rows hold anything, and nothing is left to be copied.
        """
        pairs = self.drop()
        if pairs:
            self._passage.device.copy(pairs)

    def drop(self) -> Sequence[Copy]:
        """Forget what was sent; returns it."""
        room = self._room
        if room is None:
            return ()
        pairs, room.pairs, room.used = room.pairs, [], 0
        return pairs


def find_passage() -> DevicePassage | None:
    """The passage to the GPU that MLX computes on; None where memory is shared or there is none."""
    if mx.default_device().type != mx.gpu or not mx.cuda.is_available():
        return None
    try:
        return DevicePassage(first_device())
    except OSError as error:
        logger.warning("experts are written to the GPU's memory page by page: %s", error)
        return None


def address_of(view: memoryview) -> int:
    """Where a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0
