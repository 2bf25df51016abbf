"""The I/O loop: one thread with an event loop, a priority queue, and one task per read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from .asks import Ask, Purge, ReadHost
from .errors import LoopClosed, ReadsPurged, loop_died
from .lanes import Batch, Job, Lanes, Read
from .meter import DriveStatistics
from .queue import Entry, Key, ReadQueue

READ_TIMEOUT = 60.0
"""Seconds without an answer of the drive after which a read is given up (arbitrary: drives that
spin up or retry bad sectors, and file systems of a network, take up to half a minute)."""


class IoLoop:
    """Runs the reads. A context manager: the thread lives exactly as long as the ``with`` block.

    Contract across the threads: ``submit`` either raises ``LoopClosed`` at once, or each of its
    keys reaches ``finish``, ``abandoned``, ``dropped`` or ``void`` of the host, also when the loop
    dies.

    A demand that was read without error is finished by the lane that did its last job; the loop
    hears of it afterwards, for its own books. All other ends are told by the loop.

    Jobs are given out in this order: of demands that have begun, of demands in the queue, of sure
    guesses, of guesses that have begun, of guesses in the queue. The last two only while no demand
    is unfinished and on a few lanes, so that a demand finds the drive nearly free; and a guess
    begins only on credit, which the compute thread grants with each message (how, is decided
    there). Sure guesses, which the next demands are for, take whatever lane no demand waits for.

    Args:
        host: owner of the slots.
        lanes: jobs in flight at once, each in a thread of its own.
        guess_lanes: how many of them guesses may use; None for a quarter.
        lookahead_price: see ``ReadQueue``.
        grace: seconds that ``__exit__`` waits for running reads before it abandons them.
        read_timeout: seconds after which a read to which the drive does not answer is given up. Its
            slot stays out of use until the drive answers, its lane is replaced.
        clock: seconds that never go back; times the lanes' jobs.
    """

    def __init__(
        self,
        host: ReadHost,
        *,
        lanes: int,
        guess_lanes: int | None = None,
        lookahead_price: float = 0.5,
        grace: float = 5.0,
        read_timeout: float = READ_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._lanes = Lanes(lanes, host.read, self._report, self._publish, clock)
        self._clock = clock
        self._read_timeout = read_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when it should ring
        self._stuck: Job | None = None  # the last one to be given up, for errors
        # So many jobs are with the lanes that none has to wait for the loop to be given the next.
        self._most = lanes + lanes // 4
        self._guess_lanes = max(lanes // 4, 1) if guess_lanes is None else min(guess_lanes, lanes)
        self._grace = grace
        self._queue = ReadQueue(lookahead_price)
        # Reentrant: a garbage collection inside `submit` may run the `stop` of another engine.
        self._lock = threading.RLock()  # guards _inbox, _awake, _closed and _stopped
        self._inbox: deque[Ask | Purge] = deque()
        self._awake = False
        self._stopped = False
        self._closed = False
        self._ending: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._abandoned = False
        self._running: set[asyncio.Task[None]] = set()
        self._reads: dict[Key, Read] = {}
        self._demands: deque[Read] = deque()  # those with jobs left
        self._sure: deque[Read] = deque()
        self._guesses: deque[Read] = deque()
        self._deferred: dict[Key, tuple[Hashable, int]] = {}
        self._unfinished = 0  # demands among the reads
        self._batches: dict[Key, Batch] = {}  # of the demands in the queue
        self._busy = [0, 0]  # jobs of guesses and of demands that the lanes have
        self._credit = 0.0
        self._delayed_bytes = 0
        self._stack = ExitStack()
        self._portal: BlockingPortal
        self._loop: asyncio.AbstractEventLoop

    # -- life ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._end_lanes)
            options = {"use_uvloop": _have_uvloop()}
            self._portal = stack.enter_context(start_blocking_portal("asyncio", options))
            self._loop = self._portal.call(_running_loop)
            self._lanes.start()
            stack.callback(self._close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _close(self) -> None:
        with self._lock:
            self._closed = self._stopped = True
        self._portal.call(self._shut)

    def _end_lanes(self) -> None:
        # A lane to which the drive does not answer is left behind; idle ones end at once.
        self._lanes.stop(wait=not self._abandoned)

    async def _shut(self) -> None:
        self._stop()
        assert self._ending is not None
        await self._ending

    async def _end(self) -> None:
        try:
            self._take_messages()
            self._drop_all(LoopClosed("the I/O loop has been closed"))
        finally:
            await self._end_reads()

    async def _end_reads(self) -> None:
        if self._running:
            _, late = await asyncio.wait(set(self._running), timeout=self._grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    # -- any thread ---------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """What killed the loop, if anything did."""
        return self._failure

    def statistics(self) -> DriveStatistics:
        """What the lanes have done. Cheap; from any thread."""
        return self._lanes.meter.statistics(self._delayed_bytes)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the recent past while busy; 0.0 at first."""
        return self._lanes.meter.bandwidth

    def depths(self) -> tuple[int, int, int, int]:
        """Demands and guesses in the queue, and lanes that work on demands and on guesses."""
        return self._queue.demands, self._queue.guesses, self._busy[True], self._busy[False]

    def submit(self, ask: Ask | Purge) -> None:
        """Hand one message to the loop. Cheap; never blocks on I/O.

        Raises:
            LoopClosed: nothing of the message was taken.
        """
        with self._lock:
            if self._closed:
                raise LoopClosed("the I/O loop takes no more reads") from self._failure
            self._inbox.append(ask)
            if not self._awake:
                # Under the lock: else `_close` could end the event loop just before this line.
                self._loop.call_soon_threadsafe(self._drain)
                self._awake = True

    def stop(self) -> None:
        """Begin to close, from any thread; returns at once. Idempotent.

        For whoever cannot leave the block because it waits for a read: what has not begun is
        dropped, and a read that hangs is abandoned after the grace.
        """
        with self._lock:
            self._closed = True
            if not self._stopped:
                # Under the lock for the same reason as in `submit`.
                self._loop.call_soon_threadsafe(self._stop)
                self._stopped = True

    def start(self, task: Callable[[], Awaitable[Any]]) -> Future[Any]:
        """Run a coroutine function as a task on the loop (the trace writer, for one)."""
        return self._portal.start_task_soon(task)

    # -- lanes --------------------------------------------------------------------------------

    def _report(self) -> None:
        with suppress(RuntimeError):  # the event loop has ended: this read was abandoned
            self._loop.call_soon_threadsafe(self._collect)

    def _publish(self, read: Read) -> None:
        try:
            self._host.finish(read.key, read.slot, read.nbytes, None)
        except BaseException as fatal:
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._die, fatal)

    # -- loop thread --------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end())

    def _drain(self) -> None:
        try:
            self._take_messages()
            self._dispatch()
        except BaseException as error:
            self._die(error)

    def _take_messages(self) -> None:
        with self._lock:
            # A message put in after this line wakes the loop again.
            self._awake = False
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            if isinstance(message, Purge):
                self._give_up(self._queue.remove_owner(message.owner), ReadsPurged())
            else:
                self._give_up(self._take(message), None)

    def _take(self, ask: Ask) -> list[Entry]:
        """Queue what a message asks for; returns the guesses that it makes void."""
        queue = self._queue
        batch = Batch(0)
        for key in ask.demands:
            # A guess is on its way to another place, or the lane has told an end of which the loop
            # has not heard: when it has.
            if key in self._reads:
                self._deferred[key] = (ask.owner, ask.position)
                self._part(key)
                self._promote(key)
                continue
            entry = queue.get(key)
            if entry is not None and entry.demand:
                self._part(key)
            else:
                if entry is not None:
                    self._host.promoted(key)
                self._batches[key] = batch
                batch.left += 1
            queue.demand(key, ask.owner, ask.position)
        for key in ask.joins:
            entry = queue.get(key)
            if entry is not None and entry.demand:  # else the end of its first owner would end it
                queue.demand(key, ask.owner, ask.position)
            self._part(key)
            self._promote(key)
        if (ask.demands or ask.joins) and self._busy[False]:
            self._delayed_bytes += sum(
                read.jobs[read.next - 1] * read.running
                for read in self._reads.values()
                if not (read.demand or read.sure) and read.running
            )
        for guess in ask.guesses:
            if guess.key not in self._reads:
                queue.speculate(
                    guess.key, ask.owner, guess.position, guess.probability, sure=guess.sure
                )
        # Idle time cannot be saved up: what was not used before this message is gone.
        self._credit = min(self._credit, 0.0) + ask.grant
        return queue.drop_stale(ask.position + 1)

    def _part(self, key: Key) -> None:
        """A second layer call waits for the read; it must not wait for the others of the first."""
        if key in self._reads:
            self._lanes.part(self._reads[key])
        elif (batch := self._batches.pop(key, None)) is not None:
            self._lanes.settle(batch)

    def _promote(self, key: Key) -> None:
        read = self._reads.get(key)
        if read is not None and not read.demand:
            waiting = self._waiting(read)
            read.demand = True
            self._unfinished += 1
            if read in waiting:
                waiting.remove(read)
                self._demands.append(read)

    def _waiting(self, read: Read) -> deque[Read]:
        """Where a read of its kind stands while it has jobs left."""
        return self._demands if read.demand else self._sure if read.sure else self._guesses

    def _dispatch(self) -> None:
        if not self._lanes.alive:
            self._refuse()
        while self._lanes.alive and sum(self._busy) < self._most:
            read = self._next()
            if read is None:
                break
            self._hand_out(read)
        more = self._demands or self._queue.demands or self._sure or self._queue.sure
        self._lanes.expect(more=bool(more))

    def _next(self) -> Read | None:
        """The read whose next job a free lane should do."""
        while self._demands or self._queue.demands:
            read = self._demands[0] if self._demands else self._begin()
            if read is not None:
                return read
        while self._sure or self._queue.sure:
            read = self._sure[0] if self._sure else self._begin()
            if read is not None:
                return read
        # A promoted read that is nearly through leaves the drive to itself, too.
        if self._unfinished or self._busy[False] >= self._guess_lanes:
            return None
        while self._guesses or (self._credit > 0 and len(self._queue)):
            read = self._guesses[0] if self._guesses else self._begin()
            if read is not None:
                return read
        return None

    def _begin(self) -> Read | None:
        entry = self._queue.peek()
        assert entry is not None
        # If one of these raises, `_die` finds the entry in the queue.
        slot = self._host.begin(entry)
        jobs = self._host.jobs(entry.key) if slot is not None else ()
        self._queue.pop()
        if slot is None:
            self._give_up([entry], None)
            return None
        batch = self._batches.pop(entry.key, None)
        done = self._loop.create_future()
        read = Read(entry.key, slot, entry.demand, jobs, done, batch, entry.sure)
        self._reads[entry.key] = read
        if entry.demand:
            self._unfinished += 1
        elif not entry.sure:
            self._credit -= sum(jobs)
        self._waiting(read).append(read)
        task = self._loop.create_task(self._read(read))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return read

    def _hand_out(self, read: Read) -> None:
        job, demand = Job(read, read.next, read.demand), read.demand
        read.next += 1
        read.running += 1
        if not read.waiting:
            self._waiting(read).remove(read)
        self._busy[demand] += 1
        self._lanes.put(job)
        if self._timer is None:
            self._arm(self._read_timeout)

    def _collect(self) -> None:
        try:
            for job in self._lanes.collect():
                self._busy[job.demand] -= not job.lost
                read = job.read
                read.running -= 1
                if read.over:
                    self._complete(read)
            self._dispatch()
        except BaseException as fatal:
            self._die(fatal)

    @staticmethod
    def _complete(read: Read) -> None:
        if read.give_back is not None:  # long after it was given up
            read.give_back()
        elif not read.done.done():
            read.done.set_result(None)

    async def _read(self, read: Read) -> None:
        try:
            await read.done
        except asyncio.CancelledError:
            self._abandoned = True
            read.error = LoopClosed("the I/O loop was closed while the drive did not answer")
        self._running.discard(_current_task())
        if read.give_back is not None:
            return
        self._forget(read)
        try:
            if self._lanes.claim(read):
                self._host.finish(read.key, read.slot, read.nbytes, read.error)
            # Without unfinished demands guesses may go on.
            if self._take_deferred(read.key) or not self._unfinished:
                self._dispatch()
        except BaseException as fatal:
            self._die(fatal)

    def _forget(self, read: Read) -> None:
        del self._reads[read.key]
        self._unfinished -= read.demand

    def _take_deferred(self, key: Key) -> bool:
        if key not in self._deferred:
            return False
        self._queue.demand(key, *self._deferred.pop(key))
        if self._closed:
            self._drop_all(LoopClosed("the I/O loop has been closed"))
        return True

    # -- loop thread, when the drive does not answer --------------------------------------------

    def _arm(self, delay: float) -> None:
        self._due = self._clock() + delay
        self._timer = self._loop.call_later(delay, self._watch)

    def _watch(self) -> None:
        """Give up the reads that hang; one timer for all of them."""
        self._timer = None
        try:
            # Late when this process was stopped or starved: then it was not the drive's fault.
            late = max(self._clock() - self._due, 0.0)
            self._give_up_late(self._clock() - self._read_timeout - late)
            if sum(self._busy):
                oldest = self._lanes.oldest()
                age = 0.0 if oldest is None else self._clock() - oldest
                self._arm(max(self._read_timeout - age, min(late, self._read_timeout), 0.001))
        except BaseException as fatal:
            self._die(fatal)

    def _give_up_late(self, before: float) -> None:
        """Give up the reads of which a job was begun before this time and has not ended."""
        late = self._lanes.lose(before)
        for job in late:
            self._busy[job.demand] -= 1
            self._stuck = job
        for job in late:
            if job.read.give_back is None:
                self._abandon(job)
        if late:
            self._dispatch()

    def _abandon(self, job: Job) -> None:
        read = job.read
        error = self._timeout(job)
        self._withdraw(read, error)
        self._forget(read)
        read.give_back = _nothing  # so that its task does not report it, whatever happens now
        if not read.done.done():
            read.done.set_result(None)
        read.give_back = self._host.abandoned(read.key, read.slot, error)
        self._take_deferred(read.key)

    def _withdraw(self, read: Read, error: BaseException) -> None:
        """No more jobs of the read are handed out, and those that were do nothing."""
        read.withdrawn = True
        if read in (waiting := self._waiting(read)):
            waiting.remove(read)
        batch = self._lanes.drop(read, error)
        if batch is not None:
            self._lanes.settle(batch)

    def _timeout(self, job: Job) -> BaseException:
        return self._host.timeout(job.read.key, job.index, self._clock() - job.since)

    def _refuse(self) -> None:
        """All lanes hang: nothing that they have not begun may wait for them."""
        stuck = self._stuck
        assert stuck is not None
        for job in self._lanes.take_back():
            self._busy[job.demand] -= 1
            job.read.running -= 1
            if job.read.over:  # it was given up, and the drive has answered since
                self._complete(job.read)
        for read in list(self._reads.values()):
            if read.left:
                self._withdraw(read, self._timeout(stuck))
                if read.over:
                    self._complete(read)
        demands = []
        while (entry := self._queue.peek()) is not None and entry.demand:
            self._queue.pop()
            demands.append(entry)
        if demands:
            self._give_up(demands, self._timeout(stuck))

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._closed = True
            self._failure = self._failure or error
        self._take_messages()
        self._drop_all(loop_died(error))

    def _drop_all(self, reason: BaseException) -> None:
        self._give_up(self._queue.clear(), reason)

    def _give_up(self, entries: Sequence[Entry], reason: BaseException | None) -> None:
        demands = [entry.key for entry in entries if entry.demand]
        for key in demands:
            if (batch := self._batches.pop(key, None)) is not None:
                self._lanes.settle(batch)
        guesses = [entry.key for entry in entries if not entry.demand]
        if demands:
            self._host.dropped(demands, reason)
        if guesses:
            self._host.void(guesses, reason)


def _nothing() -> None:
    return None


async def _running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _have_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True
