"""Traces: what is written is read, a bounded buffer, and a target that cannot be written."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiofiles.threadpool.binary import AsyncFileIO

from moestream.runtime import tracing
from moestream.runtime.trace_format import OPERATIONS
from moestream.runtime.tracefile import read_trace
from moestream.runtime.tracing import BATCH_EVENTS, Tracer

from .fakes import TIMEOUT

SIZES = ("experts", "top_k", "slots", "record_bytes")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


def tokens_of(path: Path) -> list[int]:
    return [token.token for token in read_trace(path).tokens]


async def write_all(tracer: Tracer) -> None:
    tracer.close()
    await tracer.write()


async def test_events_are_read_with_their_arguments(path: Path) -> None:
    tracer = Tracer(path)
    tracer.about = {"layers": [{"group": 2, "layer": 3, **dict.fromkeys(SIZES, 8)}]}
    tracer.bandwidth = 2e9
    at = tracer._epoch + 1
    tracer.read(2, 7, at, at + 0.002, 4096, True, tracer._epoch)
    tracer.stall(2, at + 0.001, at + 0.004, 1, 0, 2)
    tracer.token(1, 42, at, at + 0.010)
    tracer.prompt(1, 128, at, at + 0.5)
    tracer.route(2, 5, at, at + 0.001, [7, 4], 1, [])
    tracer.route(2, 6, at + 0.002, at + 0.003, [7, 4, 1], 2, [[7, 4], [1, 4]])
    tracer.predict(2, 5, 1, [7, 4], [0.75, 0.25, 0.125])
    tracer.queue("promote", 2, 7)
    tracer.queue("guess", 2, 4, 0.3)
    tracer.evict(2, [1, ~6])
    tracer.use(2, 7, 0.25)
    tracer.depth(1, 2, 3, 4)
    await write_all(tracer)
    trace = read_trace(path)
    assert trace.notices == []
    assert trace.bandwidth == 2e9
    (read,), (stall,), (token,), (prompt,) = (
        trace.reads,
        trace.stalls,
        trace.tokens,
        trace.prompts,
    )
    assert (read.group, read.layer, read.expert, read.nbytes) == (2, 3, 7, 4096)
    assert (read.speculative, read.asked) == (True, 0.0)
    assert (stall.group, stall.layer) == (2, 3)
    assert (stall.late, stall.evicted, stall.unpredicted, stall.unknown) == (1, 0, 2, 0)
    assert (token.request, token.token, prompt.request, prompt.tokens) == (1, 42, 1, 128)
    lengths = [span.dur for span in (read, stall, token, prompt)]
    assert lengths == pytest.approx([2000, 3000, 10000, 500000])
    assert [read.ts, stall.ts, token.ts] == pytest.approx([1e6, 1.001e6, 1e6])
    assert [(sync.group, sync.layer) for sync in trace.syncs] == [(2, 3), (2, 3)]
    assert [sync.dur for sync in trace.syncs] == pytest.approx([1000, 1000])
    one, two = trace.routes
    assert (one.group, one.layer, one.forward, one.experts, one.tokens) == (2, 3, 5, (7, 4), 1)
    assert one.ts == pytest.approx(trace.syncs[0].end)
    assert (one.tail, two.tail) == ((), ((7, 4), (1, 4)))
    assert (two.forward, two.experts, two.tokens) == (6, (7, 4, 1), 2)
    (guess,) = trace.predictions
    assert (guess.group, guess.layer, guess.forward, guess.distance) == (2, 3, 5, 1)
    assert (guess.experts, guess.probabilities) == ((7, 4), (0.75, 0.25))
    seen = [(done.op, done.group, done.expert, done.probability) for done in trace.operations]
    assert seen == [("promote", 2, 7, 1.0), ("guess", 2, 4, 0.3)]
    assert [(e.group, e.expert, e.unused) for e in trace.evictions] == [(2, 1, False), (2, 6, True)]
    assert [(use.group, use.expert, use.lead) for use in trace.uses] == [(2, 7, 250_000)]
    assert [(depth.demand, depth.guesses) for depth in trace.queue_depth] == [(1, 2)]
    assert [(depth.demand, depth.guesses) for depth in trace.inflight] == [(3, 4)]
    assert min(trace.operations[0].ts, trace.evictions[0].ts, trace.queue_depth[0].ts) > 0


async def test_all_operations_of_the_queue_are_known(path: Path) -> None:
    tracer = Tracer(path)
    for operation in OPERATIONS:
        tracer.queue(operation, 0, 0)
    await write_all(tracer)
    assert tuple(done.op for done in read_trace(path).operations) == OPERATIONS


async def test_an_empty_trace_is_valid(path: Path) -> None:
    await write_all(Tracer(path))
    trace = read_trace(path)
    assert (trace.tokens, trace.notices, trace.bandwidth) == ([], [], None)


async def test_threads_are_named(path: Path) -> None:
    tracer = Tracer(path)

    def work() -> None:
        for expert in range(2):
            tracer.read(0, expert, 1.0, 2.0, 1, False, 1.0)

    thread = threading.Thread(target=work, name='lane "\u00e4\\"')
    thread.start()
    thread.join()
    tracer.stall(0, 1.0, 2.0, 0, 0, 1)
    await write_all(tracer)
    trace = read_trace(path)
    assert [trace.threads[read.tid] for read in trace.reads] == ['lane "\u00e4\\"'] * 2
    assert trace.threads[trace.stalls[0].tid] == "moestream-compute"


async def test_what_is_added_while_it_is_being_written(path: Path) -> None:
    tracer = Tracer(path)
    writer = asyncio.create_task(tracer.write())
    for number in range(3 * BATCH_EVENTS):
        tracer.token(1, number, 0.0, 1.0)
        if number % 50 == 0:
            await asyncio.sleep(0)
    tracer.close()
    await writer
    assert tokens_of(path) == list(range(3 * BATCH_EVENTS))


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
    seen = [(token.request, token.token) for token in read_trace(path).tokens]
    assert sorted(seen) == [(request, number) for request in range(4) for number in range(500)]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Queue[bytes]]:
    """Gets what each write has brought into the file, when it is there."""
    done: asyncio.Queue[bytes] = asyncio.Queue()
    write = tracing._write

    async def noted(file: AsyncFileIO, data: bytes) -> None:
        await write(file, data)
        if data:
            done.put_nowait(data)

    monkeypatch.setattr(tracing, "_write", noted)
    yield done


async def test_what_was_written_is_there_before_the_end(
    path: Path, writes: asyncio.Queue[bytes]
) -> None:
    """A killed process leaves the events of all writes before."""
    tracer = Tracer(path)
    tracer.token(1, 0, 0.0, 1.0)
    writer = asyncio.create_task(tracer.write())
    for _ in ("head", "token"):
        await asyncio.wait_for(writes.get(), TIMEOUT)
    (notice,) = read_trace(path).notices
    assert "the 1 events" in notice
    assert tokens_of(path) == [0]
    tracer.close()
    await writer
    assert read_trace(path).notices == []


async def test_closing_wakes_the_writer(
    path: Path, writes: asyncio.Queue[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 10 * TIMEOUT)
    tracer = Tracer(path)
    writer = asyncio.create_task(tracer.write())
    await asyncio.wait_for(writes.get(), TIMEOUT)
    tracer.token(1, 7, 0.0, 1.0)
    await asyncio.to_thread(tracer.close)
    await asyncio.wait_for(writer, TIMEOUT)
    assert tokens_of(path) == [7]


def test_closing_after_the_loop_has_ended_is_nothing(
    path: Path, writes: asyncio.Queue[bytes]
) -> None:
    tracer = Tracer(path)

    async def given_up() -> None:
        writer = asyncio.create_task(tracer.write())
        await asyncio.wait_for(writes.get(), TIMEOUT)
        writer.cancel()
        await asyncio.wait([writer])

    asyncio.run(given_up())
    tracer.close()
    assert len(read_trace(path).notices) == 1


async def test_a_target_that_takes_parts_gets_all(path: Path) -> None:
    got = bytearray()

    class Narrow:
        async def write(self, data: bytes) -> int:
            got.extend(data[:3])
            return min(len(data), 3)

    await tracing._write(cast(Any, Narrow()), b"ten  bytes")
    assert got == b"ten  bytes"


async def test_a_full_buffer_counts_what_it_drops(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "BUFFERED_EVENTS", 5)
    tracer = Tracer(path)
    for number in range(8):
        tracer.token(1, number, 0.0, 1.0)
    assert tracer.dropped == 3
    await write_all(tracer)
    assert tokens_of(path) == [0, 1, 2, 3, 4]


def test_nothing_is_kept_without_a_file() -> None:
    tracer = Tracer(None)
    tracer.read(0, 0, 0.0, 1.0, 1, False, 0.0)
    tracer.stall(0, 0.0, 1.0, 0, 0, 1)
    tracer.route(0, 0, 0.0, 1.0, [1], 1, [])
    tracer.predict(0, 0, 1, [1], [0.5])
    tracer.queue("join", 0, 1)
    tracer.evict(0, [1])
    tracer.use(0, 1, 0.5)
    tracer.depth(0, 0, 0, 0)
    tracer.token(0, 0, 0.0, 1.0)
    tracer.prompt(0, 0, 0.0, 1.0)
    assert not tracer.enabled
    assert not tracer._events


def test_an_old_file_is_replaced(path: Path) -> None:
    path.write_text("x" * 10_000)
    asyncio.run(write_all(Tracer(path)))
    assert read_trace(path).notices == []


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

    async def batches() -> AsyncIterator[bytes]:
        raise OSError(28, "No space left on device")
        yield b""

    tracer = Tracer(path)
    monkeypatch.setattr(tracer, "_batches", batches)
    await tracer.write()
    assert not tracer.enabled
    tracer.close()


async def test_a_number_that_fits_no_record_switches_tracing_off(
    path: Path, quiet: pytest.LogCaptureFixture
) -> None:
    tracer = Tracer(path)
    tracer.token(1, 5, 0.0, 1.0)
    tracer.queue("join", 1 << 40, 0)
    await write_all(tracer)
    assert not tracer.enabled
    assert tracer.error is not None and tracer.error in quiet.text


def test_an_event_costs_little(path: Path) -> None:
    """Bound on memory, not on time: nothing but a tuple is kept."""
    tracer = Tracer(path)
    tracer.token(1, 1, 0.0, 1.0)
    (event,) = tracer._events
    assert sys.getsizeof(event) < 256
