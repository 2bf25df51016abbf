"""Noise that makes predictions on synthetic checkpoints as good as a trained model's, no better."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from scripts.make_checkpoint import Shape, make_checkpoint, read_routing, route
from scripts.synthetic.routing import DEMO

from moestream import Engine, EngineClosed, Generation, InvalidRequest, PrefetchConfig, Statistics
from moestream.runtime.bench.routing import MEASURED, Fit, fit_noise, noisy_gate, noisy_lookahead
from moestream.runtime.tracefile import read_trace

SHAPE = Shape(layers=12, top_k=6, hidden=256, inner=64, heads=2, kv_heads=1, head_size=64)
TOKENS = 80
LOOKING = PrefetchConfig(distances=(0, 1, 2, 3), width=2.0, predict_only=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape, routed = route(SHAPE, DEMO)
    directory = tmp_path_factory.mktemp("noise") / "model"
    return make_checkpoint(directory, shape, routed=routed, quiet=True)


async def walk(
    checkpoint: Path,
    prefetch: PrefetchConfig,
    trace: Path,
    recall: Any = None,
    *,
    seed: int = 0,
    tokens: int = TOKENS,
) -> tuple[Generation, Statistics, dict[int, Fit]]:
    """Decode the recorded steps, with noise if a recall is given."""
    first, _ = read_routing(checkpoint)
    fits: dict[int, Fit] = {}
    async with await Engine.open(checkpoint, slots=16, prefetch=prefetch, trace=trace) as engine:
        if recall is not None:
            fits = await asyncio.wrap_future(noisy_lookahead(engine, recall, seed=seed))
        result = await engine.generate([first], max_tokens=tokens, ignore_eos=True)
        return result, engine.statistics(), fits


def routing(trace: Path) -> list[tuple[int, tuple[int, ...]]]:
    return [(r.layer, tuple(sorted(r.experts))) for r in read_trace(trace).routes]


@pytest.mark.one_loop
async def test_recall_is_what_was_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    clean, _, noisy = tmp_path / "off.json", tmp_path / "clean.json", tmp_path / "noisy.json"
    plain, seen, _ = await walk(checkpoint, LOOKING, clean)
    perfect = seen.prefetch.recall
    assert set(perfect) == {0, 1, 2, 3}
    assert all(shares == (1.0, 1.0) for shares in perfect.values()), "nothing to learn from it"
    result, seen, fits = await walk(checkpoint, LOOKING, noisy, MEASURED)
    for distance, (top_k, twice) in MEASURED.items():
        fit = fits[distance]
        assert fit.at_top_k == pytest.approx(top_k, abs=0.01)
        assert seen.prefetch.recall[distance][0] == pytest.approx(top_k, abs=0.03)
        assert seen.prefetch.recall[distance][1] == pytest.approx(fit.at_twice_top_k, abs=0.025)
        assert fit.at_twice_top_k == pytest.approx(twice, abs=0.03), "not fitted, but close"
    assert [fits[d].sigma for d in (0, 1, 2, 3)] == sorted(fit.sigma for fit in fits.values())
    assert result.tokens == plain.tokens
    assert routing(noisy) == routing(clean)
    errors_differ(noisy, read_routing(checkpoint)[1])


def errors_differ(trace: Path, chosen: np.ndarray) -> None:
    """Between tokens, layers and distances."""
    missed: dict[tuple[int, int], list[int]] = {}
    for seen in read_trace(trace).predictions:
        # Forward 1 is the prompt of one token, which is step 0.
        wanted = set(chosen[(seen.forward - 1) % len(chosen), seen.layer].tolist())
        count = len(wanted - set(seen.experts[:6]))
        missed.setdefault((seen.layer, seen.distance), []).append(count)
    series = [np.array(counts) for counts in missed.values()]
    assert len(series) == 12 + 11 + 10 + 9
    assert all(counts.std() > 0.3 for counts in series), "some tokens more than others"
    pairs = np.corrcoef(np.stack([counts[: TOKENS - 1] for counts in series]))
    others = pairs[~np.eye(len(series), dtype=bool)]
    assert abs(others.mean()) < 0.1
    assert others.max() < 0.6


@pytest.mark.one_loop
async def test_the_seed_makes_the_noise(checkpoint: Path, tmp_path: Path) -> None:
    config = PrefetchConfig(distances=(1,), predict_only=True)
    seen = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        trace = tmp_path / f"{name}.json"
        await walk(checkpoint, config, trace, {1: (0.7, 0.9)}, seed=seed, tokens=8)
        seen[name] = [p.experts for p in read_trace(trace).predictions]
    assert seen["a"] == seen["b"]
    assert seen["a"] != seen["c"]


@pytest.mark.one_loop
async def test_reads_on_noisy_guesses_change_no_token(checkpoint: Path, tmp_path: Path) -> None:
    first, chosen = read_routing(checkpoint)
    config = PrefetchConfig(deterministic=True, embedding=True, distances=(1, 2))
    recall = {**MEASURED, 99: (0.6, 0.8)}
    result, seen, fits = await walk(checkpoint, config, tmp_path / "trace.json", recall)
    assert set(fits) == {1, 2, 99}
    assert seen.prefetch.begun > 100
    assert seen.prefetch.wasted > 0
    assert seen.prefetch.recall[99][0] == pytest.approx(0.6, abs=0.05)
    steps = (np.arange(TOKENS) + 1) % len(chosen)
    assert result.tokens == tuple((first + steps).tolist())


async def refused(checkpoint: Path, message: str, recall: Any = MEASURED, **options: Any) -> None:
    async with await Engine.open(checkpoint, **options) as engine:
        with pytest.raises(InvalidRequest, match=message):
            await asyncio.wrap_future(noisy_lookahead(engine, recall))
        await engine.generate("Hello", max_tokens=2)


async def test_engines_that_cannot_be_made_noisy(checkpoint: Path, demo: Path) -> None:
    ahead = PrefetchConfig(distances=(1, 2))
    await refused(checkpoint, "nothing is predicted", slots=16)
    await refused(checkpoint, r"distances \[2\]", {1: (0.7, 0.9)}, slots=16, prefetch=ahead)
    await refused(checkpoint, "above chance", {1: (0.01, 1), 2: (1, 1)}, slots=16, prefetch=ahead)
    await refused(demo, "orthogonal embeddings", slots=16, prefetch=ahead)


async def test_a_second_time_and_a_closed_engine(checkpoint: Path) -> None:
    async with await Engine.open(checkpoint, slots=16, prefetch=PrefetchConfig()) as engine:
        await asyncio.wrap_future(noisy_lookahead(engine))
        with pytest.raises(InvalidRequest, match="used once"):
            await asyncio.wrap_future(noisy_lookahead(engine))
    with pytest.raises(EngineClosed):
        done: Future[Any] = noisy_lookahead(engine)
        done.result()


# -- a gate by itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [0.9, 0.6, 0.3])
def test_a_fit_meets_the_recall(wanted: float) -> None:
    scores = np.random.default_rng(0).standard_normal((2000, 64)).astype(np.float32)
    fit = fit_noise(scores, 6, (wanted, 1.0))
    assert fit.at_top_k == pytest.approx(wanted, abs=0.01)
    assert fit.at_top_k < fit.at_twice_top_k < 1
    other = scores + np.random.default_rng(9).normal(0, fit.sigma, scores.shape)
    best, again = (np.argsort(-s, axis=1)[:, :6] for s in (scores, other))
    found = sum(len(set(a) & set(b)) for a, b in zip(best.tolist(), again.tolist(), strict=True))
    assert found / best.size == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize("kind", ["linear", "bias", "quantized"])
def test_a_noisy_gate_has_noise_of_that_size(kind: str) -> None:
    gate: Any = nn.Linear(256, 64, bias=kind == "bias")
    if kind == "quantized":
        gate = gate.to_quantized(64, 8)
    before = [np.array(value) for _, value in sorted(gate.parameters().items())]
    noisy = noisy_gate(gate, 2.5, seed=4)
    x = mx.where(mx.random.normal((500, 256), key=mx.random.key(1)) > 0, 1.0, -1.0)
    difference = np.array(noisy(x) - gate(x))
    assert difference.std() == pytest.approx(2.5, rel=0.05)
    assert abs(difference.mean()) < 0.1
    assert np.array_equal(np.array(noisy_gate(gate, 2.5, seed=4)(x)), np.array(noisy(x)))
    assert not np.allclose(np.array(noisy_gate(gate, 2.5, seed=5)(x)), np.array(noisy(x)))
    after = [np.array(value) for _, value in sorted(gate.parameters().items())]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
