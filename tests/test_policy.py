"""Eviction policies by their definitions, under any use, and on a piece of recorded routing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestream.runtime.policies import DEFAULT_POLICY, POLICIES
from moestream.runtime.policy import LeastRecentlyUsed, Policy
from moestream.runtime.policy_frequency import DecayedFrequency, Successors
from moestream.runtime.replay_policies import POLICIES as REPLAYED
from moestream.runtime.replay_policies import policies_of, replay_layer, replay_routes
from moestream.runtime.residency import NONE, Residency
from moestream.runtime.tracefile import read_trace

EXPERTS = 8
WIDTH = 3

call = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=WIDTH, unique=True)
calls = st.lists(call, min_size=1, max_size=30)
names = st.sampled_from(sorted(POLICIES))


def holding(policy: Policy, experts: Sequence[int]) -> Policy:
    for expert in experts:
        policy.added(expert)
    return policy


def tell(policy: Policy, told: Sequence[Sequence[int]]) -> list[int]:
    """Route the calls; the ranking behind the last one, of all experts."""
    for experts in told:
        policy.routed(experts)
    return list(policy.coldest())


# -- by definition --------------------------------------------------------------------------------


@given(calls)
def test_lru_goes_by_the_last_use(told: list[list[int]]) -> None:
    policy = holding(LeastRecentlyUsed(), range(EXPERTS))
    uses = [expert for experts in told for expert in experts]
    last = {expert: at for at, expert in enumerate(uses)}
    assert tell(policy, told) == sorted(range(EXPERTS), key=lambda e: (last.get(e, -1), e))


def frequency(told: Sequence[Sequence[int]], expert: int, half_life: float) -> float:
    """The sum of aged uses; a later place in a call is worth a little more."""
    return sum(
        math.exp2((at + 1 - len(told)) / half_life) * (1 + 1e-10 * experts.index(expert))
        for at, experts in enumerate(told)
        if expert in experts
    )


def is_order_of(ranking: Sequence[int], worth: dict[int, float]) -> bool:
    """Whether the ranking is the order of worth, but for what rounding may turn round."""
    return all(worth[a] <= worth[b] + 1e-12 for a, b in pairwise(ranking))


@given(calls, st.sampled_from([1.0, 4.0, 16.0]))
def test_decayed_frequency_is_the_sum_of_aged_uses(told: list[list[int]], half_life: float) -> None:
    policy = holding(DecayedFrequency(EXPERTS, half_life), range(EXPERTS))
    ranking = tell(policy, told)
    worth = {e: frequency(told, e, half_life) for e in range(EXPERTS)}
    others = EXPERTS - len(told[-1])
    assert ranking[others:] == told[-1]
    assert is_order_of(ranking[:others], worth)


@given(calls, st.lists(call, max_size=5), st.integers(0, 30))
def test_successors_add_what_followed_this_token(
    told: list[list[int]], tail: list[list[int]], at: int
) -> None:
    """By definition: a list of pairs of tokens, counted anew; ``tail`` is of a prompt."""
    policy = holding(Successors(EXPERTS, WIDTH), range(EXPERTS))
    before, behind = told[:at], told[at:] or [[0]]
    tell(policy, before)
    policy.tokens(tail)
    ranking = tell(policy, behind)
    pairs = [*pairwise(before), *pairwise(tail + behind)]
    now = behind[-1]
    seen = sum(len(set(first) & set(now)) for first, _ in pairs)
    worth = {
        e: frequency(before + behind, e, Successors.HALF_LIFE)
        + Successors.PULL
        * sum(len(set(first) & set(now)) for first, second in pairs if e in second)
        / (seen + Successors.DOUBT)
        for e in range(EXPERTS)
    }
    others = EXPERTS - len(now)
    assert ranking[others:] == now
    assert is_order_of(ranking[:others], worth)


def test_rows_of_successors_are_halved_lane_by_lane() -> None:
    chance = Random(0)
    policy = Successors(EXPERTS, WIDTH)
    rows = [[0] * EXPERTS for _ in range(EXPERTS)]
    seen = [0] * EXPERTS
    last: list[int] = []
    for _ in range(2000):
        token = chance.sample(range(EXPERTS), WIDTH)
        for source in last:
            if seen[source] == Successors.MOST:
                seen[source] //= 2
                rows[source] = [count // 2 for count in rows[source]]
            seen[source] += 1
            for expert in token:
                rows[source][expert] += 1
        policy.routed(token)
        last = token
    assert policy._seen == seen
    assert max(map(max, rows)) > 60
    assert policy._rows == [sum(n << 16 * e for e, n in enumerate(row)) for row in rows]


def test_tokens_of_several_requests_follow_nobody() -> None:
    policy = Successors(EXPERTS, 1)
    tell(policy, [[0], [1], [2, 3], [1]])  # the third call is of two requests
    assert policy._seen[:4] == [1, 0, 0, 0]
    policy.tokens([[0], [2]])
    tell(policy, [[0, 2], [3]])  # a prompt, and the token behind it
    assert policy._seen[:4] == [2, 0, 1, 0]


def test_what_followed_decides_between_equals() -> None:
    policy = holding(Successors(EXPERTS, 1), range(4))
    # 1 and 2 are used alike; behind 0 it is 2 that comes.
    for _ in range(3):
        tell(policy, [[0], [2], [3], [1]])
    assert tell(policy, [[0]]).index(2) > tell(policy, [[0]]).index(1)
    plain = holding(DecayedFrequency(EXPERTS), range(4))
    for _ in range(3):
        tell(plain, [[0], [2], [3], [1]])
    assert tell(plain, [[0]]).index(2) < tell(plain, [[0]]).index(1)


def test_a_prompt_counts_once_and_is_no_token() -> None:
    policy = Successors(EXPERTS, 2)
    tell(policy, [[0, 1]])
    policy.tokens([])  # a prompt begins, and its tokens are not on record
    tell(policy, [[2, 3, 4, 5], [6, 7], [0, 1]])
    assert policy._seen == [0] * 6 + [1, 1]
    assert policy._weight[2] == pytest.approx(policy._weight[5])


@pytest.mark.parametrize("width", [257, 258, 300])
def test_what_followed_fits_its_lane_at_every_width(width: int) -> None:
    policy = Successors(512, width)
    holding(policy, range(512))
    token = list(range(512 - width, 512))  # the last lane has none behind it
    for _ in range(5):
        policy.tokens([token] * 64)
        tell(policy, [token])
    assert sorted(policy.coldest()) == sorted(policy.order(list(range(512)))) == list(range(512))
    assert (sum(policy._seen) > 0) == (width == 257)


@pytest.mark.parametrize("name", ["lfu-decay", "successors", "neighbours"])
def test_misses_count_like_hits(name: str) -> None:
    policy = POLICIES[name](EXPERTS, 1)  # type: ignore[index]
    for expert in (5, 5, 5, 1):
        policy.routed([expert])
    for expert in (1, 5):  # only now have they got slots
        policy.added(expert)
    policy.routed([2])
    assert list(policy.coldest()) == [1, 5]


@pytest.mark.parametrize("name", ["lfu-decay", "successors", "neighbours"])
def test_frequency_is_kept_over_very_many_calls(name: str) -> None:
    policy = holding(POLICIES[name](EXPERTS, 1), (1, 2, 3))  # type: ignore[index]
    for _ in range(20_000):
        policy.routed([1])
    policy.routed([2])
    policy.routed([0])
    assert list(policy.coldest()) == [3, 2, 1]


def test_the_heat_of_earlier_runs_decides_until_something_is_used() -> None:
    policy = DecayedFrequency(4, half_life=4.0)
    policy.seed([1.0, 8.0, 4.0, 0.0])
    holding(policy, (0, 1, 2))
    policy.routed([3])
    assert list(policy.coldest()) == [0, 2, 1]
    policy.routed([0])
    policy.routed([3])
    assert list(policy.coldest()) == [2, 1, 0]
    policy.seed([0.0] * 4)


# -- under any use --------------------------------------------------------------------------------


@given(names, st.data())
def test_books_balance_and_rules_hold_under_any_use(name: str, data: st.DataObject) -> None:
    slots, reserve = 5, 2
    residency = Residency(EXPERTS, slots, POLICIES[name], reserve=reserve)  # type: ignore[index]
    pinned: list[list[int]] = []
    last_use: dict[int, int] = {}
    now = 0
    for _ in range(data.draw(st.integers(1, 40))):
        residency.evicted.clear()
        kind = data.draw(st.sampled_from(["call", "call", "release", "guess", "touch", "preload"]))
        expert = data.draw(st.integers(0, EXPERTS - 1))
        held = [e for e in range(EXPERTS) if residency.slot(e) != NONE]
        if kind == "call":
            wanted = data.draw(call)
            if not residency.fits(wanted):
                continue
            there = {e for e in wanted if residency.slot(e) != NONE}
            got = residency.acquire(wanted)
            now += 1
            assert sorted(got.reads) == sorted(set(wanted) - there)
            assert not {event.expert for event in residency.evicted} & set(wanted)
            last_use.update(dict.fromkeys(wanted, now))
            pinned.append(got.slots)
            for read in got.reads:
                if data.draw(st.booleans()):
                    residency.published(read)
                else:
                    residency.failed(read)
        elif kind == "release" and pinned:
            residency.release(pinned.pop())
        elif kind == "guess" and residency.slot(expert) == NONE:
            room = residency.room()
            if residency.guess(expert) != NONE:
                assert room > reserve
                for event in residency.evicted:
                    assert last_use.get(event.expert, 0) < now or event.unused
                residency.published(expert)
        elif kind == "touch" and expert in held:
            residency.touch(expert)
            assert list(residency._policy.coldest())[-1] == expert
        elif kind == "preload":
            free = slots - len(held)
            if residency.preload(expert) != NONE:
                assert free and not residency.evicted
                residency.published(expert)
        residency.check_integrity()
    for slots_of in pinned:
        residency.release(slots_of)
    residency.check_integrity(idle=True)


@given(names, calls, st.integers(1, EXPERTS))
def test_decisions_depend_on_the_routing_alone(
    name: str, told: list[list[int]], slots: int
) -> None:
    routing = [tuple(experts) for experts in told]
    first, second = (
        replay_layer(routing, slots, REPLAYED[name](routing, EXPERTS, WIDTH)) for _ in range(2)
    )
    assert first == second


def test_a_guess_passes_over_what_was_just_used_once() -> None:
    """A frequency policy ranks it lowest, but it may be used again at once."""
    residency = Residency(EXPERTS, 4, POLICIES["lfu-decay"], reserve=1)
    for experts in ([0], [1], [0], [1], [2], [3], [2], [0], [1], [4]):
        got = residency.acquire(experts)
        for expert in got.reads:
            residency.published(expert)
        residency.release(got.slots)
    assert next(iter(residency._policy.coldest())) == 2  # 3 has gone for 4
    residency.evicted.clear()
    assert residency.guess(7) != NONE
    assert [event.expert for event in residency.evicted] == [2]
    assert residency.resident(4)


# -- on recorded routing --------------------------------------------------------------------------

DEMO_ROUTES = Path(__file__).parent / "data" / "demo.route.csv.gz"
"""Three layers of the demo model that answers held-out questions."""


def hits(name: str, slots: int) -> int:
    trace = read_trace(DEMO_ROUTES)
    experts = {group: layer.experts for group, layer in trace.layers.items()}
    policies = policies_of(REPLAYED[name], trace.routes, experts)
    steps = replay_routes(trace.routes, dict.fromkeys(experts, slots), policies)
    return sum(n for r, (n, _) in zip(trace.routes, steps, strict=True) if r.tokens == 1)


COUNTS = {
    "belady": [1752, 3192, 4387],
    "fifo": [1091, 1857, 3281],
    "lfu-decay": [1182, 2100, 3533],
    "lru": [1093, 1923, 3374],
    "neighbours": [1176, 2139, 3551],
    "successors": [1184, 2110, 3529],
}
"""With 8, 16 and 32 slots of 64, in 286 tokens of decode."""


@pytest.mark.parametrize("name", sorted(REPLAYED))
def test_hits_on_recorded_routing(name: str) -> None:
    assert [hits(name, slots) for slots in (8, 16, 32)] == COUNTS[name]


def test_the_default_beats_lru_wherever_it_was_measured() -> None:
    for ours, lru, best in zip(
        COUNTS[DEFAULT_POLICY], COUNTS["lru"], COUNTS["belady"], strict=True
    ):
        assert lru < ours < best
