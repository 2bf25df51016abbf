"""Which resident expert of a layer is given up first: the interface, and the simplest order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


class Policy(Protocol):
    """Order of the experts of one layer that hold a slot, coldest first.

    Pure: depends on the calls of these methods alone. Called under the store's lock, by the compute
    thread and, for guesses, by the loop thread.
    """

    def behind(self, before: Policy) -> None:
        """The policy of the layer that is called before this one in each forward, if there is one.

        Told first of all, in the order of the layers.
        """

    def seed(self, heat: Sequence[float]) -> None:
        """How much each expert was used by earlier runs, in any unit; told before any call."""

    def routed(self, experts: Sequence[int]) -> None:
        """A layer call wants these distinct experts, whether they hold a slot or not.

        Told once, before the call's slots are assigned, all at once or in parts. Of a prompt the
        hottest come last.
        """

    def tokens(self, rows: Sequence[Sequence[int]]) -> None:
        """The next call is that of a prompt; the experts of its last tokens, in order."""

    def added(self, expert: int) -> None:
        """The expert has got a slot, for the call that was just routed or for a guess."""

    def removed(self, expert: int) -> None:
        """The expert has lost its slot."""

    def keep(self, expert: int) -> None:
        """The expert, which holds a slot, is predicted for the layer's next call."""

    def coldest(self) -> Iterator[int]:
        """Every expert that holds a slot, the one to give up first in front."""

    def order(self, experts: list[int]) -> list[int]:
        """Experts of the present call, given in its order, likewise; what comes last is kept."""


PolicyFactory = Callable[[int, int], Policy]
"""Makes the policy of a layer from its number of experts and the width of its routing."""


class LeastRecentlyUsed:
    """LRU: the expert whose last use is longest ago goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def behind(self, before: Policy) -> None:
        pass  # each layer is on its own

    def seed(self, heat: Sequence[float]) -> None:
        pass  # what was not used in this run has no age

    def routed(self, experts: Sequence[int]) -> None:
        order = self._order
        for expert in experts:
            if expert in order:
                order.move_to_end(expert)

    def tokens(self, rows: Sequence[Sequence[int]]) -> None:
        pass  # the order of the prompt's call says all

    def added(self, expert: int) -> None:
        self._order[expert] = None

    def removed(self, expert: int) -> None:
        del self._order[expert]

    def keep(self, expert: int) -> None:
        self._order.move_to_end(expert)

    def coldest(self) -> Iterator[int]:
        return iter(self._order)

    def order(self, experts: list[int]) -> list[int]:
        return experts  # all were used at once


def least_recently_used(experts: int, width: int) -> Policy:
    """The factory of ``LeastRecentlyUsed``, which needs no sizes."""
    return LeastRecentlyUsed()
