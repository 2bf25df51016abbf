"""The lanes: threads that do the blocking reads, demands first, and report in batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from .meter import Meter
from .queue import Key


@dataclass(slots=True)
class Batch:
    """Demands of one layer call: they are of use together, so their end is told once.

    Attributes:
        left: reads that have not ended.
    """

    left: int


@dataclass(slots=True, eq=False)
class Read:
    """A read that has begun: its jobs go to the lanes one by one.

    ``left``, ``nbytes`` and ``error`` are written under the lock of the lanes, the rest by the loop
    thread.

    Attributes:
        key: (group, expert).
        slot: where to.
        demand: whether somebody waits for it.
        jobs: bytes of each job.
        done: of the task that waits for it.
        batch: the layer call that it belongs to; None for a guess.
        next: the job to hand out next.
        running: jobs that were handed out and have not been collected.
        left: jobs that have not ended.
        nbytes: bytes read so far.
        error: the first one; jobs that follow do nothing.
    """

    key: Key
    slot: int
    demand: bool
    jobs: Sequence[int]
    done: asyncio.Future[None]
    batch: Batch | None = None
    next: int = 0
    running: int = 0
    left: int = field(init=False)
    nbytes: int = 0
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.left = len(self.jobs)

    @property
    def waiting(self) -> bool:
        """Whether a job has not been given to a lane."""
        return self.next < len(self.jobs)


@dataclass(slots=True, eq=False)
class Job:
    """One job of a read; ``demand`` is how it was counted when it was handed out."""

    read: Read
    index: int
    demand: bool


class Work(Protocol):
    """Does one job; may raise."""

    def __call__(self, key: Key, slot: int, job: int) -> int:
        """Returns the bytes read."""


class Lanes:
    """Threads with two queues of jobs. A context manager is not needed: ``start`` and ``stop``.

    Waking a thread costs more than anything else that a read needs of the interpreter (15 to 30 us
    with the lock being passed on, measured). So a lane takes its next job without asking, and calls
    ``report`` only when something can be done about it: a layer call has all its experts, a job of
    a guess has ended, or the lanes are about to run out of jobs while ``more`` wait.

    Args:
        count: threads.
        work: does a job.
        report: asks the loop to call ``collect``; called in a lane, must not raise.
    """

    def __init__(self, count: int, work: Work, report: Callable[[], None]) -> None:
        self.count = count
        self.meter = Meter()
        self._work = work
        self._report = report
        self._lock = threading.Lock()  # guards the counts below, those of reads, and the meter
        self._out = 0  # demanded jobs that have not ended
        self._running = 0
        self._more = False
        self._told = False
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # one per job; False ends a lane
        self._demands: deque[Job] = deque()
        self._guesses: deque[Job] = deque()
        self._finished: deque[Job] = deque()
        # Daemons: a drive that never answers must not keep the interpreter from ending.
        self._threads = [
            threading.Thread(target=self._run, name=f"moestream-lane-{i}", daemon=True)
            for i in range(count)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, *, wait: bool) -> None:
        """End the threads; what has not begun is forgotten. ``wait`` until the last has ended."""
        self._demands.clear()
        self._guesses.clear()
        for _ in self._threads:
            self._tokens.put(False)
        for thread in self._threads if wait else ():
            if thread.ident is not None:
                thread.join()

    # -- loop thread --------------------------------------------------------------------------

    def put(self, job: Job) -> None:
        """Hand out a job."""
        if job.demand:
            with self._lock:
                self._out += 1
            self._demands.append(job)
        else:
            self._guesses.append(job)
        self._tokens.put(True)

    def expect(self, *, more: bool) -> None:
        """Say whether demanded jobs wait for the next ``collect``."""
        if more == self._more:
            return
        with self._lock:
            self._more = more
            tell = more and self._out <= self.count and not self._told
            self._told = self._told or tell
        if tell:
            self._report()

    def settle(self, batch: Batch) -> None:
        """A read of the batch was given up before it began."""
        with self._lock:
            batch.left -= 1
            tell = not batch.left and not self._told
            self._told = self._told or tell
        if tell:
            self._report()

    def collect(self) -> list[Job]:
        """The jobs that have ended since the last call."""
        with self._lock:
            self._told = False  # what ends behind this line is told again
        finished = self._finished
        return [finished.popleft() for _ in range(len(finished))]

    # -- lanes --------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._tokens.get():
            job = self._take()
            if job is not None:  # else `stop` has emptied the queues
                self._do(job)

    def _take(self) -> Job | None:
        for jobs in (self._demands, self._guesses):
            try:
                return jobs.popleft()
            except IndexError:
                continue
        return None

    def _do(self, job: Job) -> None:
        read = job.read
        with self._lock:
            self._running += 1
            self.meter.start(self._running)
        nbytes, error = 0, read.error
        if error is None:
            try:
                nbytes = self._work(read.key, read.slot, job.index)
            except BaseException as problem:
                error = problem
        self._finished.append(job)
        with self._lock:
            self._running -= 1
            self.meter.add(nbytes)
            self.meter.stop(self._running)
            self._out -= job.demand
            read.nbytes += nbytes
            read.error = read.error or error
            read.left -= 1
            tell = self._is_news(job) and not self._told
            self._told = self._told or tell
        if tell:
            self._report()

    def _is_news(self, job: Job) -> bool:
        read, batch = job.read, job.read.batch
        ended = not read.left and batch is not None
        if ended and batch is not None:
            batch.left -= 1
        if batch is None or not job.demand:
            return True
        return (ended and not batch.left) or (self._more and self._out <= self.count)
