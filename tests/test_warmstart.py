"""What earlier runs used most is read before anybody asks, and gives way to whoever does."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestream import Engine
from moestream.io.loop import IoLoop
from moestream.io.queue import Entry, Key
from moestream.io.reader import RecordReader
from moestream.io.records import Record
from moestream.runtime import warmstart
from moestream.runtime.residency import NONE
from moestream.runtime.store import PRELOAD, ExpertStore
from moestream.runtime.tracing import Tracer

from .fakes import FakeDrive, FakeLoop, Layer, Tensor, write_packed, write_stacked

TENSORS = (Tensor("up.weight", (16, 4)), Tensor("up.scales", (16,)))
EXPERTS = 8

counts = st.lists(st.integers(0, 5).map(float), min_size=EXPERTS, max_size=EXPERTS)


# -- choosing, pure -------------------------------------------------------------------------------


@given(st.lists(counts, min_size=1, max_size=3), st.integers(1, EXPERTS))
def test_the_hottest_are_chosen(heat: list[list[float]], slots: int) -> None:
    keys = warmstart.choose(heat, [slots] * len(heat))
    for group, layer in enumerate(heat):
        chosen = [expert for g, expert in keys if g == group]
        assert len(chosen) == min(slots, sum(count > 0 for count in layer))
        assert len(set(chosen)) == len(chosen)
        left = [layer[e] for e in range(EXPERTS) if e not in chosen]
        assert all(layer[e] > 0 and layer[e] >= max(left, default=0) for e in chosen)


def test_earlier_runs_weigh_less_and_an_idle_run_nothing() -> None:
    assert warmstart.merge([8.0, 0.0, 2.0], [1, 3, 0]) == [5.0, 3.0, 1.0]
    assert warmstart.merge([8.0, 1.0], [0, 0]) == [8.0, 1.0]


@pytest.fixture
def layers(tmp_path: Path) -> list[Layer]:
    return [
        write_stacked(tmp_path / "b", TENSORS, experts=EXPERTS, layer=4),
        write_packed(tmp_path / "a", TENSORS, experts=EXPERTS, layer=7),
    ]


def test_keys_are_ordered_as_they_lie_in_the_files(layers: list[Layer]) -> None:
    records = [layer.record for layer in layers]
    keys = [(0, 5), (1, 3), (0, 2), (1, 0)]
    assert warmstart.in_file_order(keys, records) == [(1, 0), (1, 3), (0, 2), (0, 5)]


def test_heat_is_kept_by_layer_and_checked(layers: list[Layer]) -> None:
    records: list[Record] = [layer.record for layer in layers]
    heat = [[float(e) for e in range(EXPERTS)], [0.5] * EXPERTS]
    table = json.loads(json.dumps(warmstart.to_json(heat, records)))
    assert list(table) == ["4", "7"]
    assert warmstart.from_json(table, records) == heat
    other = {"4": [1.0, 2.0], "9": [1.0] * EXPERTS}  # of a model with fewer experts
    assert warmstart.from_json(other, records) == [[0.0] * EXPERTS] * 2
    assert warmstart.from_json({"4": [-1] * EXPERTS}, records)[0] == [0.0] * EXPERTS
    for damaged in ({"4": ["x"]}, {"4": [None]}, {"4": 3}):
        with pytest.raises((TypeError, ValueError)):
            warmstart.from_json(damaged, records)


# -- in the store, step by step -------------------------------------------------------------------


@pytest.fixture
def store(layers: list[Layer]) -> Iterator[ExpertStore]:
    records = [layer.record for layer in layers]
    reader = RecordReader(records, preadv=FakeDrive())
    made = ExpertStore(records, (3, 4), reader, tracer=Tracer(None))
    yield made
    made.check_integrity(idle=True)
    reader.close()


def entry(*key: int) -> Entry:
    return Entry((key[0], key[1]), False, PRELOAD, 1e-6, set(), 0)


def test_one_message_asks_for_all_of_them_behind_every_guess(store: ExpertStore) -> None:
    loop = FakeLoop(store)
    store.connect(loop.as_loop())
    store.preload([])
    assert not loop.asks
    store.preload([(0, 5), (1, 2)])
    (ask,) = loop.asks
    assert [guess.key for guess in ask.guesses] == [(0, 5), (1, 2)]
    assert {guess.position for guess in ask.guesses} == {PRELOAD}
    assert ask.grant == sum(books.stored_bytes for books in store.groups)
    assert not ask.demands


def test_it_is_read_into_a_free_slot_and_is_no_guess(
    store: ExpertStore, layers: list[Layer]
) -> None:
    loop = FakeLoop(store)
    store.connect(loop.as_loop())
    slot = store.begin(entry(0, 5))
    assert slot is not None
    loop.end((0, 5), slot)
    assert [bytes(row) for row in store.groups[0].pool.rows(slot)] == layers[0].expected(5)
    got = store.demand(0, [5], owner=1, position=0)
    assert got is not None
    assert (got.slots, got.misses, got.futures) == ([slot], 0, [])
    store.release(0, got.slots)
    assert (store.counters.hits, store.counters.reads) == (1, 1)
    assert store.counters.guesses_begun == store.counters.guesses_used == 0


def test_a_demand_joins_a_read_that_has_begun(store: ExpertStore) -> None:
    loop = FakeLoop(store)
    store.connect(loop.as_loop())
    slot = store.begin(entry(0, 5))
    assert slot is not None
    got = store.demand(0, [5], owner=1, position=0)
    assert got is not None
    assert (got.misses, len(got.futures)) == (0, 1)
    loop.end((0, 5), slot)
    assert got.futures[0].result(timeout=0) is None
    store.release(0, got.slots)


def test_nothing_is_evicted_for_it_and_room_for_a_call_stays(store: ExpertStore) -> None:
    loop = FakeLoop(store)
    store.connect(loop.as_loop())
    begun = [store.begin(entry(0, expert)) for expert in range(4)]
    assert begun[2:] == [None, None]  # the last slot is left to the layer's calls
    for expert in range(2):
        slot = begun[expert]
        assert slot is not None
        loop.end((0, expert), slot)
    third = store.begin(entry(0, 2))
    assert third is not None
    loop.end((0, 2), third)
    assert store.begin(entry(0, 3)) is None
    assert store.groups[0].residency.evictions == 0
    assert store.begin(entry(0, 1)) is None  # is there already


# -- in an engine ---------------------------------------------------------------------------------


async def idle(loop: IoLoop) -> None:
    """All reads that the loop has taken up have ended."""

    async def ended() -> None:
        while loop._running:
            await asyncio.wait(loop._running)

    await asyncio.wrap_future(loop.start(ended))


async def resident(engine: Engine) -> set[Key]:
    await idle(engine._core.loop)
    groups = engine._core.store.groups
    return {
        (group, expert)
        for group, books in enumerate(groups)
        for expert in range(books.record.experts)
        if books.residency.resident(expert)
    }


@pytest.mark.one_loop
async def test_the_next_start_reads_what_was_used_most(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "kept.json"
    async with await Engine.open(demo, slots=16, calibration=path) as engine:
        assert await resident(engine) == set()
        first = await engine.generate("Why do birds sing?", max_tokens=24, ignore_eos=True)
        uses = [list(books.residency.uses) for books in engine._core.store.groups]
    heat = json.loads(path.read_text())["heat"]
    assert [heat[str(layer)] for layer in range(12)] == uses
    async with await Engine.open(demo, slots=16, calibration=path) as engine:
        there = await resident(engine)
        assert there == set(warmstart.choose(uses, [16] * 12))
        assert engine.statistics().reads == 12 * 16
        assert engine.statistics().prefetch.wasted == 0
        assert all(engine._core.store.groups[g].residency.slot(e) != NONE for g, e in there)
        again = await engine.generate("Why do birds sing?", max_tokens=24, ignore_eos=True)
        assert again.tokens == first.tokens
        assert again.stats.misses < first.stats.misses
    heat = json.loads(path.read_text())["heat"]
    assert heat["0"] == [1.5 * count for count in uses[0]]
    async with await Engine.open(demo, slots=16, calibration=path):
        pass
    assert json.loads(path.read_text())["heat"] == heat


@pytest.mark.one_loop
async def test_a_damaged_file_is_no_obstacle(
    demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kept.json"
    for text in ('{"heat": 3}', '{"heat": {"0": ["x"]}}', "[]", "no json"):
        path.write_text(text)
        async with await Engine.open(demo, slots=16, calibration=path) as engine:
            assert await resident(engine) == set()
        assert "cannot be used" in caplog.text
        caplog.clear()
        assert math.fsum(json.loads(path.read_text())["heat"]["0"]) == 0


@pytest.mark.one_loop
async def test_a_file_that_cannot_be_written_is_told_in_a_line(
    demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    path = folder / "kept.json"
    async with await Engine.open(demo, slots=16, calibration=path) as engine:
        await engine.generate("Why do birds sing?", max_tokens=2)
        folder.write_text("a file where the directory should be")
    (record,) = caplog.records
    assert f"the calibration cannot be kept in {path}" in record.getMessage()
    assert record.exc_info is None
