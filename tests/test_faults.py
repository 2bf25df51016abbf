"""Faults of the drive at the k-th read: who fails, with what, and that nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import moestream
from moestream import Engine, Generation, ReadTimeout
from moestream.io.faults import ERRORS, KINDS, FaultyDrive, Kind

from .fakes import TIMEOUT, join_lanes

PROMPTS = ("Once upon a time", "The cat sat on the mat and", "Where do birds sleep?")
TOKENS = 4
READ_TIMEOUT = 0.5
"""Long enough for a read from the page cache on a busy machine."""

LIMIT = 60.0
"""Seconds within which three requests end, or they hang."""


@pytest.fixture(scope="module")
def drive() -> Iterator[FaultyDrive]:
    with FaultyDrive(slow=0.02) as drive:
        yield drive


@asynccontextmanager
async def opened(model: Path, drive: FaultyDrive, **settings: Any) -> AsyncIterator[Engine]:
    """An engine on a faulty drive; nothing hangs any more when it is closed."""
    settings = {"slots": 16, "read_timeout": READ_TIMEOUT, **settings}
    async with await Engine.open(model, **settings) as engine:
        engine._core.store.reader.preadv = drive
        try:
            yield engine
            drive.answer()
            await until(lambda: not quarantined(engine) and not engine._core.loop._reads)
            engine.check_integrity(idle=True)
        finally:
            drive.forget()
            drive.answer()


async def generate(engine: Engine, prompt: str) -> Generation:
    return await engine.generate(prompt, max_tokens=TOKENS, ignore_eos=True)


async def together(engine: Engine, *prompts: str) -> list[Generation | BaseException]:
    """Requests at the same time, in this order."""
    async with asyncio.timeout(LIMIT):
        tasks = [asyncio.create_task(generate(engine, prompt)) for prompt in prompts]
        return await asyncio.gather(*tasks, return_exceptions=True)


async def undisturbed(model: Path) -> list[tuple[int, ...]]:
    async with await Engine.open(model, slots=16) as engine:
        return [(await generate(engine, prompt)).tokens for prompt in PROMPTS]


def quarantined(engine: Engine) -> int:
    return sum(group.residency.quarantined for group in engine._core.store.groups)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that another thread is about to do."""
    for _ in range(round(TIMEOUT / 0.001)):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it has not come to that")


async def check_faults(
    model: Path, drive: FaultyDrive, kind: Kind, places: list[int], **settings: Any
) -> None:
    """A fault at each of these reads of a request fails that one alone, and not the next."""
    expected = await undisturbed(model)
    # In turn, so that it is known whose read the fault meets.
    settings = {"max_running": 1, "checksum": kind == "corrupt", **settings}
    async with opened(model, drive, **settings) as engine:
        for place in places:
            happened = len(drive.happened)
            drive.plan(kind, place)
            victim, beside = await together(engine, *PROMPTS[:2])
            assert drive.happened[happened:] == [kind], "the request did not come to this read"
            if kind in ERRORS:
                assert type(victim) is ERRORS[kind], (place, victim)
                assert (victim.path.name, victim.offset >= 0) in (
                    ("model.safetensors", True),
                    (f"layer-{victim.layer:03}.bin", True),
                )
            else:
                assert isinstance(victim, Generation), (place, victim)
                assert victim.tokens == expected[0]
            assert isinstance(beside, Generation), (place, beside)
            assert beside.tokens == expected[1]
            assert quarantined(engine) == (kind == "hang")
            again, after = await together(engine, PROMPTS[0], PROMPTS[2])
            assert isinstance(again, Generation) and isinstance(after, Generation)
            assert (again.tokens, after.tokens) == (expected[0], expected[2])
            drive.answer()
            await until(lambda: not quarantined(engine))
            engine.check_integrity(idle=True)
        statistics = engine.statistics()
        failed = len(places) if kind in ERRORS else 0
        assert (statistics.requests_failed, statistics.read_errors) == (failed, failed)
        assert statistics.requests_finished == 4 * len(places) - failed


@pytest.mark.one_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_a_fault_fails_the_request_that_needed_the_read(
    kind: Kind, packed: Path, drive: FaultyDrive
) -> None:
    await check_faults(packed, drive, kind, [1, 19, 120])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_a_fault_at_some_reads(kind: Kind, packed: Path, drive: FaultyDrive) -> None:
    await check_faults(packed, drive, kind, list(range(7, 201, 30)))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_fault_at_each_read(kind: Kind, packed: Path, drive: FaultyDrive) -> None:
    await check_faults(packed, drive, kind, list(range(1, 201)))


@pytest.mark.one_loop
@pytest.mark.parametrize("kind", ["error", "short", "hang"])
async def test_faults_in_a_checkpoint_read_in_place(
    kind: Kind, demo: Path, drive: FaultyDrive
) -> None:
    """Several reads for each expert, some of them through a scratch buffer."""
    await check_faults(demo, drive, kind, [5, 400])


@pytest.mark.one_loop
@pytest.mark.parametrize("kind", ["error", "hang"])
@pytest.mark.parametrize("destination", ["slots", "staging"])
async def test_faults_of_guesses_and_demands_leave_the_engine_alive(
    kind: Kind, destination: Any, packed: Path, drive: FaultyDrive
) -> None:
    """Which of the two is hit depends on timing; each request gives the right tokens or fails."""
    expected = await undisturbed(packed)
    prefetch = moestream.PrefetchConfig(admission="always", destination=destination)
    async with opened(packed, drive, prefetch=prefetch) as engine:
        for place in (30, 100, 180):
            drive.plan(kind, place)
            first, second = await together(engine, *PROMPTS[:2])
            for outcome, tokens in ((first, expected[0]), (second, expected[1])):
                if isinstance(outcome, Generation):
                    assert outcome.tokens == tokens
                else:
                    assert type(outcome) is ERRORS[kind], outcome
            drive.forget()
            (third,) = await together(engine, PROMPTS[2])
            if not isinstance(third, Generation):  # a guess that only this one needs still hangs
                assert kind == "hang" and type(third) is ERRORS[kind], third
                drive.answer()
                (third,) = await together(engine, PROMPTS[2])
            assert isinstance(third, Generation) and third.tokens == expected[2]
            drive.answer()
            # Guesses of a request that has ended may still be on their way.
            await until(lambda: not quarantined(engine) and not engine._core.loop._reads)
            engine.check_integrity(idle=True)


# -- reads that hang --------------------------------------------------------------------------


async def test_the_error_of_a_read_that_hangs_says_where_and_what_to_do(
    packed: Path, drive: FaultyDrive
) -> None:
    async with opened(packed, drive) as engine:
        drive.plan("hang")
        with pytest.raises(ReadTimeout) as caught:
            await generate(engine, PROMPTS[0])
        error = caught.value
        assert error.path == packed / "experts" / f"layer-{error.layer:03}.bin"
        assert error.seconds >= READ_TIMEOUT
        assert str(error).startswith(f"cannot read expert {error.expert} of layer {error.layer} (")
        assert f"from {error.path} at offset {error.offset}: the drive has not" in str(error)
        assert "raise read_timeout" in str(error)
        assert isinstance(error, moestream.ReadFailed)


async def test_an_answer_that_comes_late_changes_nothing(packed: Path, drive: FaultyDrive) -> None:
    """It is written into a slot that nobody else has got meanwhile."""
    expected = await undisturbed(packed)
    async with opened(packed, drive, slots=8) as engine:
        drive.plan("hang", count=5)
        (victim,) = await together(engine, PROMPTS[0])
        assert isinstance(victim, ReadTimeout)
        hung = quarantined(engine)
        assert 1 <= hung <= 5
        drive.forget()
        (beside,) = await together(engine, PROMPTS[1])
        drive.answer()
        (after,) = await together(engine, PROMPTS[0])
        assert isinstance(beside, Generation) and beside.tokens == expected[1]
        assert isinstance(after, Generation) and after.tokens == expected[0]


async def test_fewer_slots_than_a_layer_needs(packed: Path, drive: FaultyDrive) -> None:
    """The calls run in waves through the slots that are left."""
    expected = await undisturbed(packed)
    async with opened(packed, drive, slots=6) as engine:
        drive.plan("hang", count=4)
        (victim,) = await together(engine, PROMPTS[0])
        assert isinstance(victim, ReadTimeout)
        drive.forget()
        assert quarantined(engine) == 4
        before = engine.statistics().waves
        (after,) = await together(engine, PROMPTS[0])
        assert isinstance(after, Generation) and after.tokens == expected[0]
        assert engine.statistics().waves > before
        assert quarantined(engine) == 4


async def test_no_slot_left(packed: Path, drive: FaultyDrive) -> None:
    """A clear error at once, and all is well when the drive answers."""
    expected = await undisturbed(packed)
    async with opened(packed, drive, slots=4, lanes=8) as engine:
        drive.plan("hang", count=4)
        (victim,) = await together(engine, PROMPTS[0])
        assert isinstance(victim, ReadTimeout)
        drive.forget()
        (after,) = await together(engine, PROMPTS[0])
        assert isinstance(after, ReadTimeout)
        assert "such reads hold 4 of the layer's 4 slots" in str(after)
        drive.answer()
        await until(lambda: not quarantined(engine))
        (last,) = await together(engine, PROMPTS[0])
        assert isinstance(last, Generation) and last.tokens == expected[0]


async def test_a_drive_that_answers_nothing(packed: Path, drive: FaultyDrive) -> None:
    """Each request fails, soon at once, with a bounded number of threads; then all is well."""
    expected = await undisturbed(packed)
    async with opened(packed, drive, lanes=2, slots=32) as engine:
        drive.plan("hang", count=10_000)
        for _ in range(4):
            (victim,) = await together(engine, PROMPTS[0])
            assert isinstance(victim, ReadTimeout), victim
        assert drive.hanging == 4  # twice the lanes
        drive.forget()
        (refused,) = await together(engine, PROMPTS[1])
        assert isinstance(refused, ReadTimeout)
        drive.answer()
        await until(lambda: not quarantined(engine))
        (after,) = await together(engine, PROMPTS[0])
        assert isinstance(after, Generation) and after.tokens == expected[0]
        assert engine._core.loop._lanes.alive == 2


async def test_closing_while_a_read_hangs(packed: Path, drive: FaultyDrive) -> None:
    engine = await Engine.open(packed, slots=16, read_timeout=READ_TIMEOUT)
    engine._core.store.reader.preadv = drive
    drive.plan("hang")
    (victim,) = await together(engine, PROMPTS[0])
    assert isinstance(victim, ReadTimeout)
    await engine.aclose()
    assert drive.hanging == 1
    drive.answer()
    join_lanes()


async def test_a_slow_drive_fails_nothing(packed: Path) -> None:
    expected = await undisturbed(packed)
    with FaultyDrive(delay=0.002) as drive:
        async with opened(packed, drive, slots=32, read_timeout=5.0) as engine:
            (outcome,) = await together(engine, PROMPTS[0])
            assert isinstance(outcome, Generation) and outcome.tokens == expected[0]
            assert drive.reads > 100


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "soon", None, True])
async def test_bad_read_timeouts(value: Any, demo: Path) -> None:
    with pytest.raises(moestream.InvalidRequest, match="read_timeout"):
        await Engine.open(demo, slots=8, read_timeout=value)
