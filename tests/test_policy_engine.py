"""The policies in an engine: the same tokens as ever, and the decisions that a replay makes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from moestream import Engine, InvalidRequest
from moestream.runtime.policies import DEFAULT_POLICY, POLICIES, PolicyName
from moestream.runtime.replay_policies import POLICIES as REPLAYED
from moestream.runtime.replay_policies import policies_of, replay_routes
from moestream.runtime.trace_records import Trace
from moestream.runtime.tracefile import read_trace

PROMPTS = (
    "Tell me a story about a cat that lives in a house by the sea and likes the rain.",
    "Why do birds sing?",
)


async def run(
    demo: Path, slots: int, policy: PolicyName, trace: Path | None
) -> list[tuple[int, ...]]:
    """Tokens of both prompts, one after the other in one engine."""
    tokens = []
    async with await Engine.open(demo, slots=slots, policy=policy, trace=trace) as engine:
        for prompt in PROMPTS:
            result = await engine.generate(prompt, max_tokens=12, ignore_eos=True)
            tokens.append(result.tokens)
        engine.check_integrity(idle=True)
        statistics = engine.statistics()
    assert trace is None or statistics.trace_events_dropped == 0
    return tokens


def replayed(trace: Trace, slots: int, policy: str) -> tuple[int, dict[int, list[int]]]:
    """Hits, and what each layer has evicted."""
    experts = {group: layer.experts for group, layer in trace.layers.items()}
    made = policies_of(REPLAYED[policy], trace.routes, experts)
    hits, gone = 0, {group: list[int]() for group in experts}
    steps = replay_routes(trace.routes, dict.fromkeys(experts, slots), made)
    for route, (found, evicted) in zip(trace.routes, steps, strict=True):
        hits += found
        gone[route.group] += evicted
    return hits, gone


@pytest.mark.one_loop
@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("slots", [4, 6, 40])
async def test_an_engine_evicts_what_its_replay_evicts(
    demo: Path, tmp_path: Path, slots: int, policy: PolicyName
) -> None:
    path = tmp_path / "run.trace"
    await run(demo, slots, policy, path)
    trace = read_trace(path)
    assert len(trace.layers) == 12
    assert any(len(route.experts) > slots for route in trace.routes)  # in waves
    hits, expected = replayed(trace, slots, policy)
    for group in trace.layers:
        evicted = [event.expert for event in trace.evictions if event.group == group]
        assert evicted == expected[group]
        assert len(evicted) > 20
    reads = len({(read.group, read.expert, read.asked) for read in trace.reads})
    assert hits == sum(len(route.experts) for route in trace.routes) - reads


@pytest.mark.one_loop
async def test_a_trace_names_the_hottest_last_and_tells_the_tail(
    demo: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.trace"
    async with await Engine.open(demo, slots=12, trace=path) as engine:
        for length in (1, 5, 100):  # a token, a small call, a large one
            prompt = [7 * n % 500 + 10 for n in range(length)]
            await engine.generate(prompt, max_tokens=2, ignore_eos=True)
    routes = read_trace(path).routes
    assert [r.tokens for r in routes if r.group == 0] == [1, 1, 5, 1, 100, 1]
    for route in routes:
        if route.tokens == 1:
            assert route.tail == ()
            continue
        assert len(route.tail) == min(route.tokens, 64)
        if route.tokens == 5:
            heat = Counter(expert for row in route.tail for expert in row)
            assert list(route.experts) == sorted(heat, key=lambda e: (heat[e], e))
        assert {expert for row in route.tail for expert in row} <= set(route.experts)


@pytest.mark.one_loop
async def test_every_policy_gives_the_same_tokens(demo: Path) -> None:
    everything = await run(demo, 64, "lru", None)
    for policy in POLICIES:
        assert await run(demo, 40, policy, None) == everything


async def test_an_unknown_policy_is_refused(demo: Path) -> None:
    for policy in ("belady", "", None, ["lru"]):
        with pytest.raises(InvalidRequest, match="policy="):
            await Engine.open(demo, policy=policy)  # type: ignore[arg-type]


def test_replays_know_every_policy_of_an_engine() -> None:
    assert DEFAULT_POLICY in POLICIES
    assert set(POLICIES) < set(REPLAYED)
