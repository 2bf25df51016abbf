"""The records of a trace file: what ``tracing`` packs and ``trace_decoding`` unpacks.

A file is ``MAGIC``, one line of JSON about the model, and records one after the other:
little-endian, without padding, the first byte being the kind. Times are seconds of the writer's
clock, and ``epoch`` in the line of JSON is when it began. Lists follow their record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from struct import Struct, pack
from typing import Any

FAMILY = b"moestream trace "
MAGIC = FAMILY + b"1\n"
"""The number is that of the format."""

(
    READ,
    ROUTE,
    STALL,
    TOKEN,
    PROMPT,
    PREDICT,
    QUEUE,
    EVICT,
    USE,
    DEPTH,
    THREAD,
    DRIVE,
    END,
) = range(1, 14)

STRUCTS = {
    READ: Struct("<BHdddiiq?"),  # thread, start, end, asked, group, expert, bytes, speculative
    # start and end of the synchronisation, group, forward, tokens; numbers of experts, of rows of
    # the tail, of experts in a row; experts (32 bits each), rows
    ROUTE: Struct("<BddiqiIII"),
    STALL: Struct("<Bddiiii"),  # start, end, group, late, evicted, unpredicted
    TOKEN: Struct("<Bddqq"),  # start, end, request, token
    PROMPT: Struct("<Bddqq"),  # start, end, request, tokens
    # time, group, forward, distance, number of candidates; these and their chances (32 bits each)
    PREDICT: Struct("<BdiqiI"),
    QUEUE: Struct("<BdBiid"),  # time, operation, group, expert, probability
    EVICT: Struct("<BdiI"),  # time, group, number; experts (32 bits), inverted: a guess in vain
    USE: Struct("<Bdiid"),  # time, group, expert, lead in seconds
    DEPTH: Struct("<Bdiiii"),  # time; in the queue: demands, guesses; in the lanes: likewise
    THREAD: Struct("<BHH"),  # thread, length of its name; the name in UTF-8
    DRIVE: Struct("<Bd"),  # bandwidth, bytes per second
    END: Struct("<B"),  # nothing comes after it
}

COMPUTE = 0
"""The thread of all spans but reads."""

OPERATIONS = ("guess", "promote", "join", "stale", "purge", "refuse", "timeout")
"""Of the queue; the file has the index."""

_CODES = {operation: code for code, operation in enumerate(OPERATIONS)}

Event = tuple[Any, ...]
"""The kind, then the fields as above; lists in place of their lengths, names in place of codes."""


def pack_event(event: Event) -> bytes:
    """The record of an event.

    Raises:
        struct.error: a number is too large for it.
    """
    return PACKERS[event[0]](*event)


def _route(
    kind: int,
    start: float,
    end: float,
    group: int,
    forward: int,
    tokens: int,
    experts: Sequence[int],
    tail: Sequence[Sequence[int]],
) -> bytes:
    count, rows, width = len(experts), len(tail), len(tail[0]) if tail else 0
    head = STRUCTS[kind].pack(kind, start, end, group, forward, tokens, count, rows, width)
    record = head + _integers(experts)
    return record + _integers([*chain.from_iterable(tail)]) if tail else record


def _predict(
    kind: int,
    at: float,
    group: int,
    forward: int,
    distance: int,
    experts: Sequence[int],
    chances: Sequence[float],
) -> bytes:
    count = len(experts)
    head = STRUCTS[kind].pack(kind, at, group, forward, distance, count)
    return head + _integers(experts) + pack(f"<{count}f", *chances[:count])


def _queue(kind: int, at: float, op: str, group: int, expert: int, probability: float) -> bytes:
    return STRUCTS[kind].pack(kind, at, _CODES[op], group, expert, probability)


def _evict(kind: int, at: float, group: int, experts: Sequence[int]) -> bytes:
    return STRUCTS[kind].pack(kind, at, group, len(experts)) + _integers(experts)


def _thread(kind: int, number: int, name: str) -> bytes:
    encoded = name.encode()
    return STRUCTS[kind].pack(kind, number, len(encoded)) + encoded


def _integers(values: Sequence[int]) -> bytes:
    return pack(f"<{len(values)}i", *values)


PACKERS: dict[int, Callable[..., bytes]] = {
    **{kind: struct.pack for kind, struct in STRUCTS.items()},
    ROUTE: _route,
    PREDICT: _predict,
    QUEUE: _queue,
    EVICT: _evict,
    THREAD: _thread,
}
