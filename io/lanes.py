"""The lanes: threads that do the blocking reads, demands first, and report in batches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from .meter import Meter
from .queue import Key

HEAD_START = 1e-6
"""Seconds between waking who waits and waking the loop; timers make 60 us of it (Linux). Else both
want the interpreter at once, and where the loop got it first, nothing was gained (measured)."""


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

    ``left``, ``nbytes``, ``error`` and ``claimed`` are written under the lock of the lanes, the
    rest by the loop thread.

    Attributes:
        key: (group, expert).
        slot: where to.
        demand: whether somebody waits for it.
        sure: a guess that may use all lanes.
        jobs: bytes of each job.
        done: of the task that waits for it.
        batch: the layer call that it belongs to; None for a guess.
        next: the job to hand out next.
        running: jobs that were handed out and have not been collected.
        left: jobs that have not ended.
        nbytes: bytes read so far.
        error: the first one; jobs that follow do nothing.
        claimed: a lane or the loop tells the owner of the slot that it has ended; no other may.
        withdrawn: no more jobs are handed out; the read ends with those that were.
        give_back: set when the read was given up while a job of it hangs: says to the owner of the
            slot that nothing writes there any more.
    """

    key: Key
    slot: int
    demand: bool
    jobs: Sequence[int]
    done: asyncio.Future[None]
    batch: Batch | None = None
    sure: bool = False
    next: int = 0
    running: int = 0
    left: int = field(init=False)
    nbytes: int = 0
    error: BaseException | None = None
    claimed: bool = False
    withdrawn: bool = False
    give_back: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.left = len(self.jobs)

    @property
    def waiting(self) -> bool:
        """Whether a job has not been given to a lane."""
        return self.next < len(self.jobs)

    @property
    def over(self) -> bool:
        """Whether every job that is ever done has ended and was collected."""
        return not self.running if self.withdrawn else not self.left


@dataclass(slots=True, eq=False)
class Job:
    """One job of a read.

    Attributes:
        read: what it is a part of.
        index: which part.
        demand: how it was counted when it was handed out.
        since: when a lane began it, by the clock of the lanes.
        lost: it was given up while its lane waits for the drive.
    """

    read: Read
    index: int
    demand: bool
    since: float = 0.0
    lost: bool = False


class Work(Protocol):
    """Does one job; may raise."""

    def __call__(self, key: Key, slot: int, job: int) -> int:
        """Returns the bytes read."""


class Lanes:
    """Threads with two queues of jobs. A context manager is not needed: ``start`` and ``stop``.

    Waking a thread costs more than anything else that a read needs of the interpreter (15 to 30 us
    with the lock being passed on, measured). So a lane takes its next job without asking, and calls
    ``report`` only when something can be done about it: a layer call has all its experts, a job of
    a guess has ended, or the lanes are about to run out of jobs while ``more`` wait. And a lane
    itself ``publish``-es a demand that was read without error: who waits is woken without the loop.

    A lane whose job is given up (``lose``) is replaced by a new one and ends when the drive
    answers. No more than ``count`` of them are replaced at a time: a drive that answers nothing
    must not fill the machine with threads. Without a replacement it goes on as a lane when the
    drive answers.

    Args:
        count: threads.
        work: does a job.
        report: asks the loop to call ``collect``; called in a lane, must not raise.
        publish: tells the owner of the slot that a read has ended well; called in a lane, must not
            raise.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        count: int,
        work: Work,
        report: Callable[[], None],
        publish: Callable[[Read], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = count
        self.alive = 0  # lanes that take jobs
        self.meter = Meter()
        self._work = work
        self._report = report
        self._publish = publish
        self._clock = clock
        # Guards the counts below, those of reads, the marks of jobs, and the meter.
        self._lock = threading.Lock()
        self._out = 0  # demanded jobs that have not ended
        self._running: dict[Job, threading.Thread] = {}
        self._lost: dict[Job, threading.Thread] = {}
        self._more = False
        self._told = False
        self._stopped = False
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # one per job; False ends a lane
        self._demands: deque[Job] = deque()
        self._guesses: deque[Job] = deque()
        self._finished: deque[Job] = deque()
        self._threads: list[threading.Thread] = []
        self._started = 0

    def start(self) -> None:
        """Start the threads."""
        self._add(self.count)

    def _add(self, count: int) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for number in range(self._started, self._started + count):
            # Daemons: a drive that never answers must not keep the interpreter from ending.
            name = f"moestream-lane-{number}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            # One by one, so that ``stop`` ends exactly those that were started.
            self._threads.append(thread)
            self._started += 1
            with self._lock:
                self.alive += 1

    def stop(self, *, wait: bool) -> None:
        """End the threads; what has not begun is forgotten.

        Args:
            wait: also for those that are doing a job, unless it is lost; the others end at once.
        """
        self._demands.clear()
        self._guesses.clear()
        with self._lock:
            self._stopped = True
            alive, hanging = self.alive, set(self._lost.values())
            if not wait:
                # What no lane has begun has an error by now, and will not be begun.
                hanging |= set(self._running.values())
        for _ in range(alive):
            self._tokens.put(False)
        for thread in self._threads:
            if thread not in hanging:
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

    def part(self, read: Read) -> None:
        """Another layer call waits for the read, too: its end is told by itself."""
        with self._lock:
            batch, read.batch = read.batch, None
            if batch is None:
                return
            batch.left -= read.left > 0
            tell = (not batch.left or not read.left) and not self._told
            self._told = self._told or tell
        if tell:
            self._report()

    def claim(self, read: Read) -> bool:
        """Whether the loop has to tell that the read has ended: no lane has begun to, or will."""
        with self._lock:
            free, read.claimed = not read.claimed, True
        return free

    def collect(self) -> list[Job]:
        """The jobs that have ended since the last call."""
        with self._lock:
            self._told = False  # what ends behind this line is told again
        finished = self._finished
        return [finished.popleft() for _ in range(len(finished))]

    # -- loop thread, when the drive does not answer --------------------------------------------

    def oldest(self) -> float | None:
        """When the job that has been running longest was begun; None when none runs."""
        with self._lock:
            return min((job.since for job in self._running), default=None)

    def lose(self, before: float) -> list[Job]:
        """Give up the jobs that were begun before this time; their lanes are replaced.

        They are ``collect``-ed like others once the drive has answered.
        """
        with self._lock:
            lost = [job for job in self._running if job.since < before]
            for job in lost:
                job.lost = True
                # Else another job that ends before `drop` would publish it.
                job.read.claimed = True
                self._lost[job] = self._running[job]
                self._end(job)
                self.alive -= 1
            replaced = min(self.count - self.alive, 2 * self.count - len(self._lost) - self.alive)
        with suppress(RuntimeError):  # no more threads can be had: the others go on
            self._add(max(replaced, 0))
        return lost

    def drop(self, read: Read, error: BaseException) -> Batch | None:
        """Let a read end in an error while jobs of it may be running.

        Returns its batch, which has not heard of that.
        """
        with self._lock:
            # Under the lock: a lane that ends a job of it now must not count it, too.
            batch, read.batch = read.batch if read.left else None, None
            read.error = read.error or error
        return batch

    def take_back(self) -> list[Job]:
        """The jobs that no lane has begun, when there is no lane to do so."""
        jobs: list[Job] = []
        for waiting in (self._demands, self._guesses):
            while (job := self._take(waiting)) is not None:
                jobs.append(job)
        with self._lock:
            self._out -= sum(job.demand for job in jobs)
        return jobs

    # -- lanes --------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._tokens.get():
            job = self._take(self._demands) or self._take(self._guesses)
            # There is none when `stop` or `take_back` has emptied the queues.
            if job is not None and not self._do(job):
                return

    @staticmethod
    def _take(jobs: deque[Job]) -> Job | None:
        try:
            return jobs.popleft()
        except IndexError:
            return None

    def _do(self, job: Job) -> bool:
        """Do a job; returns whether this lane is still needed."""
        read = job.read
        with self._lock:
            job.since = self._clock()
            self._running[job] = threading.current_thread()
            self.meter.start(len(self._running))
        nbytes, error = 0, read.error
        if error is None:
            try:
                nbytes = self._work(read.key, read.slot, job.index)
            except BaseException as problem:
                error = problem
        with self._lock:
            read.nbytes += nbytes
            read.error = read.error or error
            read.left -= 1
            needed = True
            if job.lost:
                del self._lost[job]
                needed = self.alive < self.count and not self._stopped
                self.alive += needed
            else:
                self.meter.add(nbytes)
                self._end(job)
            # Not before the counts are right: whoever collects it looks at them, and only once.
            self._finished.append(job)
            tell = self._is_news(job) and not self._told
            self._told = self._told or tell
            # Given up at this moment: either `lose`, `drop` or `claim` had the lock before, and the
            # read is claimed or has an error; or they find no running job, and that it is claimed.
            publish = read.demand and not (read.left or read.claimed) and read.error is None
            read.claimed = read.claimed or publish
        if publish:
            self._publish(read)
            if tell and not self._more and self._tokens.empty():  # no demand waits for loop or lane
                time.sleep(HEAD_START)
        if tell:
            self._report()
        return needed

    def _end(self, job: Job) -> None:
        """The job runs no more, or is not waited for any more."""
        del self._running[job]
        self.meter.stop(len(self._running))
        self._out -= job.demand

    def _is_news(self, job: Job) -> bool:
        read, batch = job.read, job.read.batch
        ended = not read.left and batch is not None
        if ended and batch is not None:
            batch.left -= 1
        if batch is None or not job.demand:
            return True
        return (ended and not batch.left) or (self._more and self._out <= self.count)
