"""Records what happened when, as a Chrome trace that opens in Perfetto (ui.perfetto.dev).

Any thread adds events to a bounded buffer; the I/O loop writes them. When the buffer is full,
events are counted and dropped rather than slowing a token down.
"""

from __future__ import annotations

import asyncio
import itertools
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
        self.about: dict[str, Any] = {}  # of the model and its slots, for whoever reads the trace
        self.error: str | None = None
        self._events: deque[Event] = deque()
        self._epoch = time.perf_counter()
        self._numbers = itertools.count(1)
        self._threads: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._closing = False

    # -- events, any thread -------------------------------------------------------------------

    def read(
        self,
        group: int,
        layer: int,
        expert: int,
        start: float,
        end: float,
        nbytes: int,
        speculative: bool,
        asked: float,
    ) -> None:
        """The calling lane thread has read a part of a record (``nbytes`` 0: it failed)."""
        if self.enabled:
            arguments = {
                "layer": layer,
                "group": group,
                "expert": expert,
                "bytes": nbytes,
                "speculative": speculative,
                "asked": round((asked - self._epoch) * 1e6, 1),
            }
            self._add("X", "read", start, end, arguments)

    def stall(
        self,
        group: int,
        layer: int,
        start: float,
        end: float,
        *,
        late: int,
        evicted: int,
        unpredicted: int,
    ) -> None:
        """The compute thread has waited for so many experts, by cause."""
        if self.enabled:
            arguments = {
                "layer": layer,
                "group": group,
                "experts": late + evicted + unpredicted,
                "late": late,
                "evicted": evicted,
                "unpredicted": unpredicted,
            }
            self._add("X", "stall", start, end, arguments)

    def sync(self, group: int, layer: int, start: float, end: float) -> None:
        """A layer's synchronisation with the device."""
        if self.enabled:
            self._add("X", "sync", start, end, {"group": group, "layer": layer})

    def route(
        self,
        group: int,
        layer: int,
        forward: int,
        position: int,
        experts: list[int],
        tokens: int,
        tail: list[list[int]],
    ) -> None:
        """The router's choice for a layer call; ``tail`` that of a prompt's last tokens."""
        if self.enabled:
            arguments = {
                "group": group,
                "layer": layer,
                "forward": forward,
                "position": position,
                "experts": experts,
                "tokens": tokens,
            }
            if tail:
                arguments["tail"] = tail
            self._now("i", "route", arguments)

    def predict(
        self,
        group: int,
        layer: int,
        forward: int,
        distance: int,
        experts: list[int],
        probabilities: list[float],
    ) -> None:
        """Ranked candidates for a layer, with their calibrated probabilities."""
        if self.enabled:
            arguments = {
                "group": group,
                "layer": layer,
                "forward": forward,
                "distance": distance,
                "experts": experts,
                "probabilities": [round(p, 4) for p in probabilities],
            }
            self._now("i", "predict", arguments)

    def queue(
        self, op: str, group: int, expert: int, probability: float = 1.0, position: int = -1
    ) -> None:
        """An operation of the queue: guess, promote, join, stale, purge or refuse."""
        if self.enabled:
            arguments = {
                "op": op,
                "group": group,
                "expert": expert,
                "probability": round(probability, 4),
                "position": position,
            }
            self._now("i", "queue", arguments)

    def evict(self, group: int, expert: int, slot: int, unused: bool) -> None:
        """An expert has lost its slot; ``unused`` when a guess had brought it in vain."""
        if self.enabled:
            arguments = {"group": group, "expert": expert, "slot": slot, "unused": unused}
            self._now("i", "evict", arguments)

    def use(self, group: int, expert: int, lead: float) -> None:
        """An expert that a guess brought is used for the first time, ``lead`` seconds after."""
        if self.enabled:
            arguments = {"group": group, "expert": expert, "lead_us": round(lead * 1e6, 1)}
            self._now("i", "use", arguments)

    def depth(self, name: str, demands: int, guesses: int) -> None:
        """Entries of the queue (``queue_depth``) or jobs of the lanes (``inflight``)."""
        if self.enabled:
            self._now("C", name, {"demand": demands, "guesses": guesses})

    def token(self, request: int, token: int, start: float, end: float) -> None:
        """One token of a request has been computed, from its forward to its sampling."""
        if self.enabled:
            self._add("X", "token", start, end, {"request": request, "token": token})

    def prompt(self, request: int, tokens: int, start: float, end: float) -> None:
        """A prompt chunk has been computed."""
        if self.enabled:
            self._add("X", "prompt", start, end, {"request": request, "tokens": tokens})

    def _now(self, phase: str, name: str, arguments: dict[str, Any]) -> None:
        now = time.perf_counter()
        self._add(phase, name, now, now, arguments)

    def _add(
        self, phase: str, name: str, start: float, end: float, arguments: dict[str, Any] | None
    ) -> None:
        if len(self._events) >= BUFFERED_EVENTS:
            self.dropped += 1
            return
        thread = self._threads.get(threading.get_ident()) or self._new_thread()
        self._events.append((phase, name, thread, start - self._epoch, end - start, arguments))

    def _new_thread(self) -> int:
        # Small numbers: Perfetto takes thread ids of 32 bits, Python's are longer.
        number = next(self._numbers)
        self._threads[threading.get_ident()] = number
        self._names[number] = threading.current_thread().name
        return number

    # -- writing, loop thread -----------------------------------------------------------------

    async def write(self) -> None:
        """Write events to the file until ``close`` is called, then finish the JSON document."""
        assert self.path is not None
        try:
            async with aiofiles.open(self.path, "w", encoding="utf-8") as file:
                about = json.dumps(self.about)
                await file.write(f'{{"displayTimeUnit":"ms","moestream":{about},"traceEvents":[\n')
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


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def _chrome(event: Event) -> str:
    phase, name, thread, start, duration, arguments = event
    record: dict[str, Any] = {
        "ph": phase,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": round(start * 1e6, 3),
        "args": arguments or {},
    }
    if phase == "X":
        record["dur"] = round(duration * 1e6, 3)
    elif phase == "i":
        record["s"] = "t"
    return _encode(record)
