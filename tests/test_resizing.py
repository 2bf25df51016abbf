"""Pools that shrink and grow while an engine works: same bits, less memory, honest figures."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moestream import Engine, InvalidRequest, PrefetchConfig
from moestream.io.reader import RecordReader
from moestream.runtime import store as store_module
from moestream.runtime.pressure import Level
from moestream.runtime.slots import SlotPool
from moestream.runtime.store import ExpertStore
from moestream.runtime.tracing import Tracer

from . import zoo
from .fakes import FakeLoop, Tensor, write_stacked
from .reference import ALTERNATIVES, expect, make_prompt
from .test_identity import assert_same

STEPS = 24
TENSORS = (Tensor("up.weight", (16, 4)), Tensor("up.scales", (16,), "BF16", "F32"))


def press(engine: Engine, share: float) -> None:
    """From now on the pools may have this share; nobody is woken."""
    engine._core.resizer.pressure.share = share


def settle(engine: Engine) -> None:
    """What the watcher does when the share has changed."""
    engine._core.resizer.wake()


# -- the store --------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> tuple[ExpertStore, FakeLoop, Any]:
    layer = write_stacked(tmp_path / "experts", TENSORS, experts=8)
    store = ExpertStore([layer.record], [5], RecordReader([layer.record]), tracer=Tracer(None))
    loop = FakeLoop(store)
    store.connect(loop.as_loop())
    return store, loop, layer


def bring(store: ExpertStore, loop: FakeLoop, *experts: int) -> None:
    got = store.demand(0, experts, owner=1, position=0)
    assert got is not None
    while loop.queue:
        loop.step()
    store.release(0, got.slots)


def test_the_rows_of_the_hottest_experts_move_along(
    bench: tuple[ExpertStore, FakeLoop, Any],
) -> None:
    store, loop, layer = bench
    bring(store, loop, 0, 1, 2, 3, 4)
    bring(store, loop, 1)
    swapped: list[SlotPool] = []
    for slots, there in ((3, {3, 4, 1}), (6, {3, 4, 1})):
        assert store.resize(0, slots, swapped.append)
        books = store.groups[0]
        assert swapped[-1] is books.pool
        assert books.pool.slots == books.residency.slots == slots
        assert {e for e in range(8) if books.residency.resident(e)} == there
        for expert in there:
            rows = books.pool.rows(books.residency.slot(expert))
            assert [bytes(row) for row in rows] == layer.expected(expert)
    store.check_integrity(idle=True)


def test_a_layer_that_is_being_read_is_left_alone(bench: tuple[ExpertStore, FakeLoop, Any]) -> None:
    store, loop, _ = bench
    got = store.demand(0, [2], owner=1, position=0)
    assert got is not None
    assert not store.resize(0, 2, lambda pool: pytest.fail("swapped"))
    loop.step()
    assert not store.resize(0, 2, lambda pool: pytest.fail("swapped"))
    store.release(0, got.slots)
    assert store.resize(0, 2, lambda pool: None)


def test_the_same_number_of_slots_moves_nobody(
    bench: tuple[ExpertStore, FakeLoop, Any],
) -> None:
    # The share may change back between the decision to resize and the resizing.
    store, loop, layer = bench
    got = store.demand(0, [0, 1], owner=1, position=0)
    assert got is not None
    keys = [loop.queue.popleft(), loop.queue.popleft()]
    bring(store, loop, 2, 3, 4)
    store.dropped(keys, None)  # these slots are free again, before others that are not
    store.release(0, got.slots)
    assert store.resize(0, 5, lambda pool: None)
    books = store.groups[0]
    for expert in (2, 3, 4):
        rows = books.pool.rows(books.residency.slot(expert))
        assert [bytes(row) for row in rows] == layer.expected(expert)
    store.check_integrity(idle=True)


def test_without_memory_for_the_new_pool_the_old_one_stays(
    bench: tuple[ExpertStore, FakeLoop, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, loop, _ = bench
    bring(store, loop, 0, 1, 2)
    before = store.groups[0].pool

    def refuse(record: Any, slots: int, device: Any) -> SlotPool:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(store_module, "SlotPool", refuse)
    with pytest.raises(RuntimeError):
        store.resize(0, 3, lambda pool: pytest.fail("swapped"))
    assert store.groups[0].pool is before
    assert store.room(0) == 5
    assert [store.groups[0].residency.resident(expert) for expert in range(3)] == [True] * 3
    store.check_integrity(idle=True)


# -- the engine -------------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.parametrize(
    "prefetch",
    ["off", PrefetchConfig(), PrefetchConfig(deterministic=True)],
    ids=["off", "on", "d"],
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
async def test_same_bits_before_during_and_after(name: str, prefetch: Any, tmp_path: Path) -> None:
    directory = zoo.make_checkpoint(name, tmp_path / name)
    prompt = make_prompt(7)
    expected = expect(zoo.reference(directory), prompt, STEPS)
    shares = {6: 0.5, 12: 0.0, 18: 1.0}
    async with await Engine.open(directory, slots=7, prefetch=prefetch, pressure="off") as engine:
        planned = engine.statistics().slots
        seen = set()
        stream = engine._core.loaded.stream
        resize, forwards = stream.at_rest, itertools.count()
        assert resize is not None

        def at_rest() -> None:
            """On the compute thread, so that it is known which token comes next."""
            press(engine, shares.get(next(forwards), engine._core.resizer.pressure.share))
            resize()
            seen.add(engine.statistics().slots)

        stream.at_rest = at_rest
        result = await engine.generate(
            prompt, max_tokens=STEPS, ignore_eos=True, logprobs=ALTERNATIVES
        )
        assert_same(result, expected)
        end = engine.statistics()
        assert end.planned_slots == planned
        assert end.slots == planned, "grown back"
        floors = {min(slots) for slots in seen}
        assert min(floors) < planned[0]
        assert end.resizes >= len(planned)
        again = await engine.generate(
            prompt, max_tokens=STEPS, ignore_eos=True, logprobs=ALTERNATIVES
        )
        assert_same(again, expected)
        engine.check_integrity(idle=True)


async def test_an_idle_engine_gives_memory_back_and_takes_it_again(demo: Path) -> None:
    async with await Engine.open(demo, slots=32, pressure="off") as engine:
        await engine.generate("Hello", max_tokens=2)
        full = engine.statistics()
        press(engine, 0.25)
        settle(engine)
        await engine.generate("Hello", max_tokens=1)
        less = engine.statistics()
        assert less.slots == (8,) * 12
        assert less.slot_bytes * 4 == full.slot_bytes
        # The caches of the last request are as small as those of the first.
        assert full.memory_bytes - less.memory_bytes >= 0.9 * (full.slot_bytes - less.slot_bytes)
        press(engine, 1.0)
        settle(engine)
        await engine.generate("Hello", max_tokens=1)
        assert engine.statistics().slots == (32,) * 12
        assert engine.statistics().resizes == 24
        engine.check_integrity(idle=True)


async def test_a_layer_keeps_room_for_one_token(demo: Path) -> None:
    async with await Engine.open(demo, slots=10, pressure="off") as engine:
        press(engine, 0.05)
        first = await engine.generate("Hello", max_tokens=4)
        assert engine.statistics().slots == (6,) * 12
    async with await Engine.open(demo, slots=4, pressure="off") as engine:
        press(engine, 0.05)
        assert (await engine.generate("Hello", max_tokens=4)).tokens == first.tokens
        assert engine.statistics().slots == (4,) * 12, "fewer than that by the caller's own choice"


async def test_the_watcher_reaches_the_engine(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestream.runtime.core.find_source", lambda: lambda: Level.CRITICAL)
    async with await Engine.open(demo, slots=32) as engine:
        await engine.generate("Hello", max_tokens=1)
        statistics = engine.statistics()
        assert statistics.memory_pressure == "critical"
        assert statistics.slots == (16,) * 12
    async with await Engine.open(demo, slots=32, pressure="off") as engine:
        await engine.generate("Hello", max_tokens=1)
        assert engine.statistics().slots == (32,) * 12


async def test_after_a_while_the_other_layers_wait_for_the_next_forward(
    demo: Path,
) -> None:
    clock = itertools.count()
    async with await Engine.open(demo, slots=32, pressure="off") as engine:
        engine._core.resizer.clock = lambda: float(next(clock))
        press(engine, 0.5)
        await engine.generate([5], max_tokens=3, ignore_eos=True)
        assert sorted(engine.statistics().slots) == [16] * 3 + [32] * 9


async def test_an_engine_without_memory_for_a_new_pool_goes_on(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(record: Any, slots: int, device: Any) -> SlotPool:
        raise RuntimeError("out of memory")

    async with await Engine.open(demo, slots=16, pressure="off") as engine:
        before = await engine.generate("Hello", max_tokens=4)
        monkeypatch.setattr(store_module, "SlotPool", refuse)
        press(engine, 0.5)
        settle(engine)
        assert (await engine.generate("Hello", max_tokens=4)).tokens == before.tokens
        assert engine.statistics().slots == (16,) * 12
        monkeypatch.undo()
        await engine.generate("Hello", max_tokens=14, ignore_eos=True)
        assert engine.statistics().slots == (8,) * 12
        engine.check_integrity(idle=True)


async def test_other_words_for_pressure_are_refused(demo: Path) -> None:
    with pytest.raises(InvalidRequest, match="pressure"):
        await Engine.open(demo, pressure="on")  # type: ignore[arg-type]


RUN = """
import asyncio, json, sys
import psutil
from moestream import Engine

def resident():
    return psutil.Process().memory_info().rss

async def main():
    async with await Engine.open(sys.argv[1], slots=48, pressure="off") as engine:
        await engine.generate([5, 6, 7], max_tokens=40, ignore_eos=True)
        before, held = resident(), engine.statistics().slot_bytes
        resizer = engine._core.resizer
        resizer.pressure.share = 0.25
        resizer.wake()
        await engine.generate([5, 6, 7], max_tokens=1, ignore_eos=True)
        after = engine.statistics()
        print(json.dumps({
            "fell": before - resident(), "given": held - after.slot_bytes, "slots": after.slots,
        }))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_process_becomes_smaller(tmp_path: Path) -> None:
    from scripts.make_checkpoint import Shape, make_checkpoint

    shape = Shape(layers=4, experts=64, top_k=4, hidden=512, inner=512)
    directory = make_checkpoint(tmp_path / "model", shape, aligned=True, quiet=True)
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(directory)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout)
    assert report["slots"] == [12] * 4
    assert report["given"] > 60_000_000
    assert report["fell"] > 0.9 * report["given"]
