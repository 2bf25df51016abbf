"""Reading for the next layer of a prompt: each expert once, beside the slots, same bits."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from moestream import Engine, PrefetchConfig
from moestream.io.asks import Guess
from moestream.io.queue import Entry, Key
from moestream.io.reader import RecordReader
from moestream.models.lookahead import Predictor
from moestream.runtime.core import Settings, prepare
from moestream.runtime.prefetch import Destination
from moestream.runtime.prompt_ahead import (
    CERTAIN,
    LIKELY,
    WAVES,
    PromptAhead,
    chosen,
    staging_for,
)
from moestream.runtime.sizes import LayerSize
from moestream.runtime.staging import place_bytes
from moestream.runtime.store import ExpertStore
from moestream.runtime.streaming import ExpertStream
from moestream.runtime.waves import WAVE_BYTES, wave_size

from . import zoo
from .fakes import TIMEOUT, FakeLoop, no_threads_left
from .reference import ALTERNATIVES, expect, make_prompt
from .test_identity import _architectures, assert_same
from .test_store import EXPERTS, Bench, make

ON = PrefetchConfig()
MIB = 1 << 20


# -- what is read, and how much -----------------------------------------------------------------


def test_the_coldest_of_the_certain_experts_come_first() -> None:
    assert (LIKELY, CERTAIN) == (4, 8)
    assert chosen(np.array([90, 3, 4, 0, 8, 7, 9])) == [4, 6, 0, 5, 2]
    assert chosen(np.zeros(4, np.int64)) == []


def layer_of(experts: int, record_bytes: int) -> LayerSize:
    return LayerSize(0, experts, 2, record_bytes + 100, record_bytes)


def test_two_waves_of_the_largest_record_are_staged() -> None:
    layers = [layer_of(64, MIB), layer_of(64, 2 * MIB), layer_of(16, 8 * MIB)]
    size = place_bytes(2 * MIB + 100)
    assert staging_for(layers, [32, 32, 16], None) == WAVES * 16 * size  # the third one is whole
    assert WAVES * 16 * MIB == WAVES * WAVE_BYTES
    assert staging_for(layers, [32, 32, 16], 5 * size + 1) == 5 * size
    assert staging_for(layers, [32, 32, 16], size - 1) == 0
    assert staging_for(layers, [64, 64, 16], None) == 0


def test_staging_is_planned_and_no_budget_is_refused_for_it(demo: Path) -> None:
    least = prepare(Settings(demo, memory="600MB")).plan.minimum
    for budget in (least, least + 3 * MIB, least + 12 * MIB):
        plain = prepare(Settings(demo, memory=budget)).plan
        plan = prepare(Settings(demo, memory=budget, prefetch=ON)).plan
        assert plan.minimum == plain.minimum == least
        assert plan.total_bytes <= budget
        assert plain.staging_bytes == 0
        assert (plan.staging_bytes > 0) == (budget > least)
    for prefetch in (PrefetchConfig(prompts=False), PrefetchConfig(deterministic=True)):
        assert prepare(Settings(demo, memory=budget, prefetch=prefetch)).plan == plain
    assert prepare(Settings(demo, memory="all", prefetch=ON)).plan.staging_bytes == 0


class FakePredictor:
    """Has residual streams of these shapes, and ranks by their tokens."""

    predictable = (True, True)

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.residuals = [mx.zeros(shape) for shape in shapes]
        self.ranked: list[tuple[int, tuple[int, ...], int]] = []

    def residual(self, group: int) -> mx.array:
        return self.residuals[group]

    def input_residual(self, group: int) -> None:
        return None

    def rank(self, target: int, residual: mx.array, width: int) -> mx.array:
        self.ranked.append((target, residual.shape, width))
        return residual


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [((1, 256, 4), 256), ((1, 257, 4), 129), ((1, 2000, 4), 250), ((16, 1, 4), None)],
)
def test_some_tokens_of_one_prompt_vote(
    tmp_path: Path, shape: tuple[int, ...], tokens: int | None
) -> None:
    bench = make(tmp_path)
    predictor = FakePredictor(shape, shape)
    prompts = PromptAhead(
        cast(Predictor, predictor), bench.store, layers=[4, 5], top_k=[2, 3], allowed=None
    )
    prompts.build(0)
    prompts.build(1)  # nothing is behind it
    assert predictor.ranked == ([] if tokens is None else [(1, (1, tokens, 4), 3)])
    bench.reader.close()


def test_nothing_is_predicted_while_prompts_hardly_wait(tmp_path: Path) -> None:
    bench = make(tmp_path)
    predictor = FakePredictor((1, 64, 4), (1, 64, 4))
    prompts = PromptAhead(
        cast(Predictor, predictor), bench.store, layers=[4, 5], top_k=[2, 3], allowed=None
    )
    predicted = []
    for waited in (0.2, 0.06, 0.04, 0.09, None, 0.11, 0.0):
        prompts.begin_forward()
        predicted.append(len(prompts.build(0)))
        if waited is not None:  # else it is no prompt's forward
            prompts.spent(0.5, 0.4)  # of a layer in the middle: the last one counts
            prompts.spent(1.0, waited)
    prompts.begin_forward()
    assert [*predicted, len(prompts.build(0))] == [1, 1, 1, 0, 0, 0, 1, 0]
    bench.reader.close()


# -- the store ------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with no_threads_left():
        made = make(tmp_path, staging_bytes=2 * 4096)
        yield made
        made.store.check_integrity(idle=True)
        made.reader.close()


@pytest.fixture
def loop(bench: Bench) -> FakeLoop:
    fake = FakeLoop(bench.store)
    bench.store.connect(fake.as_loop())
    return fake


def sure(*experts: int, position: int = 1) -> list[Guess]:
    return [Guess((1, expert), position, 1.0, sure=True) for expert in experts]


def entry(expert: int, position: int = 1) -> Entry:
    return Entry((1, expert), False, position, 1.0, {1}, 0, sure=True)


def stage(bench: Bench, loop: FakeLoop, *experts: int) -> None:
    """Ask for sure guesses and read them."""
    bench.store.guess(sure(*experts), owner=1, position=0, grant=0.0)
    for expert in experts:
        place = bench.store.begin(entry(expert))
        assert place is not None
        loop.end((1, expert), place)


def test_a_staged_expert_is_copied_and_not_read_again(bench: Bench, loop: FakeLoop) -> None:
    stage(bench, loop, 6)
    read = len(bench.drive.calls)
    got = bench.demand(1, 6, position=1)
    loop.step()
    assert len(bench.drive.calls) == read
    bench.check(1, [6], got.slots)
    assert (got.misses, got.late) == (1, 1)
    counters = bench.store.counters
    assert (counters.guesses, counters.guesses_begun, counters.guesses_used) == (1, 1, 1)
    assert counters.bytes_read == bench.layers[1].record.stored_bytes
    bench.store.release(1, got.slots)


def test_the_order_hangs_on_what_was_guessed_and_not_on_what_has_arrived(
    bench: Bench, loop: FakeLoop
) -> None:
    stage(bench, loop, 5)
    for _ in range(2):
        assert bench.store.split(1, [4, 5, 6, 7]) == ([], [4, 5, 6, 7])  # of another call
        # There are two places; what is not asked for is passed over.
        assert bench.store.split(1, [4, 5, 6, 7], [6, 5, 4]) == ([], [6, 5, 4, 7])
        assert bench.store.split(1, [4, 5, 7], [6, 5, 4]) == ([], [5, 4, 7])
        bench.store.give_up(1)  # nothing is there any more


def test_no_slot_is_given_up_for_a_sure_guess(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(1, 0, 1, 2, 3)
    for _ in got.slots:
        loop.step()
    bench.store.release(1, got.slots)
    stage(bench, loop, 4, 5)
    assert bench.store.split(1, range(EXPERTS)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    bench.store.give_up(1)
    assert bench.store.counters.guesses_wasted == 2


def test_no_more_is_asked_for_than_there_are_places(bench: Bench, loop: FakeLoop) -> None:
    got = bench.demand(1, 0)
    loop.step()
    guesses = sure(0, 1, 2, 3, 4)  # the first one is there
    bench.store.guess(guesses, owner=1, position=0, grant=0.0)
    bench.store.guess(guesses, owner=1, position=0, grant=0.0)
    assert [ask.guesses for ask in loop.asks[1:]] == [tuple(sure(1, 2))]
    places = [bench.store.begin(entry(expert)) for expert in (1, 2)]
    bench.store.guess(guesses, owner=1, position=0, grant=0.0)  # both places are being filled
    assert len(loop.asks) == 2
    for expert, place in zip((1, 2), places, strict=True):
        assert place is not None
        loop.end((1, expert), place)
    more = bench.demand(1, 1, position=1)
    loop.step()
    bench.store.guess(guesses, owner=1, position=0, grant=0.0)
    assert loop.asks[-1].guesses == tuple(sure(3))
    bench.store.void([(1, 3)], None)
    bench.store.give_up(1)
    bench.store.release(1, got.slots + more.slots)


def test_what_was_staged_in_vain_is_waste_and_its_place_free(bench: Bench, loop: FakeLoop) -> None:
    stage(bench, loop, 6)
    bench.store.give_up(0)  # not yet
    assert (1, 6) in bench.store._staging
    bench.store.give_up(1)
    assert (1, 6) not in bench.store._staging
    counters = bench.store.counters
    assert counters.guesses_wasted == 1
    assert counters.wasted_bytes == bench.layers[1].record.stored_bytes
    assert bench.store.take_wasted() == []  # tells nothing about guesses of tokens
    assert bench.store.begin(entry(7)) is None  # asked for before, begun too late
    got = bench.demand(1, 6, position=2)
    loop.step()
    bench.check(1, [6], got.slots)
    bench.store.release(1, got.slots)


def test_what_is_given_up_while_it_is_read_ends_nowhere(bench: Bench, loop: FakeLoop) -> None:
    place = bench.store.begin(entry(6))
    assert place is not None
    bench.store.give_up(1)
    bench.store.check_integrity(idle=True)
    loop.end((1, 6), place)
    assert bench.store.counters.guesses_wasted == 1
    assert bench.store._staging.room == 2
    assert (1, 6) not in bench.store._staging


def test_a_staged_read_that_fails_is_read_again(bench: Bench, loop: FakeLoop) -> None:
    bench.drive.fail(0)
    stage(bench, loop, 6)
    assert bench.store.counters.read_errors == 1
    assert bench.store._staging.room == 2
    got = bench.demand(1, 6, position=1)
    loop.step()
    assert got.futures[0].result() is None
    bench.check(1, [6], got.slots)
    bench.store.release(1, got.slots)


def test_a_guess_that_is_staged_already_takes_no_second_place(bench: Bench, loop: FakeLoop) -> None:
    # It was asked for again before its read began, and the message came when that had ended.
    stage(bench, loop, 6)
    assert bench.store.begin(entry(6)) is None
    bench.store.check_integrity()
    assert bench.store._staging.room == 1
    bench.store.give_up(1)


@pytest.mark.parametrize("destination", ["staging", "pagecache"])
def test_a_late_job_of_a_guess_given_up_writes_into_no_slot(
    tmp_path: Path, destination: Destination
) -> None:
    config = PrefetchConfig(destination=destination)
    bench = make(tmp_path, staging_bytes=2 * 4096, prefetch=config)
    loop = FakeLoop(bench.store)
    bench.store.connect(loop.as_loop())
    got = bench.demand(1, 0, 1, 2, 3)
    for _ in got.slots:
        loop.step()
    slot = bench.store.begin(Entry((1, 6), False, 1, 1.0, {1}, 0))
    assert slot is not None
    returned = bench.store.abandoned((1, 6), slot, TimeoutError())  # another job of it hangs
    bench.store.read((1, 6), slot, 0)
    bench.check(1, [0, 1, 2, 3], got.slots)
    returned()
    bench.store.release(1, got.slots)
    bench.store.check_integrity(idle=True)
    assert bench.store._staging.room == 2
    bench.reader.close()


# -- engines ------------------------------------------------------------------------------------


PROMPT = make_prompt(120, 8192)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Key]:
    """How often each expert is read from the drive."""
    counted: Counter[Key] = Counter()
    original = RecordReader.read_job

    def read_job(
        self: RecordReader, group: int, expert: int, job: int, rows: Any, passage: Any = None
    ) -> int:
        if job == 0:
            counted[group, expert] += 1
        return original(self, group, expert, job, rows, passage)

    monkeypatch.setattr(RecordReader, "read_job", read_job)
    return counted


@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("slots", "destination"), [(8, "slots"), (32, "slots"), (11, "staging"), (16, "pagecache")]
)
async def test_each_expert_of_a_chunk_is_read_once(
    demo: Path, slots: int, destination: Any, reads: Counter[Key]
) -> None:
    config = PrefetchConfig(destination=destination)
    async with await Engine.open(demo, slots=slots, prefetch=config) as engine:
        result = await engine.generate(PROMPT, max_tokens=1, ignore_eos=True, logprobs=ALTERNATIVES)
        engine.check_integrity(idle=True)
        told = engine.statistics()
    assert_same(result, expect(zoo.reference(demo), PROMPT, 1))
    assert set(reads.values()) == {1}
    prefetch = told.prefetch
    assert 0 < prefetch.used == prefetch.begun - prefetch.wasted
    assert prefetch.wasted <= prefetch.begun // 10
    assert sum(reads.values()) == result.stats.misses + prefetch.wasted
    assert told.bytes_read == result.stats.bytes_read + told.wasted_bytes


@pytest.mark.one_loop
@pytest.mark.parametrize("slots", [8, 24])
async def test_the_next_layer_is_read_before_its_router_has_chosen(
    demo: Path, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer waits until all places have been filled for it: that needs no layer call."""
    finished: defaultdict[int, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
    ahead: list[int] = []
    places: list[int] = []
    finish, run = ExpertStore.finish, ExpertStream.run

    def told(self: ExpertStore, key: Key, slot: int, nbytes: int, error: Any) -> None:
        finish(self, key, slot, nbytes, error)
        finished[key[0]].release()

    def wait(self: Any, switch: Any, x: Any, indices: Any) -> Any:
        if indices.shape[-2] > 1:
            there = 0
            while switch.group and there < places[0]:
                assert finished[switch.group].acquire(timeout=TIMEOUT)
                there += 1
            ahead.append(there)
        return run(self, switch, x, indices)

    monkeypatch.setattr(ExpertStore, "finish", told)
    monkeypatch.setattr(ExpertStream, "run", wait)
    async with await Engine.open(demo, slots=slots, prefetch=ON) as engine:
        places.append(engine._core.store._staging.places)
        record = engine._core.store.groups[0].record
        assert places[0] == WAVES * wave_size(slots, record.stored_bytes)
        assert engine._core.plan.staging_bytes == places[0] * place_bytes(record.pooled_bytes)
        await engine.generate(PROMPT, max_tokens=1, ignore_eos=True)
        counted = engine.statistics().prefetch
    assert ahead == [0] + [places[0]] * 11
    assert counted.begun == sum(ahead)
    assert counted.used > 0.9 * counted.begun


@pytest.mark.one_loop
@pytest.mark.parametrize("prefetch", ["off", PrefetchConfig(prompts=False)])
async def test_nothing_is_read_ahead_where_that_is_not_wanted(demo: Path, prefetch: Any) -> None:
    async with await Engine.open(demo, slots=16, prefetch=prefetch) as engine:
        await engine.generate(PROMPT, max_tokens=1, ignore_eos=True)
        assert engine.statistics().prefetch.begun == 0
        assert engine._core.plan.staging_bytes == 0


@pytest.mark.one_loop
async def test_prompts_alone_are_read_ahead(demo: Path) -> None:
    """Without distances tokens read nothing ahead."""
    prefetch = PrefetchConfig(distances=())
    async with await Engine.open(demo, slots=16, prefetch=prefetch) as engine:
        first = await engine.generate(PROMPT, max_tokens=1, ignore_eos=True)
        begun = engine.statistics().prefetch.begun
        assert begun > 0
        await engine.generate(make_prompt(2), max_tokens=8, ignore_eos=True)
        assert engine.statistics().prefetch.begun == begun
        assert engine.statistics().prefetch.predictions == 0
    assert list(first.tokens) == expect(zoo.reference(demo), PROMPT, 1).tokens


@pytest.mark.one_loop
async def test_layers_choose_what_is_read_ahead(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[int] = set()
    original = PromptAhead.guesses

    def guesses(self: PromptAhead, *arguments: Any) -> list[Guess]:
        found = original(self, *arguments)
        asked.update(guess.key[0] for guess in found)
        return found

    monkeypatch.setattr(PromptAhead, "guesses", guesses)
    for layers, groups in ((None, set()), ("2", {2})):
        async with await Engine.open(
            demo, slots=16, prefetch=PrefetchConfig(layers=layers)
        ) as engine:
            asked.clear()
            await engine.generate(PROMPT, max_tokens=1, ignore_eos=True)
            streamed = set(range(1, len(engine._core.store.groups)))
        assert asked == (groups or streamed)
        assert 2 in streamed


@pytest.mark.one_loop
async def test_wrong_guesses_change_nothing_but_the_waste(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of few tokens, and guesses at what the next layer will not be asked for."""
    prompt = PROMPT[:14]
    routed: defaultdict[int, set[int]] = defaultdict(set)
    run = ExpertStream.run

    def note(self: Any, switch: Any, x: Any, indices: Any) -> Any:
        routed[switch.group].update(np.asarray(indices).ravel().tolist())
        return run(self, switch, x, indices)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertStream, "run", note)
        async with await Engine.open(demo, slots=8) as engine:
            await engine.generate(prompt, max_tokens=1, ignore_eos=True)
    unwanted = {group: sorted(set(range(64)) - experts) for group, experts in routed.items()}
    assert any(unwanted.values())
    asked: list[Guess] = []

    def guesses(self: PromptAhead, group: int, votes: Any, position: int) -> list[Guess]:
        wrong = [
            Guess((group + 1, expert), position + 1, 1.0, sure=True)
            for expert in unwanted.get(group + 1, [])
        ]
        asked.extend(wrong)
        return wrong

    monkeypatch.setattr(PromptAhead, "guesses", guesses)
    async with await Engine.open(demo, slots=8, prefetch=ON) as engine:
        result = await engine.generate(prompt, max_tokens=1, ignore_eos=True, logprobs=ALTERNATIVES)
        engine.check_integrity()
        told = engine.statistics().prefetch
        assert engine._core.store._staging.kept == ()
    assert_same(result, expect(zoo.reference(demo), prompt, 1))
    assert asked
    assert told.used == 0
    assert told.begun == told.wasted


@pytest.mark.one_loop
async def test_a_prompt_that_is_given_up_leaves_nothing_beside_the_slots(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, cancelled = threading.Event(), threading.Event()
    run = ExpertStream.run

    def stop(self: Any, switch: Any, x: Any, indices: Any) -> Any:
        if switch.group == 2 and not cancelled.is_set():
            reached.set()
            assert cancelled.wait(TIMEOUT)
        return run(self, switch, x, indices)

    monkeypatch.setattr(ExpertStream, "run", stop)
    async with await Engine.open(demo, slots=16, prefetch=ON) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, max_tokens=1, ignore_eos=True))
        assert await asyncio.to_thread(reached.wait, TIMEOUT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
        result = await engine.generate([1], max_tokens=1)  # behind the end of the first
        assert result.tokens
        engine.check_integrity(idle=True)
        again = await engine.generate(PROMPT, max_tokens=1, ignore_eos=True, logprobs=ALTERNATIVES)
        engine.check_integrity(idle=True)
    assert_same(again, expect(zoo.reference(demo), PROMPT, 1))


@pytest.mark.one_loop
@pytest.mark.parametrize("name", _architectures())
async def test_no_bit_changes(name: str, tmp_path: Path) -> None:
    directory = zoo.make_checkpoint(name, tmp_path / name)
    reference = zoo.reference(directory)
    async with await Engine.open(directory, slots=6, prefetch=ON) as engine:
        for length in (150, 65):
            prompt = make_prompt(length)
            result = await engine.generate(
                prompt, max_tokens=4, ignore_eos=True, logprobs=ALTERNATIVES
            )
            assert_same(result, expect(reference, prompt, 4))
        engine.check_integrity()
        assert engine.statistics().prefetch.used > 0


@pytest.mark.one_loop
@pytest.mark.parametrize("prefetch", [ON, PrefetchConfig(prompts=False)])
async def test_a_prompt_leaves_no_activations_in_the_taps(
    demo: Path, prefetch: PrefetchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as large as the prompt, and there are two of each layer."""
    held: list[Any] = []
    run = ExpertStream.run

    def look(self: Any, switch: Any, x: Any, indices: Any) -> Any:
        predictor = self._ahead._predictor
        for taps in (predictor._residuals, predictor._inputs):
            held.extend(tap.array for tap in taps[: switch.group])
        return run(self, switch, x, indices)

    monkeypatch.setattr(ExpertStream, "run", look)
    async with await Engine.open(demo, slots=16, prefetch=prefetch) as engine:
        await engine.generate(PROMPT, max_tokens=1)
    assert len(held) == 2 * sum(range(12))
    assert not any(array is not None for array in held)
