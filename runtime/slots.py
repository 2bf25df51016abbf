"""Dense slot pools: one MLX array ``[slots, *shape]`` per component, written to by the reader.

The arrays are never assigned to and live as long as the pool: the byte views write into their
storage, and MLX sees each write at the next evaluation. Only the compute thread makes a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..io.records import ITEM_BYTES, PAGE, Component, Record
from .device import Device, address_of
from .hugepages import use_large_pages
from .staging import copy_rows

DTYPES = {
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "U32": mx.uint32,
    "I32": mx.int32,
}
"""MLX dtype of each safetensors dtype code that a pool can hold."""


class SlotPool:
    """The slots of one MoE layer.

    Args:
        record: of the layer.
        slots: at least 1.
        device: keeps the pool in its memory; None where memory is shared.

    Attributes:
        arrays: component name -> array ``[slots, *component.shape]`` of the pooled dtype. Each
            starts at a page boundary, so that direct I/O can write whole rows.
        widths: bytes of each row of a slot.
        nbytes: bytes of all arrays.
    """

    def __init__(self, record: Record, slots: int, device: Device | None = None) -> None:
        self.slots = slots
        self.arrays: dict[str, mx.array] = {}
        self._views: list[memoryview] = []
        self.widths = [component.pooled_bytes for component in record.components]
        for component in record.components:
            array, view = _allocate(component, slots, device)
            self.arrays[component.name] = array
            self._views.append(view)
        self._begins = [
            (address_of(view), width) for view, width in zip(self._views, self.widths, strict=True)
        ]
        self.nbytes = slots * record.pooled_bytes

    def release(self) -> None:
        """Let the memory go; no read and no evaluation may use it any more."""
        self.arrays.clear()
        self._views.clear()
        self._begins.clear()

    def take_rows(self, other: SlotPool, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows of another pool of the same layer.

        Args:
            other: nobody writes into it meanwhile.
            moves: (slot of the other pool, slot of this one).
        """
        for old, new in moves:
            copy_rows(other.rows(old), self.rows(new))

    def rows(self, slot: int) -> list[memoryview]:
        """Writable byte views of one slot, one per component."""
        return [
            view[slot * width : (slot + 1) * width]
            for view, width in zip(self._views, self.widths, strict=True)
        ]

    def addresses(self, slot: int) -> list[int]:
        """Where the rows of one slot begin."""
        return [address + slot * width for address, width in self._begins]


def _allocate(
    component: Component, slots: int, device: Device | None
) -> tuple[mx.array, memoryview]:
    dtype = DTYPES[component.pooled]
    item = ITEM_BYTES[component.pooled]
    count = slots * component.items
    # On the CPU stream: on CUDA this gives managed memory at once instead of moving it later.
    base = mx.zeros((count + PAGE // item,), dtype, stream=mx.cpu)
    mx.eval(base)
    storage = _bytes(base)
    skip = -address_of(storage) % PAGE
    pool = base[skip // item : skip // item + count].reshape(slots, *component.shape)
    mx.eval(pool)
    if count and address_of(_bytes(pool)) != address_of(storage) + skip:
        raise RuntimeError(f"MLX copied the slot pool of {component.name} instead of aliasing it")
    if mx.default_device() == mx.cpu:  # a GPU's driver has pages of its own
        use_large_pages(address_of(storage), storage.nbytes)
    if device is not None:
        device.prefer(address_of(storage), storage.nbytes)
    return pool, storage[skip : skip + count * item]


def _bytes(array: Any) -> memoryview:
    """The writable storage of an evaluated array."""
    return memoryview(array).cast("B")
