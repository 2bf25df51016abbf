"""Records what happened when, into a file that ``tracefile`` reads.

Any thread adds events to a bounded buffer; the I/O loop packs and writes them. When the buffer is
full, events are counted and dropped rather than slowing a token down.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiofiles
from aiofiles.threadpool.binary import AsyncFileIO

from .trace_format import (
    DEPTH,
    DRIVE,
    END,
    EVICT,
    MAGIC,
    PREDICT,
    PROMPT,
    QUEUE,
    READ,
    ROUTE,
    STALL,
    THREAD,
    TOKEN,
    USE,
    Event,
    pack_event,
)

logger = logging.getLogger("moestream")

BUFFERED_EVENTS = 100_000  # arbitrary: some seconds of a fast model
BATCH_EVENTS = 200  # keeps one turn of the loop, which reads wait for, near 0.1 ms
FLUSH_SECONDS = 0.5  # what a killed process loses; every write wakes a thread


class Tracer:
    """Collects events; does nothing while there is no file.

    An event is a tuple until it is written: the caches are cold where the compute thread and the
    lanes add theirs, so whatever else is done there costs several times what it does in a batch.
    Times are of ``time.perf_counter``, in seconds. Nobody changes lists that have been handed over.

    Args:
        path: the trace file; None switches tracing off.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.enabled = path is not None
        self.dropped = 0
        self.about: dict[str, Any] = {}  # of the model and its slots, for whoever reads the trace
        self.bandwidth = 0.0  # of the drive, bytes per second; known at the end
        self.error: str | None = None
        self._events: deque[Event] = deque()
        self._epoch = time.perf_counter()
        self._numbers = itertools.count(1)
        self._threads: dict[int, int] = {}
        self._closing = False
        self._wake: Callable[[], object] | None = None

    # -- events of the compute thread ---------------------------------------------------------

    def stall(
        self, group: int, start: float, end: float, late: int, evicted: int, unpredicted: int
    ) -> None:
        """The compute thread has waited for so many experts, by cause."""
        if self.enabled:
            self._add((STALL, start, end, group, late, evicted, unpredicted))

    def route(
        self,
        group: int,
        forward: int,
        start: float,
        end: float,
        experts: Sequence[int],
        tokens: int,
        tail: Sequence[Sequence[int]],
    ) -> None:
        """A layer's synchronisation with the device, and the router's choice that it brought.

        ``tail`` is that of a prompt's last tokens, the same number of experts for each.
        """
        if self.enabled:
            self._add((ROUTE, start, end, group, forward, tokens, experts, tail))

    def token(self, request: int, token: int, start: float, end: float) -> None:
        """One token of a request has been computed, from its forward to its sampling."""
        if self.enabled:
            self._add((TOKEN, start, end, request, token))

    def prompt(self, request: int, tokens: int, start: float, end: float) -> None:
        """A prompt chunk has been computed."""
        if self.enabled:
            self._add((PROMPT, start, end, request, tokens))

    # -- events of any thread -----------------------------------------------------------------

    def read(
        self,
        group: int,
        expert: int,
        start: float,
        end: float,
        nbytes: int,
        speculative: bool,
        asked: float,
    ) -> None:
        """The calling lane thread has read a part of a record (``nbytes`` 0: it failed)."""
        if self.enabled:
            thread = self._threads.get(threading.get_ident()) or self._new_thread()
            self._add((READ, thread, start, end, asked, group, expert, nbytes, speculative))

    def predict(
        self,
        group: int,
        forward: int,
        distance: int,
        experts: Sequence[int],
        probabilities: Sequence[float],
    ) -> None:
        """Ranked candidates for a layer, with their calibrated probabilities."""
        if self.enabled:
            now = time.perf_counter()
            self._add((PREDICT, now, group, forward, distance, experts, probabilities))

    def queue(self, op: str, group: int, expert: int, probability: float = 1.0) -> None:
        """An operation of the queue, one of ``trace_format.OPERATIONS``."""
        if self.enabled:
            self._add((QUEUE, time.perf_counter(), op, group, expert, probability))

    def evict(self, group: int, experts: Sequence[int]) -> None:
        """Experts have lost their slots; ``~expert`` is one that a guess had brought in vain."""
        if self.enabled:
            self._add((EVICT, time.perf_counter(), group, experts))

    def use(self, group: int, expert: int, lead: float) -> None:
        """An expert that a guess brought is used for the first time, ``lead`` seconds after."""
        if self.enabled:
            self._add((USE, time.perf_counter(), group, expert, lead))

    def depth(self, demands: int, guesses: int, demand_lanes: int, guess_lanes: int) -> None:
        """Entries of the queue, and jobs of the lanes."""
        if self.enabled:
            now = time.perf_counter()
            self._add((DEPTH, now, demands, guesses, demand_lanes, guess_lanes))

    def _add(self, event: Event) -> None:
        if len(self._events) < BUFFERED_EVENTS:
            self._events.append(event)
        else:
            self.dropped += 1

    def _new_thread(self) -> int:
        # Small numbers: Perfetto takes thread ids of 32 bits, Python's are longer.
        number = next(self._numbers)
        self._threads[threading.get_ident()] = number
        self._add((THREAD, number, threading.current_thread().name))
        return number

    # -- writing, loop thread -----------------------------------------------------------------

    async def write(self) -> None:
        """Write events to the file until ``close`` is called."""
        assert self.path is not None
        woken = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set)
        try:
            # Unbuffered: what has been written outlives the process.
            async with aiofiles.open(self.path, "wb", buffering=0) as file:
                about = json.dumps({**self.about, "epoch": self._epoch})
                await _write(file, MAGIC + about.encode() + b"\n")
                closing = False
                while not closing:
                    if not self._closing:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(FLUSH_SECONDS):
                                await woken.wait()
                    closing = self._closing  # read before the buffer: nothing is added after it
                    await _write(file, b"".join([batch async for batch in self._batches()]))
                drive = pack_event((DRIVE, self.bandwidth)) if self.bandwidth else b""
                await _write(file, drive + pack_event((END,)))
        except (OSError, struct.error) as error:
            self.enabled = False
            self._events.clear()
            reason = getattr(error, "strerror", None) or error
            self.error = f"cannot write the trace to {self.path}: {reason}"
            logger.error("%s; tracing is off from here on", self.error)

    def close(self) -> None:
        """Let ``write`` finish. Any thread; no event is added after this."""
        self._closing = True
        if self._wake is not None:
            with suppress(RuntimeError):  # the loop has ended, and the writer with it
                self._wake()

    async def _batches(self) -> AsyncIterator[bytes]:
        """The events that there are now; others may be added meanwhile."""
        left, take = len(self._events), self._events.popleft
        while left:
            count = min(left, BATCH_EVENTS)
            left -= count
            yield b"".join([pack_event(take()) for _ in range(count)])
            await asyncio.sleep(0)  # a read may have ended


async def _write(file: AsyncFileIO, data: bytes) -> None:
    while data:
        data = data[await file.write(data) :]
