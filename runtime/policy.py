"""Which resident expert of a layer is given up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol


class Policy(Protocol):
    """Order of the resident experts of one layer, coldest first. Pure; called under the lock."""

    def used(self, expert: int) -> None:
        """A resident or arriving expert has been routed to."""

    def added(self, expert: int) -> None:
        """The expert has got a slot."""

    def removed(self, expert: int) -> None:
        """The expert has lost its slot."""

    def coldest(self) -> Iterator[int]:
        """Experts that hold a slot, the one to give up first in front."""


PolicyFactory = Callable[[], Policy]


class LeastRecentlyUsed:
    """LRU: the expert whose last use is longest ago goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def used(self, expert: int) -> None:
        self._order.move_to_end(expert)

    def added(self, expert: int) -> None:
        self._order[expert] = None

    def removed(self, expert: int) -> None:
        del self._order[expert]

    def coldest(self) -> Iterator[int]:
        return iter(self._order)
