"""Unpacks the records of a trace file (``trace_format``) into a ``Trace``."""

from __future__ import annotations

import math
from collections.abc import Callable
from struct import Struct, error
from typing import Any

from .trace_format import (
    COMPUTE,
    DEPTH,
    DRIVE,
    END,
    EVICT,
    OPERATIONS,
    PREDICT,
    PROMPT,
    QUEUE,
    READ,
    ROUTE,
    STALL,
    STRUCTS,
    THREAD,
    TOKEN,
    USE,
)
from .trace_records import (
    Depth,
    Eviction,
    Prediction,
    Prompt,
    QueueOperation,
    Read,
    Route,
    Stall,
    Sync,
    Token,
    Trace,
    Use,
)

MOST_MICROSECONDS = 1e15
"""No trace is as long (arbitrary: thirty years)."""


class Decoder:
    """Files records in a trace, whose layers are already known.

    Args:
        data: the file.
        at: where its records begin.
        epoch: the moment that is to be 0, in seconds of the file's clock.
        trace: gets the records.

    Attributes:
        records: how many have been read.
    """

    def __init__(self, data: bytes, at: int, epoch: float, trace: Trace) -> None:
        self._data, self._at, self._epoch, self._trace = data, at, epoch, trace
        self._layers = {group: layer.layer for group, layer in trace.layers.items()}
        self.records = 0
        trace.threads[COMPUTE] = "moestream-compute"

    def run(self) -> bool:
        """Read up to the end mark; False when the file is cut off or damaged before it."""
        data = self._data
        try:
            while data[self._at] != END:
                kind = data[self._at]
                fields = self._unpack(STRUCTS[kind])
                _KINDS[kind](self, *fields[1:])
                self.records += 1
        except (IndexError, KeyError, ValueError, error):
            return False
        return True

    def _unpack(self, shape: Struct) -> tuple[Any, ...]:
        values = shape.unpack_from(self._data, self._at)
        self._at += shape.size
        return values

    def _list(self, count: int, kind: str = "i") -> tuple[Any, ...]:
        if count > len(self._data):  # damaged; no shape of such a size
            raise ValueError(count)
        return self._unpack(Struct(f"<{count}{kind}"))

    def _time(self, seconds: float) -> float:
        return _microseconds(seconds - self._epoch)

    def _span(self, start: float, end: float, thread: int = COMPUTE) -> tuple[float, float, int]:
        return self._time(start), max(_microseconds(end - start), 0.0), thread

    def _place(self, group: int) -> tuple[int, int]:
        return group, self._layers.get(group, group)

    # -- one function for each kind, which takes the fields of its record ---------------------

    def read(
        self,
        thread: int,
        start: float,
        end: float,
        asked: float,
        group: int,
        expert: int,
        nbytes: int,
        speculative: bool,
    ) -> None:
        if nbytes < 0:
            raise ValueError(nbytes)
        span = self._span(start, end, thread)
        place = self._place(group)
        asked_at = self._time(asked)
        self._trace.reads.append(Read(*span, *place, expert, nbytes, speculative, asked_at))

    def route(
        self,
        start: float,
        end: float,
        group: int,
        forward: int,
        tokens: int,
        count: int,
        rows: int,
        width: int,
    ) -> None:
        experts = self._list(count)
        flat = self._list(rows * width)
        if not experts or min(experts) < 0 or bool(rows) != bool(width):
            raise ValueError("no experts")
        tail = tuple(flat[row * width : (row + 1) * width] for row in range(rows))
        place = self._place(group)
        self._trace.syncs.append(Sync(*self._span(start, end), *place))
        self._trace.routes.append(Route(self._time(end), *place, forward, experts, tokens, tail))

    def stall(
        self, start: float, end: float, group: int, late: int, evicted: int, unpredicted: int
    ) -> None:
        about = (*self._place(group), late, evicted, unpredicted, 0)
        self._trace.stalls.append(Stall(*self._span(start, end), *about))

    def token(self, start: float, end: float, request: int, token: int) -> None:
        self._trace.tokens.append(Token(*self._span(start, end), request, token))

    def prompt(self, start: float, end: float, request: int, tokens: int) -> None:
        self._trace.prompts.append(Prompt(*self._span(start, end), request, tokens))

    def predict(self, at: float, group: int, forward: int, distance: int, count: int) -> None:
        experts, chances = self._list(count), self._list(count, "f")
        if not all(0.0 <= chance <= 1.0 for chance in chances):
            raise ValueError("no chances")
        about = (*self._place(group), forward, distance, experts, chances)
        self._trace.predictions.append(Prediction(self._time(at), *about))

    def queue(self, at: float, op: int, group: int, expert: int, probability: float) -> None:
        if not 0.0 <= probability <= 1.0:
            raise ValueError(probability)
        about = (OPERATIONS[op], group, expert, probability)
        self._trace.operations.append(QueueOperation(self._time(at), *about))

    def evict(self, at: float, group: int, count: int) -> None:
        for expert in self._list(count):
            unused = expert < 0
            eviction = Eviction(self._time(at), group, ~expert if unused else expert, unused)
            self._trace.evictions.append(eviction)

    def use(self, at: float, group: int, expert: int, lead: float) -> None:
        self._trace.uses.append(Use(self._time(at), group, expert, _microseconds(lead)))

    def depth(self, at: float, *counts: int) -> None:
        ts, (demands, guesses, demand_lanes, guess_lanes) = self._time(at), counts
        if min(counts) < 0:
            raise ValueError(counts)
        self._trace.queue_depth.append(Depth(ts, demands, guesses))
        self._trace.inflight.append(Depth(ts, demand_lanes, guess_lanes))

    def thread(self, number: int, size: int) -> None:
        (name,) = self._unpack(Struct(f"<{size}s"))
        self._trace.threads[number] = name.decode()

    def drive(self, bandwidth: float) -> None:
        if not 0.0 < bandwidth < math.inf:
            raise ValueError(bandwidth)
        self._trace.bandwidth = bandwidth


def _microseconds(seconds: float) -> float:
    value = seconds * 1e6
    if not abs(value) <= MOST_MICROSECONDS:  # or it is no number at all
        raise ValueError(seconds)
    return value


_KINDS: dict[int, Callable[..., None]] = {
    READ: Decoder.read,
    ROUTE: Decoder.route,
    STALL: Decoder.stall,
    TOKEN: Decoder.token,
    PROMPT: Decoder.prompt,
    PREDICT: Decoder.predict,
    QUEUE: Decoder.queue,
    EVICT: Decoder.evict,
    USE: Decoder.use,
    DEPTH: Decoder.depth,
    THREAD: Decoder.thread,
    DRIVE: Decoder.drive,
}
