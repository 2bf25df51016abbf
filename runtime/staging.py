"""Memory beside the pools for experts that were read ahead: copied into a slot on demand."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..io.queue import Key
from ..io.records import Record, whole_pages


class Staging:
    """Room for some records, the oldest given up first. Pure books; the caller locks.

    Args:
        records: of the streamed layers; a place holds the largest of them.
        nbytes: of the whole area.
    """

    def __init__(self, records: Sequence[Record], nbytes: int) -> None:
        self._widths = [[c.pooled_bytes for c in record.components] for record in records]
        # Of whole pages, so that direct reads may go here too.
        size = whole_pages(max((record.pooled_bytes for record in records), default=1))
        self.places = nbytes // size
        memory = memoryview(mmap.mmap(-1, max(self.places * size, 1)))
        self._memory = [memory[i * size : (i + 1) * size] for i in range(self.places)]
        self._free = list(range(self.places))
        self._ready: OrderedDict[Key, int] = OrderedDict()
        self._filling: dict[Key, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._ready

    def filling(self, key: Key) -> bool:
        """Whether a guess is being read into a place."""
        return key in self._filling

    def begin(self, key: Key) -> tuple[int | None, Key | None]:
        """A place for a guess (None: all are being filled), and the guess that was given up."""
        lost: Key | None = None
        if self._free:
            place = self._free.pop()
        elif self._ready:
            lost, place = self._ready.popitem(last=False)
        else:
            return None, None
        self._filling[key] = place
        return place, lost

    def end(self, key: Key, *, ready: bool) -> None:
        """The place has been filled, or not."""
        place = self._filling.pop(key)
        if ready:
            self._ready[key] = place
        else:
            self._free.append(place)

    def lose(self, key: Key) -> int:
        """The read of a guess was given up but may still write; ``put_back`` frees its place."""
        return self._filling.pop(key)

    def take(self, key: Key) -> int | None:
        """The place of a guess that is now copied into a slot; ``put_back`` frees it."""
        return self._ready.pop(key, None)

    def put_back(self, place: int) -> None:
        """Nothing reads or writes there any more."""
        self._free.append(place)

    def rows(self, group: int, place: int) -> list[memoryview]:
        """Views of a place, one per component of the layer's record."""
        memory = self._memory[place]
        rows, at = [], 0
        for width in self._widths[group]:
            rows.append(memory[at : at + width])
            at += width
        return rows


def copy_rows(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy a record; other threads run meanwhile."""
    for old, new in zip(source, target, strict=True):
        np.copyto(np.frombuffer(new, np.uint8), np.frombuffer(old, np.uint8))
