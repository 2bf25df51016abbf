"""Reading ahead: bits unchanged by every setting, each knob does what it says, rules are exact."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from moestream import Engine, InvalidRequest, PrefetchConfig
from moestream.io.loop import IoLoop
from moestream.runtime.prefetch import Governor, Trial, parse_layers
from moestream.runtime.readahead import EMBEDDING

from . import zoo
from .reference import ALTERNATIVES, expect, make_prompt
from .test_identity import assert_same

PROMPT = "Once upon a time there was a small boat."

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "one ahead": {"distances": (1,)},
    "three ahead": {"distances": (1, 2, 3)},
    "own input": {"distances": (0,)},
    "own input and one": {"distances": (0, 1)},
    "gap": {"distances": (2,)},
    "wide": {"width": 4.0},
    "narrow": {"width": 0.5},
    "always": {"admission": "always"},
    "fifo": {"admission": "always", "order": "fifo"},
    "staging": {"destination": "staging", "admission": "always"},
    "tiny staging": {"destination": "staging", "staging_bytes": 70_000, "admission": "always"},
    "no staging": {"destination": "staging", "staging_bytes": 0, "admission": "always"},
    "page cache": {"destination": "pagecache", "admission": "always"},
    "off": {"destination": "off"},
    "predict only": {"predict_only": True},
    "embedding": {"embedding": True, "admission": "always"},
    "hits first": {"hits_first": True, "admission": "always"},
    "keep predicted": {"missing_only": False, "admission": "always"},
    "deterministic": {"deterministic": True},
    "deterministic wide": {"deterministic": True, "width": 3.0, "layer_budget": 12},
    "profile": {"profile": True, "admission": "always"},
}


@pytest.mark.one_loop
@pytest.mark.parametrize("name", SETTINGS)
async def test_bits_are_unchanged(name: str, demo: Path) -> None:
    model = zoo.reference(demo)
    prompt = make_prompt(9, 8192)
    expected = expect(model, prompt, 12)
    for slots in (6, 16, 40):
        config = PrefetchConfig(**SETTINGS[name])
        async with await Engine.open(demo, slots=slots, prefetch=config) as engine:
            for _ in range(2):  # the second time with another state of the cache
                result = await engine.generate(
                    prompt, max_tokens=12, ignore_eos=True, logprobs=ALTERNATIVES
                )
                assert_same(result, expected)
            engine.check_integrity()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.one_loop
@pytest.mark.parametrize("name", [n for n in zoo.ARCHITECTURES if n not in zoo.EXCEPTIONS])
async def test_bits_are_unchanged_in_every_architecture(name: str, tmp_path: Path) -> None:
    directory = zoo.make_checkpoint(name, tmp_path / name)
    expected = expect(zoo.reference(directory), make_prompt(7), 16)
    each: list[dict[str, Any]] = [
        {"admission": "always"},
        {"distances": (0, 1), "admission": "always"},
    ]
    for settings in each:
        config = PrefetchConfig(**settings)
        async with await Engine.open(directory, slots=5, prefetch=config) as engine:
            result = await engine.generate(
                make_prompt(7), max_tokens=16, ignore_eos=True, logprobs=ALTERNATIVES
            )
            assert_same(result, expected)


@pytest.mark.one_loop
async def test_hits_first_with_tokens_that_share_no_expert(tmp_path: Path) -> None:
    """Two or three tokens routed to different experts are not one token with many of them."""
    directory = zoo.make_checkpoint("qwen3_moe", tmp_path / "m")
    model = zoo.reference(directory)
    config = PrefetchConfig(hits_first=True, admission="always")
    async with await Engine.open(directory, slots=6, prefetch=config) as engine:
        for seed in range(30):
            prompt = [(seed * 37 + n * 101) % 256 for n in range(2 + seed % 2)]
            result = await engine.generate(
                prompt, max_tokens=3, ignore_eos=True, logprobs=ALTERNATIVES
            )
            assert_same(result, expect(model, prompt, 3))


async def run(demo: Path, slots: int = 16, tokens: int = 30, **settings: Any) -> Any:
    """Statistics of an engine with these settings after some tokens."""
    config = PrefetchConfig(**{"admission": "always", **settings})
    async with await Engine.open(demo, slots=slots, prefetch=config) as engine:
        await engine.generate(PROMPT, max_tokens=tokens, ignore_eos=True)
        return engine.statistics()


async def test_guesses_are_read_and_used(demo: Path) -> None:
    prefetch = (await run(demo, distances=(1, 2))).prefetch
    assert prefetch.predictions > 0
    assert 0 < prefetch.used <= prefetch.begun <= prefetch.guesses
    assert prefetch.recall[1][0] > 0.5
    assert prefetch.recall[2][0] > 0.4
    assert prefetch.late + prefetch.evicted + prefetch.unpredicted > 0


async def test_predict_only_and_off_read_nothing_ahead(demo: Path) -> None:
    only = (await run(demo, predict_only=True)).prefetch
    assert only.predictions > 0
    assert only.guesses == only.begun == 0
    off = (await run(demo, destination="off")).prefetch
    assert off.predictions == off.guesses == 0


async def test_distances_choose_what_is_predicted(demo: Path) -> None:
    prefetch = (await run(demo, distances=(2, 3))).prefetch
    assert set(prefetch.recall) >= {2, 3}
    assert 1 not in prefetch.recall
    zero = (await run(demo, distances=(0,))).prefetch
    assert zero.recall[0][0] > 0.65


async def test_embedding_predicts_the_first_layers(demo: Path) -> None:
    without = (await run(demo)).prefetch
    prefetch = (await run(demo, embedding=True)).prefetch
    assert EMBEDDING not in without.recall
    assert prefetch.recall[EMBEDDING][0] > 0.4


async def test_width_bounds_the_candidates(demo: Path) -> None:
    narrow = (await run(demo, width=0.5)).prefetch
    wide = (await run(demo, width=3.0)).prefetch
    assert narrow.guesses < wide.guesses
    assert narrow.recall[1][1] < wide.recall[1][1]


async def test_layer_list_limits_the_targets(demo: Path) -> None:
    some = await run(demo, layers="3,7-8")
    every = await run(demo)
    assert 0 < some.prefetch.predictions < every.prefetch.predictions / 2


async def test_budgets_bound_the_guesses(demo: Path) -> None:
    tokens = 30
    layer = (await run(demo, layer_budget=1, distances=(1,), tokens=tokens)).prefetch
    assert layer.guesses <= tokens * 12
    forward = (await run(demo, forward_budget=3, tokens=tokens)).prefetch
    assert 0 < forward.guesses <= tokens * 3
    nothing = (await run(demo, forward_budget=0)).prefetch
    assert nothing.guesses == 0


async def test_min_score_leaves_unlikely_candidates_alone(demo: Path) -> None:
    every = (await run(demo, width=3.0)).prefetch
    likely = (await run(demo, width=3.0, min_score=0.6)).prefetch
    assert 0 < likely.guesses < every.guesses
    none = (await run(demo, min_score=1.0)).prefetch
    assert none.guesses == 0


async def test_staging_serves_demands_from_memory(demo: Path) -> None:
    statistics = await run(demo, destination="staging")
    assert statistics.prefetch.used > 0
    # Every miss that was staged has cost no second read.
    record = statistics.bytes_read // max(statistics.reads - statistics.prefetch.used, 1)
    assert statistics.bytes_read % record == 0


async def test_page_cache_leaves_the_slots_alone(demo: Path) -> None:
    warm = await run(demo, destination="pagecache")
    off = await run(demo, destination="off")
    assert warm.prefetch.begun > 0
    assert (warm.hits, warm.misses) == (off.hits, off.misses)


async def test_profile_measures_windows(demo: Path) -> None:
    prefetch = (await run(demo, profile=True)).prefetch
    assert prefetch.windows
    assert all(seconds > 0 for seconds in prefetch.windows.values())


async def test_deterministic_residency(demo: Path) -> None:
    first = await run(demo, deterministic=True)
    second = await run(demo, deterministic=True)
    assert first.prefetch.begun > 0
    for name in ("hits", "misses", "reads", "bytes_read"):
        assert getattr(first, name) == getattr(second, name)


@pytest.mark.one_loop
async def test_deterministic_guesses_do_not_depend_on_the_drive(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    for bandwidth in (1e6, 1e12):
        monkeypatch.setattr(IoLoop, "bandwidth", bandwidth)
        begun.append((await run(demo, admission="idle", deterministic=True)).prefetch.begun)
    assert begun[0] == begun[1] > 0


async def test_cancelled_request_leaves_no_guesses(demo: Path) -> None:
    config = PrefetchConfig(admission="always", width=4.0)
    async with await Engine.open(demo, slots=16, prefetch=config) as engine:
        for tokens in (1, 3, 7):
            stream = engine.stream(PROMPT, max_tokens=500, ignore_eos=True)
            for _ in range(tokens):
                await anext(stream)
            await stream.aclose()
        await engine.generate(PROMPT, max_tokens=1)
        queue = engine._core.loop._queue
        for _ in range(200):
            if not len(queue) and not engine._core.loop._reads:
                break
            await asyncio.sleep(0.005)
        assert not len(queue)
        engine.check_integrity(idle=True)


BAD: list[dict[str, Any]] = [
    {"distances": (-1,)},
    {"distances": (1, 1)},
    {"distances": (17,)},
    {"distances": (1.5,)},
    {"width": 0},
    {"width": 17},
    {"min_score": -0.1},
    {"min_score": 1.1},
    {"layer_budget": -1},
    {"forward_budget": -1},
    {"staging_bytes": -1},
    {"destination": "moon"},
    {"admission": "sometimes"},
    {"order": "random"},
    {"lookahead_price": math.inf},
    {"deterministic": True, "destination": "staging"},
    {"deterministic": True, "destination": "pagecache"},
    {"lookahead_price": -1.0},
    {"layers": "1-"},
    {"layers": "a"},
    {"layers": ""},
]


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        PrefetchConfig(**settings)


def test_layer_lists() -> None:
    assert parse_layers(None) is None
    assert parse_layers("0-3,5") == frozenset({0, 1, 2, 3, 5})
    assert parse_layers(" 7 ") == frozenset({7})


# -- rules ------------------------------------------------------------------------------------


def test_governor_grants_what_the_drive_reads_meanwhile() -> None:
    governor = Governor(2)
    assert governor.grant(0, 1e9) == 0.0  # nothing is known yet
    governor.window(0, 0.002)
    assert governor.grant(0, 1e9) == pytest.approx(2e6)
    assert governor.grant(1, 1e9) == 0.0


def test_governor_backs_off_when_guesses_cost_more_than_they_bring() -> None:
    governor = Governor(1)
    for _ in range(64):
        governor.delayed(100)
        governor.judge(0, used=True, nbytes=50)
    assert governor.share == 0.5
    for _ in range(64 * 20):
        governor.judge(0, used=True, nbytes=50)
    assert governor.share == 1.0


def test_governor_switches_a_useless_layer_off_and_tries_again() -> None:
    governor = Governor(2)
    for _ in range(40):
        governor.judge(1, used=False, nbytes=1)
    assert governor.switched_off == (1,)
    assert governor.wants(0)
    assert not governor.wants(1)
    for _ in range(Governor.RETRY + 1):
        governor.wants(0)
    assert governor.wants(1)


@pytest.mark.parametrize(("with_guesses", "pays"), [(0.8, True), (1.2, False), (1.0, True)])
def test_trial_finds_the_faster_way_and_tries_the_other_seldom(
    with_guesses: float, pays: bool
) -> None:
    trial = Trial()
    spent = {True: 0, False: 0}
    for count in range(3000):
        if count >= 500:
            spent[trial.on] += 1
        trial.token(with_guesses if trial.on else 1.0, 0.3)
    assert trial.verdict is pays
    assert spent[not pays] / sum(spent.values()) < 0.06
    assert trial.seconds == pytest.approx((with_guesses, 1.0))


def test_trial_notices_that_the_machine_has_changed() -> None:
    trial = Trial()
    for _ in range(1000):
        trial.token(0.8 if trial.on else 1.0, 0.3)
    assert trial.verdict
    for _ in range(3000):
        trial.token(1.5 if trial.on else 1.0, 0.3)
    assert not trial.verdict


def test_nothing_is_tried_while_tokens_hardly_wait() -> None:
    trial = Trial()
    for _ in range(Trial.LEG):
        trial.token(1.0, 0.04)
    assert not trial.on
    assert not trial.verdict
    for _ in range(50 * Trial.LEG):  # more than with guesses, and still too little to try
        trial.token(1.0, 0.09)
        assert not trial.on
    for _ in range(Trial.LEG):
        trial.token(1.0, 0.3)
    assert trial.on
    for _ in range(Trial.LEG * Trial.FIRST):
        trial.token(0.8 if trial.on else 1.0, 0.06 if trial.on else 0.3)
    assert trial.verdict  # what is left to wait is little because of the guesses


def test_a_verdict_outlasts_times_without_waiting() -> None:
    trial = Trial()
    for _ in range(1000):
        trial.token(1.5 if trial.on else 1.0, 0.3)
    assert not trial.verdict
    for _ in range(3 * Trial.LEG):
        trial.token(1.0, 0.0)
    for _ in range(2 * Trial.LEG):
        trial.token(1.0, 0.3)
    assert not trial.verdict
    assert not trial.on
