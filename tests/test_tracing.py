"""Traces: a valid file, a bounded buffer, and a target that cannot be written."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from moestream.runtime import tracing
from moestream.runtime.tracing import BATCH_EVENTS, Tracer

from .fakes import TIMEOUT


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


def events_of(path: Path, phase: str = "X") -> list[dict[str, Any]]:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["displayTimeUnit"] == "ms"
    return [event for event in document["traceEvents"] if event["ph"] == phase]


async def write_all(tracer: Tracer) -> None:
    tracer.close()
    await tracer.write()


async def test_events_are_written_with_their_arguments(path: Path) -> None:
    tracer = Tracer(path)
    start = time.perf_counter()
    tracer.read(2, 3, 7, start, start + 0.002, 4096, True, tracer._epoch)
    tracer.stall(2, 3, start + 0.001, start + 0.004, late=1, evicted=0, unpredicted=1)
    tracer.token(1, 42, start, start + 0.010)
    tracer.prompt(1, 128, start, start + 0.5)
    await write_all(tracer)
    events = events_of(path)
    assert [(event["name"], event["args"]) for event in events] == [
        (
            "read",
            {
                "layer": 3,
                "group": 2,
                "expert": 7,
                "bytes": 4096,
                "speculative": True,
                "asked": 0.0,
            },
        ),
        (
            "stall",
            {
                "layer": 3,
                "group": 2,
                "experts": 2,
                "late": 1,
                "evicted": 0,
                "unpredicted": 1,
            },
        ),
        ("token", {"request": 1, "token": 42}),
        ("prompt", {"request": 1, "tokens": 128}),
    ]
    assert [event["dur"] for event in events] == [2000, 3000, 10000, 500000]
    assert events[1]["ts"] - events[0]["ts"] == pytest.approx(1000, abs=0.01)
    assert events[0]["ts"] >= 0


async def test_an_empty_trace_is_valid(path: Path) -> None:
    await write_all(Tracer(path))
    assert events_of(path) == []
    (name,) = events_of(path, "M")
    assert name["args"] == {"name": "moestream"}


async def test_threads_are_named(path: Path) -> None:
    tracer = Tracer(path)

    def work() -> None:
        tracer.read(0, 0, 0, 1.0, 2.0, 1, False, 1.0)

    thread = threading.Thread(target=work, name='lane "\u00e4\\"')
    thread.start()
    thread.join()
    tracer.stall(0, 0, 1.0, 2.0, late=0, evicted=0, unpredicted=1)
    await write_all(tracer)
    names = {
        e["tid"]: e["args"]["name"] for e in events_of(path, "M") if e["name"] == "thread_name"
    }
    read, stall = events_of(path)
    assert names[read["tid"]] == 'lane "\u00e4\\"'
    assert names[stall["tid"]] == threading.current_thread().name


async def test_what_is_added_while_it_is_being_written(path: Path) -> None:
    tracer = Tracer(path)
    writer = asyncio.create_task(tracer.write())
    for number in range(3 * BATCH_EVENTS):
        tracer.token(1, number, 0.0, 1.0)
        if number % 50 == 0:
            await asyncio.sleep(0)
    tracer.close()
    await writer
    assert [event["args"]["token"] for event in events_of(path)] == list(range(3 * BATCH_EVENTS))


async def test_many_threads_add_while_it_is_being_written(path: Path) -> None:
    tracer = Tracer(path)

    def work(request: int) -> None:
        for number in range(500):
            tracer.token(request, number, 0.0, 1.0)

    threads = [threading.Thread(target=work, args=[request]) for request in range(4)]
    writer = asyncio.create_task(tracer.write())
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join, TIMEOUT)
    tracer.close()
    await writer
    seen = [(event["args"]["request"], event["args"]["token"]) for event in events_of(path)]
    assert sorted(seen) == [(request, number) for request in range(4) for number in range(500)]


async def test_a_thread_may_add_its_first_event_while_the_names_are_written(path: Path) -> None:
    tracer = Tracer(path)
    tracer._names = {number: f"thread {number}" for number in range(3)}
    lines = []
    for line in tracer._metadata():
        lines.append(json.loads(line))
        tracer._names[100 + len(lines)] = "late"
    assert len(lines) == 4


async def test_a_full_buffer_counts_what_it_drops(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "BUFFERED_EVENTS", 5)
    tracer = Tracer(path)
    for number in range(8):
        tracer.token(1, number, 0.0, 1.0)
    assert tracer.dropped == 3
    await write_all(tracer)
    assert [event["args"]["token"] for event in events_of(path)] == [0, 1, 2, 3, 4]


def test_nothing_is_kept_without_a_file() -> None:
    tracer = Tracer(None)
    tracer.read(0, 0, 0, 0.0, 1.0, 1, False, 0.0)
    tracer.stall(0, 0, 0.0, 1.0, late=0, evicted=0, unpredicted=1)
    tracer.token(0, 0, 0.0, 1.0)
    tracer.prompt(0, 0, 0.0, 1.0)
    assert not tracer.enabled
    assert not tracer._events


def test_an_old_file_is_replaced(path: Path) -> None:
    path.write_text("x" * 10_000)
    asyncio.run(write_all(Tracer(path)))
    assert events_of(path) == []


# -- targets that cannot be written -----------------------------------------------------------


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.ERROR, "moestream"):
        yield caplog


async def test_an_unwritable_target_switches_tracing_off(
    tmp_path: Path, quiet: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nowhere" / "run.trace"
    tracer = Tracer(path)
    tracer.token(1, 1, 0.0, 1.0)
    await tracer.write()  # ends by itself
    assert not tracer.enabled
    assert tracer.error is not None
    assert str(path) in tracer.error
    assert "No such file" in tracer.error
    assert tracer.error in quiet.text
    tracer.token(1, 2, 0.0, 1.0)
    assert not tracer._events


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
@pytest.mark.parametrize("events", [0, 10, 5000])
async def test_a_full_target_switches_tracing_off(
    quiet: pytest.LogCaptureFixture, events: int
) -> None:
    tracer = Tracer(Path("/dev/full"))
    for number in range(events):
        tracer.token(1, number, 0.0, 1.0)
    await write_all(tracer)
    assert not tracer.enabled
    assert tracer.error is not None
    assert "No space left" in tracer.error
    assert not tracer._events


async def test_a_target_that_fills_up_ends_the_writer_before_it_is_closed(
    path: Path, quiet: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later events cost one look at a flag; nobody has to close what has already ended."""

    async def batches() -> AsyncIterator[str]:
        raise OSError(28, "No space left on device")
        yield ""

    tracer = Tracer(path)
    monkeypatch.setattr(tracer, "_batches", batches)
    await tracer.write()
    assert not tracer.enabled
    tracer.close()


def test_an_event_costs_little(path: Path) -> None:
    """Bound on memory, not on time: nothing but the tuple and its arguments is kept."""
    tracer = Tracer(path)
    tracer.token(1, 1, 0.0, 1.0)
    (event,) = tracer._events
    assert sys.getsizeof(event) + sys.getsizeof(event[-1]) < 512
