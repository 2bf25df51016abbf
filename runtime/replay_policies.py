"""Policies that only replays have, and a cache of one layer without any clock.

The others are the engine's own classes. A layer call is atomic: none of its experts is evicted to
make room for another one.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from . import policies
from .policy import LeastRecentlyUsed, Policy, PolicyFactory
from .trace_records import Route
from .waves import wave_size

Calls = Sequence[tuple[int, ...]]
"""The routed experts of one layer, call by call; distinct within a call."""


class FirstInFirstOut(LeastRecentlyUsed):
    """FIFO: the expert that got its slot first goes first, however often it is used."""

    def routed(self, experts: Sequence[int]) -> None:
        pass


class Belady:
    """The perfect cache: the expert whose next use is furthest away goes first.

    Args:
        calls: every call there will be; each must be reported by ``routed``, in one or more parts.
    """

    def __init__(self, calls: Calls) -> None:
        self._future: dict[int, deque[int]] = {}
        for index, experts in enumerate(calls):
            for expert in experts:
                self._future.setdefault(expert, deque()).append(index)
        self._held: dict[int, None] = {}

    def behind(self, before: Policy) -> None:
        pass

    def seed(self, heat: Sequence[float]) -> None:
        pass

    def routed(self, experts: Sequence[int]) -> None:
        for expert in experts:
            self._future[expert].popleft()

    def tokens(self, rows: Sequence[Sequence[int]]) -> None:
        pass

    def added(self, expert: int) -> None:
        self._held[expert] = None

    def removed(self, expert: int) -> None:
        del self._held[expert]

    def keep(self, expert: int) -> None:
        pass  # it knows better than any prediction

    def coldest(self) -> Iterator[int]:
        return iter(self.order(list(self._held)))

    def order(self, experts: list[int]) -> list[int]:
        return sorted(experts, key=self._next, reverse=True)

    def _next(self, expert: int) -> float:
        uses = self._future.get(expert)
        return uses[0] if uses else math.inf


PolicyOfCalls = Callable[[Calls, int, int], Policy]
"""Makes the policy of a layer from its calls, its number of experts and the width of a token."""


def _online(make: PolicyFactory, calls: Calls, experts: int, width: int) -> Policy:
    return make(experts, width)


POLICIES: dict[str, PolicyOfCalls] = {
    **{name: partial(_online, make) for name, make in policies.POLICIES.items()},
    "fifo": lambda calls, experts, width: FirstInFirstOut(),
    "belady": lambda calls, experts, width: Belady(calls),
}


def policies_of(
    make: PolicyOfCalls, routes: Sequence[Route], experts: Mapping[int, int]
) -> dict[int, Policy]:
    """The policies of the layers that made these calls, each told of the one before.

    A layer's tokens are taken to be routed as widely as the widest of them.
    """
    own: dict[int, list[Route]] = {}
    for route in routes:
        own.setdefault(route.group, []).append(route)
    policies: dict[int, Policy] = {}
    for group in sorted(own):
        calls = [route.experts for route in own[group]]
        width = max((len(route.experts) for route in own[group] if route.tokens == 1), default=1)
        policies[group] = make(calls, experts[group], width)
    for before, policy in pairwise(policies.values()):
        policy.behind(before)
    return policies


class LayerCache:
    """The slots of one layer in a replay.

    A call of more experts than slots passes through in waves, like the engine's: those that are
    there first. Until ``settle``, which works out what is left of them, it may hold too many.
    Belady's cache, being the bound, may keep any of them.

    Args:
        slots: how many experts it holds, at least 1.
        policy: order of eviction.
        record_bytes: of an expert; 0 where it is not known. Decides how large waves are.
    """

    def __init__(self, slots: int, policy: Policy, record_bytes: int = 0) -> None:
        self.slots = slots
        self._record_bytes = record_bytes
        self._policy = policy
        self.ready: set[int] = set()
        self.reading: set[int] = set()
        self.due: OrderedDict[int, int] = OrderedDict()
        """Experts read on a guess and not used yet, and the position they are meant for."""
        self.evicted: list[int] = []
        """What has been given up so far."""
        self._waves: list[int] = []  # the experts of a call too large, in the engine's order
        self._unbooked: set[int] = set()  # of these, those that the policy has not been told of

    def routed(self, route: Route) -> None:
        """A layer call begins."""
        experts = route.experts
        if route.tail:
            self._policy.tokens(route.tail)
        self._policy.routed(experts)
        if len(experts) <= self.slots:
            return
        here = [expert for expert in experts if expert in self.ready]
        missing = [expert for expert in experts if expert not in self.ready]
        missing = self._policy.order(missing)
        self._waves = here + missing
        self._unbooked = {expert for expert in missing if expert not in self.reading}

    def __contains__(self, expert: int) -> bool:
        return expert in self.ready or expert in self.reading

    @property
    def free(self) -> int:
        return self.slots - len(self.ready) - len(self.reading)

    def reserve(self, expert: int) -> None:
        """Give the expert a slot that has been made free; its bytes are on their way."""
        self.reading.add(expert)
        if expert not in self._unbooked:
            self._policy.added(expert)

    def arrived(self, expert: int) -> None:
        self.reading.remove(expert)
        self.ready.add(expert)

    def used(self, expert: int) -> bool:
        """The call has used the expert; whether it is the first use of a guess."""
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

    def settle(self) -> None:
        """The call has ended. If it was larger than the slots: go through it in waves."""
        waves, self._waves = self._waves, []
        unbooked, self._unbooked = self._unbooked, set()
        bound = isinstance(self._policy, Belady)
        room = max(self.slots - len(self.reading), 1)
        size = wave_size(room, self._record_bytes)
        if bound:
            size = max(len(waves), 1)
        held = len(self.ready) + len(self.reading) - len(unbooked)
        before: list[int] = []  # is computed while the next wave is read
        for start in range(0, len(waves), size):
            wave = waves[start : start + size]
            kept = [*before, *wave] if size < room else wave
            before = wave
            for expert in wave:
                if expert in unbooked or expert not in self.ready:
                    if held < self.slots or bound:
                        held += 1
                    else:
                        self._evict(self._victim(kept))
                    self._policy.added(expert)
                    self.ready.add(expert)
                    unbooked.discard(expert)
        for _ in range(self.slots, held):
            # A small wave leaves experts of earlier calls alone, so the bound may keep them, too.
            others = not bound and self.ready.difference(waves)
            self._evict(self._victim(waves if others else ()))

    def _victim(self, wave: Sequence[int]) -> int:
        kept = set(wave)
        return next(e for e in self._policy.coldest() if e in self.ready and e not in kept)

    def _evict(self, expert: int) -> None:
        self.ready.remove(expert)
        self.due.pop(expert, None)
        self._policy.removed(expert)
        self.evicted.append(expert)


def replay_layer(calls: Calls, slots: int, policy: Policy) -> list[int]:
    """Hits of each call of one layer, when every miss is read at once and nothing is guessed."""
    routes = [Route(0.0, 0, 0, index, experts, 1) for index, experts in enumerate(calls)]
    return [hits for hits, _ in replay_routes(routes, {0: slots}, {0: policy})]


def replay_routes(
    routes: Iterable[Route], slots: Mapping[int, int], policies: Mapping[int, Policy]
) -> Iterator[tuple[int, list[int]]]:
    """The same for recorded calls: (hits, evicted experts in order) of each.

    Args:
        routes: the calls in the order in which they were made.
        slots: of each group.
        policies: of each group, as ``policies_of`` makes them.
    """
    caches = {group: LayerCache(slots[group], policy) for group, policy in policies.items()}
    for route in routes:
        cache, experts = caches[route.group], route.experts
        misses = [expert for expert in experts if expert not in cache.ready]
        cache.routed(route)
        for expert in misses:
            if len(experts) <= cache.slots:
                cache.make_room(experts, 0)
            cache.reserve(expert)
            cache.arrived(expert)
        cache.settle()
        evicted, cache.evicted = cache.evicted, []
        yield len(experts) - len(misses), evicted
