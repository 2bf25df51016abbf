"""When the loop or the compute thread dies, or files run out: who hears of it, and what is left."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from moestream import Engine, EngineClosed, EngineDead, Generation, OpenFailed
from moestream.io.faults import FaultyDrive

from .fakes import TIMEOUT, join_lanes

PROMPT = "Once upon a time"


class Fatal(BaseException):
    """What kills a thread."""


async def outcomes(engine: Engine, count: int) -> list[Generation | BaseException]:
    tasks = [asyncio.create_task(engine.generate(PROMPT, max_tokens=50)) for _ in range(count)]
    async with asyncio.timeout(TIMEOUT):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def check_dead(engine: Engine, cause: BaseException, waiting: int = 3) -> None:
    """All who wait, and who come later, hear of the cause; closing returns."""
    for outcome in await outcomes(engine, waiting):
        assert isinstance(outcome, EngineDead)
        assert repr(cause) in str(outcome)
        seen: BaseException | None = outcome
        while seen is not None and seen is not cause:
            seen = seen.__cause__
        assert seen is cause
    with pytest.raises(EngineDead):
        await engine.generate(PROMPT)
    await asyncio.wrap_future(engine._thread.finished)
    assert not engine.alive
    with pytest.raises(EngineDead):
        await engine.generate(PROMPT)
    async with asyncio.timeout(TIMEOUT):
        await engine.aclose()
        await engine.aclose()
    # Closed by its owner or dead before that: it is said which.
    with pytest.raises((EngineDead, EngineClosed)):
        await engine.generate(PROMPT)


@pytest.mark.parametrize("method", ["begin", "jobs", "finish"])
@pytest.mark.parametrize("call", [1, 40])
async def test_the_loop_dies_in_the_books(method: str, call: int, demo: Path) -> None:
    engine = await Engine.open(demo, slots=16)
    store, cause, calls = engine._core.store, RuntimeError("struck"), 0
    real = getattr(store, method)

    def deadly(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(*arguments)
        if calls == call:
            raise cause
        return result

    setattr(store, method, deadly)
    await check_dead(engine, cause)


async def test_the_loop_dies_while_nobody_waits(demo: Path) -> None:
    engine = await Engine.open(demo, slots=16)
    loop, cause, died = engine._core.loop, RuntimeError("struck"), threading.Event()

    def die() -> None:
        loop._die(cause)
        died.set()

    loop._loop.call_soon_threadsafe(die)
    assert await asyncio.to_thread(died.wait, TIMEOUT)
    assert not engine.alive
    await check_dead(engine, cause)


async def test_the_loop_dies_while_a_read_is_given_up(demo: Path) -> None:
    cause = RuntimeError("struck")
    with FaultyDrive() as drive:
        engine = await Engine.open(demo, slots=16, read_timeout=0.2)
        engine._core.store.reader.preadv = drive
        real = engine._core.store.abandoned

        def deadly(*arguments: Any) -> Any:
            real(*arguments)
            raise cause

        setattr(engine._core.store, "abandoned", deadly)  # noqa: B010
        drive.plan("hang")
        for outcome in await outcomes(engine, 2):
            # The first one heard of the read before the loop died of it.
            assert isinstance(outcome, EngineDead) or "has not answered" in str(outcome)
        assert engine._core.loop.failure is cause
        async with asyncio.timeout(TIMEOUT):
            await engine.aclose()
    join_lanes()


@pytest.mark.parametrize("place", ["demand", "release"])
async def test_the_compute_thread_dies(place: str, demo: Path) -> None:
    engine = await Engine.open(demo, slots=16)
    store, cause, calls = engine._core.store, Fatal("lightning"), 0
    real = getattr(store, place)

    def deadly(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise cause
        return real(*arguments, **more)

    setattr(store, place, deadly)
    await check_dead(engine, cause)


async def test_closing_does_not_wait_for_a_drive_that_does_not_answer(demo: Path) -> None:
    """Not even for the time after which the read would be given up."""
    with FaultyDrive() as drive:
        engine = await Engine.open(demo, slots=16, read_timeout=1000)
        engine._core.store.reader.preadv = drive
        engine._core.loop._grace = 0.0
        drive.plan("hang")
        tasks = [asyncio.create_task(engine.generate(PROMPT)) for _ in range(2)]
        assert await asyncio.to_thread(drive.wait_hanging, 1, TIMEOUT)
        async with asyncio.timeout(TIMEOUT):
            await engine.aclose()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, EngineClosed)
    join_lanes()


@pytest.mark.parametrize("spare", [0, 1, 6])
async def test_running_out_of_descriptors_is_one_clear_error(
    spare: int, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it would be possible to go on without direct reads: that would be slow."""
    await (await Engine.open(packed, slots=16)).aclose()
    files = psutil.Process().num_fds()
    real, opened = os.open, 0

    def limited(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        nonlocal opened
        if str(path).endswith(".bin"):
            opened += 1
            if opened > spare:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", limited)
        with pytest.raises(OpenFailed, match=r"Too many open files.*limit of open files"):
            await Engine.open(packed, slots=16)
    assert opened == spare + 1
    assert psutil.Process().num_fds() == files
    await (await Engine.open(packed, slots=16)).aclose()
