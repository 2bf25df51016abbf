"""The expert store: futures, joins, failures, shutdown; with a loop to step and the real one."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moestream.io.asks import Ask
from moestream.io.errors import LoopClosed, ReadFailed
from moestream.io.loop import IoLoop
from moestream.io.queue import Entry, Key
from moestream.io.reader import RecordReader
from moestream.runtime.policy import LeastRecentlyUsed, PolicyFactory, least_recently_used
from moestream.runtime.prefetch import OFF, PrefetchConfig
from moestream.runtime.store import Demanded, ExpertStore
from moestream.runtime.tracing import Tracer

from .fakes import (
    TIMEOUT,
    FakeDrive,
    FakeLoop,
    Layer,
    ReadCall,
    Tensor,
    join_lanes,
    no_threads_left,
    write_packed,
    write_stacked,
)

TENSORS = (Tensor("up.weight", (16, 4)), Tensor("up.scales", (16,), "BF16", "F32"))
EXPERTS = 8
SLOTS = (3, 4)


@dataclass
class Bench:
    """A store of two layers and what it stands on."""

    layers: list[Layer]
    drive: FakeDrive
    reader: RecordReader
    store: ExpertStore

    def demand(self, group: int, *experts: int, owner: int = 1, position: int = 0) -> Demanded:
        got = self.store.demand(group, experts, owner=owner, position=position)
        assert got is not None, "no room"
        return got

    def slot_bytes(self, group: int, slot: int) -> list[bytes]:
        return [bytes(row) for row in self.store.groups[group].pool.rows(slot)]

    def check(self, group: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """The slots hold these experts."""
        for expert, slot in zip(experts, slots, strict=True):
            assert self.slot_bytes(group, slot) == self.layers[group].expected(expert)


def make(
    folder: Path,
    policy: PolicyFactory = least_recently_used,
    *,
    staging_bytes: int = 0,
    prefetch: PrefetchConfig = OFF,
) -> Bench:
    layers = [
        write_stacked(folder / "stacked", TENSORS, experts=EXPERTS, layer=4),
        write_packed(folder / "packed", TENSORS, experts=EXPERTS, layer=5),
    ]
    drive = FakeDrive()
    records = [layer.record for layer in layers]
    reader = RecordReader(records, preadv=drive)
    store = ExpertStore(
        records,
        SLOTS,
        reader,
        tracer=Tracer(None),
        policy=policy,
        staging_bytes=staging_bytes,
        prefetch=prefetch,
    )
    return Bench(layers, drive, reader, store)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with no_threads_left():
        made = make(tmp_path)
        yield made
        made.store.check_integrity(idle=True)
        made.reader.close()


@pytest.fixture
def loop(bench: Bench) -> FakeLoop:
    fake = FakeLoop(bench.store)
    bench.store.connect(fake.as_loop())
    return fake


# -- step by step -----------------------------------------------------------------------------


def test_a_missing_expert_is_read_into_its_slot(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(0, 5, 2, position=17, owner=9)
    assert loop.asks == [Ask(9, 17, ((0, 5), (0, 2)))]
    assert got.misses == len(got.futures) == 2
    assert got.nbytes == 2 * bench.layers[0].record.stored_bytes
    assert not any(future.done() for future in got.futures)
    assert loop.step() == (0, 5)
    assert [future.done() for future in got.futures] == [True, False]
    loop.step()
    assert [future.result() for future in got.futures] == [None, None]
    bench.check(0, [5, 2], got.slots)
    bench.store.release(0, got.slots)


def test_a_resident_expert_costs_nothing(bench: Bench, loop: FakeLoop) -> None:
    first = bench.demand(1, 3)
    loop.step()
    second = bench.demand(1, 3)
    assert second == Demanded(first.slots, [], 0, 0)
    assert len(loop.asks) == 1
    counters = bench.store.counters
    assert (counters.hits, counters.misses, counters.joins, counters.reads) == (1, 1, 0, 1)
    assert counters.bytes_read == bench.layers[1].record.stored_bytes
    bench.store.release(1, first.slots)
    bench.store.release(1, second.slots)


def test_layers_do_not_share_slots(bench: Bench, loop: FakeLoop) -> None:
    a, b = bench.demand(0, 1, 2, 3), bench.demand(1, 1, 2, 3, 4)
    while loop.queue:
        loop.step()
    bench.check(0, [1, 2, 3], a.slots)
    bench.check(1, [1, 2, 3, 4], b.slots)
    assert (bench.store.room(0), bench.store.room(1)) == (0, 0)
    bench.store.release(0, a.slots)
    bench.store.release(1, b.slots)


@pytest.mark.parametrize("begun", [False, True])
def test_a_read_on_its_way_is_joined(bench: Bench, loop: FakeLoop, begun: bool) -> None:
    first = bench.demand(0, 1)
    if begun:
        started = loop.begin()
    second = bench.demand(0, 6, 1, owner=2)
    assert second.futures[0] is first.futures[0]
    assert second.misses == 1
    assert second.nbytes == bench.layers[0].record.stored_bytes
    assert second.slots[1] == first.slots[0]
    assert loop.asks[1].demands == ((0, 6),)
    if begun:
        loop.end(*started)
    while loop.queue:
        loop.step()
    assert all(future.done() for future in second.futures)
    bench.check(0, [6, 1], second.slots)
    assert bench.store.counters.joins == 1
    bench.store.release(0, first.slots)
    bench.store.release(0, second.slots)


def test_a_call_that_does_not_fit_changes_nothing(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(0, 1)
    assert bench.store.demand(0, [2, 3, 4], owner=1, position=0) is None
    assert bench.store.room(0) == SLOTS[0] - 1
    assert len(loop.asks) == 1
    fits = bench.demand(0, 2, 3)
    while loop.queue:
        loop.step()
    bench.check(0, [1, 2, 3], got.slots + fits.slots)
    bench.store.release(0, got.slots + fits.slots)


def test_what_is_split(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(0, 1, 2)
    loop.step()
    assert bench.store.split(0, [0, 1, 2]) == ([1], [0, 2])
    loop.step()
    assert bench.store.split(0, [0, 1, 2]) == ([1, 2], [0])
    bench.store.release(0, got.slots)


def test_a_failed_read_is_the_error_of_its_future_only(bench: Bench, loop: FakeLoop) -> None:
    bench.drive.fail(0)
    got = bench.demand(1, 1, 2)
    loop.step()
    loop.step()
    error = got.futures[0].exception()
    assert isinstance(error, ReadFailed)
    assert (error.layer, error.expert) == (5, 1)
    assert got.futures[1].result() is None
    bench.store.check_integrity()
    assert bench.store.split(1, [1, 2]) == ([2], [1])
    assert bench.store.counters.read_errors == 1
    bench.store.release(1, got.slots)


def test_after_a_failed_read_the_next_demand_reads_again(bench: Bench, loop: FakeLoop) -> None:
    bench.drive.fail(0)
    first = bench.demand(1, 1)
    loop.step()
    again = bench.demand(1, 1)  # the first call has not let go of its slot yet
    assert again.misses == 1
    assert again.futures[0] is not first.futures[0]
    assert again.slots != first.slots
    loop.step()
    assert again.futures[0].result() is None
    bench.check(1, [1], again.slots)
    bench.store.release(1, first.slots)
    bench.store.release(1, again.slots)


def test_a_caller_that_leaves_before_its_read_ends_frees_nothing(
    bench: Bench, loop: FakeLoop
) -> None:
    """The slot is still being written: no other expert may get it."""
    left = bench.demand(0, 1)
    started = loop.begin()
    bench.store.release(0, left.slots)
    assert bench.store.room(0) == SLOTS[0] - 1
    others = bench.demand(0, 2, 3)
    assert left.slots[0] not in others.slots
    while loop.queue:
        loop.step()
    bench.store.release(0, others.slots)
    loop.end(*started)
    bench.check(0, [1], left.slots)
    assert bench.store.room(0) == SLOTS[0]


def test_a_dropped_read_is_an_error(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(0, 1, 2)
    reason = LoopClosed("enough")
    loop.drop(reason)
    assert [future.exception() for future in got.futures] == [reason, reason]
    assert bench.store.counters.dropped == 2
    bench.store.release(0, got.slots)
    again = bench.demand(0, 1)
    assert again.misses == 1
    loop.step()
    assert again.futures[0].result() is None
    bench.store.release(0, again.slots)


def test_a_read_dropped_without_a_reason_is_an_error_too(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(0, 1)
    loop.drop()
    assert isinstance(got.futures[0].exception(), LoopClosed)
    bench.store.release(0, got.slots)


def test_a_demand_after_the_end_pins_nothing(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(0, 1)
    loop.step()
    bench.store.release(0, got.slots)
    loop.closed = True
    with pytest.raises(LoopClosed):
        bench.demand(0, 1, 2)
    bench.store.check_integrity(idle=True)
    assert bench.store.room(0) == SLOTS[0]
    resident = bench.demand(0, 1)  # what is there can be computed with all the same
    assert resident.futures == []
    bench.store.release(0, resident.slots)


def test_a_demand_that_cannot_be_submitted_pins_nothing(
    bench: Bench, loop: FakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(_: Ask) -> None:
        raise MemoryError

    monkeypatch.setattr(loop, "submit", submit)
    with pytest.raises(MemoryError):
        bench.demand(0, 1, 2)
    bench.store.check_integrity(idle=True)


def test_a_key_that_nobody_asked_for_has_no_slot(bench: Bench) -> None:
    assert bench.store.begin(Entry((0, 3), True, 0, 1.0, set(), 0)) is None


class Broken(LeastRecentlyUsed):
    """A policy with a bug."""

    def removed(self, expert: int) -> None:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("how", ["finish", "dropped"])
def test_a_bug_in_the_books_still_wakes_whoever_waits(tmp_path: Path, how: str) -> None:
    bench = make(tmp_path, policy=lambda experts, width: Broken())
    loop = FakeLoop(bench.store)
    bench.store.connect(loop.as_loop())
    got = bench.demand(0, 1, 2)
    bench.drive.fail(0)
    with pytest.raises(ZeroDivisionError):
        if how == "finish":
            loop.step()
        else:
            loop.drop()
    waiting = got.futures[:1] if how == "finish" else got.futures
    assert all(future.exception(timeout=0) is not None for future in waiting)
    bench.reader.close()


# -- with the real loop -----------------------------------------------------------------------


def test_futures_complete_on_the_real_loop(bench: Bench) -> None:
    with IoLoop(bench.store, lanes=2) as loop:
        bench.store.connect(loop)
        for experts in ([1, 2, 3], [3, 4], [5, 6, 7], [1, 7]):
            got = bench.demand(0, *experts)
            for future in got.futures:
                assert future.result(TIMEOUT) is None
            bench.check(0, experts, got.slots)
            bench.store.release(0, got.slots)


def test_a_failed_read_on_the_real_loop(bench: Bench) -> None:
    bench.drive.fail(0, errno.EIO)
    with IoLoop(bench.store, lanes=1) as loop:
        bench.store.connect(loop)
        got = bench.demand(1, 6)
        with pytest.raises(ReadFailed, match="expert 6 of layer 5"):
            got.futures[0].result(TIMEOUT)
        bench.store.release(1, got.slots)
        again = bench.demand(1, 6)
        assert again.futures[0].result(TIMEOUT) is None
        bench.check(1, [6], again.slots)
        bench.store.release(1, again.slots)


def test_closing_the_loop_wakes_who_waits_for_reads_that_hang(bench: Bench) -> None:
    gate = bench.drive.hang(0)
    errors: list[BaseException | None] = []
    with IoLoop(bench.store, lanes=1, grace=0.0) as loop:
        bench.store.connect(loop)
        got = bench.demand(0, 1, 2)
        gate.wait_entered()

        def wait() -> None:
            errors.extend(future.exception(TIMEOUT) for future in got.futures)

        waiter = threading.Thread(target=wait)
        waiter.start()
    waiter.join(TIMEOUT)
    assert [type(error) for error in errors] == [LoopClosed, LoopClosed]
    bench.store.release(0, got.slots)
    bench.store.check_integrity(idle=True)
    gate.open()
    join_lanes()


def test_a_bug_in_the_books_kills_the_real_loop_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    with no_threads_left():
        bench = make(tmp_path, policy=lambda experts, width: Broken())
        gate = bench.drive.hang(0)
        bench.drive.before = _fail_later(errno.EIO)
        with IoLoop(bench.store, lanes=1) as loop:
            bench.store.connect(loop)
            got = bench.demand(1, 1, 2, 3)
            gate.wait_entered()
            gate.open()
            errors = [future.exception(TIMEOUT) for future in got.futures]
            assert [error is None for error in errors] == [True, False, False]
            assert isinstance(loop.failure, ZeroDivisionError)
            with pytest.raises(LoopClosed):
                loop.submit(Ask(1, 0, ((0, 0),)))
        bench.reader.close()


def _fail_later(code: int) -> Callable[[ReadCall], None]:
    """Let each call but the first one fail."""
    seen: list[ReadCall] = []

    def fail(call: ReadCall) -> None:
        seen.append(call)
        if len(seen) > 1:
            raise OSError(code, os.strerror(code))

    return fail


# -- stress -----------------------------------------------------------------------------------


class Compute:
    """Does what the compute thread does, at random: demand, wait, check the bytes, let go late."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench = bench
        self._random = random.Random(seed)
        self._pinned: deque[tuple[int, list[int], list[int]]] = deque()
        self.failures = 0
        self.ended = 0

    def run(self, demands: int) -> None:
        try:
            for number in range(demands):
                self._step(number)
                if number % 64 == 0:
                    self._bench.store.check_integrity()
        finally:
            while self._pinned:
                self._let_go()

    def _step(self, number: int) -> None:
        store, rng = self._bench.store, self._random
        group = rng.randrange(len(SLOTS))
        while len(self._pinned) > rng.randrange(3) or not store.room(group):
            self._let_go()
        experts = rng.sample(range(EXPERTS), rng.randint(1, store.room(group)))
        got = self._bench.demand(group, *experts, owner=number % 5, position=number)
        errors = [future.exception(TIMEOUT) for future in got.futures]
        self.ended += len(errors)
        if not any(errors):
            self._pinned.append((group, experts, got.slots))
            return
        store.release(group, got.slots)
        self.failures += 1
        for error in errors:
            if error is not None and not isinstance(error, ReadFailed):
                raise error

    def _let_go(self) -> None:
        # The bytes are looked at as late as a kernel might do so.
        group, experts, slots = self._pinned.popleft()
        self._bench.check(group, experts, slots)
        self._bench.store.release(group, slots)


@pytest.mark.parametrize("seed", [1, 2])
def test_thousands_of_demands_with_failing_reads(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    lock = threading.Lock()

    def sometimes(_: ReadCall) -> None:
        with lock:
            bad = chance.random() < 0.05
        if bad:
            raise OSError(errno.EIO, "now and then")

    bench.drive.before = sometimes
    compute = Compute(bench, seed)
    with IoLoop(bench.store, lanes=3) as loop:
        bench.store.connect(loop)
        compute.run(3000)
        assert loop.failure is None
    assert compute.failures > 50
    counters = bench.store.counters
    assert counters.misses == counters.reads > 2000
    assert counters.misses + counters.joins == compute.ended
    assert 0 < counters.read_errors < counters.reads


def test_the_loop_is_closed_in_the_middle_of_a_stress(bench: Bench) -> None:
    """The compute side hears of it, by a refusal or by a future, and nothing stays pinned."""
    for seed in range(20):
        compute = Compute(bench, seed)
        outcome: Future[None] = Future()
        reads = threading.Semaphore(0)

        def count(_: ReadCall, reads: threading.Semaphore = reads) -> None:
            reads.release()

        def work(compute: Compute = compute, outcome: Future[None] = outcome) -> None:
            try:
                compute.run(1_000_000)
            except BaseException as error:
                outcome.set_exception(error)

        bench.drive.before = count
        worker = threading.Thread(target=work)
        with IoLoop(bench.store, lanes=2) as loop:
            bench.store.connect(loop)
            worker.start()
            for _ in range(30):
                assert reads.acquire(timeout=TIMEOUT)
        assert isinstance(outcome.exception(TIMEOUT), LoopClosed)
        worker.join(TIMEOUT)
        bench.store.check_integrity(idle=True)


def test_pool_rows_are_what_mlx_sees(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(1, 7)
    loop.step()
    arrays = bench.store.groups[1].pool.arrays
    seen = [np.array(arrays[tensor.name][got.slots[0]]).tobytes() for tensor in TENSORS]
    assert seen == bench.layers[1].expected(7)
    bench.store.release(1, got.slots)


def test_keys_name_group_and_expert(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(1, 7)
    key: Key = (1, 7)
    assert list(loop.queue) == [key]
    loop.step()
    bench.store.release(1, got.slots)
