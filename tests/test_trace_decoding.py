"""Trace files of an engine that are cut off, damaged, or of another version."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moestream.runtime.errors import InvalidRequest
from moestream.runtime.replay_policies import POLICIES
from moestream.runtime.replay_sweep import Options, Sweep
from moestream.runtime.report import make_report, write_report
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


@pytest.mark.parametrize(
    "garbage",
    [
        b"[" * 100_000,
        b'{"traceEvents": ' + b"[" * 100_000,
        MAGIC + b"[" * 100_000 + b"\n",
        b'step,layer,slot,expert\n"' + b"a" * 200_000,
    ],
    ids=["list", "events", "header", "field"],
)
def test_garbage_of_any_depth_and_width_is_no_trace(path: Path, garbage: bytes) -> None:
    with suppress(TraceUnreadable):
        assert read(path, garbage).notices


def test_a_routing_table_is_read_up_to_a_field_without_an_end(path: Path) -> None:
    table = b"# model=m n_expert=" + b"9" * 5000 + b'\nstep,layer,slot,expert\n0,1,0,4\n"'
    trace = read(path, table + b"a" * 200_000)
    assert "the table is damaged: the rows before that were read" in trace.notices
    assert [route.experts for route in trace.routes] == [(4,)]
    assert trace.layers[1].experts == 5


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


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize(
    "make",
    [
        lambda number: (READ, 1, number, 6.0, 6.0, 0, 7, 100, False),
        lambda number: (READ, 1, 6.0, number, 6.0, 0, 7, 100, False),
        lambda number: (READ, 1, 6.0, 6.0, number, 0, 7, 100, False),
        lambda number: (USE, 6.0, 0, 2, number),
        lambda number: (QUEUE, 6.0, "guess", 0, 2, number),
        lambda number: (PREDICT, 6.0, 0, 3, 1, [2], [number if abs(number) != 1e300 else 2.0]),
    ],
)
def test_a_number_that_cannot_be_is_damage(
    path: Path, make: Callable[[float], Event], number: float
) -> None:
    trace = read(path, head() + BODY + pack_event(make(number)) + BODY)
    assert f"the {len(EVENTS)} events before that" in trace.notices[0]
    assert len(trace.tokens) == 2


LOST = "events name experts that their layer does not have and were left out"


@pytest.mark.parametrize("expert", [8, 1 << 16, (1 << 31) - 1])
def test_experts_that_a_layer_does_not_have_are_left_out(path: Path, expert: int) -> None:
    events: list[Event] = [
        (ROUTE, 6.0, 6.0, 0, 3, 1, [1, expert], []),
        (ROUTE, 6.0, 6.0, 0, 3, 2, [1, 2], [[1, 2], [1, expert]]),
        (PREDICT, 6.0, 0, 3, 1, [2, expert], [0.5, 0.25]),
    ]
    data = BODY + b"".join(map(pack_event, events)) + pack_event((END,))
    trace = read(path, head() + data)
    assert trace.notices == [f"3 {LOST}"]
    assert (len(trace.routes), len(trace.predictions)) == (2, 1)
    # Where the file does not say how many a layer has, at most what a table can be made for.
    trace = read(path, head({**HEADER, "layers": []}) + data)
    assert trace.layers[0].experts == (9 if expert == 8 else 8)
    results = Sweep(trace, Options(slots=[2], record_bytes=100)).run()
    assert len(results) == len(POLICIES)


@pytest.mark.parametrize("entry", [{"experts": 1 << 40}, {"experts": 0}, {"slots": 0}])
def test_a_layer_that_cannot_be_is_not_believed(path: Path, entry: dict[str, int]) -> None:
    trace = read(path, head({**HEADER, "layers": [{**LAYER, **entry}]}) + BODY)
    assert "description" in "".join(trace.notices)
    assert (trace.layers[0].experts, trace.layers[0].slots) == (8, None)


def test_numbers_of_a_chrome_trace_that_cannot_be_are_left_out(path: Path) -> None:
    token = '{"ph": "X", "name": "token", "ts": %s, "dur": 1.5, "tid": 0}'
    times = ["1.5", "NaN", "Infinity", "1e999", "-1e300"]
    events = ",".join(token % time for time in times)
    trace = read(path, f'{{"traceEvents": [{events}]}}'.encode())
    assert [token.ts for token in trace.tokens] == [1.5]
    assert trace.notices == ["4 events lack what they should have and were left out"]


def test_no_damage_is_worse_than_an_unreadable_file(path: Path) -> None:
    chance = random.Random(3)
    read_anyway = 0
    for _ in range(400):
        data = bytearray(WHOLE)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(MAGIC), len(data))] = chance.choice(
                (chance.randrange(256), 0x7F, 0xFF)
            )
        try:
            trace = read(path, bytes(data))
        except TraceUnreadable:
            continue
        write_report(trace, make_report(trace), path.parent)
        with suppress(InvalidRequest):  # nothing to replay is left
            Sweep(trace, Options(slots=[2], record_bytes=100)).run()
        read_anyway += 1
    assert read_anyway > 100
