"""Records what happened when, as a Chrome trace that opens in Perfetto (ui.perfetto.dev).

Any thread adds events to a bounded buffer; the I/O loop writes them. When the buffer is full,
events are counted and dropped rather than slowing a token down.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiofiles

logger = logging.getLogger("moestream")

BUFFERED_EVENTS = 100_000  # arbitrary: some seconds of a fast model
BATCH_EVENTS = 200  # keeps one turn of the loop under a millisecond
FLUSH_SECONDS = 0.1

Event = tuple[str, str, int, float, float, dict[str, Any] | None]
"""(phase, name, thread, start in seconds, duration in seconds, arguments)."""


class Tracer:
    """Collects events; does nothing while there is no file.

    Args:
        path: the trace file; None switches tracing off.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.enabled = path is not None
        self.dropped = 0
        self.error: str | None = None
        self._events: deque[Event] = deque()
        self._epoch = time.perf_counter()
        self._names: dict[int, str] = {}
        self._closing = False

    # -- events, any thread -------------------------------------------------------------------

    def read(self, layer: int, expert: int, start: float, end: float, nbytes: int) -> None:
        """A record has been read by the calling lane thread (``nbytes`` 0: it failed)."""
        if self.enabled:
            arguments = {"layer": layer, "expert": expert, "bytes": nbytes}
            self._add("X", "read", start, end, arguments)

    def stall(self, layer: int, start: float, end: float, experts: int) -> None:
        """The compute thread has waited for this many experts."""
        if self.enabled:
            self._add("X", "stall", start, end, {"layer": layer, "experts": experts})

    def token(self, request: int, token: int, start: float, end: float) -> None:
        """One token of a request has been computed, from its forward to its sampling."""
        if self.enabled:
            self._add("X", "token", start, end, {"request": request, "token": token})

    def prompt(self, request: int, tokens: int, start: float, end: float) -> None:
        """A prompt chunk has been computed."""
        if self.enabled:
            self._add("X", "prompt", start, end, {"request": request, "tokens": tokens})

    def _add(
        self, phase: str, name: str, start: float, end: float, arguments: dict[str, Any] | None
    ) -> None:
        if len(self._events) >= BUFFERED_EVENTS:
            self.dropped += 1
            return
        thread = threading.get_ident()
        if thread not in self._names:
            self._names[thread] = threading.current_thread().name
        self._events.append((phase, name, thread, start - self._epoch, end - start, arguments))

    # -- writing, loop thread -----------------------------------------------------------------

    async def write(self) -> None:
        """Write events to the file until ``close`` is called, then finish the JSON document."""
        assert self.path is not None
        try:
            async with aiofiles.open(self.path, "w", encoding="utf-8") as file:
                await file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
                separator = ""
                closing = False
                while not closing:
                    closing = self._closing  # read before the buffer: nothing is added after it
                    for batch in self._batches():
                        await file.write(separator + batch)
                        separator = ",\n"
                    if not closing:
                        await asyncio.sleep(FLUSH_SECONDS)
                await file.write(separator + ",\n".join(self._metadata()) + "\n]}\n")
        except OSError as error:
            self.enabled = False
            self._events.clear()
            self.error = f"cannot write the trace to {self.path}: {error.strerror or error}"
            logger.error("%s; tracing is off from here on", self.error)

    def close(self) -> None:
        """Let ``write`` finish. No event is added after this."""
        self._closing = True

    def _batches(self) -> Iterator[str]:
        while self._events:
            count = min(len(self._events), BATCH_EVENTS)
            yield ",\n".join(_chrome(self._events.popleft()) for _ in range(count))

    def _metadata(self) -> Iterator[str]:
        for thread, name in list(self._names.items()):  # other threads may still add theirs
            event = {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread}
            yield json.dumps({**event, "args": {"name": name}})
        yield json.dumps(
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "moestream"}}
        )


def _chrome(event: Event) -> str:
    phase, name, thread, start, duration, arguments = event
    record = {
        "ph": phase,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": round(start * 1e6, 3),
        "dur": round(duration * 1e6, 3),
        "args": arguments or {},
    }
    return json.dumps(record)
