"""Memory beside the pools for experts that were read ahead: copied into a slot on demand."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..io.queue import Key
from ..io.records import Record, whole_pages
from .device import address_of
from .residency import check


class Staging:
    """Room for some records, the oldest given up first. Pure books; the caller locks.

    A guess that is ``kept`` is given up for no other, only by ``give_up``.

    Args:
        records: of the streamed layers; a place holds the largest of them.
        nbytes: of the whole area.
    """

    def __init__(self, records: Sequence[Record], nbytes: int) -> None:
        self._widths = [[c.pooled_bytes for c in record.components] for record in records]
        size = place_bytes(max((record.pooled_bytes for record in records), default=0))
        self.places = nbytes // size
        memory = memoryview(mmap.mmap(-1, max(self.places * size, 1)))
        self._address, self._size = address_of(memory), size
        self._memory = [memory[i * size : (i + 1) * size] for i in range(self.places)]
        self._free = list(range(self.places))
        self._ready: OrderedDict[Key, int] = OrderedDict()
        self._filling: dict[Key, int] = {}
        self._kept: set[Key] = set()
        self._unwanted: set[Key] = set()  # given up while they are filled

    def __contains__(self, key: object) -> bool:
        return key in self._ready

    def filling(self, key: Key) -> bool:
        """Whether a guess is being read into a place."""
        return key in self._filling

    @property
    def kept(self) -> tuple[Key, ...]:
        """The guesses that are kept, ready or being filled."""
        return tuple(self._kept)

    @property
    def room(self) -> int:
        """How many guesses more could be kept."""
        return len(self._free) + sum(key not in self._kept for key in self._ready)

    def begin(self, key: Key, *, keep: bool = False) -> tuple[int | None, Key | None]:
        """A place for a guess (None: there is none), and the guess that was given up for it."""
        lost: Key | None = None
        if self._free:
            place = self._free.pop()
        else:
            lost = next((old for old in self._ready if old not in self._kept), None)
            if lost is None:
                return None, None
            place = self._ready.pop(lost)
        self._filling[key] = place
        if keep:
            self._kept.add(key)
        return place, lost

    def end(self, key: Key, *, ready: bool) -> None:
        """The place has been filled, or not."""
        place = self._filling.pop(key)
        if ready and key not in self._unwanted:
            self._ready[key] = place
        else:
            self._free.append(place)
            self._kept.discard(key)
        self._unwanted.discard(key)

    def lose(self, key: Key) -> int:
        """The read of a guess was given up but may still write; ``put_back`` frees its place."""
        self._kept.discard(key)
        self._unwanted.discard(key)
        return self._filling.pop(key)

    def take(self, key: Key) -> int | None:
        """The place of a guess that is now copied into a slot; ``put_back`` frees it."""
        place = self._ready.pop(key, None)
        if place is not None:
            self._kept.discard(key)
        return place

    def give_up(self, key: Key) -> None:
        """Nobody wants a kept guess any more; while it is being filled its place is not free."""
        self._kept.discard(key)
        if key in self._filling:
            self._unwanted.add(key)
        else:
            self._free.append(self._ready.pop(key))

    def put_back(self, place: int) -> None:
        """Nothing reads or writes there any more."""
        self._free.append(place)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise IntegrityError unless the books balance.

        Args:
            idle: also demand that nothing is kept.
        """
        held = [*self._free, *self._ready.values(), *self._filling.values()]
        check(len(set(held)) == len(held) <= self.places, "a staging place has two owners")
        check(not self._ready.keys() & self._filling.keys(), "a guess is staged twice")
        check(self._kept <= self._ready.keys() | self._filling.keys(), "nothing is kept")
        check(self._unwanted <= self._filling.keys() - self._kept, "what was given up is kept")
        check(not (idle and self._kept), f"{len(self._kept)} guesses are kept while idle")

    def rows(self, group: int, place: int) -> list[memoryview]:
        """Views of a place, one per component of the layer's record."""
        memory = self._memory[place]
        rows, at = [], 0
        for width in self._widths[group]:
            rows.append(memory[at : at + width])
            at += width
        return rows

    def address(self, place: int) -> int:
        """Where a place begins; what ``rows`` views lies there one behind the other."""
        return self._address + place * self._size


def copy_rows(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy a record; other threads run meanwhile."""
    for old, new in zip(source, target, strict=True):
        np.copyto(np.frombuffer(new, np.uint8), np.frombuffer(old, np.uint8))


def place_bytes(pooled_bytes: int) -> int:
    """Bytes of a place for a record: whole pages, so that direct reads may go there, too."""
    return whole_pages(max(pooled_bytes, 1))
