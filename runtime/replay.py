"""Replays recorded routing against other caches, policies, guesses and drives.

A simulation with its own clock: the same input always gives the same output.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..io.queue import ReadQueue
from .replay_forecast import Forecast
from .replay_policies import LayerCache, PolicyOfCalls, policies_of
from .terminal import Report
from .trace_records import Route, prompt_forwards

GUESSES_IN_FLIGHT = 2
"""Arbitrary: reads cannot be stopped, and a demand waits for those that run."""

PROGRESS_CALLS = 500


@dataclass(frozen=True, slots=True)
class Drive:
    """A drive that transfers one record after the other; latencies of reads in flight overlap.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds before the first byte of a read.
        depth: reads in flight.
    """

    bandwidth: float
    latency: float = 100e-6
    depth: int = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay gave, for decode alone: prompts only warm the caches.

    ``hits`` were ready when their router chose them, of which ``guessed`` thanks to a guess and not
    used before; ``late`` were being read; the rest were ``missed``. A guess is wasted if it has not
    been used by the end.
    """

    tokens: int
    calls: int
    hits: int
    guessed: int
    late: int
    missed: int
    demand_bytes: int
    guess_bytes: int
    wasted_bytes: int
    refused: int
    stale: int
    stall_seconds: float
    compute_seconds: float
    bandwidth: float

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.late + self.missed, 1)

    @property
    def total_bytes(self) -> int:
        return self.demand_bytes + self.guess_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.total_bytes / max(self.tokens, 1)

    @property
    def waste(self) -> float:
        """Share of all bytes that were read for nothing."""
        return self.wasted_bytes / max(self.total_bytes, 1)

    @property
    def stall_per_token(self) -> float:
        return self.stall_seconds / max(self.tokens, 1)

    @property
    def compute_per_token(self) -> float:
        return self.compute_seconds / max(self.tokens, 1)

    @property
    def token_seconds(self) -> float:
        return self.stall_per_token + self.compute_per_token

    @property
    def bound_seconds(self) -> float:
        """Token time if computing and reading overlapped perfectly."""
        return max(self.compute_per_token, self.bytes_per_token / self.bandwidth)


@dataclass(slots=True)
class _Counts:
    tokens: set[int] = field(default_factory=set)
    calls: int = 0
    hits: int = 0
    guessed: int = 0
    late: int = 0
    missed: int = 0
    demand_bytes: int = 0
    guess_bytes: int = 0
    used_bytes: int = 0
    refused: int = 0
    stale: int = 0
    stall: float = 0.0


class Replay:
    """One pass over the calls with one setting.

    Args:
        routes: the layer calls in order. Forwards of more than one token are prompts.
        experts: per group, as the next two.
        slots: of the cache.
        record_bytes: of an expert.
        policy: makes the policy of a layer from that layer's calls.
        forecast: guesses per call; None guesses nothing.
        drive: what reads take.
        compute: seconds from a layer's experts being there to the next router's choice.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        experts: Mapping[int, int],
        slots: Mapping[int, int],
        record_bytes: Mapping[int, int],
        policy: PolicyOfCalls,
        drive: Drive,
        compute: float,
        forecast: Forecast | None = None,
    ) -> None:
        self._routes = routes
        self._record_bytes = record_bytes
        self._drive = drive
        self._compute = compute
        self._forecast = forecast
        self._caches = {
            group: LayerCache(slots[group], made, record_bytes[group])
            for group, made in policies_of(policy, routes, experts).items()
        }
        prompts = prompt_forwards(routes)
        # Without a single token decoded, the prompts are all there is to tell about.
        decoding = any(route.forward not in prompts for route in routes)
        self._uncounted = prompts if decoding else set()
        self._queue = ReadQueue()
        self._counts = _Counts()
        self._counting = False
        self._position = 0
        self._pinned: tuple[int, frozenset[int]] = (-1, frozenset())
        self._running: list[tuple[float, int, tuple[int, int], bool]] = []
        self._guesses_running = 0
        self._started = 0
        self._bus_free = 0.0
        self.now = 0.0
        self.finished: list[float] = []
        """When each read ended, in the order in which they did."""

    def run(self, report: Report | None = None) -> Outcome:
        """Replay every call."""
        for position, route in enumerate(self._routes):
            self._position = position
            self._counting = route.forward not in self._uncounted
            self._call(route)
            if report is not None and position % PROGRESS_CALLS == 0:
                report(position, len(self._routes))
        return self._outcome()

    def _call(self, route: Route) -> None:
        cache, asked = self._caches[route.group], self.now
        self._pinned = (route.group, frozenset(route.experts))
        cache.routed(route)
        self._demand(route, cache)
        stale = self._queue.drop_stale(self._position + 1)
        self._guess()
        self._start_reads()
        while not cache.ready.issuperset(route.experts):
            self._finish_read()
        self._count(route, self.now - asked)
        for expert in route.experts:
            if cache.used(expert) and self._counting:
                self._counts.used_bytes += self._record_bytes[route.group]
        cache.settle()
        self._counts.stale += len(stale)
        self._advance(self.now + self._compute)

    def _demand(self, route: Route, cache: LayerCache) -> None:
        """Ask for what is missing; a guess that is queued becomes a demand."""
        counts = self._counts
        late = [expert for expert in route.experts if expert in cache.reading]
        missed = [expert for expert in route.experts if expert not in cache]
        if self._counting:
            counts.late += len(late)
            counts.missed += len(missed)
            counts.hits += len(route.experts) - len(late) - len(missed)
            counts.guessed += sum(e in cache.due and e in cache.ready for e in route.experts)
        for expert in missed:
            if len(route.experts) <= cache.slots:
                # Wrong guesses that are still being read may hold every slot there is.
                while not cache.make_room(route.experts, self._position):
                    self._finish_read()
            cache.reserve(expert)
            self._queue.demand((route.group, expert), 0, self._position)

    def _guess(self) -> None:
        if self._forecast is None:
            return
        for guess in self._forecast[self._position]:
            group = self._routes[guess.position].group
            if guess.expert not in self._caches[group]:
                self._queue.speculate((group, guess.expert), 0, guess.position, guess.probability)

    def _start_reads(self) -> None:
        """Use the free lanes, demands first. A guess gets its slot only here."""
        while len(self._running) < self._drive.depth and (entry := self._queue.peek()):
            if not entry.demand and self._guesses_running >= GUESSES_IN_FLIGHT:
                return
            self._queue.pop()
            (group, expert), position = entry.key, entry.position
            if not entry.demand:
                cache = self._caches[group]
                pinned = self._pinned[1] if self._pinned[0] == group else ()
                if expert in cache:
                    continue
                if not cache.make_room(pinned, self._position, guess=True):
                    self._counts.refused += 1
                    continue
                cache.reserve(expert)
                cache.due[expert] = position
            self._start(entry.key, demand=entry.demand)

    def _start(self, key: tuple[int, int], *, demand: bool) -> None:
        nbytes = self._record_bytes[key[0]]
        begin = max(self.now + self._drive.latency, self._bus_free)
        self._bus_free = begin + nbytes / self._drive.bandwidth
        self._started += 1
        heapq.heappush(self._running, (self._bus_free, self._started, key, demand))
        self._guesses_running += not demand
        if self._counting and demand:
            self._counts.demand_bytes += nbytes
        elif self._counting:
            self._counts.guess_bytes += nbytes

    def _finish_read(self) -> None:
        """Let time go on to the end of the next read."""
        self.now, _, (group, expert), demand = heapq.heappop(self._running)
        self.finished.append(self.now)
        self._caches[group].arrived(expert)
        self._guesses_running -= not demand
        self._start_reads()

    def _advance(self, until: float) -> None:
        while self._running and self._running[0][0] <= until:
            self._finish_read()
        self.now = until

    def _count(self, route: Route, stall: float) -> None:
        if self._counting:
            self._counts.calls += 1
            self._counts.stall += stall
            self._counts.tokens.add(route.forward)

    def _outcome(self) -> Outcome:
        counts = self._counts
        return Outcome(
            tokens=len(counts.tokens),
            calls=counts.calls,
            hits=counts.hits,
            guessed=counts.guessed,
            late=counts.late,
            missed=counts.missed,
            demand_bytes=counts.demand_bytes,
            guess_bytes=counts.guess_bytes,
            wasted_bytes=counts.guess_bytes - counts.used_bytes,
            refused=counts.refused,
            stale=counts.stale,
            stall_seconds=counts.stall,
            compute_seconds=counts.calls * self._compute,
            bandwidth=self._drive.bandwidth,
        )
