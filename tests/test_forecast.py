"""Hit-rate curves, costs of tokens, and what a plan promises from them."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestream import Engine
from moestream.runtime import expectations, user_cache
from moestream.runtime.expectations import drive_bandwidth
from moestream.runtime.forecast import (
    GRID,
    SYNC_SECONDS,
    Costs,
    default_curve,
    forecast,
    hit_rate,
    stack_curve,
)
from moestream.runtime.profile import (
    ENOUGH_TOKENS,
    FIRST_TOKENS,
    DecodeLog,
    Profile,
    TokenCost,
    make_profile,
)
from moestream.runtime.sizes import LayerSize
from moestream.runtime.streaming import StepCounters


def layer_of(experts: int = 64, top_k: int = 6, record: int = 1000, layer: int = 0) -> LayerSize:
    return LayerSize(layer, experts, top_k, record, record)


# -- curves -----------------------------------------------------------------------------------


def lru_hits(calls: Sequence[Sequence[int]], slots: int, *, skip: int) -> float:
    """The same by playing it through, a call as one event."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = wanted = 0
    for number, call in enumerate(calls):
        here = [expert for expert in call if expert in cache]
        if number >= skip:
            hits += len(here)
            wanted += len(call)
        for expert in here:
            cache.move_to_end(expert)
        for expert in call:
            cache[expert] = None
            cache.move_to_end(expert)
        for expert in list(cache)[: max(len(cache) - slots, 0)]:
            del cache[expert]
    return hits / wanted


@pytest.mark.parametrize("slots", [2, 4, 8, 16, 32])
def test_one_pass_gives_what_playing_through_gives(slots: int) -> None:
    draw = random.Random(1)
    weights = [1 / (expert + 1) for expert in range(32)]
    calls = []
    for _ in range(400):
        call: dict[int, None] = {}
        while len(call) < 2:
            call[draw.choices(range(32), weights)[0]] = None
        calls.append(list(call))
    curve = stack_curve(calls, 32)
    assert curve is not None
    assert curve[slots * GRID // 32] == pytest.approx(lru_hits(calls, slots, skip=100), abs=0.02)


@given(st.lists(st.lists(st.integers(0, 15), min_size=3, max_size=3, unique=True), max_size=60))
@settings(deadline=None)
def test_curves_rise(calls: list[list[int]]) -> None:
    curve = stack_curve(calls, 16)
    assert (curve is None) == (len(calls) < 16)
    if curve is not None:
        assert len(curve) == GRID + 1
        assert curve == sorted(curve)
        assert curve[0] == 0.0 and curve[-1] <= 1.0


def test_rates_between_the_points_of_a_curve() -> None:
    assert hit_rate([0.0, 0.5, 0.8], 0.25) == 0.25
    assert hit_rate([0.0, 0.5, 0.8], 0.75) == pytest.approx(0.65)
    assert hit_rate([0.0, 0.5, 0.8], 1.0) == 1.0, "a whole layer never misses"
    assert hit_rate([0.0, 0.5, 0.8], 0.0) == 0.0


# Recorded decoding: (experts, top_k), share -> hit rate of least-recently-used slots.
RECORDED: dict[str, tuple[tuple[int, int], dict[float, float]]] = {
    "Qwen3-30B-A3B": ((128, 6), {0.0625: 0.43, 0.125: 0.614, 0.25: 0.822, 0.5: 0.959}),
    "gpt-oss-120b": ((128, 2), {0.0625: 0.519, 0.125: 0.659, 0.25: 0.791, 0.5: 0.885}),
    "Gemma-4-26B-A4B": ((128, 6), {0.0625: 0.413, 0.125: 0.615, 0.25: 0.797, 0.5: 0.951}),
    "demo": ((64, 6), {0.125: 0.196, 0.25: 0.382, 0.375: 0.53, 0.5: 0.66, 0.75: 0.86}),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_default_promises_little_more_than_was_recorded(name: str) -> None:
    (experts, top_k), rates = RECORDED[name]
    curve = default_curve(layer_of(experts, top_k))
    for share, recorded in rates.items():
        assert recorded - 0.3 < hit_rate(curve, share) < recorded + 0.06


# -- the forecast -----------------------------------------------------------------------------


def test_a_token_is_computing_and_what_is_read() -> None:
    layers = [layer_of(record=1000), layer_of(record=3000, layer=1)]
    curve = [0.0, 0.5, 1.0]
    said = forecast(layers, [32, 32], Costs(0.010, 1e-6, 0.0), {0: curve, 1: curve}, ["so"])
    assert said.hit_rate == 0.5
    assert said.bytes_per_token == 3 * 1000 + 3 * 3000
    assert said.read_seconds == pytest.approx(0.012)
    assert said.tokens_per_second == pytest.approx(1 / 0.022)
    told = said.to_json()
    assert told["assumptions"] == ["so"]
    assert json.loads(json.dumps(told)) == told


def test_whole_layers_read_nothing_and_need_no_synchronisation() -> None:
    layers = [layer_of(), layer_of(layer=1)]
    said = forecast(layers, [64, 64], Costs(0.010, 1.0, 1.0), {})
    assert (said.hit_rate, said.bytes_per_token, said.read_seconds) == (1.0, 0.0, 0.0)
    assert said.compute_seconds == 0.010 - 2 * SYNC_SECONDS
    half = forecast(layers, [64, 16], Costs(0.010, 1.0, 1.0), {1: [0.0, 1.0]})
    assert half.hit_rate == 0.25
    assert half.bytes_per_token == 0.75 * 6 * 1000


def test_a_wait_costs_something_however_few_the_bytes() -> None:
    said = forecast([layer_of(top_k=1)], [16], Costs(0.010, 0.0, 0.004), {0: [0.0, 1.0]})
    assert said.read_seconds == pytest.approx(0.75 * 0.004)


def test_layers_without_a_curve_of_their_own_get_the_mean() -> None:
    layers = [layer_of(layer=number) for number in range(3)]
    curves = {0: [0.0, 0.2, 1.0], 1: [0.0, 0.6, 1.0]}
    said = forecast(layers, [32] * 3, Costs(0.01, 0.0, 0.0), curves)
    assert said.hit_rate == pytest.approx(0.4)


# -- profiles ---------------------------------------------------------------------------------


def test_decoded_tokens_are_noted_and_nothing_else() -> None:
    times = iter([float(n) for n in range(100)])
    log = DecodeLog(1, clock=lambda: next(times))
    counters = StepCounters()
    log.forward(counters, single=False)  # a prompt
    for number in range(FIRST_TOKENS + 3):
        log.forward(counters, single=True)
        counters.stall_seconds += 0.25
        counters.misses += number
        counters.bytes_read += 1000
    assert log.tokens == type(log.tokens)(
        [TokenCost(1.0, 0.25, n, 1000) for n in range(FIRST_TOKENS, FIRST_TOKENS + 2)],
        log.tokens.maxlen,
    )
    log.end()
    log.forward(counters, single=True)
    assert len(log.tokens) == 2, "the pause between two requests is no token"


def filled_log(layers: Sequence[LayerSize], tokens: int, misses: int = 3) -> DecodeLog:
    log = DecodeLog(len(layers))
    for number in range(tokens):
        slow = 10.0 if number == 5 else 0.0  # another program
        nbytes = misses * 1000 * len(layers)
        log.tokens.append(TokenCost(0.020 + slow, 0.005, misses * len(layers), nbytes))
        for group in range(len(layers)):
            log.route(group, [number % 8, 8 + number % 4])
    return log


def test_a_profile_leaves_out_what_disturbed_single_tokens() -> None:
    layers = [layer_of(), layer_of(layer=7)]
    profile = make_profile(filled_log(layers, 64), layers, whole=5)
    assert profile is not None
    assert profile.costs.compute_seconds == pytest.approx(0.015 + 5 * SYNC_SECONDS)
    waits = 2 * (1 - 0.5**6)
    read = 6000 * profile.costs.byte_seconds + waits * profile.costs.wait_seconds
    assert read == pytest.approx(0.005)
    assert set(profile.curves) == {0, 7}
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_curves_are_those_of_a_policy_that_misses_less() -> None:
    layers = [layer_of(), layer_of(layer=7)]
    log = filled_log(layers, 64)
    plain = make_profile(log, layers, 0)
    assert plain is not None
    said = sum(6 * (1 - hit_rate(curve, 8 / 64)) for curve in plain.curves.values())
    log.tokens.clear()
    log.tokens.extend([TokenCost(0.02, 0.005, misses, 6000) for misses in (3, 5)] * 32)
    better = make_profile(log, layers, 0, [8, 8])
    assert better is not None
    told = sum(6 * (1 - hit_rate(curve, 8 / 64)) for curve in better.curves.values())
    assert told == pytest.approx(4, abs=0.01)
    assert 0.5 * said < 4 < said
    assert all(curve[-1] == 1.0 for curve in better.curves.values())
    log.tokens.extend([TokenCost(0.02, 0.005, 24, 6000)] * 640)  # pressure took slots away
    assert make_profile(log, layers, 0, [8, 8]).curves == plain.curves  # type: ignore[union-attr]


def test_few_tokens_make_no_profile() -> None:
    layers = [layer_of()]
    assert make_profile(filled_log(layers, ENOUGH_TOKENS - 1), layers, 0) is None
    assert make_profile(filled_log(layers, ENOUGH_TOKENS), layers, 0) is not None


def test_a_run_without_reads_keeps_what_others_have_learnt() -> None:
    layers = [layer_of(), layer_of(layer=1)]
    reading = make_profile(filled_log(layers, 64), layers, 0)
    still = make_profile(filled_log(layers[:1], 64, misses=0), layers[:1], 1)
    assert reading is not None and still is not None
    both = still.completed(reading)
    assert both.costs.byte_seconds == reading.costs.byte_seconds > 0
    assert both.costs.compute_seconds == still.costs.compute_seconds
    assert set(both.curves) == {0, 1}
    assert still.completed(None) == still


@pytest.mark.parametrize(
    "value", [None, [], {}, {"version": 2}, {"version": 1, "compute_seconds": "x"}]
)
def test_a_damaged_profile_is_as_good_as_none(value: Any) -> None:
    assert Profile.from_json(value) is None


# -- what is kept between runs ----------------------------------------------------------------


def test_kept_values_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESTREAM_CACHE_DIR", str(tmp_path / "kept"))
    assert user_cache.load("drive", "a/b c") is None
    assert user_cache.save("drive", "a/b c", {"x": [1, 2]})
    assert user_cache.load("drive", "a/b c") == {"x": [1, 2]}
    assert user_cache.load("profile", "a/b c") is None
    (file,) = (tmp_path / "kept").iterdir()
    file.write_text("{")
    assert user_cache.load("drive", "a/b c") is None


def test_nothing_is_kept_when_that_is_asked_or_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESTREAM_CACHE_DIR", "")
    assert not user_cache.save("drive", "a", 1)
    assert user_cache.load("drive", "a") is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOESTREAM_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert not user_cache.save("drive", "a", 1)
    monkeypatch.delenv("MOESTREAM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert user_cache.cache_folder() == tmp_path / "xdg" / "moestream"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_cache.cache_folder() == Path.home() / "Library" / "Caches" / "moestream"


def test_a_model_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(bytes(10))
    first = user_cache.model_key(tmp_path, variant="cpu")
    assert first == user_cache.model_key(tmp_path, variant="cpu")
    assert first != user_cache.model_key(tmp_path, variant="gpu")
    (tmp_path / "a.safetensors").write_bytes(bytes(11))
    assert first != user_cache.model_key(tmp_path, variant="cpu")


async def test_an_engine_keeps_its_profile(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESTREAM_CACHE_DIR", str(tmp_path))
    async with await Engine.open(demo, slots=16) as engine:
        await engine.generate("Hello", max_tokens=ENOUGH_TOKENS, ignore_eos=True)
    assert os.listdir(tmp_path) == [], "the first tokens do not count"
    async with await Engine.open(demo, slots=16) as engine:
        for _ in range(2):
            await engine.generate("Hello", max_tokens=ENOUGH_TOKENS, ignore_eos=True)
        rate = engine.statistics().hit_rate
    (name,) = os.listdir(tmp_path)
    monkeypatch.setattr(user_cache, "_name", lambda kind, key: name)
    profile = Profile.from_json(user_cache.load("profile", "this one"))
    assert profile is not None
    assert sorted(profile.curves) == list(range(12))
    rates = [hit_rate(curve, 16 / 64) for curve in profile.curves.values()]
    assert sum(rates) / 12 == pytest.approx(rate, abs=0.15)


# -- drives -----------------------------------------------------------------------------------

CELLS: dict[str, object] = {
    "cells": [
        {"mode": mode, "size": size, "depth": depth, "bandwidth": rate}
        for mode, size, depth, rate in (
            ("direct", 65536, 1, 1.0),
            ("direct", 65536, 8, 2.0),
            ("direct", 2 << 20, 8, 3.0),
            ("buffered", 65536, 8, 4.0),
        )
    ]
}


@pytest.mark.parametrize(
    ("direct", "size", "depth", "expected"),
    [
        (True, 50_000, 1.2, 1.0),
        (True, 50_000, 5.0, 2.0),
        (True, 3 << 20, 2.0, 3.0),
        (False, 3 << 20, 2.0, 4.0),
    ],
)
def test_the_reads_most_like_ours_count(
    direct: bool, size: int, depth: float, expected: float
) -> None:
    assert drive_bandwidth(CELLS, direct, size, depth) == expected


@pytest.mark.parametrize("report", [None, {}, {"cells": []}, {"cells": [{"mode": "direct"}]}, 7])
def test_a_damaged_measurement_is_as_good_as_none(report: Any) -> None:
    assert drive_bandwidth(report, True, 65536, 1.0) is None


def test_a_measured_drive_is_found_from_any_file_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESTREAM_CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "a").mkdir()
    assert expectations.remember_drive(tmp_path / "a", CELLS)
    assert user_cache.load("drive", user_cache.drive_key(tmp_path / "other")) == CELLS


def test_weights_have_a_rate() -> None:
    assert 1e6 < expectations.weight_rate() < 1e14
