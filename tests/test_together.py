"""Requests computed together: the same answers as one by one, and nobody disturbs anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moestream import (
    Chunk,
    Engine,
    EngineBusy,
    Generation,
    InvalidRequest,
    PrefetchConfig,
    ReadFailed,
    RequestTimeout,
)
from moestream.runtime.generation import Row
from moestream.runtime.scheduling import Limits

from . import zoo
from .fakes import Gate
from .reference import ALTERNATIVES, expect, make_prompt

TOLERANCE = 1e-5
"""Of log-probabilities. On the CPU backend a row of a batch is computed bit for bit like a row by
itself, except where a rotating cache holds the same keys in another order (1.7e-6 was seen)."""

Asked = list[tuple[Any, dict[str, Any]]]

EXACT = ("qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "jamba")
ROUNDED = ("gpt_oss", "gemma4_text", "deepseek_v32", "afmoe")
PROMPTS = [make_prompt(length, 8192) for length in (5, 33, 12, 60)]


@pytest.fixture
async def engine(demo: Path) -> AsyncIterator[Engine]:
    async with await Engine.open(demo, slots=48) as engine:
        yield engine
        engine.check_integrity()


async def at_once(engine: Engine, asked: Asked) -> list[Generation]:
    return await asyncio.gather(*[engine.generate(prompt, **rest) for prompt, rest in asked])


async def in_turn(engine: Engine, asked: Asked) -> list[Generation]:
    return [await engine.generate(prompt, **rest) for prompt, rest in asked]


def widths(engine: Engine) -> list[int]:
    """Rows of each forward from here on."""
    seen: list[int] = []
    model = engine._core.loaded.model

    class Watched:
        def __call__(self, tokens: Any, **rest: Any) -> Any:
            seen.append(tokens.shape[0])
            return model(tokens, **rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    engine._core.loaded.model = Watched()
    return seen


def running(engine: Engine) -> tuple[Row, ...]:
    return engine._scheduler.totals.running


# -- the same answers -------------------------------------------------------------------------


async def test_eight_equal_requests_at_once(engine: Engine) -> None:
    asked: Asked = [(PROMPTS[1], {"max_tokens": 20, "ignore_eos": True, "logprobs": 2})] * 8
    alone = await engine.generate(asked[0][0], **asked[0][1])
    seen = widths(engine)
    before = engine.statistics()
    together = await at_once(engine, asked)
    after = engine.statistics()
    assert max(seen) == 8
    assert after.batched and after.most_running == 8
    for one in together:
        assert one.tokens == alone.tokens
        assert one.logprobs == alone.logprobs  # to the last bit, on the CPU backend
    # Experts that several rows are routed to are asked for once.
    asked_for = after.hits + after.misses - before.hits - before.misses
    assert asked_for < 0.85 * 8 * (alone.stats.hits + alone.stats.misses)
    assert asked_for == sum(one.stats.hits + one.stats.misses for one in together)
    read = after.bytes_read - before.bytes_read
    wasted = after.wasted_bytes - before.wasted_bytes  # by reading ahead in the prompts
    assert read - wasted == sum(one.stats.bytes_read for one in together)
    engine.check_integrity(idle=True)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
async def test_architectures(name: str, tmp_path: Path) -> None:
    directory = zoo.make_checkpoint(name, tmp_path / name)
    model = zoo.reference(directory)
    # Windows, rotations and growths of caches fall into these lengths.
    lengths = [5, 40, 17, 90, 3, 64, 28, 9]
    steps = [30, 9, 45, 20, 3, 12, 1, 38]
    expected = [
        expect(model, make_prompt(n), count) for n, count in zip(lengths, steps, strict=True)
    ]
    async with await Engine.open(directory, slots=8, max_running=4) as engine:
        assert engine.statistics().batched
        seen = widths(engine)
        results = await at_once(
            engine,
            [
                (
                    make_prompt(n),
                    {"max_tokens": count, "ignore_eos": True, "logprobs": ALTERNATIVES},
                )
                for n, count in zip(lengths, steps, strict=True)
            ],
        )
        assert max(seen) == engine.statistics().most_running > 1
        engine.check_integrity(idle=True)
    for result, wanted in zip(results, expected, strict=True):
        assert list(result.tokens) == wanted.tokens
        assert result.logprobs is not None
        own = [one.logprob for one in result.logprobs]
        reference = [logprob for logprob, _ in wanted.logprobs]
        if name in EXACT:
            assert own == reference
        else:
            assert own == pytest.approx(reference, abs=TOLERANCE)


@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("name", "reason"), [("minimax_m3_vl", "blocks"), ("llama4", "ChunkedKVCache")]
)
async def test_models_whose_caches_cannot_be_batched(
    name: str, reason: str, tmp_path: Path
) -> None:
    directory = zoo.make_checkpoint(name, tmp_path / name)
    model = zoo.reference(directory)
    async with await Engine.open(directory, slots=4) as engine:
        statistics = engine.statistics()
        assert not statistics.batched
        assert statistics.most_running == 1
        assert reason in statistics.batch_limit
        results = await at_once(
            engine,
            [(make_prompt(n), {"max_tokens": 8, "ignore_eos": True}) for n in (40, 5, 70)],
        )
    for n, result in zip((40, 5, 70), results, strict=True):
        assert list(result.tokens) == expect(model, make_prompt(n), 8).tokens


async def test_every_request_keeps_its_own_sampling(engine: Engine) -> None:
    asked: Asked = [
        (PROMPTS[0], {"temperature": 1.0, "seed": 7, "max_tokens": 18}),
        (PROMPTS[1], {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 12}),
        (PROMPTS[2], {"repetition_penalty": 1.5, "max_tokens": 15}),
        (PROMPTS[3], {"logit_bias": {77: 50.0}, "frequency_penalty": 1.0, "max_tokens": 9}),
        ("Once upon a time", {"max_tokens": 30, "stop": " little"}),
        (PROMPTS[0], {"temperature": 1.0, "seed": 2**63 + 5, "top_k": 20, "max_tokens": 16}),
        (PROMPTS[2], {"max_tokens": 6, "logprobs": 4}),
    ]
    alone = await in_turn(engine, asked)
    together = await at_once(engine, asked)
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.tokens, one.finish_reason) == (
            other.text,
            other.tokens,
            other.finish_reason,
        )
        assert one.logprobs == other.logprobs
    assert together[4].finish_reason == "stop"


async def test_everything_resident(demo: Path) -> None:
    async with await Engine.open(demo, memory="all") as engine:
        asked: Asked = [(prompt, {"max_tokens": 25, "ignore_eos": True}) for prompt in PROMPTS]
        alone = await in_turn(engine, asked)
        # The others come while the first one runs ahead of its token.
        stream = engine.stream(PROMPTS[0], max_tokens=25, ignore_eos=True)
        tokens = [(await anext(stream)).token for _ in range(5)]
        others = asyncio.create_task(at_once(engine, asked[1:]))
        tokens += [chunk.token async for chunk in stream]
        assert tuple(tokens) == alone[0].tokens
        assert [one.tokens for one in await others] == [one.tokens for one in alone[1:]]


async def test_with_reading_ahead(demo: Path) -> None:
    asked: Asked = [(prompt, {"max_tokens": 14, "ignore_eos": True}) for prompt in PROMPTS]
    config = PrefetchConfig(admission="always")
    async with await Engine.open(demo, slots=24, prefetch=config) as engine:
        alone = await in_turn(engine, asked)
        guesses = engine.statistics().prefetch.guesses
        assert guesses
        # One is alone first, and its guesses are on their way when the others come.
        stream = engine.stream(PROMPTS[0], max_tokens=900, ignore_eos=True)
        await anext(stream)
        others = asyncio.create_task(at_once(engine, asked))
        for _ in range(6):
            await anext(stream)
        await stream.aclose()
        assert [one.tokens for one in await others] == [one.tokens for one in alone]
        await engine.generate(PROMPTS[0], max_tokens=1)
        engine.check_integrity()


# -- turns ------------------------------------------------------------------------------------


async def test_a_long_prompt_lets_streams_go_on(demo: Path) -> None:
    async with await Engine.open(demo, slots=16, prefill_chunk=24) as engine:
        stream = engine.stream(PROMPTS[0], max_tokens=900, ignore_eos=True)
        await anext(stream)
        own = running(engine)[0].number
        events: list[tuple[str, int, int]] = []
        tracer = engine._core.tracer
        tracer.token = lambda request, *rest: events.append(("token", request, 1))  # type: ignore[method-assign]
        tracer.prompt = lambda request, size, *rest: events.append(("prompt", request, size))  # type: ignore[method-assign]
        result = await engine.generate(make_prompt(200, 8192), max_tokens=3, ignore_eos=True)
        await stream.aclose()
        assert len(result.tokens) == 3
        chunks = [index for index, event in enumerate(events) if event[0] == "prompt"]
        sizes = [events[index][2] for index in chunks]
        assert max(sizes) <= 24
        assert sum(sizes) >= 200 - 24  # the last piece counts as the first token
        for before, after in pairwise(chunks):
            between = events[before + 1 : after]
            assert ("token", own, 1) in between


class Hold:
    """A job that keeps the compute thread until a test lets it go on."""

    def __init__(self) -> None:
        self.gate = Gate()

    def run(self, core: Any) -> None:
        self.gate()

    def abort(self, error: BaseException) -> None:
        self.gate.open()


async def arrive_together(engine: Engine, asked: Asked) -> list[Generation]:
    """All requests have arrived before the first is looked at."""
    hold = Hold()
    engine._thread.submit(hold)
    hold.gate.wait_entered()
    tasks = [asyncio.create_task(engine.generate(prompt, **rest)) for prompt, rest in asked]
    await asyncio.sleep(0)  # each submits in its first step
    assert engine._thread.waiting == len(asked)
    hold.gate.open()
    return await asyncio.gather(*tasks)


async def test_equal_requests_run_in_step(engine: Engine) -> None:
    asked: Asked = [(PROMPTS[1], {"max_tokens": 6, "ignore_eos": True})] * 8
    seen = widths(engine)
    before = engine.statistics()
    answers = await arrive_together(engine, asked)
    assert seen == [1] * 8 + [8] * 5
    together = engine.statistics()
    del seen[:]
    assert [one.tokens for one in await in_turn(engine, asked)] == [one.tokens for one in answers]
    after = engine.statistics()
    # Decoding needs the experts of one request for all eight; prompts are asked for one by one.
    demanded = [one.hits + one.misses for one in (before, together, after)]
    saved = (demanded[2] - demanded[1]) - (demanded[1] - demanded[0])
    assert saved == 7 * 5 * 12 * 6  # others, forwards, layers, experts of a token


async def test_jobs_run_between_requests_of_one_token(engine: Engine) -> None:
    seen = widths(engine)
    model, after = engine._core.loaded.model, list[int]()

    class Probe:
        def run(self, core: Any) -> None:
            after.append(len(seen))

        def abort(self, error: BaseException) -> None: ...

    class Asking:
        def __call__(self, tokens: Any, **rest: Any) -> Any:
            if not seen:
                engine._thread.submit(Probe())
            return model(tokens, **rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    engine._core.loaded.model = Asking()
    await arrive_together(engine, [(PROMPTS[0], {"max_tokens": 1})] * 4)
    assert seen == [1] * 4
    assert after == [1]


async def test_short_prompts_wait_for_tokens_of_streams(demo: Path) -> None:
    async with await Engine.open(demo, slots=48, prefill_chunk=128) as engine:
        asked: Asked = [(PROMPTS[2], {"max_tokens": 4, "ignore_eos": True})] * 5
        seen = widths(engine)
        await arrive_together(engine, asked)
        # The first by itself, then two (64 tokens each by decree) between two tokens.
        assert seen == [1, 1, 1, 3, 1, 1, 5, 5, 2]


async def test_priority_goes_first_and_then_arrival(demo: Path) -> None:
    async with await Engine.open(demo, slots=16, max_running=1) as engine:
        stream = engine.stream(PROMPTS[0], max_tokens=900, ignore_eos=True)
        await anext(stream)
        ended: list[int] = []

        async def ask(number: int, priority: int) -> None:
            await engine.generate(PROMPTS[0], max_tokens=1, priority=priority)
            ended.append(number)

        tasks = []
        for number, priority in enumerate((0, -1, 5, 0, 5)):
            tasks.append(asyncio.create_task(ask(number, priority)))
            await asyncio.sleep(0)
        await stream.aclose()
        await asyncio.gather(*tasks)
        assert ended == [2, 4, 0, 3, 1]


async def test_a_full_engine_refuses_and_takes_again(demo: Path) -> None:
    async with await Engine.open(demo, slots=16, max_running=1, max_waiting=1) as engine:
        stream = engine.stream(PROMPTS[0], max_tokens=900, ignore_eos=True)
        await anext(stream)
        waiting = asyncio.create_task(engine.generate(PROMPTS[1], max_tokens=2))
        await asyncio.sleep(0)
        for _ in range(3):
            with pytest.raises(EngineBusy, match="max_waiting"):
                await engine.generate(PROMPTS[2])
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        another = asyncio.create_task(engine.generate(PROMPTS[1], max_tokens=2))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy):
            await engine.generate(PROMPTS[2])
        await stream.aclose()
        assert len((await another).tokens) == 2
        assert (await engine.generate(PROMPTS[2], max_tokens=1)).tokens


async def test_caches_beyond_the_budget_make_the_last_one_wait(engine: Engine) -> None:
    asked: Asked = [(prompt, {"max_tokens": 40, "ignore_eos": True}) for prompt in PROMPTS]
    alone = await in_turn(engine, asked)
    loaded, scheduler = engine._core.loaded, engine._scheduler
    # Two may begin; as soon as one is longer than 64 tokens, only one has room.
    step = 64

    class Tight(Limits):
        def cache_bytes(self, lengths: Any) -> int:
            return len(lengths) * (1 + max(lengths, default=0) // step)

        def admits(self, lengths: Any, newcomer: int) -> bool:
            return self.fit([*lengths, newcomer])

    own = loaded.limits
    values = {name: getattr(own, name) for name in own.__slots__}
    loaded.limits = Tight(**{**values, "kv_budget": 2})
    seen = widths(engine)
    put_back: list[int] = []
    original = scheduler._put_back

    def watched(core: Any, row: Row) -> None:
        put_back.append(row.number)
        original(core, row)

    scheduler._put_back = watched  # type: ignore[method-assign]
    together = await at_once(engine, asked)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert max(seen) == 2
    assert put_back
    engine.check_integrity(idle=True)


@pytest.mark.parametrize(
    "settings", [{"max_running": 0}, {"max_waiting": -1}, {"prefill_chunk": 0}], ids=str
)
async def test_bad_limits(settings: dict[str, Any], demo: Path) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(settings))):
        await Engine.open(demo, **settings)


async def test_bad_turns(engine: Engine) -> None:
    for arguments in ({"priority": 1.5}, {"timeout": -1}, {"timeout": "soon"}):
        with pytest.raises(InvalidRequest, match=next(iter(arguments))):
            await engine.generate(PROMPTS[0], **arguments)


# -- those who leave --------------------------------------------------------------------------


async def test_one_leaves_and_the_others_do_not_notice(engine: Engine) -> None:
    asked: Asked = [(prompt, {"max_tokens": 30, "ignore_eos": True}) for prompt in PROMPTS]
    alone = await in_turn(engine, asked)
    all_run = asyncio.Event()
    begun: set[int] = set()

    async def follow(number: int) -> list[int]:
        tokens = []
        async for chunk in engine.stream(asked[number][0], **asked[number][1]):
            tokens.append(chunk.token)
            if len(tokens) == 3:  # two of them by forwards for all
                begun.add(number)
            if len(begun) == len(asked):
                all_run.set()
        return tokens

    seen = widths(engine)
    tasks = [asyncio.create_task(follow(number)) for number in range(len(asked))]
    await all_run.wait()
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    for number in (0, 2, 3):
        assert tuple(await tasks[number]) == alone[number].tokens
    assert 4 in seen and 3 in seen[seen.index(4) :]
    assert engine.statistics().requests_cancelled == 1
    assert running(engine) == ()
    assert not engine._scheduler._batch.rows
    engine.check_integrity(idle=True)


async def test_a_forward_that_nobody_wants_stops_within_a_layer(demo: Path) -> None:
    async with await Engine.open(demo, slots=48) as engine:
        streams = [engine.stream(p, max_tokens=900, ignore_eos=True) for p in PROMPTS[:2]]
        for stream in streams:
            await anext(stream)
        while len(running(engine)) < 2:
            await anext(streams[0])
        gate, calls = Gate(), list[tuple[int, int]]()
        demand = engine._core.store.demand

        def watched(group: int, experts: Any, *, owner: Any, **rest: Any) -> Any:
            if owner < 0:
                calls.append((rest["position"], group))
                if group == 3:
                    gate()
            return demand(group, experts, owner=owner, **rest)

        engine._core.store.demand = watched  # type: ignore[method-assign]
        await asyncio.get_running_loop().run_in_executor(None, gate.wait_entered)
        for stream in streams:
            await stream.aclose()
        stopped = len(calls)
        gate.open()
        await engine.generate(PROMPTS[2], max_tokens=1)
        assert all(call[1] == 3 for call in calls[stopped:])
        engine.check_integrity(idle=True)


async def test_a_timeout_hands_over_what_there_is(engine: Engine) -> None:
    whole = await engine.generate(PROMPTS[0], max_tokens=40, ignore_eos=True)
    other = asyncio.create_task(engine.generate(PROMPTS[1], max_tokens=40, ignore_eos=True))
    chunks: list[Chunk] = []
    with pytest.raises(RequestTimeout, match="500 s") as caught:
        async with aclosing(
            engine.stream(PROMPTS[0], max_tokens=900, ignore_eos=True, timeout=500)
        ) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 5:
                    for row in running(engine):
                        if row.request.timeout is not None:
                            row.request.created -= 501  # the time is over
    assert caught.value.seconds == 500
    generation = caught.value.generation
    assert generation is not None
    assert generation.finish_reason == "cancelled"
    assert generation.tokens[:5] == whole.tokens[:5]
    assert generation.tokens == tuple(chunk.token for chunk in chunks)
    assert len((await other).tokens) == 40
    engine.check_integrity(idle=True)


async def test_a_timeout_counts_the_waiting(demo: Path) -> None:
    async with await Engine.open(demo, slots=16, max_running=1) as engine:
        stream = engine.stream(PROMPTS[0], max_tokens=900, ignore_eos=True)
        await anext(stream)
        with pytest.raises(RequestTimeout) as caught:
            await engine.generate(PROMPTS[1], max_tokens=3, timeout=0)
        assert caught.value.generation is None
        await stream.aclose()
        assert len((await engine.generate(PROMPTS[1], max_tokens=2, timeout=500)).tokens) == 2


# -- what goes wrong --------------------------------------------------------------------------


async def test_a_read_that_fails_once_fails_nobody(demo: Path) -> None:
    async with await Engine.open(demo, slots=12) as engine:
        asked: Asked = [(prompt, {"max_tokens": 16, "ignore_eos": True}) for prompt in PROMPTS]
        alone = await in_turn(engine, asked)
        failures = failing_reads(engine, once=True)
        together = await at_once(engine, asked)
        assert [one.tokens for one in together] == [one.tokens for one in alone]
        assert failures == [1]
        assert engine.statistics().requests_failed == 0
        engine.check_integrity(idle=True)


async def test_reads_that_keep_failing_fail_all_who_need_them(demo: Path) -> None:
    async with await Engine.open(demo, slots=12) as engine:
        asked: Asked = [(prompt, {"max_tokens": 16, "ignore_eos": True}) for prompt in PROMPTS]
        alone = await in_turn(engine, asked)
        reader = engine._core.store.reader
        good = reader.preadv
        failing_reads(engine, once=False)
        outcomes = await asyncio.gather(
            *[engine.generate(prompt, **rest) for prompt, rest in asked], return_exceptions=True
        )
        assert {type(outcome) for outcome in outcomes} == {ReadFailed}
        reader.preadv = good
        engine.check_integrity(idle=True)
        together = await at_once(engine, asked)
        assert [one.tokens for one in together] == [one.tokens for one in alone]


def failing_reads(engine: Engine, *, once: bool) -> list[int]:
    """Reads of forwards for several requests fail from here on; returns a list of the failures."""
    failures: list[int] = []
    reader, stream = engine._core.store.reader, engine._core.loaded.stream
    good = reader.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if failures and not once:
            raise OSError(5, "Input/output error")
        if not failures and stream.step.owner < 0:
            failures.append(1)
            raise OSError(5, "Input/output error")
        return int(good(descriptor, buffers, offset))

    reader.preadv = preadv
    return failures


async def test_limits_can_be_looked_at(engine: Engine) -> None:
    statistics = engine.statistics()
    assert (statistics.batched, statistics.most_running, statistics.batch_limit) == (True, 8, "")
    assert replace(engine._core.loaded.limits, rows=2).rows == 2
