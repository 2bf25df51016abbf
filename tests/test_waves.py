"""Calls of more experts than slots: each expert is read once, the next wave meanwhile."""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestream import Engine, MoestreamError
from moestream.io.reader import RecordReader
from moestream.runtime.bench.padding import Throttle
from moestream.runtime.prefetch import PROMPTS
from moestream.runtime.streaming import ExpertStream
from moestream.runtime.waves import WAVE_BYTES, wave_size

from . import zoo
from .reference import expect, make_prompt


@given(st.integers(1, 512), st.integers(0, 64 << 20))
def test_two_waves_fit(room: int, record_bytes: int) -> None:
    size = wave_size(room, record_bytes)
    assert 1 <= size <= room
    assert room == 1 or 2 * size <= room


def test_waves_of_large_records_leave_room_for_the_hottest() -> None:
    assert wave_size(32, WAVE_BYTES // 4) == 8
    assert wave_size(32, WAVE_BYTES // 12 + 1) == 12
    assert wave_size(32, 1000) == 16
    assert wave_size(32, 0) == 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("waves"))


@pytest.mark.one_loop
@pytest.mark.parametrize("slots", [4, 5, 8])
async def test_each_expert_of_a_chunk_is_read_once(
    model: Path, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[tuple[int, int]] = Counter()
    original = RecordReader.read_job

    def read_job(
        self: RecordReader, group: int, expert: int, job: int, rows: Any, passage: Any = None
    ) -> int:
        if job == 0:
            reads[group, expert] += 1
        return original(self, group, expert, job, rows, passage)

    monkeypatch.setattr(RecordReader, "read_job", read_job)
    prompt = make_prompt(300)
    async with await Engine.open(model, slots=slots) as engine:
        result = await engine.generate(prompt, max_tokens=1, ignore_eos=True)
        engine.check_integrity(idle=True)
    assert result.stats.waves > 2 * len({group for group, _ in reads})
    assert set(reads.values()) == {1}
    assert sum(reads.values()) == result.stats.misses
    assert list(result.tokens) == expect(zoo.reference(model), prompt, 1).tokens


@pytest.mark.one_loop
async def test_the_next_wave_is_asked_for_before_this_one_is_computed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for and what is computed, in order: one wave is always ahead."""
    events: list[str] = []
    ask, compute = ExpertStream._ask, ExpertStream._compute_wave

    def asked(self: Any, *arguments: Any) -> Any:
        wave = ask(self, *arguments)
        if wave is not None:
            events.append("a")
        return wave

    def computed(self: Any, *arguments: Any) -> Any:
        events.append("c")
        return compute(self, *arguments)

    monkeypatch.setattr(ExpertStream, "_ask", asked)
    monkeypatch.setattr(ExpertStream, "_compute_wave", computed)
    async with await Engine.open(model, slots=8) as engine:
        await engine.generate(make_prompt(300), max_tokens=1, ignore_eos=True)
    assert re.fullmatch("(aa(ca)*cc)+", "".join(events))  # of a layer, the last has none ahead


@pytest.mark.one_loop
async def test_waves_are_the_same_however_fast_the_drive_is(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses for a prompt arrive before their layer, or hardly begin: nothing else changes."""
    compute = ExpertStream._compute_wave
    waves: list[tuple[int, list[int]]] = []

    def computed(self: Any, switch: Any, *arguments: Any) -> Any:
        waves.append((switch.group, list(arguments[-1].experts)))
        return compute(self, switch, *arguments)

    monkeypatch.setattr(ExpertStream, "_compute_wave", computed)
    runs = []
    for rate in (None, 3e6):
        waves.clear()
        async with await Engine.open(
            model, slots=8, lanes=1, prefetch=PROMPTS, pressure="off"
        ) as engine:
            if rate is not None:
                engine._core.store.reader.preadv = Throttle(rate)
            result = await engine.generate(make_prompt(300), max_tokens=1, ignore_eos=True)
            guesses = engine.statistics().prefetch
        assert guesses.used > 0 or rate is not None
        runs.append((list(waves), result.tokens))
    assert runs[0] == runs[1]


@pytest.mark.one_loop
async def test_prompts_that_hardly_wait_are_not_read_ahead_again(model: Path) -> None:
    begun = []
    async with await Engine.open(model, slots=8, prefetch=PROMPTS, pressure="off") as engine:
        prompts = engine._core.loaded.stream._prompts
        assert prompts is not None
        for waited in (0.5, 0.01, 0.01, 0.5):  # of a second, by the prompt before
            prompts.spent(1.0, waited)
            await engine.generate(make_prompt(300), max_tokens=1, ignore_eos=True)
            begun.append(engine.statistics().prefetch.begun)
            engine.check_integrity(idle=True)
    assert 0 < begun[0] == begun[1] == begun[2] < begun[3]


@pytest.mark.one_loop
async def test_a_read_that_fails_in_a_wave_leaves_an_engine_that_works(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []
    original = RecordReader.read_job

    def read_job(
        self: RecordReader, group: int, expert: int, job: int, rows: Any, passage: Any = None
    ) -> int:
        if not failed and group == 1 and expert == 9:
            failed.append(expert)
            raise OSError(5, "Input/output error")
        return original(self, group, expert, job, rows, passage)

    prompt = make_prompt(300)
    async with await Engine.open(model, slots=6) as engine:
        before = await engine.generate(prompt, max_tokens=4, ignore_eos=True)
    monkeypatch.setattr(RecordReader, "read_job", read_job)
    async with await Engine.open(model, slots=6) as engine:
        with pytest.raises((MoestreamError, OSError)):
            await engine.generate(prompt, max_tokens=4, ignore_eos=True)
        assert failed
        after = await engine.generate(prompt, max_tokens=4, ignore_eos=True)
        engine.check_integrity(idle=True)
    assert after.tokens == before.tokens


@pytest.mark.one_loop
@pytest.mark.parametrize("slots", [4, 16])
async def test_how_far_a_prompt_is(model: Path, slots: int) -> None:
    """Told on the caller's loop, layer by layer, from nothing to all, and never backwards."""
    told: list[tuple[int, int]] = []
    threads: set[int] = set()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.get_ident())

    async with await Engine.open(model, slots=slots) as engine:
        await engine.generate(make_prompt(300), max_tokens=2, ignore_eos=True, progress=progress)
        streamed = slots < 16
        assert [total for _, total in told] == [300] * len(told)
        done = [done for done, _ in told]
        assert (done[0], done[-1]) == (0, 300)
        assert done == sorted(set(done))
        assert len(done) > 2 or not streamed
        assert threads == {threading.get_ident()}
        with pytest.raises(MoestreamError, match="progress"):
            await engine.generate("x", progress=3)  # type: ignore[arg-type]
