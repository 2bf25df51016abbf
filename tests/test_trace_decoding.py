"""Trace files of an engine that are cut off, damaged, or of another version."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from moestream.runtime.trace_format import (
    DEPTH,
    DRIVE,
    END,
    EVICT,
    FAMILY,
    MAGIC,
    PREDICT,
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
from moestream.runtime.trace_records import Trace
from moestream.runtime.tracefile import TraceUnreadable, read_trace

LAYER = {"group": 0, "layer": 4, "experts": 8, "top_k": 2, "slots": 4, "record_bytes": 100}
HEADER: dict[str, Any] = {"epoch": 5.0, "model": "tiny", "layers": [LAYER]}
EVENTS: list[Event] = [
    (THREAD, 1, "lane 0"),
    (ROUTE, 5.0, 5.1, 0, 0, 3, [1, 2, 7], [[1, 2], [7, 2]]),
    (READ, 1, 5.1, 5.2, 5.1, 0, 7, 100, False),
    (STALL, 5.1, 5.2, 0, 1, 0, 0),
    (TOKEN, 5.0, 5.3, 1, 99),
    (ROUTE, 5.4, 5.5, 0, 1, 1, [3, 1], []),
    (PREDICT, 5.5, 0, 2, 1, [2, 1], [0.5, 0.25]),
    (QUEUE, 5.5, "guess", 0, 2, 0.5),
    (EVICT, 5.5, 0, [7, ~5]),
    (USE, 5.6, 0, 2, 0.1),
    (DEPTH, 5.6, 1, 0, 1, 0),
    (TOKEN, 5.4, 5.7, 1, 98),
    (DRIVE, 1e9),
]


def head(header: Any = HEADER) -> bytes:
    return MAGIC + json.dumps(header).encode() + b"\n"


BODY = b"".join(pack_event(event) for event in EVENTS)
WHOLE = head() + BODY + pack_event((END,))


def read(path: Path, data: bytes) -> Trace:
    path.write_bytes(data)
    return read_trace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


def test_a_whole_file_has_no_notices(path: Path) -> None:
    trace = read(path, WHOLE)
    assert trace.notices == []
    assert (trace.model, trace.bandwidth) == ("tiny", 1e9)
    assert [token.token for token in trace.tokens] == [99, 98]
    assert trace.tokens[0].ts == 0
    assert trace.routes[0].layer == 4


def test_a_packed_file_is_read(path: Path) -> None:
    assert len(read(path, gzip.compress(WHOLE)).tokens) == 2
    cut = read(path, gzip.compress(WHOLE)[:-12])
    assert len(cut.notices) == 2


def test_any_cut_leaves_the_events_before_it(path: Path) -> None:
    ends = [len(head())]
    for event in EVENTS:
        ends.append(ends[-1] + len(pack_event(event)))
    for size in range(len(head()), len(WHOLE)):
        trace = read(path, WHOLE[:size])
        whole = sum(end <= size for end in ends) - 1
        assert f"the {whole} events before that" in trace.notices[0]
        tokens = sum(event[0] == TOKEN for event in EVENTS[:whole])
        assert len(trace.tokens) == tokens
        assert len(trace.routes) == sum(event[0] == ROUTE for event in EVENTS[:whole])


@pytest.mark.parametrize("size", [len(MAGIC), len(MAGIC) + 5, len(head()) - 1])
def test_a_file_cut_before_its_events_is_an_error(path: Path, size: int) -> None:
    with pytest.raises(TraceUnreadable, match="before the first event"):
        read(path, WHOLE[:size])


@pytest.mark.parametrize("header", [[], {}, {"epoch": "soon"}, 7])
def test_a_damaged_header_is_an_error(path: Path, header: Any) -> None:
    with pytest.raises(TraceUnreadable, match="first lines"):
        read(path, head(header) + BODY)


def test_another_format_is_named(path: Path) -> None:
    with pytest.raises(TraceUnreadable, match="format 12, which"):
        read(path, FAMILY + b"12\n" + WHOLE[len(MAGIC) :])


def test_a_damaged_description_leaves_the_layers_to_the_routing(path: Path) -> None:
    trace = read(path, head({**HEADER, "layers": [{"group": 0}]}) + BODY + pack_event((END,)))
    assert "description" in trace.notices[0]
    assert (trace.layers[0].experts, trace.layers[0].top_k, trace.layers[0].slots) == (8, 2, None)


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00",
        b"\xff",
        pack_event((QUEUE, 6.0, "join", 0, 1, 1.0)).replace(
            b"\x02\x00\x00\x00\x00", b"\xf0" + bytes(4)
        ),
        pack_event((ROUTE, 6.0, 6.0, 0, 2, 1, [], [])),
        pack_event((ROUTE, 6.0, 6.0, 0, 2, 1, [-1], [])),
        pack_event((ROUTE, 6.0, 6.0, 0, 2, 1, [1], []))[:-12]
        + b"\xff" * 4
        + bytes(4)
        + b"\x01\0\0\0",
        pack_event((EVICT, 6.0, 0, []))[:-4] + b"\xff" * 4,
        pack_event((THREAD, 2, "ab")).replace(b"ab", b"\xff\xff"),
    ],
)
def test_damage_ends_the_reading(path: Path, damage: bytes) -> None:
    trace = read(path, head() + BODY + damage + BODY + pack_event((END,)))
    assert trace.notices == [
        f"the file is cut off or damaged: the {len(EVENTS)} events before that were read"
    ]
    assert len(trace.tokens) == 2
    assert trace.layers[0].slots == 4


def test_no_damage_is_worse_than_an_unreadable_file(path: Path) -> None:
    chance = random.Random(3)
    read_anyway = 0
    for _ in range(400):
        data = bytearray(WHOLE)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(MAGIC), len(data))] = chance.randrange(256)
        try:
            read(path, bytes(data))
        except TraceUnreadable:
            continue
        read_anyway += 1
    assert read_anyway > 100
