"""The I/O loop: one thread with an event loop, a priority queue, and one task per read."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from .errors import LoopClosed
from .queue import ReadQueue

Key = tuple[int, int]
"""(group, expert): index of the MoE layer, index of the expert in it."""


class ReadHost(Protocol):
    """Whoever owns the slots that reads go into.

    ``begin``, ``finish`` and ``dropped`` run on the loop thread and must be short; ``read`` runs in
    a lane thread and blocks. Each key that was asked for ends in exactly one ``finish`` or
    ``dropped``.
    """

    def begin(self, key: Key) -> int | None:
        """The slot to read into, or None when the read is not wanted (any more)."""

    def read(self, key: Key, slot: int) -> int:
        """Read the record into the slot; returns the bytes read."""

    def finish(self, key: Key, slot: int, nbytes: int, error: BaseException | None) -> None:
        """The read has ended; nothing writes into the slot any more unless it was abandoned."""

    def dropped(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        """These reads will never start."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One message to the loop: what a layer needs now.

    Attributes:
        owner: request that asks.
        position: absolute index of the layer call, see ``ReadQueue``.
        demands: keys that the compute thread waits for.
    """

    owner: Hashable
    position: int
    demands: tuple[Key, ...]


class IoLoop:
    """Runs the reads. A context manager: the thread lives exactly as long as the ``with`` block.

    Contract across the threads: ``submit`` either raises ``LoopClosed`` at once, or each of its
    keys reaches ``finish`` or ``dropped`` of the host, also when the loop dies.

    Args:
        host: owner of the slots.
        lanes: reads in flight at once, each in a thread of its own.
        grace: seconds that ``__exit__`` waits for running reads before it abandons them.
    """

    def __init__(self, host: ReadHost, *, lanes: int, grace: float = 5.0) -> None:
        self._host = host
        self._lanes = lanes
        self._grace = grace
        self._queue = ReadQueue()
        self._lock = threading.Lock()  # guards _inbox, _awake, _closed and _stopped
        self._inbox: deque[Ask] = deque()
        self._awake = False
        self._stopped = False
        self._closed = False
        self._ending: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._abandoned = False
        self._running: set[asyncio.Task[None]] = set()
        self._stack = ExitStack()
        self._portal: BlockingPortal
        self._loop: asyncio.AbstractEventLoop
        self._executor: ThreadPoolExecutor

    # -- life ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._executor = ThreadPoolExecutor(self._lanes, thread_name_prefix="moestream-lane")
            stack.callback(self._end_lanes)
            options = {"use_uvloop": _have_uvloop()}
            self._portal = stack.enter_context(start_blocking_portal("asyncio", options))
            self._loop = self._portal.call(_running_loop)
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
        self._executor.shutdown(wait=not self._abandoned, cancel_futures=True)

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

    def submit(self, ask: Ask) -> None:
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
        for ask in messages:
            for key in ask.demands:
                self._queue.demand(key, ask.owner, ask.position)

    def _dispatch(self) -> None:
        while len(self._running) < self._lanes:
            entry = self._queue.peek()
            if entry is None:
                return
            slot = self._host.begin(entry.key)  # if it raises, `_die` finds the entry in the queue
            self._queue.pop()
            if slot is None:
                self._host.dropped([entry.key], None)
                continue
            task = self._loop.create_task(self._read(entry.key, slot))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _read(self, key: Key, slot: int) -> None:
        nbytes = 0
        error: BaseException | None = None
        try:
            nbytes = await self._loop.run_in_executor(self._executor, self._host.read, key, slot)
        except asyncio.CancelledError:
            self._abandoned = True
            error = LoopClosed("the I/O loop was closed while the drive did not answer")
        except BaseException as caught:
            error = caught
        self._running.discard(_current_task())
        try:
            self._host.finish(key, slot, nbytes, error)
            self._dispatch()
        except BaseException as fatal:
            self._die(fatal)

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._closed = True
            self._failure = self._failure or error
        self._take_messages()
        self._drop_all(LoopClosed(f"the I/O loop died: {error!r}"))

    def _drop_all(self, reason: BaseException) -> None:
        keys = [entry.key for entry in self._queue.clear()]
        if keys:
            self._host.dropped(keys, reason)


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
