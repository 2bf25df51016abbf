"""The engine as its callers see it, on the packaged demo model."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

import moestream
from moestream import Chunk, Engine, EngineClosed, EngineDead, Generation, InvalidRequest
from moestream.runtime.tracefile import read_trace

from . import zoo

PROMPT = "Once upon a time"
QUESTION = [{"role": "user", "content": "Tell me a story about a cat."}]


@pytest.fixture
async def engine(demo: Path) -> AsyncIterator[Engine]:
    async with await Engine.open(demo, slots=16) as engine:
        yield engine
        engine.check_integrity()


async def collect(engine: Engine, prompt: Any, **sampling: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.stream(prompt, **sampling)]


# -- generation -------------------------------------------------------------------------------


async def test_stream_and_generate_agree(engine: Engine) -> None:
    result = await engine.generate(PROMPT, max_tokens=24)
    chunks = await collect(engine, PROMPT, max_tokens=24)
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(chunk.token for chunk in chunks) == result.tokens
    assert [chunk.finish_reason for chunk in chunks] == [None] * 23 + ["length"]
    assert chunks[-1].result is not None
    assert chunks[-1].result.tokens == result.tokens
    assert result.finish_reason == "length"
    assert result.text.startswith(", there was a little")


async def test_prompt_as_text_and_as_tokens_agree(engine: Engine, demo: Path) -> None:
    from mlx_lm.utils import load_tokenizer

    tokens = load_tokenizer(demo).encode(PROMPT)
    as_text = await engine.generate(PROMPT, max_tokens=8)
    as_tokens = await engine.generate(tokens, max_tokens=8)
    assert as_text.tokens == as_tokens.tokens
    assert as_text.prompt_tokens == len(tokens)


async def test_chat_messages_end_with_the_end_token(engine: Engine) -> None:
    question = [{"role": "user", "content": "Hello! How are you?"}]
    result = await engine.generate(question, max_tokens=200)
    assert result.finish_reason == "stop"
    assert result.tokens[-1] in (0, 2)
    assert "<|" not in result.text


async def test_ignore_eos_goes_on(engine: Engine) -> None:
    question = [{"role": "user", "content": "Hello! How are you?"}]
    short = await engine.generate(question, max_tokens=200)
    wanted = len(short.tokens) + 5
    result = await engine.generate(question, max_tokens=wanted, ignore_eos=True)
    assert len(result.tokens) == wanted
    assert result.tokens[: len(short.tokens)] == short.tokens
    assert result.finish_reason == "length"


async def test_stop_text_is_cut_off_and_never_streamed(engine: Engine) -> None:
    whole = await engine.generate(PROMPT, max_tokens=40)
    stop = whole.text[20:27]
    result = await engine.generate(PROMPT, max_tokens=40, stop=[stop, "not there"])
    assert result.finish_reason == "stop"
    assert result.text == whole.text[: whole.text.index(stop)]
    chunks = await collect(engine, PROMPT, max_tokens=40, stop=stop)
    assert "".join(chunk.text for chunk in chunks) == result.text


async def test_held_back_text_is_shown_at_the_end(engine: Engine) -> None:
    whole = await engine.generate(PROMPT, max_tokens=10)
    never = whole.text[-3:] + "\x00"
    result = await engine.generate(PROMPT, max_tokens=10, stop=never)
    assert result.text == whole.text


async def test_seed_decides_sampling(engine: Engine) -> None:
    settings = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 12}
    first = await engine.generate(PROMPT, seed=7, **settings)  # type: ignore[arg-type]
    again = await engine.generate(PROMPT, seed=7, **settings)  # type: ignore[arg-type]
    other = await engine.generate(PROMPT, seed=8, **settings)  # type: ignore[arg-type]
    fresh = await engine.generate(PROMPT, **settings)  # type: ignore[arg-type]
    assert first.tokens == again.tokens
    assert len({first.tokens, other.tokens, fresh.tokens}) == 3


async def test_logprobs(engine: Engine) -> None:
    result = await engine.generate(PROMPT, max_tokens=5, logprobs=3)
    assert result.logprobs is not None
    assert len(result.logprobs) == 5
    for token, logprob in zip(result.tokens, result.logprobs, strict=True):
        assert logprob.token == token
        assert logprob.top[0] == (token, logprob.logprob)  # greedy takes the best
        assert len(logprob.top) == 3
        assert sorted((value for _, value in logprob.top), reverse=True) == [
            value for _, value in logprob.top
        ]
    plain = await engine.generate(PROMPT, max_tokens=5)
    assert plain.logprobs is None
    assert plain.tokens == result.tokens


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
async def test_penalties_change_what_is_repeated(engine: Engine, penalty: str) -> None:
    plain = await engine.generate(PROMPT, max_tokens=12, logit_bias={77: 50.0}, ignore_eos=True)
    assert plain.tokens == (77,) * 12
    arguments: Any = {"max_tokens": 12, "logit_bias": {77: 1.0}, penalty: 2.0}
    punished = await engine.generate(PROMPT, ignore_eos=True, **arguments)
    rewarded = await engine.generate(PROMPT, ignore_eos=True, **{**arguments, penalty: -2.0})
    assert len(set(punished.tokens)) > len(set(rewarded.tokens))


async def test_tokenizer_and_alive(demo: Path) -> None:
    engine = await Engine.open(demo, slots=8)
    assert engine.alive
    assert engine.tokenizer.decode(engine.tokenizer.encode(PROMPT)) == PROMPT
    await engine.aclose()
    assert not engine.alive
    assert engine.tokenizer is None


async def test_logit_bias_and_repetition_penalty(engine: Engine) -> None:
    free = await engine.generate(PROMPT, max_tokens=8, ignore_eos=True)
    forced = await engine.generate(PROMPT, max_tokens=3, logit_bias={77: 1e6}, ignore_eos=True)
    assert forced.tokens == (77, 77, 77)
    penalised = await engine.generate(
        PROMPT, max_tokens=8, logit_bias={77: 50.0}, repetition_penalty=100.0, ignore_eos=True
    )
    assert penalised.tokens != free.tokens
    assert penalised.tokens.count(77) < 8


async def test_every_kind_of_sampling_runs(engine: Engine) -> None:
    for settings in ({"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.5}, {"top_p": 1.0}):
        result = await engine.generate(PROMPT, max_tokens=3, temperature=0.7, **settings)
        assert 1 <= len(result.tokens) <= 3


async def test_statistics_count_what_was_read(demo: Path) -> None:
    async with await Engine.open(demo, slots=16, prefetch="off") as engine:
        await check_statistics(engine)


async def check_statistics(engine: Engine) -> None:
    before = engine.statistics()
    result = await engine.generate(PROMPT, max_tokens=10, ignore_eos=True)
    after = engine.statistics()
    record = 3 * 64 * 256 // 2 + 3 * 2 * 2 * 64 * 256 // 64  # 4-bit weights, bf16 scales, biases
    assert after.reads - before.reads == result.stats.misses
    assert after.bytes_read - before.bytes_read == result.stats.misses * record
    assert result.stats.bytes_read == result.stats.misses * record
    # Ten forwards of 12 layers; the prompt's route to up to 6 experts a token.
    assert result.stats.hits + result.stats.misses >= 10 * 12 * 6
    assert after.tokens - before.tokens == 10
    assert after.requests_finished - before.requests_finished == 1
    assert after.streamed_layers == 12
    assert after.resident_layers == 0
    assert after.slots == (16,) * 12


async def test_everything_resident_neither_syncs_nor_reads(demo: Path) -> None:
    async with await Engine.open(demo, memory="all") as engine:
        result = await engine.generate(PROMPT, max_tokens=10)
        assert result.stats.syncs == 0
        statistics = engine.statistics()
        assert statistics.reads == 0
        assert statistics.resident_layers == 12


# -- many callers -----------------------------------------------------------------------------


async def test_requests_are_served_in_order(engine: Engine) -> None:
    finished: list[int] = []

    async def ask(number: int) -> None:
        await engine.generate(PROMPT, max_tokens=3)
        finished.append(number)

    await asyncio.gather(*[ask(number) for number in range(8)])
    assert finished == list(range(8))


async def test_callers_do_not_disturb_each_other(engine: Engine) -> None:
    alone = [await engine.generate(f"{PROMPT}, {n}", max_tokens=6) for n in range(4)]
    together = await asyncio.gather(
        *[engine.generate(f"{PROMPT}, {n}", max_tokens=6) for n in range(4)]
    )
    assert [one.tokens for one in alone] == [one.tokens for one in together]


async def test_a_caller_on_another_loop(engine: Engine) -> None:
    expected = await engine.generate(PROMPT, max_tokens=4)
    results: list[Generation] = []

    def elsewhere() -> None:
        results.append(asyncio.run(engine.generate(PROMPT, max_tokens=4)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.get_running_loop().run_in_executor(None, thread.join)
    assert results[0].tokens == expected.tokens


async def test_two_engines_at_once(demo: Path, engine: Engine) -> None:
    async with await Engine.open(demo, slots=24) as other:
        first, second = await asyncio.gather(
            engine.generate(PROMPT, max_tokens=10), other.generate(PROMPT, max_tokens=10)
        )
    assert first.tokens == second.tokens


# -- cancellation and end ---------------------------------------------------------------------


async def test_closing_a_stream_stops_the_request(engine: Engine) -> None:
    async with aclosing(engine.stream(PROMPT, max_tokens=500, ignore_eos=True)) as stream:
        async for _ in stream:
            break
    result = await engine.generate(PROMPT, max_tokens=3)
    assert len(result.tokens) == 3
    statistics = engine.statistics()
    assert statistics.requests_cancelled == 1
    engine.check_integrity(idle=True)


async def test_cancelling_the_task_stops_the_request(engine: Engine) -> None:
    started = asyncio.Event()

    async def ask() -> None:
        async for _ in engine.stream(PROMPT, max_tokens=1900, ignore_eos=True):
            started.set()

    task = asyncio.create_task(ask())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.generate(PROMPT, max_tokens=2)
    assert engine.statistics().requests_cancelled == 1


async def test_cancelling_a_waiting_request_skips_it(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_tokens=1900, ignore_eos=True)
    await anext(stream)
    waiting = asyncio.create_task(engine.generate(PROMPT, max_tokens=1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await stream.aclose()
    await engine.generate(PROMPT, max_tokens=1)
    assert engine.statistics().requests_cancelled == 2


async def test_cancellation_in_the_prompt_takes_effect_within_a_layer(demo: Path) -> None:
    async with await Engine.open(demo, slots=16) as engine:
        store = engine._core.store
        calls: list[int] = []
        inside = asyncio.Event()
        loop = asyncio.get_running_loop()
        demand = store.demand
        release = threading.Event()

        def watched(group: int, experts: Any, **rest: Any) -> Any:
            calls.append(group)
            if len(calls) == 3:
                loop.call_soon_threadsafe(inside.set)
                release.wait(10)
            return demand(group, experts, **rest)

        store.demand = watched  # type: ignore[method-assign]
        task = asyncio.create_task(engine.generate(list(range(5, 105)), max_tokens=4))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        at_cancel = calls[-1]
        release.set()
        await engine.generate([1], max_tokens=1)
        # Whatever the cancelled request asked for after the third call belongs to the same layer.
        later = calls[3:]
        restart = later.index(0) if 0 in later else len(later)
        assert all(group == at_cancel for group in later[:restart])
        engine.check_integrity(idle=True)


async def test_closing_fails_what_runs_and_what_waits(demo: Path) -> None:
    engine = await Engine.open(demo, slots=16)
    running = engine.stream(PROMPT, max_tokens=1900, ignore_eos=True)
    await anext(running)
    waiting = [asyncio.create_task(engine.generate(PROMPT)) for _ in range(3)]
    await asyncio.sleep(0)
    await engine.aclose()
    for task in waiting:
        with pytest.raises(EngineClosed):
            await task
    with pytest.raises(EngineClosed):
        async for _ in running:
            pass
    with pytest.raises(EngineClosed):
        await engine.generate(PROMPT)
    await engine.aclose()


async def test_death_of_the_compute_thread_reaches_everyone(demo: Path) -> None:
    class Fatal(BaseException):
        pass

    engine = await Engine.open(demo, slots=16)
    demand = engine._core.store.demand
    calls = 0

    def deadly(*args: Any, **rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise Fatal("lightning")
        return demand(*args, **rest)

    engine._core.store.demand = deadly  # type: ignore[method-assign]
    tasks = [asyncio.create_task(engine.generate(PROMPT, max_tokens=9)) for _ in range(3)]
    for task in tasks:
        with pytest.raises(EngineDead, match="lightning"):
            await task
    with pytest.raises(EngineDead):
        await engine.generate(PROMPT)
    await asyncio.wrap_future(engine._thread.finished)
    assert not engine.alive
    await engine.aclose()


async def test_death_of_the_loop_reaches_everyone(demo: Path) -> None:
    engine = await Engine.open(demo, slots=16)
    tasks = [asyncio.create_task(engine.generate(PROMPT, max_tokens=900)) for _ in range(3)]
    engine._core.loop._loop.call_soon_threadsafe(engine._core.loop._die, RuntimeError("struck"))
    for task in tasks:
        with pytest.raises(EngineDead, match="struck"):
            await task
    assert not engine.alive
    with pytest.raises(EngineDead):
        await engine.generate(PROMPT)
    await engine.aclose()


async def test_forgotten_engine_warns_and_ends(demo: Path) -> None:
    engine: Engine | None = await Engine.open(demo, slots=16)
    assert engine is not None
    thread = engine._thread
    with pytest.warns(ResourceWarning, match="was not closed"):
        del engine
        gc.collect()
    await asyncio.wrap_future(thread.finished)
    thread.join()


async def test_cancelled_open_leaves_nothing(demo: Path) -> None:
    task = asyncio.create_task(Engine.open(demo, slots=16))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.slow
@pytest.mark.one_loop
async def test_fifty_opens_leak_nothing(demo: Path) -> None:
    process = psutil.Process()

    async def once() -> None:
        async with await Engine.open(demo, slots=16) as engine:
            await engine.generate(PROMPT, max_tokens=2)

    for _ in range(3):
        await once()
    gc.collect()
    threads, files, memory = (
        process.num_threads(),
        process.num_fds(),
        process.memory_info().rss,
    )
    for _ in range(50):
        await once()
    gc.collect()
    assert process.num_threads() <= threads
    assert process.num_fds() <= files
    assert process.memory_info().rss - memory < 40e6


# -- the caller's loop ------------------------------------------------------------------------


async def test_the_callers_loop_keeps_ticking(engine: Engine) -> None:
    await engine.generate(PROMPT, max_tokens=4)  # compiled kernels and imports are there now
    gaps: list[float] = []
    done = False

    async def tick() -> None:
        last = time.perf_counter()
        while not done:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last - 0.001)
            last = now

    ticking = asyncio.create_task(tick())
    await engine.generate(PROMPT, max_tokens=60, ignore_eos=True)
    done = True
    await ticking
    gaps.sort()
    # A shared machine may take the processor away now and then; blocking calls would show in
    # every token, that is in more than one of thirty ticks.
    assert gaps[int(len(gaps) * 0.97)] < 0.005


# -- traces -----------------------------------------------------------------------------------


async def test_trace_tells_what_the_statistics_count(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    async with await Engine.open(demo, slots=16, trace=path, prefetch="off") as engine:
        result = await engine.generate(PROMPT, max_tokens=5)
        reads = engine.statistics().reads
    trace = read_trace(path)
    assert trace.notices == []
    assert [token.token for token in trace.tokens] == list(result.tokens)
    assert len(trace.reads) == reads
    assert trace.stalls
    assert sum(stall.experts for stall in trace.stalls) == result.stats.misses
    assert {group: layer.slots for group, layer in trace.layers.items()} == dict.fromkeys(
        range(12), 16
    )
    assert all(record.layer == trace.layers[record.group].layer for record in trace.reads)
    assert {trace.threads[token.tid] for token in trace.tokens} == {"moestream-compute"}
    lanes = {trace.threads[read.tid] for read in trace.reads}
    assert all(name.startswith("moestream-lane") for name in lanes)


async def test_trace_that_cannot_be_written_is_refused(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(moestream.TraceUnwritable):
        await Engine.open(demo, slots=16, trace=tmp_path / "missing" / "run.trace")


# -- bad input --------------------------------------------------------------------------------

BAD_SAMPLING = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 1.5},
    {"max_tokens": True},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": "hot"},
    {"top_p": 1.1},
    {"top_p": -0.1},
    {"min_p": 2},
    {"top_k": -1},
    {"top_k": 10_000_000, "temperature": 1.0},
    {"seed": -1},
    {"seed": 2**64},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1.0},
    {"presence_penalty": 2.5},
    {"frequency_penalty": "much"},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {8192: 1.0}},
    {"logit_bias": {"a": 1.0}},
    {"logit_bias": {1: math.nan}},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": [1]},
    {"logprobs": -1},
    {"logprobs": 100_000},
]


@pytest.mark.parametrize("sampling", BAD_SAMPLING, ids=str)
async def test_bad_sampling_values(sampling: dict[str, Any], engine_for_errors: Engine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await engine_for_errors.generate(PROMPT, **sampling)
    assert next(iter(sampling)).split("_")[0] in str(caught.value)


BAD_PROMPTS: list[Any] = [
    "",
    [],
    [-1],
    [8192],
    [1, "a"],
    [1.5],
    [True],
    [{"role": "user"}],
    [{"role": "user", "content": "x"}, 3],
    None,
    7,
    b"bytes",
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
async def test_bad_prompts(prompt: Any, engine_for_errors: Engine) -> None:
    with pytest.raises(InvalidRequest):
        await engine_for_errors.generate(prompt, max_tokens=1)
    assert (await engine_for_errors.generate([5], max_tokens=1)).tokens


async def test_prompt_longer_than_the_context(demo: Path) -> None:
    async with await Engine.open(demo, slots=16, context=20) as engine:
        with pytest.raises(moestream.PromptTooLong, match="20"):
            await engine.generate([5] * 20)
        result = await engine.generate([5] * 15, max_tokens=100, ignore_eos=True)
        assert len(result.tokens) == 5
        assert result.finish_reason == "length"


async def test_unknown_argument_is_a_type_error(engine_for_errors: Engine) -> None:
    with pytest.raises(TypeError):
        await engine_for_errors.generate(PROMPT, temprature=1.0)  # type: ignore[call-arg]


BAD_SETTINGS: list[dict[str, Any]] = [
    {"slots": 0},
    {"slots": -1},
    {"slots": 1.5},
    {"slots": True},
    {"memory": "lots"},
    {"memory": 0},
    {"memory": -5},
    {"memory": "8XB"},
    {"context": 0},
    {"lanes": 0},
    {"dtype": "int4"},
    {"prefetch": "turbo"},
]


@pytest.mark.parametrize("settings", BAD_SETTINGS, ids=str)
async def test_bad_settings(settings: dict[str, Any], demo: Path) -> None:
    with pytest.raises(InvalidRequest):
        await Engine.open(demo, **settings)


async def test_budget_too_small_says_what_would_do(demo: Path) -> None:
    with pytest.raises(moestream.BudgetTooSmall) as caught:
        await Engine.open(demo, memory="10MB")
    assert caught.value.given == 10_000_000
    assert caught.value.minimum > 10_000_000
    assert "at least" in str(caught.value)
    async with await Engine.open(demo, memory=caught.value.minimum + 20_000_000) as engine:
        assert min(engine.plan.slots) >= 6


async def test_models_that_cannot_be_streamed(tmp_path: Path) -> None:
    with pytest.raises(moestream.CheckpointNotFound):
        await Engine.open(tmp_path / "nowhere")
    directory = zoo.make_checkpoint("qwen3_moe", tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "no_such_type"}))
    with pytest.raises(moestream.UnsupportedModel, match="no_such_type"):
        await Engine.open(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    with pytest.raises(moestream.UnsupportedModel):
        await Engine.open(directory)


async def test_file_cut_off_while_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moestream.runtime import core

    directory = zoo.make_checkpoint("qwen3_moe", tmp_path / "m")
    prepare = core.prepare

    def cut(settings: Any) -> Any:
        prepared = prepare(settings)
        os.truncate(directory / "model.safetensors", 100_000)
        return prepared

    monkeypatch.setattr(core, "prepare", cut)
    with pytest.raises(moestream.OpenFailed, match="cannot be opened"):
        await Engine.open(directory, slots=4)


async def test_failing_expert_product_leaves_nothing_pinned(demo: Path) -> None:
    async with await Engine.open(demo, slots=8) as engine:
        expected = await engine.generate(PROMPT, max_tokens=4)
        switch = engine._core.loaded.model.layers[5].mlp.switch_mlp
        inner, calls = switch.inner, 0

        def failing(x: Any, indices: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                raise RuntimeError("out of memory")
            return inner(x, indices)

        switch.inner = failing
        for _ in range(20):
            with pytest.raises(moestream.GenerationFailed, match="out of memory"):
                await engine.generate(PROMPT, max_tokens=40, ignore_eos=True)
        switch.inner = inner
        engine.check_integrity(idle=True)
        assert (await engine.generate(PROMPT, max_tokens=4)).tokens == expected.tokens


async def test_limits_of_mlx_are_restored_by_the_last_engine(demo: Path) -> None:
    import mlx.core as mx

    def limits() -> tuple[int, int]:
        cache, memory = mx.set_cache_limit(1 << 20), mx.set_memory_limit(1 << 40)
        mx.set_cache_limit(cache)
        mx.set_memory_limit(memory)
        return cache, memory

    before = limits()
    first = await Engine.open(demo, memory="900MB")
    second = await Engine.open(demo, memory="1500MB")
    await first.aclose()
    assert limits()[1] >= 1_500_000_000
    await second.aclose()
    assert limits() == before


async def test_closing_frees_the_memory(demo: Path) -> None:
    import mlx.core as mx

    gc.collect()
    before = mx.get_active_memory()
    async with await Engine.open(demo, slots=16) as engine:
        await engine.generate(PROMPT, max_tokens=2)
        assert mx.get_active_memory() > before + 5_000_000
    assert mx.get_active_memory() < before + 500_000
    assert engine.statistics().tokens == 2  # the figures stay


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_request_whose_loop_is_gone_stops(engine: Engine) -> None:
    def elsewhere() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(engine.generate(PROMPT, max_tokens=1900, ignore_eos=True))
        loop.run_until_complete(asyncio.sleep(0.05))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    await asyncio.get_running_loop().run_in_executor(None, elsewhere)
    await engine.generate(PROMPT, max_tokens=1)
    assert engine.statistics().requests_cancelled == 1


async def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(moestream.HubUnavailable, match="offline"):
        await Engine.open("mlx-community/no-such-model-4bit")


async def test_failing_drive_fails_one_request(demo: Path) -> None:
    async with await Engine.open(demo, slots=16) as engine:
        expected = await engine.generate(PROMPT, max_tokens=6)
        reader = engine._core.store.reader
        good = reader.preadv
        calls = 0

        def failing(descriptor: int, buffers: Any, offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls == 50:
                raise OSError(5, os.strerror(5))
            return good(descriptor, buffers, offset)

        reader.preadv = failing
        with pytest.raises(moestream.ReadFailed, match="Input/output error") as caught:
            await engine.generate(QUESTION, max_tokens=6)
        assert caught.value.path.name == "model.safetensors"
        assert caught.value.offset > 0
        engine.check_integrity(idle=True)
        again = await engine.generate(PROMPT, max_tokens=6)
        assert again.tokens == expected.tokens
        assert engine.statistics().read_errors == 1
        assert engine.statistics().requests_failed == 1


@pytest.fixture
async def engine_for_errors(demo: Path) -> AsyncIterator[Engine]:
    async with await Engine.open(demo, slots=6) as engine:
        yield engine
