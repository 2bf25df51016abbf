"""Experts for a GPU with memory of its own: read into host memory, then copied to the slot.

On CUDA, MLX keeps slot pools in managed memory. Written in place, as unified memory is, each page
of a slot moves to the host when a read begins and back when a kernel first touches it: 0.65 ms of
the evaluation for a record of 2.65 MB (H200, docs/bench). So the pools are kept on the device, and
each lane copies there what it has read: 0.06 ms.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from ..io.records import JOB_BYTES, PAGE, whole_pages
from .cuda import Copy, first_device

logger = logging.getLogger("moestream")


class Device(Protocol):
    """What is needed of a driver. Any thread."""

    def prefer(self, address: int, nbytes: int) -> None:
        """Keep this managed memory on the device, and bring it there; a hint."""

    def borrow(self, nbytes: int) -> memoryview:
        """Host memory that the device reads fast, of at least this size, at a page boundary."""

    def give_back(self, memory: memoryview) -> None:
        """Nothing uses this borrowed memory any more."""

    def copy(self, pairs: Sequence[Copy]) -> None:
        """Copy from host memory; has ended when it returns."""


class _Room:
    """Host memory of one lane; given back when the lane's thread has ended.

    A lane that hangs keeps it, so that nobody else uses what its read may still write to.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.memory = device.borrow(nbytes)
        self.used = 0
        self.pairs: list[Copy] = []

    def __del__(self) -> None:
        self._device.give_back(self.memory)


class DevicePassage:
    """How what lanes read gets into slots that lie on a device. Implements ``io.reader.Passage``.

    Args:
        device: copies.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lane = threading.local()

    def room(self, nbytes: int) -> memoryview:
        """Host memory of the calling lane, at a page boundary, until its next ``flush``."""
        room: _Room | None = getattr(self._lane, "room", None)
        if room is not None and room.used + nbytes > len(room.memory):
            self.flush()
        if room is None or nbytes > len(room.memory):
            # A job's parts, each padded to a page, or a part that cannot be cut.
            size = max(whole_pages(nbytes), JOB_BYTES + 16 * PAGE)
            room = self._lane.room = _Room(self.device, size)
        begin = room.used
        room.used += whole_pages(nbytes)
        return room.memory[begin : begin + nbytes]

    def send(self, source: memoryview, rows: Sequence[memoryview]) -> None:
        """Distribute host memory over pieces of rows; it is there after the next ``flush``."""
        pairs, at = self._lane.room.pairs, address_of(source)
        for row in rows:
            pairs.append((address_of(row), at, len(row)))
            at += len(row)

    def flush(self) -> None:
        """Whatever was sent is there, or has failed, when this returns."""
        room: _Room | None = getattr(self._lane, "room", None)
        if room is None:
            return
        pairs, room.pairs, room.used = room.pairs, [], 0
        if pairs:
            self.device.copy(pairs)

    def copy(self, source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
        """Copy a record from host memory into a slot."""
        ways = zip(source, target, strict=True)
        self.device.copy([(address_of(new), address_of(old), len(new)) for old, new in ways])


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
