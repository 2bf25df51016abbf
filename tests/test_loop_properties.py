"""Random sequences of asks, on the real loop with gated lanes and on the real store.

Nothing but the test moves: each job waits at a gate until an operation lets it end, and after each
operation the test waits until loop and lanes have come to rest. So every interleaving that
hypothesis thinks of is carried out as it is, and what must hold at rest can be asked for.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moestream.io.asks import Ask, Guess, Purge, ReadHost
from moestream.io.errors import ReadsPurged
from moestream.io.faults import FaultyDrive
from moestream.io.lanes import Batch, Job, Lanes, Read
from moestream.io.loop import IoLoop
from moestream.io.queue import Entry, Key
from moestream.io.reader import Passage, RecordReader
from moestream.runtime.prefetch import PrefetchConfig
from moestream.runtime.store import Demanded, ExpertStore
from moestream.runtime.tracing import Tracer

from .fakes import TIMEOUT, Tensor, join_lanes, write_packed, write_stacked

TRIES = 500
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
        on_end, on_purged: called with each key that ends, and that is dropped with its owner.
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
        self.on_purged: Callable[[Key], None] = lambda key: None

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
            if isinstance(reason, ReadsPurged):
                self.on_purged(key)
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
        self.calls: list[tuple[int, set[Key]]] = []  # owner, and what the layer call waits for
        self.host.on_end = self._ended
        self.host.on_purged = self._purged
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
        for _, call in self.calls:
            call.discard(key)

    def _purged(self, key: Key) -> None:
        for owner, call in self.calls:
            self.host.check(key not in call, f"{key} is purged and {owner} waits for it")

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
        under_way = [k for k, read in loop._reads.items() if k not in demands and not read.claimed]
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
        self.calls.append((owner, {*demands, *joined}))
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
            self._on_loop(partial(self.loop._give_up_late, running[which % len(running)] + 0.5))

    def purge(self, owner: int) -> None:
        self.calls = [call for call in self.calls if call[0] != owner]
        self.loop.submit(Purge(owner))

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
                counting = len(self._stops_that_count())
                lost = len(self.host.stops) - counting
                told = self.loop._lanes._told  # a lane is about to report, or has done so
                if counting == expected == self._at_gate() and lost == self._lost() and not told:
                    break
                self.host.changed.wait(0.002)
        else:
            raise AssertionError(f"{expected} jobs should be at the gate: {self.host.stops}")
        self._on_loop(self._check)
        assert not self.host.wrong, self.host.wrong

    def _stops_that_count(self) -> list[Stop]:
        lost = {(j.read.key, j.read.slot, j.index) for j in self.loop._lanes._lost}
        return [stop for stop in self.host.stops if stop.place not in lost]

    def _lost(self) -> int:
        """How many jobs that were given up have not come back to the loop."""
        lanes = self.loop._lanes
        return len(lanes._lost) + sum(job.lost for job in list(lanes._finished))

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
        lanes = loop._lanes
        spare = 2 * lanes.count - len(lanes._lost)
        check(lanes.alive == min(lanes.count, spare), "lanes that hang are not replaced")
        for _, call in self.calls:
            reads = [loop._reads.get(key) for key in call]
            over = [read is not None and not read.left for read in reads]
            check(not call or not all(over), f"nobody is told that {call} have all been read")
        if loop._queue.demands:
            check(loop._lanes.alive > 0, "demands wait for lanes that there are not")
            check(self.host.stops != [], "demands wait and nothing is read")
        for key in ALL_KEYS:
            due = self.opened[key] - self.host.ends[key]
            read = loop._reads.get(key)
            reading = read is not None and not read.claimed  # else its lane has told its end
            there = reading + (key in loop._queue) + (key in loop._deferred)
            check(due == there, f"{key} is to end {due} times and is there {there} times")

    def finish(self) -> None:
        """Let everything end; then every key has ended as often as it was asked for."""
        while self.host.stops:
            self.let_go(0, fail=False)
            self.rest()
        assert not self.loop._queue.demands and not self.loop._reads
        assert not any(call for _, call in self.calls)
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
            machine.purge(owner)
        case ("give up", which):
            machine.give_up(which)
    return position


def ask(owner: int, *demands: Key, joins: int = 0) -> tuple[Any, ...]:
    return ("ask", owner, 1, list(demands), joins, [], 0.0)


def guess(key: Key) -> tuple[Any, ...]:
    return ("ask", 0, 1, [], 0, [(key, 3, 1.0)], 1000.0)


GO, LAST = ("let go", 0, False), ("let go", -1, False)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    lanes=st.integers(1, 4),
    guess_lanes=st.integers(1, 2),
    jobs=st.integers(0, 2),
    unwanted=st.frozensets(KEYS, max_size=2),
    operations=st.lists(OPERATIONS, min_size=12, max_size=50),
    end=st.sampled_from(["rest", "stop", "close"]),
)
# A second call waits for one read of a first call, whose others take longer.
@example(4, 1, 0, frozenset(), [ask(0, (0, 0), (1, 3)), ask(1, joins=1), GO], "rest")
@example(4, 1, 0, frozenset(), [ask(0, (0, 0), (1, 3)), ask(1, joins=1), LAST], "rest")
# Of a call one is read and the other hangs.
@example(4, 1, 0, frozenset(), [ask(0, (0, 0), (1, 3)), GO, ("give up", 0)], "rest")
# A guess that is being read becomes a demand for another place, and then hangs.
@example(1, 1, 0, frozenset(), [guess((1, 0)), ask(0, (1, 0)), ("give up", 0), GO], "rest")
# The first of two who wait for a read in the queue leaves.
@example(
    *(1, 1, 0, frozenset()),
    [ask(0, (0, 0)), ask(0, (2, 0)), ask(1, joins=2), ("purge", 0)],
    "rest",
)
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
    with machine.loop:
        try:
            for operation in operations:
                position = carry_out(machine, operation, position)
                machine.rest()
            if end == "rest":
                machine.finish()
            elif end == "stop":
                machine.loop.stop()
                machine._on_loop(lambda: None)
        finally:
            machine.host.open()
    assert not machine.host.wrong, machine.host.wrong
    assert not any(call for _, call in machine.calls)
    for key in ALL_KEYS:
        assert machine.host.ends[key] == machine.opened[key], key


# -- one interleaving that gates cannot make ----------------------------------------------------


class Nosy:
    """The lock of the lanes; looks for jobs that have ended whenever a lane is about to take it."""

    def __init__(self, lanes: Lanes, look: Callable[[], None]) -> None:
        self._real = lanes._lock
        self._look = look
        self._looking = False

    def __enter__(self) -> None:
        if not self._looking:
            self._looking = True
            self._look()
            self._looking = False
        self._real.acquire()

    def __exit__(self, *_: object) -> None:
        self._real.release()


async def test_a_job_is_collected_only_when_its_read_is_known_to_have_ended() -> None:
    """Another lane's report may make the loop collect at any moment, and it looks only once."""
    over: set[Read] = set()

    def collect() -> None:
        over.update(job.read for job in lanes.collect() if not job.read.left)

    begun = threading.Event()

    def work(key: Key, slot: int, job: int) -> int:
        begun.set()
        return 1

    lanes = Lanes(1, work, collect, over.add)
    lanes._lock = Nosy(lanes, collect)  # type: ignore[assignment]
    done = asyncio.get_running_loop().create_future()
    read = Read((0, 0), 0, True, [1], done, Batch(1))
    lanes.start()
    lanes.put(Job(read, 0, True))
    assert await asyncio.to_thread(begun.wait, TIMEOUT)
    lanes.stop(wait=True)
    assert over == {read}


# -- the real store -----------------------------------------------------------------------------

EXPERTS, SLOTS = 8, (4, 5)
TENSORS = (Tensor("up.weight", (16, 4)), Tensor("up.scales", (16,), "BF16", "F32"))


@dataclass
class Call:
    """A layer call that has not let go of its slots."""

    group: int
    experts: list[int]
    got: Demanded
    owner: int


class Bench:
    """The real store on the real loop, with a drive that fails and hangs when it is told to."""

    def __init__(self, folder: Path, drive: FaultyDrive, prefetch: PrefetchConfig) -> None:
        self.layers = [
            write_stacked(folder / "stacked", TENSORS, experts=EXPERTS, layer=4),
            write_packed(folder / "packed", TENSORS, experts=EXPERTS, layer=5),
        ]
        records = [layer.record for layer in self.layers]
        self.reader = RecordReader(records, preadv=drive)
        self.drive = drive
        self.store = ExpertStore(
            records,
            SLOTS,
            self.reader,
            tracer=Tracer(None),
            top_k=[2, 2],
            prefetch=prefetch,
            staging_bytes=1 << 14,
        )
        self.calls: list[Call] = []
        self.wrong: list[str] = []
        self.futures = 0
        self._writers: set[int] = set()
        self._lock = threading.Lock()
        self._read_job = self.reader.read_job
        self.reader.read_job = self._alone  # type: ignore[method-assign]

    def _alone(
        self,
        group: int,
        expert: int,
        job: int,
        rows: Sequence[memoryview],
        passage: Passage | None = None,
    ) -> int:
        """Nobody else may write to these rows meanwhile."""
        place = ctypes.addressof(ctypes.c_char.from_buffer(rows[0]))
        with self._lock:
            if place in self._writers:
                self.wrong.append(f"{(group, expert)} is read into a slot that is written to")
            self._writers.add(place)
        try:
            return self._read_job(group, expert, job, rows, passage)
        finally:
            with self._lock:
                self._writers.discard(place)

    def demand(self, owner: int, position: int, group: int, experts: list[int], more: Any) -> None:
        guesses = [
            Guess((g, e), position + ahead, chance or 1.0, sure=chance is None)
            for (g, e), ahead, chance in more
        ]
        got = self.store.demand(
            group, experts, owner=owner, position=position, guesses=guesses, grant=1e6
        )
        if got is not None:
            self.futures += len(got.futures)
            self.calls.append(Call(group, experts, got, owner))

    def end(self, loop: IoLoop, which: int) -> None:
        """Wait for a call, look at its bytes, and let go of it."""
        if not self.calls:
            return
        call = self.calls.pop(which % len(self.calls))
        errors = [self._error(loop, future) for future in call.got.futures]
        if not any(errors):
            for expert, slot in zip(call.experts, call.got.slots, strict=True):
                rows = [bytes(row) for row in self.store.groups[call.group].pool.rows(slot)]
                if rows != self.layers[call.group].expected(expert):
                    self.wrong.append(f"{(call.group, expert)} has other bytes")
        self.store.release(call.group, call.got.slots)

    def _error(self, loop: IoLoop, future: Future[None]) -> BaseException | None:
        for _ in range(TRIES):
            with suppress(TimeoutError):
                return future.exception(0.005)
            if self.drive.hanging:
                self.give_up(loop)
        raise AssertionError("a call is never told that its reads have ended")

    def give_up(self, loop: IoLoop) -> None:
        """The time of the reads that hang is over."""
        self.drive.wait_hanging(1, 0.02)
        loop.start(partial(_do, partial(loop._give_up_late, time.monotonic()))).result(TIMEOUT)


async def _do(function: Callable[[], None]) -> None:
    function()


STORE_OPERATIONS = st.one_of(
    st.tuples(
        st.just("demand"),
        OWNERS,
        st.integers(0, 1),
        st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4, unique=True),
        st.lists(
            st.tuples(
                st.tuples(st.integers(0, 1), st.integers(0, EXPERTS - 1)),
                st.integers(1, 4),
                st.sampled_from([0.2, 1.0, None]),  # None: sure
            ),
            max_size=3,
        ),
    ),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("fault"), st.sampled_from(["error", "short", "hang"]), st.integers(1, 4)),
    st.tuples(st.just("answer")),
    st.tuples(st.just("give up")),
    st.tuples(st.just("purge"), OWNERS),
    st.tuples(st.just("over"), st.integers(0, 4)),
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lanes=st.integers(1, 3),
    destination=st.sampled_from(["slots", "staging"]),
    operations=st.lists(STORE_OPERATIONS, min_size=10, max_size=50),
    end=st.sampled_from(["answer", "close"]),
)
# A guess hangs on its way into memory beside the pools, and the next one needs a place there.
@example(
    *(2, "staging"),
    [
        ("fault", "hang", 3),
        ("demand", 0, 0, [0], [((1, 3), 9, 1.0)]),
        ("end", 0),
        ("give up",),
        ("demand", 0, 0, [1], [((1, 4), 9, 1.0)]),
        ("end", 0),
        ("demand", 0, 1, [4], []),
        ("end", 0),
    ],
    "answer",
)
def test_slots_have_one_owner_and_futures_end(
    tmp_path_factory: pytest.TempPathFactory,
    lanes: int,
    destination: Any,
    operations: list[tuple[Any, ...]],
    end: str,
) -> None:
    prefetch = PrefetchConfig(destination=destination)
    with FaultyDrive() as drive:
        bench = Bench(tmp_path_factory.mktemp("bench"), drive, prefetch)
        store = bench.store
        with IoLoop(store, lanes=lanes, grace=0.05) as loop:
            store.connect(loop)
            try:
                for position, operation in enumerate(operations):
                    match operation:
                        case ("demand", owner, group, experts, guesses):
                            bench.demand(owner, position, group, experts, guesses)
                        case ("end", which):
                            bench.end(loop, which)
                        case ("fault", kind, at):
                            drive.plan(kind, at)
                        case ("give up",):
                            bench.give_up(loop)
                        case ("answer",):
                            drive.answer()
                        case ("purge", owner):
                            store.purge(owner)
                        case ("over", ahead):
                            store.give_up(position + ahead)
                    store.check_integrity()
                    assert loop.failure is None
                while end == "answer" and bench.calls:
                    bench.end(loop, 0)
            finally:
                if end == "answer":
                    drive.forget()
                    drive.answer()
        for call in bench.calls:  # the loop has been closed under them
            for future in call.got.futures:
                assert future.done()
            store.release(call.group, call.got.slots)
        assert not bench.wrong, bench.wrong
        store.give_up(len(operations) + 5)
        store.check_integrity(idle=True)
        assert not store._flights
        drive.forget()
        drive.answer()
        join_lanes()
        bench.reader.close()
