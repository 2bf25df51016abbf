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
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiofiles

logger = logging.getLogger("moestream")

BUFFERED_EVENTS = 100_000  # arbitrary: some seconds of a fast model
BATCH_EVENTS = 50  # keeps one turn of the loop, which reads wait for, near 0.1 ms
WRITE_EVENTS = 2000  # handed to the file at once
FLUSH_SECONDS = 0.1


def _span(name: str, arguments: str) -> str:
    head = '{"ph":"X","name":"' + name + '","pid":1,"tid":%d,"ts":%.3f,"dur":%.3f,"args":{'
    return head + arguments + "}}"


def _instant(name: str, arguments: str, phase: str = "i") -> str:
    head = '{"ph":"' + phase + '","name":"' + name + '","pid":1,"tid":%d,"ts":%.3f,'
    return head + ('"s":"t",' if phase == "i" else "") + '"args":{' + arguments + "}}"


# Templates rather than an encoder: a tenth of the time under the interpreter lock. All values are
# numbers, lists of integers (whose text is JSON), "true" or "false".
_READ = _span(
    "read",
    '"layer":%d,"group":%d,"expert":%d,"bytes":%d,"speculative":%s,"asked":%.1f',
)
_STALL = _span(
    "stall",
    '"layer":%d,"group":%d,"experts":%d,"late":%d,"evicted":%d,"unpredicted":%d',
)
_SYNC = _span("sync", '"group":%d,"layer":%d')
_TOKEN = _span("token", '"request":%d,"token":%d')
_PROMPT = _span("prompt", '"request":%d,"tokens":%d')
_ROUTE = _instant(
    "route",
    '"group":%d,"layer":%d,"forward":%d,"position":%d,"experts":%s,"tokens":%d',
)
_ROUTE_TAIL = _instant(
    "route",
    '"group":%d,"layer":%d,"forward":%d,"position":%d,"experts":%s,"tokens":%d,"tail":%s',
)
_PREDICT = _instant(
    "predict",
    '"group":%d,"layer":%d,"forward":%d,"distance":%d,"experts":%s,"probabilities":%s',
)
_QUEUE = _instant(
    "queue",
    '"op":"%s","group":%d,"expert":%d,"probability":%.4f,"position":%d',
)
_EVICT = _instant("evict", '"group":%d,"expert":%d,"slot":%d,"unused":%s')
_USE = _instant("use", '"group":%d,"expert":%d,"lead_us":%.1f')
_DEPTHS = {
    name: _instant(name, '"demand":%d,"guesses":%d', "C") for name in ("queue_depth", "inflight")
}
_BOOL = ("false", "true")

Event = tuple[str, int, float, float, tuple[Any, ...]]
"""(template, thread, start, end, arguments); the end of an instant is negative."""


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
        self.bandwidth = 0.0  # of the drive, bytes per second; known at the end
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
        asked = (asked - self._epoch) * 1e6
        self._add(_READ, start, end, (layer, group, expert, nbytes, _BOOL[speculative], asked))

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
        experts = late + evicted + unpredicted
        self._add(_STALL, start, end, (layer, group, experts, late, evicted, unpredicted))

    def sync(self, group: int, layer: int, start: float, end: float) -> None:
        """A layer's synchronisation with the device."""
        self._add(_SYNC, start, end, (group, layer))

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
        """The router's choice for a layer call; ``tail`` that of a prompt's last tokens.

        Nobody changes the lists afterwards.
        """
        arguments = (group, layer, forward, position, experts, tokens)
        if tail:
            self._now(_ROUTE_TAIL, (*arguments, tail))
        else:
            self._now(_ROUTE, arguments)

    def predict(
        self,
        group: int,
        layer: int,
        forward: int,
        distance: int,
        experts: list[int],
        probabilities: Sequence[float],
    ) -> None:
        """Ranked candidates for a layer, with their calibrated probabilities."""
        if self.enabled:
            rounded = [round(p, 4) for p in probabilities[: len(experts)]]
            self._now(_PREDICT, (group, layer, forward, distance, experts, rounded))

    def queue(
        self, op: str, group: int, expert: int, probability: float = 1.0, position: int = -1
    ) -> None:
        """An operation of the queue: guess, promote, join, stale, purge or refuse."""
        self._now(_QUEUE, (op, group, expert, probability, position))

    def evict(self, group: int, expert: int, slot: int, unused: bool) -> None:
        """An expert has lost its slot; ``unused`` when a guess had brought it in vain."""
        self._now(_EVICT, (group, expert, slot, _BOOL[unused]))

    def use(self, group: int, expert: int, lead: float) -> None:
        """An expert that a guess brought is used for the first time, ``lead`` seconds after."""
        self._now(_USE, (group, expert, lead * 1e6))

    def depth(self, name: str, demands: int, guesses: int) -> None:
        """Entries of the queue (``queue_depth``) or jobs of the lanes (``inflight``)."""
        self._now(_DEPTHS[name], (demands, guesses))

    def token(self, request: int, token: int, start: float, end: float) -> None:
        """One token of a request has been computed, from its forward to its sampling."""
        self._add(_TOKEN, start, end, (request, token))

    def prompt(self, request: int, tokens: int, start: float, end: float) -> None:
        """A prompt chunk has been computed."""
        self._add(_PROMPT, start, end, (request, tokens))

    def _now(self, template: str, arguments: tuple[Any, ...]) -> None:
        if self.enabled:
            self._add(template, time.perf_counter(), -1.0, arguments)

    def _add(self, template: str, start: float, end: float, arguments: tuple[Any, ...]) -> None:
        if not self.enabled:
            return
        if len(self._events) >= BUFFERED_EVENTS:
            self.dropped += 1
            return
        thread = self._threads.get(threading.get_ident()) or self._new_thread()
        self._events.append((template, thread, start, end, arguments))

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
                    while batches := [batch async for batch in self._batches()]:
                        await file.write(separator + ",\n".join(batches))
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

    async def _batches(self) -> AsyncIterator[str]:
        for _ in range(WRITE_EVENTS // BATCH_EVENTS):
            count = min(len(self._events), BATCH_EVENTS)
            if not count:
                return
            yield ",\n".join([self._text(self._events.popleft()) for _ in range(count)])
            await asyncio.sleep(0)  # a read may have ended

    def _text(self, event: Event) -> str:
        template, thread, start, end, arguments = event
        ts = (start - self._epoch) * 1e6
        if end < 0:
            return template % (thread, ts, *arguments)
        return template % (thread, ts, (end - start) * 1e6, *arguments)

    def _metadata(self) -> Iterator[str]:
        for thread, name in list(self._names.items()):  # other threads may still add theirs
            event = {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread}
            yield json.dumps({**event, "args": {"name": name}})
        process = {"ph": "M", "pid": 1, "tid": 0}
        yield json.dumps({**process, "name": "process_name", "args": {"name": "moestream"}})
        if self.bandwidth:
            arguments = {"bandwidth_bytes_per_s": round(self.bandwidth)}
            yield json.dumps({**process, "name": "drive", "args": arguments})
