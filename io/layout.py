"""How the tensors of an expert are laid out in a packed record. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .records import ITEM_BYTES, PAGE, WIDENED, block_bytes, whole_pages


@dataclass(frozen=True, slots=True)
class StoredComponent:
    """One tensor inside a record.

    Attributes:
        name: dotted name inside the expert module.
        dtype: safetensors dtype code.
        shape: for one expert.
        offset: byte offset inside the record.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        count = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of all records of a layer.

    Attributes:
        components: in the order of their offsets, without gaps.
        nbytes: of all components.
        stride: bytes from one record to the next, a multiple of ``PAGE``.
        block: bytes that one checksum covers, a multiple of ``PAGE``.
    """

    components: tuple[StoredComponent, ...]
    nbytes: int
    stride: int
    block: int


def lay_out(components: Iterable[StoredComponent]) -> Layout:
    """Put components one behind the other; their given offsets do not count.

    First comes what direct I/O can always put straight into slots: tensors of whole pages that are
    never widened. Then those of whole pages that a CPU engine widens. Last the others, which pass a
    scratch buffer, the larger items first, so that none lies across an item boundary.
    """
    ordered = sorted(components, key=_rank)
    placed = []
    at = 0
    for component in ordered:
        placed.append(StoredComponent(component.name, component.dtype, component.shape, at))
        at += component.nbytes
    return Layout(tuple(placed), at, max(whole_pages(at), PAGE), block_bytes(at))


def _rank(component: StoredComponent) -> tuple[int, int]:
    if component.nbytes % PAGE:
        return 2, -ITEM_BYTES[component.dtype]
    return int(component.dtype in WIDENED), 0
