"""The I/O loop: order, lanes, its contract across threads, its end, and its death."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

import pytest
import uvloop

from moestream.io import loop as loop_module
from moestream.io.asks import Ask, Guess, Purge
from moestream.io.errors import LoopClosed
from moestream.io.lanes import Job
from moestream.io.loop import IoLoop
from moestream.io.queue import Key

from .fakes import TIMEOUT, FakeHost, Gate, join_lanes, no_threads_left


@pytest.fixture(autouse=True, params=["uvloop", "asyncio"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on both event loops."""
    name: str = request.param
    monkeypatch.setattr(loop_module, "_have_uvloop", lambda: name == "uvloop")
    return name


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    with no_threads_left():
        yield


def ask(*keys: Key, owner: int = 1, position: int = 0) -> Ask:
    return Ask(owner, position, keys)


def layer(group: int, experts: int) -> list[Key]:
    return [(group, expert) for expert in range(experts)]


class Stuck:
    """A host whose lanes are all held up by reads of the given keys."""

    def __init__(self, *keys: Key) -> None:
        self.host = FakeHost()
        self.gate = Gate()
        self.keys = keys
        self.host.on_read = self._read

    def _read(self, key: Key) -> None:
        if key in self.keys:
            self.gate()


FIRST: Key = (99, 0)


# -- reads ------------------------------------------------------------------------------------


def test_every_read_is_reported_once() -> None:
    host = FakeHost()
    with IoLoop(host, lanes=3) as loop:
        loop.submit(ask(*layer(0, 5)))
        loop.submit(ask(*layer(1, 5), position=1))
        host.wait_ended(10)
    for key in layer(0, 5) + layer(1, 5):
        outcome = host.outcome(key)
        assert (outcome.kind, outcome.slot, outcome.nbytes) == ("finish", key[1], 10)
        assert outcome.error is None
    assert host.peak <= 3


def test_demands_are_read_in_the_order_of_their_layers_then_of_their_arrival() -> None:
    stuck = Stuck(FIRST)
    with IoLoop(stuck.host, lanes=1) as loop:
        loop.submit(ask(FIRST))
        stuck.gate.wait_entered()
        loop.submit(ask((5, 1), (5, 0), position=5))
        loop.submit(ask((2, 3), position=2))
        loop.submit(ask((5, 2), (2, 1), position=3, owner=2))
        stuck.gate.open()
        stuck.host.wait_ended(6)
    assert stuck.host.begun == [FIRST, (2, 3), (5, 2), (2, 1), (5, 1), (5, 0)]


def test_a_demand_for_a_queued_expert_joins_it() -> None:
    stuck = Stuck(FIRST)
    with IoLoop(stuck.host, lanes=1) as loop:
        loop.submit(ask(FIRST))
        stuck.gate.wait_entered()
        loop.submit(ask((1, 1), (2, 2), position=8))
        loop.submit(ask((2, 2), position=4, owner=2))
        stuck.gate.open()
        stuck.host.wait_ended(3)
    assert stuck.host.begun == [FIRST, (2, 2), (1, 1)]
    assert stuck.host.outcome((2, 2)).kind == "finish"


def sure(*keys: Key, position: int = 1) -> tuple[Guess, ...]:
    return tuple(Guess(key, position, 1.0, sure=True) for key in keys)


def test_sure_guesses_take_the_lanes_that_demands_leave() -> None:
    """With a demand unfinished and without a grant, where no other guess would begin."""
    stuck = Stuck(FIRST)
    together = threading.Barrier(3)

    def read(key: Key) -> None:
        if key[0] == 1:
            together.wait(TIMEOUT)
        stuck._read(key)

    stuck.host.on_read = read
    with IoLoop(stuck.host, lanes=4) as loop:
        loop.submit(ask(FIRST))
        stuck.gate.wait_entered()
        guess = Guess((2, 0), 1, 1.0)
        loop.submit(Ask(1, 0, guesses=(guess, *sure(*layer(1, 3)))))
        stuck.host.wait_ended(3)
        assert stuck.host.begun == [FIRST, *layer(1, 3)]
        stuck.gate.open()
        stuck.host.wait_ended(4)
        assert loop.statistics().delayed_bytes == 0
    assert stuck.host.outcome((2, 0)).kind == "void"


def test_sure_guesses_begin_behind_the_demands_that_wait() -> None:
    stuck = Stuck(FIRST)
    with IoLoop(stuck.host, lanes=1) as loop:
        loop.submit(ask(FIRST))
        stuck.gate.wait_entered()
        loop.submit(Ask(1, 0, guesses=sure((1, 0), (1, 1))))
        loop.submit(Ask(1, 0, ((0, 0), (0, 1))))
        stuck.gate.open()
        stuck.host.wait_ended(5)
    assert stuck.host.begun == [FIRST, (0, 0), (0, 1), (1, 0), (1, 1)]


def test_sure_guesses_do_not_wait_for_the_last_demand_of_a_batch() -> None:
    """Lanes that run out of demands say so, though the call has not got all of its experts."""
    stuck = Stuck(FIRST)
    with IoLoop(stuck.host, lanes=2) as loop:
        loop.submit(Ask(1, 0, (FIRST, *layer(0, 3)), guesses=sure((1, 0))))
        stuck.host.wait_ended(4)
        assert stuck.host.outcome((1, 0)).kind == "finish"
        stuck.gate.open()
        stuck.host.wait_ended(5)


def test_a_sure_guess_that_is_being_read_counts_as_no_delay() -> None:
    stuck = Stuck((1, 0))
    with IoLoop(stuck.host, lanes=2) as loop:
        loop.submit(Ask(1, 0, guesses=sure((1, 0))))
        stuck.gate.wait_entered()
        loop.submit(Ask(1, 1, ((0, 0),)))
        stuck.host.wait_ended(1)
        assert loop.statistics().delayed_bytes == 0
        stuck.gate.open()
        stuck.host.wait_ended(2)


def test_sure_guesses_go_with_their_owner() -> None:
    stuck = Stuck(FIRST)
    with IoLoop(stuck.host, lanes=1) as loop:
        loop.submit(Ask(1, 0, (FIRST,), guesses=sure((1, 0))))
        loop.submit(Ask(2, 0, guesses=sure((1, 0), (1, 1))))
        stuck.gate.wait_entered()
        loop.submit(Purge(2))
        stuck.host.wait_ended(1)
        stuck.gate.open()
        stuck.host.wait_ended(3)
    assert stuck.host.outcome((1, 0)).kind == "finish"
    assert stuck.host.outcome((1, 1)).kind == "void"


@pytest.mark.parametrize("lanes", [1, 3])
def test_as_many_reads_run_as_there_are_lanes(lanes: int) -> None:
    host = FakeHost()
    together = threading.Barrier(lanes)

    def meet(_: Key) -> None:
        together.wait(TIMEOUT)

    host.on_read = meet
    with IoLoop(host, lanes=lanes) as loop:
        loop.submit(ask(*layer(0, 4 * lanes)))
        host.wait_ended(4 * lanes)
    assert host.peak == lanes
    assert len(host.threads["read"]) == lanes


def test_the_books_are_kept_on_the_loop_thread_and_reads_are_not() -> None:
    """Only the end of a demand that was read is told by its lane."""
    stuck = Stuck(FIRST)
    host = stuck.host
    with IoLoop(host, lanes=2) as loop:
        host.unwanted.add((0, 1))
        loop.submit(ask(FIRST, (0, 1), (0, 2)))
        stuck.gate.wait_entered()
        stuck.gate.open()
        host.wait_ended(3)
        threads = {name: set(seen) for name, seen in host.threads.items()}
    (thread,) = threads["begin"]
    assert threads["dropped"] == {thread}
    assert threads["finish"] <= threads["read"]
    assert thread not in threads["read"]
    assert threading.get_ident() not in threads["read"] | {thread}


def test_a_read_that_is_no_longer_wanted_is_dropped() -> None:
    host = FakeHost()
    host.unwanted = {(0, 0), (0, 2)}
    with IoLoop(host, lanes=1) as loop:
        loop.submit(ask(*layer(0, 4)))
        host.wait_ended(4)
    assert [host.outcome(key).kind for key in layer(0, 4)] == ["dropped", "finish"] * 2
    assert host.outcome((0, 0)).error is None


@pytest.mark.parametrize("error", [OSError(5, "broken"), SystemExit(1), KeyboardInterrupt()])
def test_a_read_that_raises_fails_alone(error: BaseException) -> None:
    host = FakeHost()

    def read(key: Key) -> None:
        if key == (0, 1):
            raise error

    host.on_read = read
    with IoLoop(host, lanes=2) as loop:
        loop.submit(ask(*layer(0, 4)))
        host.wait_ended(4)
        assert loop.failure is None
        loop.submit(ask((1, 0)))
        host.wait_ended(5)
    assert host.outcome((0, 1)).error is error
    assert host.outcome((0, 1)).nbytes == 0
    assert all(host.outcome(key).error is None for key in [(0, 0), (0, 2), (0, 3), (1, 0)])


def test_a_failed_expert_can_be_asked_for_again() -> None:
    host = FakeHost()
    errors = [OSError("once")]

    def read(_: Key) -> None:
        if errors:
            raise errors.pop()

    host.on_read = read
    asked_again = threading.Event()
    with IoLoop(host, lanes=1) as loop:

        def again(key: Key) -> None:
            if not asked_again.is_set():
                asked_again.set()
                loop.submit(ask(key))
            else:
                done.set()

        done = threading.Event()
        host.on_finish = again
        loop.submit(ask((0, 0)))
        assert done.wait(TIMEOUT)
    assert [outcome.error is None for outcome in host.outcomes[0, 0]] == [False, True]


class Blocked:
    """Keeps the loop thread busy from ``with`` until ``go_on``."""

    def __init__(self, loop: IoLoop) -> None:
        self._loop = loop
        self._gate = Gate()

    def __enter__(self) -> Self:
        self._done = self._loop.start(self._block)
        self._gate.wait_entered()
        return self

    async def _block(self) -> None:
        self._gate()

    def __exit__(self, *_: object) -> None:
        self._gate.open()
        self._done.result(TIMEOUT)


def books(loop: IoLoop) -> tuple[int, int, list[int], int]:
    """Reads, unfinished demands, busy lanes and tasks, when the loop has done what it was told."""

    async def look() -> tuple[int, int, list[int], int]:
        for _ in range(1_000_000):  # a lane is about to tell of what the host has heard already
            if not loop._lanes._told:
                break
            await asyncio.sleep(0)
        for _ in range(4):  # tasks of reads that have ended have their turn
            await asyncio.sleep(0)
        return len(loop._reads), loop._unfinished, list(loop._busy), len(loop._running)

    result: tuple[int, int, list[int], int] = loop.start(look).result(TIMEOUT)
    return result


def test_a_demand_ends_although_the_loop_is_busy() -> None:
    stuck = Stuck(*layer(0, 2))
    host = stuck.host
    with IoLoop(host, lanes=2) as loop:
        loop.submit(ask(*layer(0, 2)))
        stuck.gate.wait_entered()
        assert books(loop) == (2, 2, [0, 2], 2)
        with Blocked(loop):
            stuck.gate.open()
            host.wait_ended(2)
            assert host.threads["finish"] <= host.threads["read"]
            assert len(loop._reads) == 2  # it has not heard of it
            loop.submit(ask((0, 0)))  # and the expert was lost again
        host.wait_outcomes((0, 0), 2)
        assert books(loop) == (0, 0, [0, 0], 0)
    assert [outcome.kind for outcome in host.outcomes[0, 0]] == ["finish"] * 2
    assert host.outcome((0, 1)).kind == "finish"


def test_the_loop_is_told_last_and_once() -> None:
    """Of a call of three reads, each is told to the host by its lane, then all to the loop."""
    host = FakeHost()
    events: list[str] = []
    host.on_finish = lambda key: events.append("finish")
    with IoLoop(host, lanes=1) as loop:
        report = loop._lanes._report

        def reported() -> None:
            events.append("report")
            report()

        with Blocked(loop):  # all three are with the lanes before one has ended
            loop._most = 3
            loop._lanes._report = reported
            loop.submit(ask(*layer(0, 3)))
        host.wait_ended(3)
        assert books(loop) == (0, 0, [0, 0], 0)
    assert events == ["finish"] * 3 + ["report"]


def test_a_demand_that_fails_is_told_by_the_loop() -> None:
    stuck = Stuck((0, 0))
    host = stuck.host

    def read(key: Key) -> None:
        stuck.gate()
        raise OSError("broken")

    host.on_read = read
    with IoLoop(host, lanes=1) as loop:
        loop.submit(ask((0, 0)))
        stuck.gate.wait_entered()
        stuck.gate.open()
        host.wait_ended(1)
    assert host.threads["finish"] == host.threads["begin"]
    assert isinstance(host.outcome((0, 0)).error, OSError)


def test_an_expert_is_read_again_while_others_of_its_call_are_still_being_read() -> None:
    """The loop has not heard of its end, since only the end of the whole call is told."""
    stuck = Stuck((0, 1))
    host = stuck.host
    with IoLoop(host, lanes=2) as loop:
        loop.submit(ask(*layer(0, 2)))
        host.wait_ended(1)
        loop.submit(ask((0, 0), position=1))
        host.wait_outcomes((0, 0), 2)
        assert (0, 1) not in host.outcomes
        stuck.gate.open()
        host.wait_ended(2)
        assert books(loop) == (0, 0, [0, 0], 0)


# -- tasks ------------------------------------------------------------------------------------


def test_tasks_run_on_the_loop(kind: str) -> None:
    host = FakeHost()

    async def task() -> tuple[bool, int]:
        return isinstance(asyncio.get_running_loop(), uvloop.Loop), threading.get_ident()

    with IoLoop(host, lanes=1) as loop:
        on_uvloop, thread = loop.start(task).result(TIMEOUT)
        loop.submit(ask((0, 0)))
        host.wait_ended(1)
        assert host.threads["begin"] == {thread}
    assert on_uvloop == (kind == "uvloop")


def test_a_task_that_fails_leaves_the_loop_alive() -> None:
    host = FakeHost()

    async def task() -> None:
        raise ValueError("no")

    with IoLoop(host, lanes=1) as loop:
        with pytest.raises(ValueError, match="no"):
            loop.start(task).result(TIMEOUT)
        loop.submit(ask((0, 0)))
        host.wait_ended(1)
    assert host.outcome((0, 0)).error is None


# -- a drive that does not answer ---------------------------------------------------------------

SHORT = 0.2
"""Seconds after which a read is given up here; only reads at a gate last so long, or longer."""


def test_a_read_that_hangs_is_given_up_and_its_slot_comes_back_later() -> None:
    stuck = Stuck((0, 0))
    host = stuck.host
    with IoLoop(host, lanes=1, read_timeout=SHORT) as loop:
        loop.submit(ask((0, 0), (0, 1)))
        host.wait_ended(2)
        assert host.outcome((0, 0)).kind == "abandoned"
        assert isinstance(host.outcome((0, 0)).error, TimeoutError)
        assert host.outcome((0, 1)).kind == "finish"  # by the lane that has taken its place
        assert host.returned == []
        stuck.gate.open()
        host.wait_returned(1)
        assert host.returned == [((0, 0), 0)]
        loop.submit(ask((1, 0)))
        host.wait_ended(3)
        assert loop.failure is None
    assert sum(len(outcomes) for outcomes in host.outcomes.values()) == 3


def test_an_expert_whose_read_hangs_can_be_asked_for_again() -> None:
    host, gate, calls = FakeHost(), Gate(), []

    def read(key: Key) -> None:
        calls.append(key)
        if len(calls) == 1:
            gate()

    host.on_read = read
    with IoLoop(host, lanes=1, read_timeout=SHORT) as loop:
        loop.submit(ask((0, 0)))
        host.wait_ended(1)
        loop.submit(ask((0, 0)))
        loop.submit(ask((0, 1)))
        host.wait_ended(2)
        gate.open()
        host.wait_returned(1)
    assert [outcome.kind for outcome in host.outcomes[0, 0]] == ["abandoned", "finish"]


def test_no_more_lanes_than_twice_their_number() -> None:
    """When all of them hang, what waits is told so at once; one that answers works on."""
    stuck = Stuck(*layer(0, 9))
    host = stuck.host
    with IoLoop(host, lanes=2, read_timeout=SHORT) as loop:
        loop.submit(ask(*layer(0, 9)))
        host.wait_ended(9)
        kinds = [host.outcome(key).kind for key in layer(0, 9)]
        assert kinds.count("abandoned") == 4
        assert set(kinds) <= {"abandoned", "finish", "dropped"}
        errors = [host.outcome(key).error for key in layer(0, 9)]
        assert all(isinstance(error, TimeoutError) for error in errors)
        lanes = [t for t in threading.enumerate() if t.name.startswith("moestream-lane")]
        assert len(lanes) == 4
        loop.submit(ask((1, 0)))
        host.wait_ended(10)
        assert isinstance(host.outcome((1, 0)).error, TimeoutError)
        stuck.gate.open()
        host.wait_returned(4)
        loop.submit(ask((1, 1)))
        host.wait_ended(11)
        assert host.outcome((1, 1)).error is None
        assert loop._lanes.alive == 2
    join_lanes()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_read_that_is_being_given_up_is_not_published(jobs: int) -> None:
    """Its drive answers between `lose` and `abandoned`; its other job, if any, ends there, too."""
    stuck = Stuck((0, 0))
    host = stuck.host
    ticks = itertools.count(1)
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)
    early: list[Key] = []

    def read(_: Key) -> None:
        begun.release()
        stuck.gate()

    def timeout(key: Key, job: int, seconds: float) -> BaseException:
        stuck.gate.open()
        for _ in range(jobs):
            assert ended.acquire(timeout=TIMEOUT)
        early.extend(host.outcomes)
        return TimeoutError(key, job)

    host.on_read = read
    host.jobs = lambda key: [10] * jobs  # type: ignore[method-assign]
    host.timeout = timeout  # type: ignore[method-assign]
    loop = IoLoop(host, lanes=2, read_timeout=1e6, clock=lambda: float(next(ticks)))
    do = loop._lanes._do

    def counted(job: Job) -> bool:
        needed = do(job)
        ended.release()
        return needed

    loop._lanes._do = counted  # type: ignore[method-assign]

    async def give_up() -> None:
        loop._give_up_late(min(job.since for job in loop._lanes._running) + 0.5)

    with loop:
        loop.submit(ask((0, 0)))
        for _ in range(jobs):
            assert begun.acquire(timeout=TIMEOUT)
        loop.start(give_up).result(TIMEOUT)
        host.wait_returned(1)
        assert books(loop) == (0, 0, [0, 0], 0)
    assert early == []
    assert host.outcome((0, 0)).kind == "abandoned"
    assert host.returned == [((0, 0), 0)]


def test_closing_does_not_wait_for_a_read_that_was_given_up() -> None:
    stuck = Stuck((0, 0))
    with IoLoop(stuck.host, lanes=2, read_timeout=SHORT, grace=1000.0) as loop:
        loop.submit(ask((0, 0)))
        stuck.host.wait_ended(1)
    assert stuck.host.returned == []
    stuck.gate.open()
    join_lanes()


def test_a_process_that_was_stopped_does_not_blame_the_drive() -> None:
    """The timer rings late and all reads look old: they get their time once more."""
    stuck = Stuck((0, 0))
    now = [0.0]
    rung = threading.Event()

    async def ring() -> None:
        loop._watch()
        rung.set()

    with IoLoop(stuck.host, lanes=1, read_timeout=60.0, clock=lambda: now[0]) as loop:
        loop.submit(ask((0, 0)))
        stuck.gate.wait_entered()
        now[0] = 1000.0  # 940 seconds after the timer was due
        loop.start(ring).result(TIMEOUT)
        assert loop._due == 1060.0
        stuck.gate.open()
        stuck.host.wait_ended(1)
    assert stuck.host.outcome((0, 0)).kind == "finish"


# -- the end ----------------------------------------------------------------------------------


def test_no_lane_is_left_when_the_block_ends() -> None:
    host = FakeHost()
    for _ in range(20):  # an idle lane needs a moment to end, which nobody may get to see
        with no_threads_left(), IoLoop(host, lanes=8) as loop:
            loop.submit(ask(*layer(0, 8)))


def test_what_was_not_begun_is_dropped_at_the_end() -> None:
    stuck = Stuck(FIRST)
    with IoLoop(stuck.host, lanes=1) as loop:
        loop.submit(ask(FIRST, *layer(0, 3)))
        stuck.gate.wait_entered()
        stuck.host.on_dropped = lambda keys: stuck.gate.open()
    assert stuck.host.outcome(FIRST).error is None
    for key in layer(0, 3):
        outcome = stuck.host.outcome(key)
        assert outcome.kind == "dropped"
        assert isinstance(outcome.error, LoopClosed)


def test_what_was_just_submitted_is_read_or_dropped_at_the_end() -> None:
    host = FakeHost()
    for number in range(20):
        with IoLoop(host, lanes=1) as loop:
            loop.submit(ask((number, 0), (number, 1)))
    keys = [(number, expert) for number in range(20) for expert in (0, 1)]
    assert all(host.outcome(key).kind in ("finish", "dropped") for key in keys)


def test_a_submit_after_the_end_is_refused_at_once() -> None:
    host = FakeHost()
    with IoLoop(host, lanes=1) as loop:
        pass
    with pytest.raises(LoopClosed):
        loop.submit(ask((0, 0)))
    assert not host.outcomes


@pytest.mark.parametrize("grace", [0.0, 0.02])
def test_reads_that_hang_are_abandoned_after_the_grace(grace: float) -> None:
    stuck = Stuck((0, 0), (0, 1))
    with IoLoop(stuck.host, lanes=2, grace=grace) as loop:
        loop.submit(ask(*layer(0, 4)))
        stuck.gate.wait_entered()
    # The drive has not answered yet, the block is over all the same.
    for key in layer(0, 4):
        assert isinstance(stuck.host.outcome(key).error, LoopClosed)
    assert [stuck.host.outcome(key).kind for key in layer(0, 4)] == ["finish"] * 2 + ["dropped"] * 2
    with pytest.raises(LoopClosed):
        loop.submit(ask((1, 0)))
    stuck.gate.open()
    join_lanes()
    assert sum(len(outcomes) for outcomes in stuck.host.outcomes.values()) == 4


def test_reads_that_end_within_the_grace_are_finished() -> None:
    stuck = Stuck((0, 0))
    with IoLoop(stuck.host, lanes=1, grace=TIMEOUT) as loop:
        loop.submit(ask((0, 0), (0, 1)))
        stuck.gate.wait_entered()
        stuck.host.on_dropped = lambda keys: stuck.gate.open()
    assert stuck.host.outcome((0, 0)).error is None


def test_who_waits_for_a_read_that_hangs_can_be_freed_from_another_thread() -> None:
    """The one who waits is inside the block: its end alone would never come."""
    stuck = Stuck((0, 0))
    host = stuck.host
    with IoLoop(host, lanes=1, grace=0.0) as loop:
        loop.submit(ask((0, 0), (0, 1)))
        stuck.gate.wait_entered()
        stopper = threading.Thread(target=loop.stop)
        stopper.start()
        host.wait_ended(2)
        stopper.join(TIMEOUT)
        with pytest.raises(LoopClosed):
            loop.submit(ask((0, 2)))
        loop.stop()
    loop.stop()
    assert isinstance(host.outcome((0, 0)).error, LoopClosed)
    assert host.outcome((0, 1)).kind == "dropped"
    assert loop.failure is None
    stuck.gate.open()
    join_lanes()


def test_tasks_go_on_after_a_stop_until_the_block_ends() -> None:
    """The trace is written to its end."""
    goes_on = threading.Event()

    async def task() -> str:
        await asyncio.to_thread(goes_on.wait, TIMEOUT)
        return "written"

    with IoLoop(FakeHost(), lanes=1) as loop:
        written = loop.start(task)
        loop.stop()
        goes_on.set()
        assert written.result(TIMEOUT) == "written"


def test_stopping_races_with_the_end_of_the_block() -> None:
    host = FakeHost()
    for number in range(50):
        together = threading.Barrier(2)

        def stop(together: threading.Barrier = together) -> None:
            together.wait(TIMEOUT)
            loop.stop()

        stopper = threading.Thread(target=stop)
        with IoLoop(host, lanes=1) as loop:
            loop.submit(ask((number, 0), (number, 1)))
            stopper.start()
            together.wait(TIMEOUT)
        stopper.join(TIMEOUT)
        assert not stopper.is_alive()
    for number in range(50):
        assert host.outcome((number, 0)).kind in ("finish", "dropped")
        assert host.outcome((number, 1)).kind in ("finish", "dropped")


def test_stopping_after_death_frees_who_waits_for_reads_that_hang() -> None:
    stuck = Stuck(FIRST)
    host = stuck.host

    def finish(key: Key) -> None:
        if key == (0, 0):
            raise Bug

    host.on_finish = finish
    with IoLoop(host, lanes=2, grace=0.0) as loop:
        loop.submit(ask(FIRST))
        loop.submit(ask((0, 0)))
        host.wait_ended(1)
        loop.stop()
        host.wait_ended(2)
        assert isinstance(host.outcome(FIRST).error, LoopClosed)
    stuck.gate.open()
    join_lanes()


def test_an_error_in_the_block_ends_the_loop_too() -> None:
    host = FakeHost()
    with pytest.raises(ZeroDivisionError), IoLoop(host, lanes=2) as loop:
        loop.submit(ask((0, 0)))
        raise ZeroDivisionError
    assert host.outcome((0, 0)).kind in ("finish", "dropped")


class Slow:
    """An event loop whose ``call_soon_threadsafe`` waits for something else to happen first."""

    def __init__(self, real: asyncio.AbstractEventLoop, wait: Gate, patience: float) -> None:
        self._real = real
        self._wait = wait
        self._patience = patience
        self.called = threading.Event()

    def call_soon_threadsafe(self, *arguments: Any) -> None:
        self.called.set()
        self._wait._entered.wait(self._patience)
        self._real.call_soon_threadsafe(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_closing_waits_for_a_lane_that_is_telling_an_end() -> None:
    """Though it does not wait for one to which the drive does not answer."""
    stuck = Stuck((0, 1))
    host = stuck.host
    telling = Gate()
    told: list[Key] = []

    def finish(key: Key) -> None:
        if key == (0, 0):
            telling()
            told.append(key)

    host.on_finish = finish
    loop = IoLoop(host, lanes=2, grace=0.0)
    stop = loop._lanes.stop

    def stopping(*, wait: bool) -> None:
        assert not wait
        telling.open()
        stop(wait=wait)
        assert told == [(0, 0)]

    loop._lanes.stop = stopping  # type: ignore[method-assign]
    with loop:
        loop.submit(ask((0, 1)))
        loop.submit(ask((0, 0)))
        stuck.gate.wait_entered()
        telling.wait_entered()
    assert host.outcome((0, 0)).error is None
    assert isinstance(host.outcome((0, 1)).error, LoopClosed)
    stuck.gate.open()
    join_lanes()


def test_closing_waits_for_a_submit_that_is_about_to_wake_the_loop() -> None:
    """Else the event loop is gone when it is woken, and submit raises something after having taken
    the keys."""
    host = FakeHost()
    loop = IoLoop(host, lanes=1)
    loop.__enter__()
    closed = Gate()
    slow = Slow(loop._loop, closed, patience=0.1)
    loop._loop = slow  # type: ignore[assignment]

    def close() -> None:
        assert slow.called.wait(TIMEOUT)
        loop.__exit__(None, None, None)
        closed._entered.set()

    closer = threading.Thread(target=close)
    closer.start()
    loop.submit(ask((0, 0)))
    closer.join(TIMEOUT)
    assert host.outcome((0, 0)).kind in ("finish", "dropped")


@pytest.mark.slow
def test_submits_race_with_the_end() -> None:
    """Threads submit while the loop is closed: each is refused, or its keys end exactly once."""
    for _ in range(200):
        _race_submits_with_the_end(threads=4)


class Submitters:
    """Threads that submit until they are refused, never more than some keys ahead of the loop."""

    AHEAD = 16

    def __init__(self, host: FakeHost, threads: int) -> None:
        self._credit = threading.Semaphore(threads * self.AHEAD)
        self._threads = threads
        self._started = threading.Barrier(threads + 1)
        self.taken: list[Key] = []
        self.refused: list[int] = []
        self._host = host

    def give_credit(self, keys: int) -> None:
        """So many keys have ended."""
        self._credit.release(keys)

    def start(self, loop: IoLoop) -> None:
        """Return once each thread has submitted something."""
        self._workers = [
            threading.Thread(target=self._submit, args=[loop, number])
            for number in range(self._threads)
        ]
        for worker in self._workers:
            worker.start()
        self._started.wait(TIMEOUT)

    def _submit(self, loop: IoLoop, number: int) -> None:
        for attempt in range(1_000_000):
            assert self._credit.acquire(timeout=TIMEOUT), "keys that were taken have not ended"
            assert self._credit.acquire(timeout=TIMEOUT), "keys that were taken have not ended"
            keys = [(number, 2 * attempt), (number, 2 * attempt + 1)]
            try:
                loop.submit(ask(*keys, owner=number, position=attempt))
            except LoopClosed:
                self.refused.append(number)
                self._credit.release(2)
                return
            self.taken.extend(keys)
            if attempt == 0:
                self._started.wait(TIMEOUT)

    def check(self, *others: Key) -> None:
        """Wait for their ends: each was refused, and what had been taken has ended once."""
        for worker in self._workers:
            worker.join(TIMEOUT)
            assert not worker.is_alive()
        assert sorted(self.refused) == list(range(self._threads))
        taken = [*self.taken, *others]
        self._host.wait_ended(len(taken))
        assert sorted(self._host.outcomes) == sorted(taken)
        assert all(len(outcomes) == 1 for outcomes in self._host.outcomes.values())


def _race_submits_with_the_end(threads: int) -> None:
    host = FakeHost()
    submitters = Submitters(host, threads)
    host.on_finish = lambda key: submitters.give_credit(1)
    host.on_dropped = lambda keys: submitters.give_credit(len(keys))
    with IoLoop(host, lanes=2) as loop:
        submitters.start(loop)
    submitters.check()


# -- death ------------------------------------------------------------------------------------


class Bug(Exception):
    """What the host's own code raises."""


def test_a_finish_that_raises_kills_the_loop_and_everybody_hears_of_it() -> None:
    stuck = Stuck(FIRST)
    host = stuck.host
    bug = Bug("books")

    def finish(key: Key) -> None:
        if key == (0, 0):
            raise bug

    host.on_finish = finish
    with IoLoop(host, lanes=2) as loop:
        loop.submit(ask(FIRST))
        stuck.gate.wait_entered()
        loop.submit(ask(*layer(0, 4)))
        host.wait_ended(4)  # they have been read or dropped, FIRST still runs
        assert loop.failure is bug
        with pytest.raises(LoopClosed) as refused:
            loop.submit(ask((1, 0)))
        assert refused.value.__cause__ is bug
        stuck.gate.open()
        host.wait_ended(5)
    assert host.outcome(FIRST).error is None
    assert host.outcome((0, 0)).kind == "finish"
    # Its lane may have ended before the loop said that more wait: then the loop hands out the
    # next one before it hears of the death.
    assert host.outcome((0, 1)).kind in ("finish", "dropped")
    for key in [(0, 2), (0, 3)]:
        outcome = host.outcome(key)
        assert outcome.kind == "dropped"
        assert isinstance(outcome.error, LoopClosed)
        assert "books" in str(outcome.error)
    assert (1, 0) not in host.outcomes


def test_a_finish_that_raises_in_a_lane_kills_the_loop() -> None:
    host = FakeHost()
    bug = Bug("books")

    def finish(key: Key) -> None:
        raise bug

    host.on_finish = finish
    with IoLoop(host, lanes=1) as loop:
        loop.submit(ask((0, 0)))
        host.wait_ended(1)
        assert host.threads["finish"] == host.threads["read"]
        for number in range(1_000_000):
            try:
                loop.submit(Ask(1, number))
            except LoopClosed as refused:
                assert refused.__cause__ is bug
                break
        assert loop.failure is bug
    assert host.outcome((0, 0)).kind == "finish"


def test_nothing_is_lost_when_the_loop_dies_before_it_hears_of_an_end() -> None:
    stuck = Stuck((0, 0))
    host = stuck.host
    dying = Gate()
    bug = Bug("slots")

    def begin(key: Key) -> None:
        if key == (1, 0):
            dying()
            raise bug

    host.on_begin = begin
    with IoLoop(host, lanes=2) as loop:
        loop.submit(ask((0, 0)))
        stuck.gate.wait_entered()
        loop.submit(ask((1, 0), (1, 1)))
        dying.wait_entered()
        stuck.gate.open()
        host.wait_ended(1)  # told by the lane, while the loop is about to die
        dying.open()
        host.wait_ended(3)
        assert loop.failure is bug
        assert books(loop) == (0, 0, [0, 0], 0)
    assert host.outcome((0, 0)).error is None
    assert [host.outcome(key).kind for key in layer(1, 2)] == ["dropped"] * 2


def test_a_begin_that_raises_kills_the_loop_and_its_own_key_hears_of_it_too() -> None:
    host = FakeHost()
    bug = Bug("slots")

    def begin(key: Key) -> None:
        if key == (0, 1):
            raise bug

    host.on_begin = begin
    with IoLoop(host, lanes=1) as loop:
        loop.submit(ask(*layer(0, 3)))
        host.wait_ended(3)
        assert loop.failure is bug
    assert [host.outcome(key).kind for key in layer(0, 3)] == ["finish", "dropped", "dropped"]


def test_a_drop_that_raises_kills_the_loop() -> None:
    host = FakeHost()
    bug = Bug("drop")
    host.unwanted = {(0, 0)}

    def dropped(keys: Sequence[Key]) -> None:
        if keys == [(0, 0)]:
            raise bug

    host.on_dropped = dropped
    with IoLoop(host, lanes=1) as loop:
        loop.submit(ask(*layer(0, 3)))
        host.wait_ended(3)
        assert loop.failure is bug
    assert [host.outcome(key).kind for key in layer(0, 3)] == ["dropped"] * 3


def test_a_drop_that_raises_at_the_end_is_told_and_leaves_nothing_behind() -> None:
    stuck = Stuck(FIRST)

    def dropped(_: Sequence[Key]) -> None:
        stuck.gate.open()
        raise Bug("drop")

    stuck.host.on_dropped = dropped
    with pytest.raises(Bug, match="drop"), IoLoop(stuck.host, lanes=1) as loop:
        loop.submit(ask(FIRST, (0, 0)))
        stuck.gate.wait_entered()
    assert stuck.host.outcome(FIRST).kind == "finish"


def test_submits_race_with_death() -> None:
    """The loop dies while others submit: each is refused, or its keys end exactly once."""
    host = FakeHost()
    submitters = Submitters(host, threads=3)

    def finish(key: Key) -> None:
        submitters.give_credit(1)
        if key == FIRST:
            raise Bug

    host.on_finish = finish
    host.on_dropped = lambda keys: submitters.give_credit(len(keys))
    with IoLoop(host, lanes=2) as loop:
        submitters.start(loop)
        loop.submit(ask(FIRST))
        submitters.check(FIRST)
        assert isinstance(loop.failure, Bug)
