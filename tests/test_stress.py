"""A thousand requests that are given up at any moment, from several loops in several threads."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import uvloop

from moestream import Engine, EngineBusy, RequestTimeout

from . import zoo
from .reference import make_prompt

LIMIT = 200.0
"""Seconds that all of it may take at most."""

PROMPTS = [make_prompt(length) for length in (3, 20, 41, 75)]
LOOPS = 4


async def one(engine: Engine, dice: random.Random, outcomes: Counter[str]) -> None:
    """A request that ends by itself or is given up at some moment."""
    prompt = dice.choice(PROMPTS)
    most = dice.choice((1, 3, 6))
    how = dice.choice(("before", "soon", "prompt", "tokens", "after", "end", "end", "timeout"))
    timeout = dice.choice((0.0, 0.02, 0.1)) if how == "timeout" else None
    task = asyncio.ensure_future(
        collect(engine, prompt, most, timeout, 1 if how == "tokens" else None, dice.randrange(3))
    )
    try:
        if how == "before":
            task.cancel()
        elif how in ("soon", "prompt"):
            turns = dice.randrange(4 if how == "soon" else 400)
            for _ in range(turns):  # turns of the loop, no time
                if task.done():
                    break
                await asyncio.sleep(0)
            task.cancel()
        outcomes[await task] += 1
        if how == "after":
            task.cancel()
    except asyncio.CancelledError:
        outcomes["cancelled"] += 1
    except RequestTimeout:
        outcomes["timeout"] += 1
    except EngineBusy:
        outcomes["busy"] += 1


async def collect(
    engine: Engine,
    prompt: list[int],
    most: int,
    timeout: float | None,  # noqa: ASYNC109
    leave: int | None,
    priority: int,
) -> str:
    stream = engine.stream(
        prompt, max_tokens=most, ignore_eos=True, timeout=timeout, priority=priority
    )
    async with aclosing(stream) as chunks:
        count = 0
        async for _ in chunks:
            count += 1
            if count == leave and count < most:
                return "closed"
    assert count == most
    return "ended"


def elsewhere(engine: Engine, number: int, count: int, outcomes: Counter[str]) -> None:
    """A caller's thread with a loop of its own; eight requests at a time."""
    dice = random.Random(number)

    async def serve() -> None:
        left = count
        while left:
            some = min(left, 8)
            left -= some
            own = [asyncio.create_task(one(engine, dice, outcomes)) for _ in range(some)]
            await asyncio.gather(*own)

    factory = uvloop.new_event_loop if number % 2 else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve())


async def stress(directory: Path, requests: int) -> None:
    model = zoo.make_checkpoint("qwen3_next", directory)
    process = psutil.Process()
    async with await Engine.open(model, slots=6, max_running=6, max_waiting=20) as engine:
        alone = [await engine.generate(p, max_tokens=8, ignore_eos=True) for p in PROMPTS]
        gc.collect()
        files, threads = process.num_fds(), process.num_threads()
        outcomes = [Counter[str]() for _ in range(LOOPS)]
        callers = [
            threading.Thread(target=elsewhere, args=(engine, n, requests // LOOPS, outcomes[n]))
            for n in range(LOOPS)
        ]
        for caller in callers:
            caller.start()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LIMIT):
            for caller in callers:
                await loop.run_in_executor(None, caller.join)
            # Whoever was given up has left when a later request has ended.
            again = await asyncio.gather(
                *[engine.generate(p, max_tokens=8, ignore_eos=True) for p in PROMPTS]
            )
        assert [one.tokens for one in again] == [one.tokens for one in alone]
        total = sum(outcomes, Counter[str]())
        assert sum(total.values()) == requests
        assert min(total[kind] for kind in ("ended", "cancelled", "closed", "timeout")) > 0
        engine.check_integrity(idle=True)
        statistics = engine.statistics()
        assert statistics.requests_running == statistics.requests_waiting == 0
        assert statistics.requests_failed == total["timeout"]
        scheduler, store = engine._scheduler, engine._core.store
        assert not scheduler.entrance._inside
        assert not scheduler._batch.rows and scheduler._filling is None
        assert not store._flights
        assert len(asyncio.all_tasks()) == 1
        # The executor that waited for the callers has some threads of its own.
        assert process.num_threads() <= threads + LOOPS
        assert process.num_fds() <= files + 1  # of that executor


@pytest.mark.one_loop
async def test_a_hundred_requests(tmp_path: Path) -> None:
    await stress(tmp_path, 100)


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.timeout(LIMIT + 60)
async def test_a_thousand_requests(tmp_path: Path) -> None:
    await stress(tmp_path, 1000)
