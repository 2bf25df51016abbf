"""A repeated prefix is not computed again: same answers, counted tokens, bounded bytes."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, load_prompt_cache

from moestream import (
    BudgetTooSmall,
    Engine,
    Generation,
    InvalidRequest,
    PromptCacheFileError,
    ReadFailed,
)
from moestream.runtime import server
from moestream.runtime.core import Settings, prepare
from moestream.runtime.inspection import inspect_plan
from moestream.runtime.kvsize import arrays
from moestream.runtime.pressure import Level, Pressure, watch
from moestream.runtime.prompt_cache import PromptCache, is_divisible, sequence_bytes
from moestream.runtime.prompt_index import LEAST_TOKENS, Kept, PromptIndex, as_tokens
from moestream.runtime.scheduling import Limits

from . import zoo
from .fakes import Gate
from .reference import expect, make_prompt
from .serving import QUESTION, calling
from .test_cli import call, call_json, error_line
from .test_stress import one

TOLERANCE = 1e-5
"""Of log-probabilities. The rest of a prompt is computed in other pieces than the whole would be;
on the CPU backend plain caches gave the same bits, rotating ones differed by up to 1.2e-6."""

PLAIN, SLIDING, HYBRID = "qwen3_moe", "gpt_oss", "qwen3_next"
KINDS = (PLAIN, SLIDING, "gemma4_text", HYBRID, "jamba")
DIVISIBLE = {PLAIN, "deepseek_v32", "minimax_m3_vl"}
ROOM = 1 << 26

PROMPT = make_prompt(60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Small random models, each made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = zoo.make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def open_zoo(directory: Path, **settings: Any) -> Any:
    return Engine.open(directory, **{"slots": 8, "prompt_cache": ROOM, **settings})


async def ask(engine: Engine, prompt: Sequence[int], steps: int = 8, **rest: Any) -> Generation:
    return await engine.generate(
        list(prompt), max_tokens=steps, ignore_eos=True, logprobs=2, **rest
    )


def forwarded(engine: Engine) -> list[tuple[int, int]]:
    """(rows, tokens) of each forward from here on."""
    seen: list[tuple[int, int]] = []
    model = engine._core.loaded.model

    class Watched:
        def __call__(self, tokens: Any, **rest: Any) -> Any:
            seen.append(tokens.shape)
            return model(tokens, **rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    engine._core.loaded.model = Watched()
    return seen


def cache_of(engine: Engine) -> PromptCache:
    kept = engine._core.loaded.kept
    assert kept is not None
    return kept


def check_books(engine: Engine) -> None:
    """The bytes are those of the arrays, and within the bound."""
    kept = cache_of(engine)
    assert kept.nbytes == sum(sequence_bytes(one) for one in kept.index)
    assert kept.nbytes <= kept.index.limit
    assert engine.statistics().prompt_cache_bytes == kept.nbytes


def bits(engine: Engine) -> list[bytes]:
    """Every byte of what is kept."""
    return [
        bytes(memoryview(array.reshape(-1).view(mx.uint8)))  # type: ignore[arg-type]
        for kept in cache_of(engine).index
        for array in arrays(kept.caches)
        if array.size
    ]


def same_but_rounded(result: Generation, model: Any, prompt: Sequence[int]) -> None:
    """The answer is mlx-lm's for the undivided prompt."""
    wanted = expect(model, prompt, len(result.tokens))
    assert list(result.tokens) == wanted.tokens
    assert result.logprobs is not None
    own = [logprob for logprob, _ in wanted.logprobs]
    assert [one.logprob for one in result.logprobs] == pytest.approx(own, abs=TOLERANCE)


# -- the books --------------------------------------------------------------------------------


def sequence(tokens: Sequence[int], *, divisible: bool = True, scored: int = 0) -> Kept:
    return Kept(as_tokens(tokens), None, divisible, 100, {scored: None})


def test_a_prompt_finds_its_longest_usable_prefix() -> None:
    index = PromptIndex(10_000)
    tokens = make_prompt(100)
    whole, part = sequence(tokens[:80]), sequence(tokens[:50], divisible=False)
    for kept in (whole, part):
        index.add(kept)
    assert index.find(tokens).length == 80
    assert index.find([*tokens[:70], 999]).length == 70
    # The last token is computed for the sake of its logits, unless these are known.
    assert index.find(tokens[:70]).length == 69
    index.add(sequence(tokens[:70], divisible=False, scored=70))
    assert index.find(tokens[:70]).length == 70
    assert index.find([*tokens[: LEAST_TOKENS - 1], 999]).kept is None
    assert index.find([999, *tokens]).kept is None


def test_what_cannot_be_divided_is_used_whole_and_tells_where_to_keep_more() -> None:
    index = PromptIndex(10_000)
    tokens = make_prompt(100)
    index.add(sequence(tokens[:30], divisible=False))
    index.add(sequence(tokens, divisible=False))
    match = index.find([*tokens[:60], *make_prompt(9)])
    assert (match.length, match.branch) == (30, 60)
    # Not for a few tokens more, nor for a prompt that ends there.
    assert index.find([*tokens[:40], 999]).branch == 0
    assert index.find(tokens[:60]).branch == 0


def test_the_books_against_plain_lists() -> None:
    dice = random.Random(7)
    index = PromptIndex(1000)
    mirror: list[Kept] = []  # the oldest first
    bases = [make_prompt(60), make_prompt(61)]
    for _ in range(600):
        base = dice.choice(bases)[: dice.randrange(16, 60)]
        tokens = [*base, *([900 + dice.randrange(3)] * dice.randrange(3))]
        if dice.random() < 0.5:
            match = index.find(tokens)
            usable = [plain_usable(kept, tokens) for kept in mirror]
            assert match.length == max((n for n in usable if n >= LEAST_TOKENS), default=0)
            if match.kept is not None:
                mirror.remove(match.kept)
                mirror.append(match.kept)
        else:
            kept = sequence(tokens, divisible=dice.random() < 0.5)
            kept.nbytes = dice.randrange(1, 400)
            before = len(mirror)
            assert index.make_room(kept.nbytes)
            while sum(one.nbytes for one in mirror) + kept.nbytes > 1000:
                mirror.pop(0)
            assert len(index) == len(mirror) <= before
            index.add(kept)
            mirror.append(kept)
        assert list(index) == mirror
        assert index.nbytes == sum(one.nbytes for one in mirror) <= 1000
    assert index.evicted > 100
    assert not index.make_room(1001) and len(index)


def plain_usable(kept: Kept, tokens: list[int]) -> int:
    own = kept.tokens.tolist()
    common = 0
    while common < min(len(own), len(tokens)) and own[common] == tokens[common]:
        common += 1
    if kept.divisible:
        return min(common, len(tokens) - 1)
    return common if common == len(own) < len(tokens) else 0


def test_which_caches_can_be_divided() -> None:
    def filled(cache: Any, rows: int) -> Any:
        cache.update_and_fetch(mx.zeros((1, 1, rows, 2)), mx.zeros((1, 1, rows, 2)))
        return cache

    assert is_divisible([filled(KVCache(), 5), KVCache()], 5)
    assert is_divisible([filled(RotatingKVCache(8), 5)], 5)
    assert not is_divisible([filled(RotatingKVCache(8), 8)], 8)
    assert not is_divisible([filled(KVCache(), 5), ArraysCache(1)], 5)
    assert not is_divisible([filled(KVCache(), 2)], 5)  # its rows stand for more than a token


# -- the same answers, and less to compute ----------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize("name", KINDS)
async def test_only_the_rest_is_computed(name: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(name)
    model = zoo.reference(directory)
    async with await open_zoo(directory) as engine:
        first = await ask(engine, PROMPT)
        assert first.cached_tokens == 0
        seen = forwarded(engine)
        # A turn of a conversation: what was asked and answered, and more.
        prompt = [*PROMPT, *first.tokens, *make_prompt(20)]
        second = await ask(engine, prompt)
        known = len(PROMPT) + len(first.tokens) - 1  # the last token was never computed
        assert second.cached_tokens == known
        assert seen[0] == (1, len(prompt) - known)
        assert seen[1:] == [(1, 1)] * 7
        same_but_rounded(second, model, prompt)
        # The same prompt again: nothing of it is computed or read, and the bits are the same.
        seen.clear()
        again = await ask(engine, PROMPT)
        assert again.cached_tokens == len(PROMPT)
        assert seen == [(1, 1)] * 7
        assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
        statistics = engine.statistics()
        assert statistics.cached_tokens == known + len(PROMPT)
        assert statistics.prompt_tokens == 2 * len(PROMPT) + len(prompt)
        check_books(engine)
        engine.check_integrity(idle=True)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [PLAIN, SLIDING, HYBRID])
async def test_prompts_that_share_their_beginning(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(name)
    model = zoo.reference(directory)
    prompts = [[*PROMPT[:40], *make_prompt(20 + n)] for n in range(4)]
    async with await open_zoo(directory) as engine:
        seen = forwarded(engine)
        for number, prompt in enumerate(prompts):
            seen.clear()
            result = await ask(engine, prompt)
            same_but_rounded(result, model, prompt)
            pieces = [tokens for _, tokens in seen if tokens > 1]
            if number == 0:
                assert pieces == [60]
            elif name in DIVISIBLE or number > 1:
                assert (result.cached_tokens, pieces) == (40, [20 + number])
            else:
                # These caches cannot be divided: the second prompt keeps them where it leaves.
                assert (result.cached_tokens, pieces) == (0, [40, 21])
        check_books(engine)


@pytest.mark.one_loop
async def test_reads_are_saved(demo: Path) -> None:
    async with await Engine.open(demo, slots=8, prompt_cache="64MB") as engine:
        first = await engine.generate(make_prompt(120, 8192), max_tokens=1)
        engine._core.loaded.stream._mark -= 1000  # it was idle for a while
        again = await engine.generate(make_prompt(120, 8192), max_tokens=1)
        assert again.stats.host_seconds < 100
        assert first.stats.bytes_read > 0
        assert (again.cached_tokens, again.stats.bytes_read, again.stats.hits) == (120, 0, 0)
        assert again.tokens == first.tokens


@pytest.mark.one_loop
@pytest.mark.parametrize("settings", [{"slots": 16}, {"memory": "all"}], ids=str)
async def test_a_conversation_with_the_demo_model(settings: Any, demo: Path) -> None:
    talk: list[dict[str, str]] = []
    async with (
        await Engine.open(demo, **settings) as plain,
        await Engine.open(demo, **settings, prompt_cache=True) as engine,
    ):
        before = 0
        for line in ("Hello! How are you?", "What is a friend?", "Tell me about the sea."):
            talk.append({"role": "user", "content": line})
            wanted = await plain.generate(talk, max_tokens=16)
            result = await engine.generate(talk, max_tokens=16)
            assert (result.text, result.tokens) == (wanted.text, wanted.tokens)
            assert wanted.cached_tokens == 0
            assert result.cached_tokens >= before
            before = result.prompt_tokens
            talk.append({"role": "assistant", "content": result.text})
        assert plain.statistics().prompt_cache_sequences == 0
        check_books(engine)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [PLAIN, "deepseek_v32"])
async def test_whole_chunks_keep_the_bits(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Reuse that ends where a chunk ends leaves the pieces as they would have been."""
    directory = checkpoint(name)
    prompts = [[*make_prompt(64), *make_prompt(30 + n)] for n in range(2)]
    async with (
        await open_zoo(directory, prompt_cache=None) as plain,
        await open_zoo(directory) as engine,
    ):
        for one_engine in (plain, engine):
            one_engine._core.loaded.chunk_tokens = lambda length: 32
        for prompt, known in zip(prompts, (0, 64), strict=True):
            result, wanted = await ask(engine, prompt), await ask(plain, prompt)
            assert result.cached_tokens == known
            assert (result.tokens, result.logprobs) == (wanted.tokens, wanted.logprobs)


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.parametrize("name", sorted(set(zoo.ARCHITECTURES) - set(zoo.EXCEPTIONS)))
async def test_every_architecture(name: str, tmp_path: Path) -> None:
    directory = zoo.make_checkpoint(name, tmp_path / name)
    model = zoo.reference(directory)
    async with await open_zoo(directory) as engine:
        first = await ask(engine, PROMPT)
        prompts = [
            PROMPT,
            [*PROMPT, *first.tokens, *make_prompt(20)],
            *([*PROMPT[:40], *make_prompt(40 + n)] for n in range(3)),
        ]
        results = [await ask(engine, prompt) for prompt in prompts]
        for prompt, result in zip(prompts, results, strict=True):
            same_but_rounded(result, model, prompt)
        assert results[1].cached_tokens == len(PROMPT) + len(first.tokens) - 1
        assert results[4].cached_tokens == 40
        check_books(engine)


# -- several requests -------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [PLAIN, SLIDING, HYBRID])
async def test_nobody_writes_to_what_is_kept(name: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(name)
    ends = [make_prompt(3 + n) for n in range(4)]
    async with await open_zoo(directory, prompt_cache=None) as plain:
        wanted = [await ask(plain, [*PROMPT, *end], 20) for end in ends]
    async with await open_zoo(directory) as engine:
        await ask(engine, PROMPT, 1)
        # Frozen: later requests find what is kept and add nothing.
        kept = cache_of(engine)
        kept.offer = lambda *_, **__: False  # type: ignore[method-assign]
        before = bits(engine)
        assert before
        seen = forwarded(engine)
        results = await asyncio.gather(*[ask(engine, [*PROMPT, *end], 20) for end in ends])
        assert max(rows for rows, _ in seen) > 1
        assert bits(engine) == before
        for result, other in zip(results, wanted, strict=True):
            assert result.cached_tokens == len(PROMPT)
            assert result.tokens == other.tokens


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [PLAIN, HYBRID])
async def test_a_prompt_is_there_as_soon_as_it_is_computed(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    async with await open_zoo(checkpoint(name)) as engine:
        seen = forwarded(engine)
        results = await asyncio.gather(*[ask(engine, PROMPT, 12) for _ in range(4)])
        assert [tokens for _, tokens in seen if tokens > 1] == [len(PROMPT)]
        assert sorted(one.cached_tokens for one in results) == [0, 60, 60, 60]
        assert len({one.tokens for one in results}) == 1
        check_books(engine)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", KINDS)
async def test_rows_that_leave_a_batch_are_kept(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(name)
    model = zoo.reference(directory)
    prompts = [make_prompt(length) for length in (60, 20, 45)]
    async with await open_zoo(directory) as engine:
        seen = forwarded(engine)
        steps = (30, 12, 9)  # the first one stays when the others leave
        results = await asyncio.gather(
            *[ask(engine, prompt, count) for prompt, count in zip(prompts, steps, strict=True)]
        )
        assert max(rows for rows, _ in seen) == 3
        for prompt, result in zip(prompts, results, strict=True):
            more = [*prompt, *result.tokens, *make_prompt(9)]
            again = await ask(engine, more, 4)
            assert again.cached_tokens == len(prompt) + len(result.tokens) - 1
            same_but_rounded(again, model, more)
        check_books(engine)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [PLAIN, HYBRID])
async def test_who_is_put_back_goes_on_from_what_was_kept(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    prompts = [make_prompt(length) for length in (20, 33, 27, 60)]
    directory = checkpoint(name)
    async with await open_zoo(directory, prompt_cache=None) as plain:
        wanted = [await ask(plain, prompt, 40) for prompt in prompts]
    async with await open_zoo(directory) as engine:

        class Tight(Limits):
            def cache_bytes(self, lengths: Any) -> int:
                return len(lengths) * (1 + max(lengths, default=0) // 64)

            def admits(self, lengths: Any, newcomer: int) -> bool:
                return self.fit([*lengths, newcomer])

        own = engine._core.loaded.limits
        values = {field: getattr(own, field) for field in own.__slots__}
        engine._core.loaded.limits = Tight(**{**values, "kv_budget": 2})
        put_back: list[int] = []
        original = engine._scheduler._put_back

        def watched(core: Any, row: Any) -> None:
            put_back.append(row.number)
            original(core, row)

        engine._scheduler._put_back = watched
        seen = forwarded(engine)
        results = await asyncio.gather(*[ask(engine, prompt, 40) for prompt in prompts])
        assert put_back
        assert [one.tokens for one in results] == [one.tokens for one in wanted]
        # Each prompt was computed once; who came back computed its newest token alone.
        pieces = [tokens for _, tokens in seen if tokens > 1]
        assert sorted(pieces) == [20, 27, 33, 60]
        assert [one.cached_tokens for one in results] == [0] * 4
        check_books(engine)
        engine.check_integrity(idle=True)


# -- those who leave --------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [PLAIN, HYBRID])
async def test_what_a_cancelled_request_had_computed_is_kept(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(name)
    model = zoo.reference(directory)
    async with await open_zoo(directory) as engine:
        tokens = []
        stream = engine.stream(PROMPT, max_tokens=900, ignore_eos=True)
        for _ in range(5):
            tokens.append((await anext(stream)).token)
        # Stop it in the middle of a forward: some layers have noted the token, others not.
        gate, calls = Gate(), list[int]()
        demand = engine._core.store.demand

        def watched(group: int, *rest: Any, **more: Any) -> Any:
            if group == 0 and not calls:
                calls.append(group)
                gate()
            return demand(group, *rest, **more)

        engine._core.store.demand = watched
        await asyncio.get_running_loop().run_in_executor(None, gate.wait_entered)
        length = engine._scheduler.totals.running[0].length
        while len(PROMPT) + len(tokens) < length:  # handed out before the gate was there
            tokens.append((await anext(stream)).token)
        await stream.aclose()
        gate.open()
        prompt = [*PROMPT, *tokens, *make_prompt(20)]
        result = await ask(engine, prompt)
        # What cannot be divided is left from the end of the prompt.
        assert result.cached_tokens == (length - 1 if name == PLAIN else len(PROMPT))
        same_but_rounded(result, model, prompt)
        check_books(engine)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [PLAIN, HYBRID])
async def test_streams_left_while_the_next_forward_runs(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    """With everything resident a forward is ahead of the token: caches hold one token more."""
    directory = checkpoint(name)
    model = zoo.reference(directory)
    async with await open_zoo(directory, memory="all", slots=None) as engine:
        for left in (1, 2, 3, 7, 12):
            start = [left, *PROMPT]
            tokens = []
            async with aclosing(engine.stream(start, max_tokens=900, ignore_eos=True)) as stream:
                async for chunk in stream:
                    tokens.append(chunk.token)
                    if len(tokens) == left:
                        break
            prompt = [*start, *tokens, *make_prompt(20)]
            result = await ask(engine, prompt)
            assert result.cached_tokens >= len(start)
            same_but_rounded(result, model, prompt)
        # An answer that stops by itself has had its next forward started, too.
        start = [99, *PROMPT]
        first = (await ask(engine, start, 9)).tokens
        end = engine._core.loaded.end_tokens
        engine._core.loaded.end_tokens = frozenset([first[5]])
        cache_of(engine).clear()
        stopped = await engine.generate(start, max_tokens=9)
        engine._core.loaded.end_tokens = end
        assert stopped.finish_reason == "stop"
        prompt = [*start, *stopped.tokens, *make_prompt(20)]
        result = await ask(engine, prompt)
        assert result.cached_tokens == len(start) + len(stopped.tokens)
        same_but_rounded(result, model, prompt)


@pytest.mark.one_loop
async def test_a_failed_request_keeps_nothing_wrong(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(HYBRID)
    model = zoo.reference(directory)
    async with await open_zoo(directory, slots=4) as engine:
        reader = engine._core.store.reader
        good = reader.preadv
        reads = 0

        def preadv(*arguments: Any) -> int:
            nonlocal reads
            reads += 1
            if reads > 40:
                raise OSError(5, "Input/output error")
            return int(good(*arguments))

        reader.preadv = preadv
        with pytest.raises(ReadFailed):
            await ask(engine, PROMPT, 400)
        reader.preadv = good
        prompt = [*PROMPT, *make_prompt(9)]
        same_but_rounded(await ask(engine, prompt), model, prompt)
        check_books(engine)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [PLAIN, HYBRID])
async def test_nothing_is_left_of_200_requests(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    dice, outcomes = random.Random(3), Counter[str]()
    limit = 500_000
    async with await open_zoo(checkpoint(name), slots=6, prompt_cache=limit) as engine:
        await ask(engine, PROMPT)
        cache_of(engine).clear()
        base = settled()
        for _ in range(25):
            await asyncio.gather(*[one(engine, dice, outcomes) for _ in range(8)])
            assert engine.statistics().prompt_cache_bytes <= limit
        assert sum(outcomes.values()) == 200 and outcomes["ended"] and outcomes["cancelled"]
        await engine.generate(PROMPT[:5], max_tokens=1)  # behind the last ones that left
        check_books(engine)
        engine.check_integrity(idle=True)
        nbytes, count = cache_of(engine).nbytes, len(cache_of(engine).index)
        assert count
        held = settled() - base
        # What is kept holds on to no larger memory, such as a batch's: a page for each array.
        assert held <= nbytes + 4096 * sum(len(arrays(k.caches)) for k in cache_of(engine).index)
        cache_of(engine).clear()
        assert settled() - base <= 4096


def settled() -> int:
    """Bytes of MLX's arrays that are alive."""
    gc.collect()
    return mx.get_active_memory()


# -- memory -----------------------------------------------------------------------------------


@pytest.mark.one_loop
async def test_the_least_recently_used_leave(checkpoint: Callable[[str], Path]) -> None:
    async with await open_zoo(checkpoint(PLAIN)) as engine:
        await ask(engine, PROMPT)
        size = cache_of(engine).nbytes
    async with await open_zoo(checkpoint(PLAIN), prompt_cache=3 * size + size // 2) as engine:
        prompts = [[n, *PROMPT[1:]] for n in range(5)]
        for prompt in prompts[:3]:
            await ask(engine, prompt)
        assert (await ask(engine, prompts[0])).cached_tokens == 60  # used: 1 is the oldest now
        await ask(engine, prompts[3])
        statistics = engine.statistics()
        assert statistics.prompt_cache_sequences == 3
        assert statistics.prompt_cache_evicted >= 1
        assert statistics.prompt_cache_bytes <= 3 * size + size // 2
        seen = [(await ask(engine, prompts[n])).cached_tokens for n in (0, 2, 3)]
        assert seen == [60, 60, 60]
        assert (await ask(engine, prompts[1])).cached_tokens == 0
        check_books(engine)
    async with await open_zoo(checkpoint(PLAIN), prompt_cache=size // 2) as engine:
        for prompt in prompts:
            await ask(engine, prompt)
        assert engine.statistics().prompt_cache_sequences == 0  # too large by itself


async def test_pressure_takes_what_is_kept_first(checkpoint: Callable[[str], Path]) -> None:
    async with await open_zoo(checkpoint(PLAIN), pressure="off") as engine:
        await ask(engine, PROMPT)
        assert engine.statistics().prompt_cache_sequences == 1
        resizer = engine._core.resizer
        pressure = Pressure()
        resizer.pressure = pressure
        levels = iter([Level.CALM, Level.WARNING, Level.WARNING])
        shares: list[float] = []

        def changed() -> None:
            shares.append(pressure.share)
            resizer.wake()

        class Over(Exception):
            pass

        def source() -> Level:
            level = next(levels, None)
            if level is None:
                raise Over
            return level

        with pytest.raises(Over):
            await watch(source, pressure, changed, seconds=0.0)
        assert shares == [1.0]  # told once, before any slot has to go
        planned = engine.statistics().planned_slots
        await ask(engine, PROMPT[:5], 1)
        statistics = engine.statistics()
        assert (statistics.prompt_cache_sequences, statistics.prompt_cache_bytes) == (0, 0)
        assert statistics.slots == planned
        # Nothing stays while the pressure lasts.
        await ask(engine, PROMPT)
        await ask(engine, PROMPT[:5], 1)
        assert engine.statistics().prompt_cache_sequences == 0
        pressure.level = Level.CALM
        await ask(engine, PROMPT)
        assert engine.statistics().prompt_cache_sequences == 1


def test_the_plan_has_a_place_for_it(demo: Path) -> None:
    plain = prepare(Settings(demo, memory="600MB")).plan
    plan = prepare(Settings(demo, memory="600MB", prompt_cache=20_000_000)).plan
    assert (plain.prompt_cache_bytes, plan.prompt_cache_bytes) == (0, 20_000_000)
    assert plan.total_bytes <= 600_000_000
    assert 20_000_000 <= plan.minimum - plain.minimum <= 20_500_000
    with pytest.raises(BudgetTooSmall, match="prompt cache 20MB") as caught:
        prepare(Settings(demo, memory=plan.minimum - 1, prompt_cache=20_000_000))
    assert caught.value.parts["prompt_cache"] == 20_000_000


@pytest.mark.parametrize("more", [0, 1_000_000, 50_000_000, 10**10])
def test_true_takes_what_can_be_spared(more: int, demo: Path) -> None:
    minimum = prepare(Settings(demo, memory=10**10)).plan.minimum
    plain = prepare(Settings(demo, memory=minimum + more)).plan
    plan = prepare(Settings(demo, memory=minimum + more, prompt_cache=True)).plan
    assert plan.minimum == plain.minimum  # no budget is refused for its sake
    assert plan.total_bytes <= minimum + more
    one_request = plan.kv_bytes // plan.sequences
    assert plan.prompt_cache_bytes <= one_request
    if more >= 10**10:
        assert plan.prompt_cache_bytes == one_request
        assert plan.slots == plain.slots
    by_hand = prepare(Settings(demo, slots=8, prompt_cache=True)).plan
    assert by_hand.prompt_cache_bytes == by_hand.kv_bytes // by_hand.sequences


def test_the_plan_shows_it(demo: Path) -> None:
    value = call_json("plan", str(demo), "--memory", "600MB", "--prompt-cache", "20MB")
    assert value["parts"]["prompt_cache"] == 20_000_000
    assert sum(value["parts"].values()) == 600_000_000
    report = inspect_plan(str(demo), memory="600MB", slots=None, context=None)
    assert value["everything_resident"] > report.everything_resident
    output, _ = call("plan", str(demo), "--memory", "600MB", "--prompt-cache", "20MB")
    assert "prompt cache" in output
    assert "prompt cache" not in call("plan", str(demo), "--memory", "600MB")[0]


@pytest.mark.parametrize("size", ["much", -1, 0, 1.5])
async def test_bad_sizes(size: Any, demo: Path) -> None:
    with pytest.raises(InvalidRequest, match="prompt_cache"):
        await Engine.open(demo, prompt_cache=size)


def names(directory: Path) -> list[str]:
    return [file.name for file in directory.iterdir()]


# -- files ------------------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize("name", [PLAIN, SLIDING, HYBRID])
async def test_saved_and_loaded(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.safetensors"
    async with await open_zoo(checkpoint(name)) as engine:
        assert await engine.save_prompt_cache(path) == 0 and not path.exists()
        first = await ask(engine, PROMPT)
        await ask(engine, make_prompt(30))
        count = engine.statistics().prompt_cache_sequences
        assert await engine.save_prompt_cache(path) == count
        saved = bits(engine)
        layers = len(next(iter(cache_of(engine).index)).caches)
    assert names(tmp_path) == [path.name]
    # mlx-lm reads it: the layers of each sequence, and one with logits.
    assert len(load_prompt_cache(str(path))) == count * (layers + 1)
    async with await open_zoo(checkpoint(name)) as engine:
        assert await engine.load_prompt_cache(path) == count
        assert bits(engine) == saved
        check_books(engine)
        again = await ask(engine, PROMPT)
        assert again.cached_tokens == 60
        assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
        assert await engine.load_prompt_cache(path) == count  # they are there
        assert engine.statistics().prompt_cache_sequences == count
    async with await open_zoo(checkpoint(name), prompt_cache=1000) as engine:
        assert await engine.load_prompt_cache(path) == 0  # no room


@pytest.mark.one_loop
async def test_files_of_others_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.safetensors"
    async with await open_zoo(checkpoint(PLAIN)) as engine:
        await ask(engine, PROMPT)
        await engine.save_prompt_cache(path)
    other = zoo.make_checkpoint(PLAIN, tmp_path / "other", seed=1)
    for directory, settings in ((other, {}), (checkpoint(PLAIN), {"dtype": "checkpoint"})):
        async with await open_zoo(directory, **settings) as engine:
            with pytest.raises(PromptCacheFileError, match=r"another model.*delete the file"):
                await engine.load_prompt_cache(path)
            assert engine.statistics().prompt_cache_sequences == 0
    async with await open_zoo(checkpoint(PLAIN), prompt_cache=None) as engine:
        for work in (engine.load_prompt_cache, engine.save_prompt_cache):
            with pytest.raises(InvalidRequest, match="prompt_cache=True"):
                await work(path)
    async with await open_zoo(checkpoint(PLAIN)) as engine:
        with pytest.raises(PromptCacheFileError, match="No such file"):
            await engine.load_prompt_cache(tmp_path / "nothing.safetensors")
        weights = next(checkpoint(PLAIN).glob("*.safetensors"))
        with pytest.raises(PromptCacheFileError, match="version"):
            await engine.load_prompt_cache(weights)
        for name in ("prompts.bin", ""):
            with pytest.raises(InvalidRequest, match="path"):
                await engine.save_prompt_cache(name)
    with pytest.raises(Exception, match="closed"):
        await engine.load_prompt_cache(path)


@pytest.mark.one_loop
async def test_damage_is_found(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path, bad = tmp_path / "prompts.safetensors", tmp_path / "bad.safetensors"
    async with await open_zoo(checkpoint(HYBRID)) as engine:
        await ask(engine, PROMPT)
        await engine.save_prompt_cache(path)
        cache_of(engine).clear()
        content = path.read_bytes()
        dice = random.Random(5)
        begin = 8 + int.from_bytes(content[:8], "little")
        places = [dice.randrange(begin, len(content)) for _ in range(12)]
        places += [content.index(text) + 12 for text in (b'\\"tokens\\": ', b'\\"crc32\\": ')]
        for place in places:
            damaged = bytearray(content)
            damaged[place] ^= 1
            bad.write_bytes(damaged)
            with pytest.raises(PromptCacheFileError, match="damaged"):
                await engine.load_prompt_cache(bad)
        for size in (0, 5, 100, begin, begin + 9, len(content) - 1):
            bad.write_bytes(content[:size])
            with pytest.raises(PromptCacheFileError, match="damaged"):
                await engine.load_prompt_cache(bad)
        check_books(engine)
        assert engine.statistics().prompt_cache_sequences == 0
        assert (await ask(engine, PROMPT)).cached_tokens == 0


async def test_a_file_appears_whole_or_not_at_all(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompts.safetensors"
    async with await open_zoo(checkpoint(PLAIN)) as engine:
        await ask(engine, PROMPT)
        await engine.save_prompt_cache(path)
        old = path.read_bytes()
        await ask(engine, make_prompt(50))
        with monkeypatch.context() as patch:

            def full(self: Path, target: Path) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(Path, "replace", full)
            with pytest.raises(PromptCacheFileError, match=r"cannot be written.*No space"):
                await engine.save_prompt_cache(path)
        assert path.read_bytes() == old
        assert names(tmp_path) == [path.name]
        with pytest.raises(PromptCacheFileError, match="cannot be written"):
            await engine.save_prompt_cache(tmp_path / "no" / "folder.safetensors")
        # One who does not wait for the end leaves no trace in the engine.
        task = asyncio.create_task(engine.save_prompt_cache(path))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await engine.load_prompt_cache(path) == 2


@pytest.mark.one_loop
async def test_caches_that_mlx_lm_cannot_save(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    async with await open_zoo(checkpoint("deepseek_v41")) as engine:
        await ask(engine, PROMPT)
        assert (await ask(engine, PROMPT)).cached_tokens == 60
        with pytest.raises(PromptCacheFileError, match="LayerCache"):
            await engine.save_prompt_cache(tmp_path / "x.safetensors")


# -- the command line and the server ----------------------------------------------------------


def test_chat_computes_a_turn_once(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.safetensors"
    arguments = ("chat", str(demo), "--slots", "16", "--max-tokens", "8", "--ignore-eos")
    plain, errors = call(*arguments, stdin="Hello there, how are you?\nTell me more\n")
    first, second = [line for line in errors.splitlines() if line.startswith("prompt ")]
    assert "cached" not in first and "cached)" in second
    again, errors = call(
        *arguments, "--prompt-cache", str(path), stdin="Hello there, how are you?\n/quit\n"
    )
    assert path.exists()
    assert plain.startswith(again.rstrip("\n"))
    _, errors = call(*arguments, "--prompt-cache", str(path), stdin="Hello there, how are you?\n")
    (line,) = [line for line in errors.splitlines() if line.startswith("prompt ")]
    assert "cached)" in line


def test_run_goes_on_from_a_file(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    text = "Once upon a time, in a small town by the sea, there lived an old man with a dog."
    arguments = ("run", str(demo), "-p", text, "--slots", "16", "--max-tokens", "8")
    first = call_json(*arguments, "--prompt-cache", str(path))
    again = call_json(*arguments, "--prompt-cache", str(path))
    assert (first["cached_tokens"], again["cached_tokens"]) == (0, first["prompt_tokens"])
    assert again["text"] == first["text"]
    path.write_bytes(b"something else")
    assert "delete the file" in error_line(*arguments, "--prompt-cache", str(path))
    line = error_line(*arguments, "--prompt-cache", "run.cache")
    assert "--prompt-cache='run.cache' must be a path that ends in .safetensors" in line


@pytest.mark.one_loop
async def test_the_server_tells_what_was_cached(demo: Path) -> None:
    async with (
        await Engine.open(demo, slots=16, prompt_cache="64MB") as engine,
        calling(server.app(engine)) as client,
    ):
        chat = {"messages": QUESTION, "max_tokens": 4}
        seen = []
        for _ in range(2):
            body = (await client.post("/v1/chat/completions", json=chat)).json()
            seen.append(body["usage"]["prompt_tokens_details"])
        assert seen == [{"cached_tokens": 0}, {"cached_tokens": 17}]
        several = {**chat, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        frames = (await client.post("/v1/chat/completions", json=several)).text.split("\n\n")
        last = json.loads(frames[-3].removeprefix("data: "))
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 17}
        message = (await client.post("/v1/messages", json=chat)).json()
        usage = message["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (0, 17)
        streamed = (await client.post("/v1/messages", json={**chat, "stream": True})).text
        assert '"cache_read_input_tokens":17' in streamed.replace(" ", "")
        # A last chunk is handed out before its request is counted; this one is counted behind it.
        await engine.generate([5, 6, 7], max_tokens=1)
        metrics = (await client.get("/metrics")).text
        assert "moestream_engine_cached_tokens_total 85.0" in metrics
        held = engine.statistics().prompt_cache_bytes
        (line,) = re.findall(r"^moestream_engine_prompt_cache_bytes (.*)$", metrics, re.MULTILINE)
        assert float(line) == held > 0
