"""The compute thread's contract, and the streams that such threads lease."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from moestream.runtime.compute import ComputeThread
from moestream.runtime.errors import EngineClosed, EngineDead
from moestream.runtime.streams import leased_streams

from .fakes import TIMEOUT, Gate, no_threads_left


class Bug(Exception):
    """What a job raises."""


class FakeCore:
    """What jobs work on; writes down what happened."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()

    def note(self, event: str) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())

    @contextmanager
    def opened(self) -> Iterator[FakeCore]:
        self.note("open")
        try:
            yield self
        finally:
            self.note("close")


class FakeJob:
    """A job that writes down how it ended."""

    def __init__(self, work: Callable[[], None] = lambda: None, name: str = "job") -> None:
        self.name = name
        self._work = work
        self.ran = 0
        self.aborts: list[BaseException] = []
        self.ended = threading.Event()

    def run(self, core: FakeCore) -> None:
        self.ran += 1
        core.note(self.name)
        try:
            self._work()
        finally:
            self.ended.set()

    def abort(self, error: BaseException) -> None:
        self.aborts.append(error)
        self.ended.set()

    @property
    def outcomes(self) -> int:
        """1 if the contract was kept."""
        return self.ran + len(self.aborts)


def fail() -> None:
    raise Bug("step")


@pytest.fixture
def core() -> Iterator[FakeCore]:
    with no_threads_left():
        yield FakeCore()


@contextmanager
def running(core: FakeCore) -> Iterator[ComputeThread[FakeCore]]:
    """A thread that has come up; stopped and joined at the end."""
    thread = ComputeThread(core.opened)
    thread.start()
    try:
        assert thread.ready.result(TIMEOUT) is core
        yield thread
    finally:
        thread.stop()
        thread.finished.result(TIMEOUT)
        thread.join()


# -- life -------------------------------------------------------------------------------------


def test_jobs_run_in_the_order_of_their_arrival_on_one_thread(core: FakeCore) -> None:
    with running(core) as thread:
        jobs = [FakeJob(name=f"job {number}") for number in range(5)]
        for job in jobs:
            thread.submit(job)
        assert jobs[-1].ended.wait(TIMEOUT)
    assert core.events == ["open", *(job.name for job in jobs), "close"]
    assert len(core.threads) == 1
    assert threading.get_ident() not in core.threads


def test_waiting_jobs_are_counted(core: FakeCore) -> None:
    gate = Gate()
    with running(core) as thread:
        thread.submit(FakeJob(gate))
        gate.wait_entered()
        assert thread.waiting == 0
        for expected in (1, 2):
            thread.submit(FakeJob())
            assert thread.waiting == expected
        gate.open()
    assert thread.waiting == 0


def test_stopping_ends_the_running_job_and_aborts_the_others(core: FakeCore) -> None:
    gate = Gate()
    with running(core) as thread:
        first, others = FakeJob(gate), [FakeJob() for _ in range(3)]
        for job in (first, *others):
            thread.submit(job)
        gate.wait_entered()
        thread.stop()
        with pytest.raises(EngineClosed):
            thread.submit(FakeJob())
        gate.open()
        thread.finished.result(TIMEOUT)
    assert first.ran == 1
    assert first.aborts == []
    for job in others:
        assert job.ran == 0
        assert [type(error) for error in job.aborts] == [EngineClosed]


def test_stopping_is_idempotent_and_final(core: FakeCore) -> None:
    with running(core) as thread:
        for _ in range(3):
            thread.stop()
        thread.finished.result(TIMEOUT)
        thread.stop()
        thread.join()
        thread.join()
        with pytest.raises(EngineClosed):
            thread.submit(FakeJob())
    assert core.events == ["open", "close"]


def test_a_thread_that_was_never_started_needs_no_join(core: FakeCore) -> None:
    thread = ComputeThread(core.opened)
    thread.stop()
    thread.join()
    with pytest.raises(EngineClosed):
        thread.submit(FakeJob())


def test_a_job_may_be_submitted_before_the_thread_is_up(core: FakeCore) -> None:
    gate = Gate()

    @contextmanager
    def slowly() -> Iterator[FakeCore]:
        gate()
        with core.opened() as opened:
            yield opened

    thread = ComputeThread(slowly)
    thread.start()
    job = FakeJob()
    thread.submit(job)
    gate.wait_entered()
    assert not thread.ready.done()
    gate.open()
    assert job.ended.wait(TIMEOUT)
    assert job.ran == 1
    thread.stop()
    thread.join()


def test_stopping_while_the_core_is_being_opened(core: FakeCore) -> None:
    gate = Gate()

    @contextmanager
    def slowly() -> Iterator[FakeCore]:
        gate()
        with core.opened() as opened:
            yield opened

    thread = ComputeThread(slowly)
    thread.start()
    gate.wait_entered()
    job = FakeJob()
    thread.submit(job)
    thread.stop()
    gate.open()
    thread.finished.result(TIMEOUT)
    thread.join()
    assert [type(error) for error in job.aborts] == [EngineClosed]
    assert core.events == ["open", "close"]


# -- death ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Bug("step"), SystemExit(3), KeyboardInterrupt()])
def test_a_job_that_raises_kills_the_thread_and_every_job_that_waits(
    core: FakeCore, error: BaseException
) -> None:
    gate = Gate()

    def work() -> None:
        gate()
        raise error

    with running(core) as thread:
        first, others = FakeJob(work), [FakeJob() for _ in range(3)]
        for job in (first, *others):
            thread.submit(job)
        gate.wait_entered()
        gate.open()
        thread.finished.result(TIMEOUT)
        assert first.outcomes == 1
        for job in others:
            assert job.ran == 0
            (abort,) = job.aborts
            assert isinstance(abort, EngineDead)
            assert abort.__cause__ is error
        with pytest.raises(EngineDead) as refused:
            thread.submit(FakeJob())
        assert refused.value.__cause__ is error
        thread.stop()
        with pytest.raises(EngineDead):  # still the more telling of the two
            thread.submit(FakeJob())
    assert core.events == ["open", "job", "close"]


def test_a_job_that_raises_while_the_thread_is_being_stopped(core: FakeCore) -> None:
    gate = Gate()

    def work() -> None:
        gate()
        fail()

    with running(core) as thread:
        waiting = FakeJob()
        thread.submit(FakeJob(work))
        thread.submit(waiting)
        gate.wait_entered()
        thread.stop()
        gate.open()
        thread.finished.result(TIMEOUT)
    assert [type(error) for error in waiting.aborts] == [EngineDead]


def test_waiting_jobs_hear_of_a_death_before_the_core_is_cleaned_up(core: FakeCore) -> None:
    cleaning = Gate()

    @contextmanager
    def slow_to_close() -> Iterator[FakeCore]:
        try:
            yield core
        finally:
            cleaning()

    thread = ComputeThread(slow_to_close)
    thread.start()
    thread.ready.result(TIMEOUT)
    gate = Gate()
    waiting = FakeJob()

    def work() -> None:
        gate()
        fail()

    thread.submit(FakeJob(work))
    thread.submit(waiting)
    gate.open()
    assert waiting.ended.wait(TIMEOUT)
    cleaning.wait_entered()
    assert not thread.finished.done()
    with pytest.raises(EngineDead):
        thread.submit(FakeJob())
    cleaning.open()
    thread.finished.result(TIMEOUT)
    thread.join()


def test_an_abort_that_raises_does_not_keep_the_others_from_hearing(
    core: FakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    class Sulking(FakeJob):
        def abort(self, error: BaseException) -> None:
            super().abort(error)
            raise Bug("abort")

    gate = Gate()
    with caplog.at_level(logging.CRITICAL + 1, "moestream"), running(core) as thread:
        jobs = [Sulking(), FakeJob(), Sulking(), FakeJob()]
        thread.submit(FakeJob(gate))
        for job in jobs:
            thread.submit(job)
        gate.wait_entered()
        thread.stop()
        gate.open()
        thread.finished.result(TIMEOUT)
    assert [job.outcomes for job in jobs] == [1] * 4


def test_every_caller_gets_an_error_of_its_own(core: FakeCore) -> None:
    """One object raised again and again would grow by a traceback each time and keep the frames."""
    with running(core) as thread:
        thread.submit(FakeJob(fail))
        thread.finished.result(TIMEOUT)
        depths = set()
        errors = []
        for _ in range(5):
            with pytest.raises(EngineDead) as refused:
                thread.submit(FakeJob())
            errors.append(refused.value)
            depths.add(len(traceback.extract_tb(refused.value.__traceback__)))
    assert len({id(error) for error in errors}) == 5
    assert len(depths) == 1


def broken_at_once() -> AbstractContextManager[FakeCore]:
    raise Bug("make")


@contextmanager
def broken_on_entry() -> Iterator[FakeCore]:
    raise Bug("enter")
    yield FakeCore()


@pytest.mark.parametrize("make", [broken_at_once, broken_on_entry])
def test_a_core_that_cannot_be_opened(
    make: Callable[[], AbstractContextManager[FakeCore]],
) -> None:
    with no_threads_left():
        thread = ComputeThread(make)
        early = FakeJob()
        thread.submit(early)
        thread.start()
        with pytest.raises(Bug):
            thread.ready.result(TIMEOUT)
        assert thread.finished.result(TIMEOUT) is None
        thread.join()
        assert [type(error) for error in early.aborts] == [EngineClosed]
        with pytest.raises(EngineClosed):
            thread.submit(FakeJob())


def test_a_core_that_cannot_be_closed_is_told_in_the_log(
    core: FakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def broken_on_exit() -> Iterator[FakeCore]:
        yield core
        raise Bug("exit")

    thread = ComputeThread(broken_on_exit)
    thread.start()
    thread.ready.result(TIMEOUT)
    with caplog.at_level(logging.ERROR, "moestream"):
        thread.stop()
        thread.finished.result(TIMEOUT)
        thread.join()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], Bug)


def test_a_death_is_not_told_twice(core: FakeCore, caplog: pytest.LogCaptureFixture) -> None:
    with running(core) as thread:
        thread.submit(FakeJob(fail))
        thread.finished.result(TIMEOUT)
    assert not caplog.records


@pytest.mark.parametrize("which", ["ready", "finished"])
def test_nobody_can_cancel_what_the_thread_reports(core: FakeCore, which: str) -> None:
    """Else the thread would fail to report, and everybody else would see a cancellation."""
    with running(core) as thread:
        assert not getattr(thread, which).cancel()
    assert thread.finished.result(0) is None


# -- races ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stop", "death"])
def test_jobs_race_with_the_end(core: FakeCore, end: str) -> None:
    """Each job is refused, or exactly one of run and abort is called."""
    for _ in range(200):
        _race(core, end)


def _race(core: FakeCore, end: str) -> None:
    taken: list[FakeJob] = []
    started = threading.Barrier(4)

    def submitter() -> None:
        for attempt in range(200):  # enough to be at it when the end comes
            job = FakeJob()
            try:
                thread.submit(job)
            except (EngineClosed, EngineDead):
                return
            taken.append(job)
            if attempt == 0:
                started.wait(TIMEOUT)

    with running(core) as thread:
        workers = [threading.Thread(target=submitter) for _ in range(3)]
        for worker in workers:
            worker.start()
        started.wait(TIMEOUT)
        if end == "death":
            thread.submit(FakeJob(fail))
        else:
            thread.stop()
        thread.finished.result(TIMEOUT)
        for worker in workers:
            worker.join(TIMEOUT)
            assert not worker.is_alive()
    assert all(job.outcomes == 1 for job in taken)
    core.events.clear()


# -- leased streams ---------------------------------------------------------------------------


ENDING = 2
"""The system shows a thread for a moment after it has been joined: so many may be counted."""


def system_threads() -> int:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("cannot count the threads of the operating system here")
    return len(list(tasks.iterdir()))


def work_on_a_thread() -> Any:
    """Some MLX work on a thread that then ends."""
    results: list[Any] = []

    def work() -> None:
        with leased_streams():
            a = mx.arange(64, dtype=mx.float32)
            results.append(mx.sum(a * 2).item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(TIMEOUT)
    (result,) = results
    return result


def test_short_threads_leave_no_system_threads_behind() -> None:
    assert work_on_a_thread() == 4032
    before = system_threads()
    for _ in range(30):
        assert work_on_a_thread() == 4032
    assert abs(system_threads() - before) <= ENDING


def test_threads_at_once_have_streams_of_their_own() -> None:
    seen: list[mx.Stream] = []
    together = threading.Barrier(3)

    def work() -> None:
        with leased_streams():
            seen.append(mx.default_stream(mx.default_device()))
            together.wait(TIMEOUT)
            assert [mx.sum(mx.ones((50,)) * i).item() for i in range(9)] == list(range(0, 450, 50))
            together.wait(TIMEOUT)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len({str(stream) for stream in seen}) == 3


def test_streams_come_back_from_a_thread_that_failed() -> None:
    work_on_a_thread()
    before = system_threads()

    def work() -> None:
        with pytest.raises(Bug), leased_streams():
            mx.eval(mx.ones((4,)) + 1)
            raise Bug

    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(TIMEOUT)
    assert abs(system_threads() - before) <= ENDING
