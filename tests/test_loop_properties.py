"""Random sequences of asks, on the real loop with gated lanes and on the real store.

Nothing but the test moves: each job waits at a gate until an operation lets it end, and after each
operation the test waits until loop and lanes have come to rest. So every interleaving that
hypothesis thinks of is carried out as it is, and what must hold at rest can be asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moestream.io.asks import Ask, Guess, Purge, ReadHost
from moestream.io.lanes import Job
from moestream.io.loop import IoLoop
from moestream.io.queue import Entry, Key

from .fakes import TIMEOUT

TRIES = 2000
"""How often the test looks whether all has come to rest."""

Place = tuple[Key, int, int]
"""(key, slot, job): what a lane is doing."""


@dataclass
class Stop:
    """A job at the gate."""

    place: Place
    lost: bool = False
    error: BaseException | None = None
    go: threading.Event = field(default_factory=threading.Event)


class GatedHost(ReadHost):
    """Gives each read a slot of its own and lets the test end each job.

    Attributes:
        stops: jobs at the gate, in the order of their arrival.
        ends: key -> how often it has ended.
        wrong: what must never happen and has.
        on_end: called with each key that ends.
    """

    def __init__(self, jobs: int, unwanted: frozenset[Key]) -> None:
        self._jobs = jobs
        self._unwanted = unwanted
        self._slots = itertools.count()
        self._reading: dict[Key, int] = {}  # with the slot
        self._abandoned: set[int] = set()
        self.changed = threading.Condition()
        self._open = False
        self.stops: list[Stop] = []
        self.ends: Counter[Key] = Counter()
        self.wrong: list[str] = []
        self.on_end: Callable[[Key], None] = lambda key: None
        self.failures: dict[Key, BaseException] = {}

    def open(self) -> None:
        """Let all jobs end from now on."""
        with self.changed:
            self._open = True
            stops, self.stops = self.stops, []
        for stop in stops:
            stop.go.set()

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.wrong.append(problem)

    def begin(self, entry: Entry) -> int | None:
        if entry.key in self._unwanted:
            return None
        self.check(entry.key not in self._reading, f"{entry.key} is read twice at once")
        self._reading[entry.key] = next(self._slots)
        return self._reading[entry.key]

    def jobs(self, key: Key) -> Sequence[int]:
        return [10] * (1 + (key[1] + self._jobs) % 3)

    def read(self, key: Key, slot: int, job: int) -> int:
        stop = Stop((key, slot, job))
        with self.changed:
            self.check(self._reading.get(key) == slot, f"{key} is read without a slot")
            same = [s for s in self.stops if s.place == stop.place]
            self.check(not same, f"{stop.place} is done twice at once")
            if self._open:
                return 10
            self.stops.append(stop)
            self.changed.notify_all()
        if not stop.go.wait(TIMEOUT):
            raise TimeoutError("nobody opened the gate")
        if stop.error is not None:
            raise stop.error
        return 10

    def finish(self, key: Key, slot: int, nbytes: int, error: BaseException | None) -> None:
        self.check(self._reading.pop(key, None) == slot, f"{key} has finished elsewhere")
        at_gate = [s for s in self.stops if s.place[:2] == (key, slot)]
        self.check(not at_gate, f"{key} has finished while it is being read")
        whole = 10 * len(self.jobs(key))
        self.check(error is not None or nbytes == whole, f"{key} has finished early")
        self._end(key)

    def timeout(self, key: Key, job: int, seconds: float) -> BaseException:
        return TimeoutError(key, job)

    def abandoned(self, key: Key, slot: int, error: BaseException) -> Callable[[], None]:
        self.check(self._reading.pop(key, None) == slot, f"{key} is abandoned elsewhere")
        self._abandoned.add(slot)
        self._end(key)
        return partial(self._give_back, key, slot)

    def _give_back(self, key: Key, slot: int) -> None:
        self.check(slot in self._abandoned, f"slot {slot} comes back twice")
        self._abandoned.discard(slot)
        at_gate = [s for s in self.stops if s.place[:2] == (key, slot)]
        self.check(not at_gate, f"slot {slot} comes back while it is written to")

    @property
    def out_of_use(self) -> int:
        """Slots that have not come back."""
        return len(self._abandoned)

    def dropped(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        for key in keys:
            self._end(key)

    def void(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        for key in keys:
            self._end(key)

    def promoted(self, key: Key) -> None:
        pass

    def _end(self, key: Key) -> None:
        self.ends[key] += 1
        self.on_end(key)


class Machine:
    """The loop, what it was asked for, and what must hold at rest."""

    def __init__(self, lanes: int, guess_lanes: int, jobs: int, unwanted: frozenset[Key]) -> None:
        self.host = GatedHost(jobs, unwanted)
        ticks = itertools.count(1)
        self.loop = IoLoop(
            self.host,
            lanes=lanes,
            guess_lanes=guess_lanes,
            grace=TIMEOUT,
            read_timeout=1e6,
            clock=lambda: float(next(ticks)),
        )
        self._guess_lanes = min(guess_lanes, lanes)
        self.opened: Counter[Key] = Counter()  # ends that are due, by key
        self.calls: list[set[Key]] = []  # what each layer call waits for
        self._wanted: Counter[Key] = Counter()  # demands that have not ended
        self._stopped = False
        self.host.on_end = self._ended
        self._ending = threading.Semaphore(0)
        self._watch_lanes()

    def _watch_lanes(self) -> None:
        lanes, put, do = self.loop._lanes, self.loop._lanes.put, self.loop._lanes._do

        def checked_put(job: Job) -> None:
            loop, check = self.loop, self.host.check
            if not job.demand:
                waiting = loop._queue.demands or any(r.demand for r in loop._reads.values())
                check(not waiting, f"{job.read.key} is guessed while a demand waits")
            check(loop._busy[False] <= self._guess_lanes, "guesses have taken more lanes")
            check(sum(loop._busy) <= loop._most, "more jobs are out than should be")
            put(job)

        def counted_do(job: Job) -> bool:
            needed = do(job)
            self._ending.release()
            return needed

        lanes.put = checked_put  # type: ignore[method-assign]
        lanes._do = counted_do  # type: ignore[method-assign]

    def _ended(self, key: Key) -> None:
        for call in self.calls:
            call.discard(key)

    # -- operations ---------------------------------------------------------------------------

    def ask(
        self,
        owner: int,
        position: int,
        demands: Sequence[Key],
        joins: int,
        guesses: Sequence[tuple[Key, int, float]],
        grant: float,
    ) -> None:
        """One layer call; ``joins`` are so many of the reads that are under way."""
        loop = self.loop
        under_way = [k for k in loop._reads if k not in demands]
        under_way += [k for k in self._queued() if loop._batches.get(k) and k not in demands]
        joined = tuple(dict.fromkeys(under_way))[:joins]
        for key in demands:
            if key in loop._reads:
                self.opened[key] += key not in loop._deferred
            else:
                self.opened[key] += loop._queue.get(key) is None
        queued = {*self._queued(), *loop._reads, *demands}
        for key, _, _ in guesses:
            self.opened[key] += key not in queued
            queued.add(key)
        self.calls.append({*demands, *joined})
        offers = tuple(Guess(key, position + ahead, chance) for key, ahead, chance in guesses)
        loop.submit(Ask(owner, position, tuple(demands), joined, offers, grant))

    def _queued(self) -> list[Key]:
        queue = self.loop._queue
        return [key for key in ALL_KEYS if queue.get(key) is not None]

    def let_go(self, which: int, *, fail: bool) -> None:
        """Let a job end that waits at the gate."""
        stops = self.host.stops
        if stops:
            stop = stops[which % len(stops)]
            stop.error = OSError("broken") if fail else None
            with self.host.changed:
                stops.remove(stop)
            stop.go.set()
            assert self._ending.acquire(timeout=TIMEOUT)

    def give_up(self, which: int) -> None:
        """Give up the jobs that a lane began before some other one, and that one."""
        running = sorted(job.since for job in self.loop._lanes._running)
        if running:
            self._on_loop(partial(self.loop._give_up_late, running[which % len(running)]))

    def stop(self) -> None:
        self._stopped = True
        self.loop.stop()

    # -- rest ---------------------------------------------------------------------------------

    def _on_loop(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            result = function()
            for _ in range(4):  # tasks of reads that have ended have their turn
                await asyncio.sleep(0)
            return result

        return self.loop.start(call).result(TIMEOUT)

    def rest(self) -> None:
        """Wait until nothing moves, then check what has to hold."""
        for _ in range(TRIES):
            expected = self._on_loop(self._at_gate)
            with self.host.changed:
                if len(self._stops_that_count()) == expected == self._at_gate():
                    break
                self.host.changed.wait(0.002)
        else:
            raise AssertionError(f"{expected} jobs should be at the gate: {self.host.stops}")
        self._on_loop(self._check)
        assert not self.host.wrong, self.host.wrong

    def _stops_that_count(self) -> list[Stop]:
        lost = {(j.read.key, j.read.slot, j.index) for j in self.loop._lanes._lost}
        return [stop for stop in self.host.stops if stop.place not in lost]

    def _at_gate(self) -> int:
        """How many jobs have to be at the gate when the lanes have come to rest."""
        lanes = self.loop._lanes
        ended = sum(not job.lost for job in list(lanes._finished))
        return min(lanes.alive, sum(self.loop._busy) - ended)

    def _check(self) -> None:
        loop, check = self.loop, self.host.check
        check(loop.failure is None, f"the loop has died: {loop.failure!r}")
        demanded = sum(read.demand for read in loop._reads.values())
        check(demanded == loop._unfinished, "the unfinished demands are miscounted")
        loop._queue.check_integrity()
        for call in self.calls:
            reads = [loop._reads.get(key) for key in call]
            over = [read is not None and not read.left for read in reads]
            check(not call or not all(over), f"nobody is told that {call} have all been read")
        if loop._queue.demands:
            check(loop._lanes.alive > 0, "demands wait for lanes that there are not")
            check(self.host.stops != [], "demands wait and nothing is read")
        for key in ALL_KEYS:
            due = self.opened[key] - self.host.ends[key]
            there = (key in loop._reads) + (key in loop._queue) + (key in loop._deferred)
            check(due == there, f"{key} is to end {due} times and is there {there} times")

    def finish(self) -> None:
        """Let everything end; then every key has ended as often as it was asked for."""
        while self.host.stops:
            self.let_go(0, fail=False)
            self.rest()
        assert not self.loop._queue.demands and not self.loop._reads
        assert not any(self.calls)
        assert not self.host.out_of_use


ALL_KEYS = [(group, expert) for group in range(3) for expert in range(4)]
KEYS = st.sampled_from(ALL_KEYS)
OWNERS = st.integers(0, 2)
GUESSES = st.tuples(KEYS, st.integers(0, 3), st.sampled_from([0.1, 0.5, 1.0]))
ASKS = st.tuples(
    st.just("ask"),
    OWNERS,
    st.integers(0, 2),
    st.lists(KEYS, max_size=5, unique=True),
    st.integers(0, 3),
    st.lists(GUESSES, max_size=3),
    st.sampled_from([0.0, 15.0, 1000.0]),
)
OPERATIONS = st.one_of(
    ASKS,
    st.tuples(st.just("let go"), st.integers(0, 7), st.booleans()),
    st.tuples(st.just("let go"), st.integers(0, 7), st.just(False)),
    st.tuples(st.just("let go"), st.integers(0, 7), st.just(False)),
    st.tuples(st.just("purge"), OWNERS),
    st.tuples(st.just("give up"), st.integers(0, 7)),
)


def carry_out(machine: Machine, operation: tuple[Any, ...], position: int) -> int:
    """Do one operation; returns the position of the layer call from then on."""
    match operation:
        case ("ask", owner, step, demands, joins, guesses, grant):
            position += step
            machine.ask(owner, position, demands, joins, guesses, grant)
        case ("let go", which, fail):
            machine.let_go(which, fail=fail)
        case ("purge", owner):
            machine.loop.submit(Purge(owner))
        case ("give up", which):
            machine.give_up(which)
    return position


def ask(owner: int, *demands: Key, joins: int = 0) -> tuple[Any, ...]:
    return ("ask", owner, 1, list(demands), joins, [], 0.0)


GO = ("let go", 0, False)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    lanes=st.integers(1, 4),
    guess_lanes=st.integers(1, 2),
    jobs=st.integers(0, 2),
    unwanted=st.frozensets(KEYS, max_size=2),
    operations=st.lists(OPERATIONS, max_size=40),
    end=st.sampled_from(["rest", "stop", "close"]),
)
# A second call waits for one read of a first call, whose others take longer.
@example(4, 1, 0, frozenset(), [ask(0, (0, 0), (1, 2)), ask(1, joins=9), GO, GO], "rest")
# Of one call some are read, some purged, some fail, one is not wanted.
@example(
    *(1, 1, 0, frozenset({(0, 1)})),
    [ask(0, (0, 0), (0, 1), (0, 2)), ask(1, (0, 2), (0, 3)), ("purge", 0), ("let go", 0, True)],
    "rest",
)
def test_whatever_is_asked_for_ends_and_in_order(
    lanes: int,
    guess_lanes: int,
    jobs: int,
    unwanted: frozenset[Key],
    operations: list[tuple[Any, ...]],
    end: str,
) -> None:
    machine = Machine(lanes, guess_lanes, jobs, unwanted)
    position = 0
    try:
        with machine.loop:
            for operation in operations:
                position = carry_out(machine, operation, position)
                machine.rest()
            if end == "rest":
                machine.finish()
            elif end == "stop":
                machine.stop()
                machine._on_loop(lambda: None)
            machine.host.open()
    finally:
        machine.host.open()
    assert not machine.host.wrong, machine.host.wrong
    assert not any(machine.calls)
    for key in ALL_KEYS:
        assert machine.host.ends[key] == machine.opened[key], key
