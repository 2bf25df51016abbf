"""Eviction policies for replays, and a cache of one layer without any clock.

All of them are ``runtime.policy.Policy``: pure, and told of every use. A layer call is atomic: none
of its experts is evicted to make room for another one.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from .policy import LeastRecentlyUsed, Policy

Calls = Sequence[tuple[int, ...]]
"""The routed experts of one layer, call by call; distinct within a call."""


class FirstInFirstOut(LeastRecentlyUsed):
    """FIFO: the expert that got its slot first goes first, however often it is used."""

    def used(self, expert: int) -> None:
        pass


class DecayedFrequency:
    """LFU with exponential decay: the expert with the smallest sum of aged uses goes first.

    Experts keep their sums while they have no slot.

    Args:
        half_life: after so many uses of the layer's experts, a use counts half.
    """

    def __init__(self, half_life: float = 128.0) -> None:
        self._half_life = half_life
        self._now = 0
        self._held: dict[int, None] = {}
        # log2 of the sum of 2^(time of use / half life): aging scales all alike, so none is redone.
        self._weight: dict[int, float] = {}

    def used(self, expert: int) -> None:
        self._now += 1
        new = self._now / self._half_life
        old = self._weight.get(expert, -math.inf)
        self._weight[expert] = max(old, new) + math.log2(1 + 2 ** -abs(old - new))

    def added(self, expert: int) -> None:
        self._held[expert] = None

    def removed(self, expert: int) -> None:
        del self._held[expert]

    def coldest(self) -> Iterator[int]:
        weight = self._weight
        return iter(sorted(self._held, key=lambda expert: weight.get(expert, -math.inf)))


class Belady:
    """The perfect cache: the expert whose next use is furthest away goes first.

    Args:
        calls: every call there will be; each must be reported by ``used`` in this order.
    """

    def __init__(self, calls: Calls) -> None:
        self._future: dict[int, deque[int]] = {}
        for index, experts in enumerate(calls):
            for expert in experts:
                self._future.setdefault(expert, deque()).append(index)
        self._held: dict[int, None] = {}

    def used(self, expert: int) -> None:
        self._future[expert].popleft()

    def added(self, expert: int) -> None:
        self._held[expert] = None

    def removed(self, expert: int) -> None:
        del self._held[expert]

    def coldest(self) -> Iterator[int]:
        return iter(sorted(self._held, key=self._next, reverse=True))

    def _next(self, expert: int) -> float:
        uses = self._future.get(expert)
        return uses[0] if uses else math.inf


PolicyOfCalls = Callable[[Calls], Policy]

POLICIES: dict[str, PolicyOfCalls] = {
    "lru": lambda calls: LeastRecentlyUsed(),
    "lfu-decay": lambda calls: DecayedFrequency(),
    "belady": Belady,
    "fifo": lambda calls: FirstInFirstOut(),
}


class LayerCache:
    """The slots of one layer in a replay.

    A call of more experts than slots passes through in waves: it may hold more than there is room
    for until ``settle``, which leaves what the policy wants to keep.

    Args:
        slots: how many experts it holds, at least 1.
        policy: order of eviction.
    """

    def __init__(self, slots: int, policy: Policy) -> None:
        self.slots = slots
        self._policy = policy
        self.ready: set[int] = set()
        self.reading: set[int] = set()
        self.due: OrderedDict[int, int] = OrderedDict()
        """Experts read on a guess and not used yet, and the position they are meant for."""

    def __contains__(self, expert: int) -> bool:
        return expert in self.ready or expert in self.reading

    @property
    def free(self) -> int:
        return self.slots - len(self.ready) - len(self.reading)

    def reserve(self, expert: int) -> None:
        """Give the expert a slot that has been made free; its bytes are on their way."""
        self.reading.add(expert)
        self._policy.added(expert)

    def arrived(self, expert: int) -> None:
        self.reading.remove(expert)
        self.ready.add(expert)

    def used(self, expert: int) -> bool:
        """The call has used the expert; whether it is the first use of a guess."""
        self._policy.used(expert)
        return self.due.pop(expert, None) is not None

    def make_room(self, keep: Iterable[int], position: int, *, guess: bool = False) -> bool:
        """Free a slot if none is; False if nothing may be given up.

        What was guessed for a call that is still to come goes last, and never for another guess.
        """
        if self.free > 0:
            return True
        kept = set(keep)
        candidates = [e for e in self._policy.coldest() if e in self.ready and e not in kept]
        past = [e for e in candidates if self.due.get(e, position - 1) < position]
        victims = past if guess else past or candidates
        if victims:
            self._evict(victims[0])
        return bool(victims)

    def settle(self, call: Iterable[int]) -> None:
        """Give up what a call larger than the slots has left over; its waves took every slot."""
        if self.free < 0:
            used = set(call)
            cold = sorted(self._policy.coldest(), key=lambda expert: expert in used)
            for expert in [e for e in cold if e in self.ready][: -self.free]:
                self._evict(expert)

    def _evict(self, expert: int) -> None:
        self.ready.remove(expert)
        self.due.pop(expert, None)
        self._policy.removed(expert)


def replay_layer(calls: Calls, slots: int, policy: Policy) -> list[int]:
    """Hits of each call of one layer, when every miss is read at once and nothing is guessed."""
    cache = LayerCache(slots, policy)
    hits = []
    for experts in calls:
        misses = [expert for expert in experts if expert not in cache.ready]
        hits.append(len(experts) - len(misses))
        for expert in misses:
            if len(experts) <= slots:
                cache.make_room(experts, 0)
            cache.reserve(expert)
            cache.arrived(expert)
        for expert in experts:
            cache.used(expert)
        cache.settle(experts)
    return hits
