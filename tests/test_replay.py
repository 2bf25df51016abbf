"""Replays: policies, the clock, and the command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moestream.runtime.cli import app
from moestream.runtime.errors import InvalidRequest
from moestream.runtime.policy import LeastRecentlyUsed
from moestream.runtime.replay import Drive, Outcome, Replay
from moestream.runtime.replay_forecast import Forecast, foretold, recorded
from moestream.runtime.replay_policies import (
    POLICIES,
    Belady,
    FirstInFirstOut,
    LayerCache,
    policies_of,
    replay_layer,
    replay_routes,
)
from moestream.runtime.replay_sweep import (
    DEFAULT_BANDWIDTH,
    NoRouting,
    Options,
    Prefetch,
    Sweep,
    parse_prefetch,
)
from moestream.runtime.trace_records import Layer, Prediction, Route, Token, Trace
from moestream.runtime.tracefile import TraceUnreadable, read_trace

EXPERTS = 8
RECORD = 1000
DRIVE = Drive(bandwidth=1e6, latency=1e-4, depth=4)
COMPUTE = 5e-4

calls_of_layer = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4, unique=True).map(tuple),
    min_size=1,
    max_size=40,
)
slot_counts = st.integers(1, EXPERTS)


@st.composite
def routings(draw: st.DrawFn) -> list[Route]:
    """Forwards over some layers; the first one may be a prompt."""
    layers = draw(st.integers(1, 3))
    prompt = draw(st.booleans())
    one = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True).map(tuple)
    routes: list[Route] = []
    for forward in range(draw(st.integers(1, 12))):
        tokens = 5 if prompt and not forward else 1
        for group in range(layers):
            routes.append(Route(len(routes), group, group, forward, draw(one), tokens))
    return routes


def replay(
    routes: Sequence[Route],
    slots: int,
    policy: str = "lru",
    forecast: Forecast | None = None,
    drive: Drive = DRIVE,
) -> tuple[Outcome, Replay]:
    groups = {route.group for route in routes}
    made = Replay(
        routes,
        dict.fromkeys(groups, EXPERTS),
        dict.fromkeys(groups, slots),
        dict.fromkeys(groups, RECORD),
        POLICIES[policy],
        drive,
        COMPUTE,
        forecast,
    )
    return made.run(), made


def experts_of(routes: Sequence[Route]) -> dict[int, int]:
    return {route.group: EXPERTS for route in routes}


# -- policies -------------------------------------------------------------------------------------


@example(calls=[(0, 3, 2), (0, 1, 3, 4), (2,)], slots=3)  # a wave that leaves 2 alone
@given(calls_of_layer, slot_counts)
def test_no_policy_hits_more_than_belady(calls: list[tuple[int, ...]], slots: int) -> None:
    best = sum(replay_layer(calls, slots, Belady(calls)))
    for policy in POLICIES.values():
        assert sum(replay_layer(calls, slots, policy(calls, EXPERTS, 3))) <= best


@example(calls=[(3, 0, 2), (0, 1, 4, 5), (3, 5, 0, 1), (2,), (0, 4, 6), (0, 3)], slots=5)
@given(calls_of_layer, st.integers(1, EXPERTS - 1))
def test_more_slots_never_cost_lru_or_belady_hits(calls: list[tuple[int, ...]], slots: int) -> None:
    # Of a call of several experts those that were missing are the younger ones, whatever their
    # order: only one by one does LRU with more slots hold all that it would hold with fewer.
    single = [(expert,) for call in calls for expert in call]
    small = replay_layer(single, slots, LeastRecentlyUsed())
    large = replay_layer(single, slots + 1, LeastRecentlyUsed())
    assert all(a <= b for a, b in zip(small, large, strict=True))
    fitting = [call for call in calls if len(call) <= slots]  # others pass through in waves
    best = [sum(replay_layer(fitting, n, Belady(fitting))) for n in (slots, slots + 1)]
    assert best[0] <= best[1]


@given(calls_of_layer)
def test_with_every_expert_resident_each_is_missed_once(calls: list[tuple[int, ...]]) -> None:
    for policy in POLICIES.values():
        hits = sum(replay_layer(calls, EXPERTS, policy(calls, EXPERTS, 3)))
        assert sum(map(len, calls)) - hits == len({expert for call in calls for expert in call})


def brute_force(calls: list[tuple[int, ...]], slots: int) -> int:
    """The most hits that any choice of evictions gives."""
    from itertools import combinations

    states = {frozenset[int](): 0}
    for call in calls:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            there = held | set(call)  # waves may leave what is held alone
            now = hits + len(held & set(call))
            # What is kept, beyond the call itself while it fits.
            must = set(call) if len(call) <= slots else set()
            loose = sorted(there - must)
            for kept in combinations(loose, min(len(loose), slots - len(must))):
                state = frozenset(must | set(kept))
                after[state] = max(after.get(state, 0), now)
        states = after
    return max(states.values())


small_calls = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(tuple),
    min_size=1,
    max_size=8,
)


@given(small_calls, st.integers(1, 4))
def test_belady_is_the_best_there_is(calls: list[tuple[int, ...]], slots: int) -> None:
    assert sum(replay_layer(calls, slots, Belady(calls))) == brute_force(calls, slots)


def test_a_call_is_atomic() -> None:
    # Expert by expert, LRU of two would evict 1 for 2 and then miss it.
    assert replay_layer([(0, 1), (2, 1)], 2, LeastRecentlyUsed()) == [0, 1]


def test_a_call_larger_than_the_slots_keeps_its_last() -> None:
    assert replay_layer([(0, 1, 2), (1, 2)], 2, LeastRecentlyUsed()) == [0, 2]


def test_fifo_does_not_care_for_use() -> None:
    calls = [(0,), (1,), (0,), (2,), (0,)]
    assert replay_layer(calls, 2, FirstInFirstOut()) == [0, 0, 1, 0, 0]
    assert replay_layer(calls, 2, LeastRecentlyUsed()) == [0, 0, 1, 0, 1]


def test_guesses_for_calls_to_come_are_spared() -> None:
    cache = LayerCache(2, LeastRecentlyUsed())
    for expert in (0, 1):
        cache.reserve(expert)
        cache.arrived(expert)
    cache.due[0] = 5
    assert cache.make_room((), 5, guess=True)
    assert cache.ready == {0}
    cache.reserve(2)
    cache.arrived(2)
    assert not cache.make_room((2,), 5, guess=True)
    assert cache.make_room((2,), 5)
    assert cache.ready == {2}


# -- the simulation -------------------------------------------------------------------------------


@given(routings(), slot_counts, st.sampled_from(sorted(POLICIES)))
def test_without_guesses_bytes_are_misses(routes: list[Route], slots: int, policy: str) -> None:
    outcome, _ = replay(routes, slots, policy)
    assert outcome.total_bytes == outcome.missed * RECORD
    assert outcome.late == outcome.guess_bytes == outcome.wasted_bytes == 0
    decoded = [r for r in routes if r.tokens == 1] or routes
    assert outcome.hits + outcome.missed == sum(len(route.experts) for route in decoded)


@given(routings(), slot_counts, st.sampled_from(sorted(POLICIES)))
def test_hits_do_not_depend_on_the_clock(routes: list[Route], slots: int, policy: str) -> None:
    outcome, _ = replay(routes, slots, policy)
    slow, _ = replay(routes, slots, policy, drive=Drive(1e3, 0.1, 1))
    assert outcome.hits == slow.hits
    hits = 0
    groups = experts_of(routes)
    made = policies_of(POLICIES[policy], routes, groups)
    each = [hits for hits, _ in replay_routes(routes, dict.fromkeys(groups, slots), made)]
    decoding = any(route.tokens == 1 for route in routes)
    hits += sum(n for r, n in zip(routes, each, strict=True) if r.tokens == 1 or not decoding)
    assert outcome.hits == hits


@given(
    routings(),
    slot_counts,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 3),
    st.sampled_from([Drive(1e6, 1e-4, 4), Drive(1e5, 0.0, 1), Drive(1e9, 1e-3, 2)]),
)
def test_time_and_bytes_add_up_with_guesses(
    routes: list[Route], slots: int, policy: str, recall: float, ahead: int, drive: Drive
) -> None:
    forecast = foretold(routes, experts_of(routes), recall=recall, lookahead=ahead)
    outcome, made = replay(routes, slots, policy, forecast, drive)
    assert made.finished == sorted(made.finished)
    assert made.now >= max(made.finished)
    assert outcome.demand_bytes == outcome.missed * RECORD
    assert 0 <= outcome.wasted_bytes <= outcome.guess_bytes
    assert 0.0 <= outcome.hit_rate <= 1.0
    decoded = [r for r in routes if r.tokens == 1] or routes
    accesses = sum(len(route.experts) for route in decoded)
    assert outcome.hits + outcome.late + outcome.missed == accesses
    assert outcome.token_seconds >= outcome.compute_per_token
    again, _ = replay(routes, slots, policy, forecast, drive)
    assert again == outcome


def one_layer_each(*calls: Sequence[int], tokens: int = 1) -> list[Route]:
    """One forward with a layer per call."""
    return [Route(n, n, n, 0, tuple(call), tokens) for n, call in enumerate(calls)]


def test_a_miss_takes_its_latency_and_transfer() -> None:
    outcome, _ = replay(one_layer_each([0, 1]), 2)
    # Latencies overlap, transfers do not: 0.1 ms + 2 x 1 ms.
    assert outcome.stall_seconds == pytest.approx(2.1e-3)
    assert outcome.token_seconds == pytest.approx(2.6e-3)
    assert outcome.bound_seconds == pytest.approx(2e-3)


def test_reads_beyond_the_depth_wait_for_a_lane() -> None:
    outcome, _ = replay(one_layer_each([0, 1]), 2, drive=Drive(1e6, 1e-3, 1))
    assert outcome.stall_seconds == pytest.approx(2 * 2e-3)


def test_a_right_guess_hides_its_read() -> None:
    routes = one_layer_each([0], [1])
    fast = Drive(1e7, 0.0, 4)
    off, _ = replay(routes, 2, drive=fast)
    guessed, _ = replay(routes, 2, forecast=foretold(routes, experts_of(routes)), drive=fast)
    assert (off.hits, guessed.hits, guessed.guessed) == (0, 1, 1)
    assert guessed.stall_seconds == pytest.approx(off.stall_seconds / 2)
    assert guessed.waste == 0


def test_a_guess_that_is_being_read_is_joined() -> None:
    routes = one_layer_each([0], [1])
    outcome, _ = replay(routes, 2, forecast=foretold(routes, experts_of(routes)))
    assert (outcome.late, outcome.missed) == (1, 1)
    assert outcome.total_bytes == 2 * RECORD
    assert outcome.stall_seconds < replay(routes, 2)[0].stall_seconds


def test_wrong_guesses_are_waste() -> None:
    routes = one_layer_each([0], [1], [2])
    forecast = foretold(routes, experts_of(routes), recall=0.0, lookahead=1)
    outcome, _ = replay(routes, 4, forecast=forecast)
    assert outcome.wasted_bytes == outcome.guess_bytes == 2 * RECORD
    assert outcome.stall_seconds >= replay(routes, 4)[0].stall_seconds


def test_a_guess_whose_layer_has_been_passed_is_dropped() -> None:
    routes = one_layer_each([0], [1, 2, 3, 4])
    forecast = foretold(routes, experts_of(routes), recall=0.0)
    outcome, _ = replay(routes, 8, forecast=forecast, drive=Drive(1e5, 0.0, 4))
    assert outcome.guess_bytes == 2 * RECORD  # no more are in flight at once
    assert outcome.stale == 2


# -- forecasts ------------------------------------------------------------------------------------


def test_noise_keeps_the_recall() -> None:
    routes = [Route(n, n % 4, n % 4, n // 4, (n % 8, (n + 3) % 8), 1) for n in range(4000)]
    right = total = 0
    for guesses in foretold(routes, experts_of(routes), recall=0.7, lookahead=1):
        total += len(guesses)
        right += sum(guess.expert in routes[guess.position].experts for guess in guesses)
        assert len({guess.expert for guess in guesses}) == len(guesses)
    assert total == 2 * 3000  # the first layer of a token is guessed by nobody
    assert right / total == pytest.approx(0.7, abs=0.02)


def test_noise_depends_on_the_seed_alone() -> None:
    routes = one_layer_each(*([n % 8] for n in range(30)))
    made = [foretold(routes, experts_of(routes), recall=0.5, seed=seed) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_prompts_are_not_guessed() -> None:
    routes = one_layer_each([0], [1], tokens=3)
    assert not any(foretold(routes, experts_of(routes)))


def test_recorded_guesses_are_known_so_many_layers_before() -> None:
    routes = one_layer_each([0], [1], [2])
    made = recorded(
        routes,
        [
            Prediction(0, 2, 2, 0, 2, (2, 5), (0.9, 0.1)),
            Prediction(0, 2, 2, 0, 0, (3,), (0.0,)),
            Prediction(0, 0, 0, 0, 1, (4,), (0.5,)),  # before everything
            Prediction(0, 1, 1, 0, 99, (6,), (0.4,)),  # at the start of the token
            Prediction(0, 0, 0, 9, 1, (4,), (0.5,)),  # never came
        ],
    )
    known = [(guess.position, guess.expert, guess.probability) for guess in made[0]]
    assert known == [(2, 2, 0.9), (2, 5, 0.1), (1, 6, 0.4)]
    assert [(g.expert, g.probability > 0) for g in made[1]] == [(3, True)]
    assert not made[2]


# -- CSV ------------------------------------------------------------------------------------------

HEADER = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"


def csv_text(tokens: int = 6, layers: int = 2) -> str:
    """A prompt of three tokens, whose last layer computes one only, and then some tokens."""
    lines = [
        "# route_trace v1",
        "# model=/models/toy.gguf arch=toy n_layer=2 n_expert=8 n_expert_used=2",
        "# layer=0 expert_bytes=1000 dense_bytes=5",
        "# layer=1 expert_bytes=2000 dense_bytes=5",
        HEADER,
    ]
    for layer in range(layers):
        for step in range(3 if layer < layers - 1 else 1):
            for rank in range(2):
                lines.append(f"0,0,{step},{layer},{rank},{(step + rank) % 3},0.5,0,0")
    for step in range(3, 3 + tokens):
        for layer in range(layers):
            for rank in range(2):
                lines.append(f"0,1,{step},{layer},{rank},{(step * 3 + rank) % 8},0.5,0,0")
    return "\n".join(lines) + "\n"


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.csv"
    path.write_text(csv_text())
    return path


def test_csv_is_read_call_by_call(csv_file: Path) -> None:
    trace = read_trace(csv_file)
    assert trace.model == "toy.gguf"
    assert trace.layers[1] == Layer(1, 1, 8, 2, None, 2000)
    prompt, last = trace.routes[:2]
    assert (prompt.tokens, last.tokens) == (3, 1)
    assert prompt.forward == last.forward == 0
    assert prompt.experts == (0, 1, 2)
    assert [route.forward for route in trace.routes[2:]] == [n for n in range(1, 7) for _ in "ab"]
    assert trace.routes[2].experts == (1, 2)


def test_the_hottest_experts_of_a_prompt_come_last(tmp_path: Path) -> None:
    rows = [HEADER, "0,0,0,0,0,3,1,0,9", "0,0,1,0,0,1,1,0,9", "0,0,2,0,0,3,1,0,9"]
    path = tmp_path / "hot.csv"
    path.write_text("\n".join(rows))
    trace = read_trace(path)
    assert trace.routes[0].experts == (1, 3)
    assert trace.layers[0] == Layer(0, 0, 4, 1, None, 9)


def test_the_last_tokens_of_a_prompt_are_kept_one_by_one(csv_file: Path) -> None:
    prompt, last, token = read_trace(csv_file).routes[:3]
    assert prompt.tail == ((0, 1), (1, 2), (2, 0))
    assert last.tail == token.tail == ()


def test_gzipped_csv_is_the_same(csv_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "toy.csv.gz"
    path.write_bytes(gzip.compress(csv_file.read_bytes()))
    assert read_trace(path).routes == read_trace(csv_file).routes


def test_damaged_rows_are_counted(csv_file: Path) -> None:
    csv_file.write_text(csv_file.read_text() + "0,1,9\n0,1,x,0,0,1,1,0,0\n")
    trace = read_trace(csv_file)
    assert trace.notices == ["2 rows are damaged and were left out"]
    assert len(trace.routes) == 14


def test_another_csv_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TraceUnreadable, match="neither"):
        read_trace(path)


# -- the sweep ------------------------------------------------------------------------------------


def sweep(trace: Trace, **options: Any) -> Sweep:
    return Sweep(trace, Options(**options))


def test_what_the_file_says_is_used() -> None:
    trace = Trace(Path("t"), bandwidth=5e8)
    trace.routes = one_layer_each([0, 1], [2, 3])
    trace.layers = {n: Layer(n, n, 8, 2, 3, 700) for n in range(2)}
    trace.tokens = [Token(0.0, 3000.0, 1, 1, 1)]
    made = sweep(trace)
    assert made.assumed == []
    assert made.drive.bandwidth == 5e8
    assert made.compute == pytest.approx(1.5e-3)
    assert made.record_bytes == {0: 700, 1: 700}
    names = {result.cache for result in made.run()}
    assert names == {"as recorded", "6.25 %", "12.5 %", "25 %", "50 %"}


def test_what_is_assumed_is_said(csv_file: Path) -> None:
    made = sweep(read_trace(csv_file))
    assert made.drive.bandwidth == DEFAULT_BANDWIDTH
    assert [line.split(";")[1].split()[1] for line in made.assumed] == [
        "--bandwidth",
        "--compute-ms-per-layer",
    ]


def test_what_cannot_be_assumed_is_an_error(csv_file: Path) -> None:
    empty = Trace(Path("t"))
    with pytest.raises(NoRouting, match="no routing"):
        sweep(empty)
    trace = read_trace(csv_file)
    with pytest.raises(InvalidRequest, match="no predictions"):
        sweep(trace, prefetch=[Prefetch("recorded")])
    trace.layers = {n: Layer(n, n, 8, 2) for n in range(2)}
    with pytest.raises(InvalidRequest, match="--record-bytes"):
        sweep(trace)
    assert sweep(trace, record_bytes=5).record_bytes == {0: 5, 1: 5}


def test_progress_reaches_towards_the_whole(csv_file: Path) -> None:
    told: list[tuple[int, int]] = []
    made = sweep(read_trace(csv_file), slots=[2], policies=["lru", "fifo"])
    made.run(lambda done, total: told.append((done, total)))
    assert told == [(0, 28), (14, 28)]


@pytest.mark.parametrize("text", ["of", "noisy", "noisy:", "noisy:2", "off:1", ""])
def test_prefetch_kinds_are_checked(text: str) -> None:
    with pytest.raises(ValueError):
        parse_prefetch(text)


def test_prefetch_kinds_are_shown_as_given() -> None:
    for text in ("off", "recorded", "perfect", "noisy:0.85"):
        assert str(parse_prefetch(text)) == text


# -- the command ----------------------------------------------------------------------------------


def call(*arguments: str, code: int = 0) -> tuple[str, str]:
    environment = {"COLUMNS": "120", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, ["trace", "replay", *arguments], env=environment)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result.stdout, result.stderr


def test_replay_prints_a_sorted_table(csv_file: Path) -> None:
    output, errors = call(str(csv_file), "--slots", "4,2", "--policy", "lru,belady")
    lines = output.splitlines()
    assert lines[0].split()[:3] == ["slots", "cache", "policy"]
    assert [line.split()[1:3] for line in lines[1:5]] == [
        ["2", "belady"],
        ["2", "lru"],
        ["4", "belady"],
        ["4", "lru"],
    ]
    assert "\u2026" not in output
    assert lines[5].startswith("per token; drive 2.00 GB/s")
    assert "--bandwidth" in errors


def test_replay_prints_an_object(csv_file: Path) -> None:
    arguments = [str(csv_file), "--share", "0.25", "--prefetch", "off,perfect,noisy:0.5", "--json"]
    output, errors = call(*arguments, "--bandwidth", "1MB/s", "--compute-ms-per-layer", "2")
    assert errors == ""
    document = json.loads(output)
    assert document["bandwidth_bytes_per_s"] == 1e6
    assert document["compute_ms_per_layer"] == 2
    assert len(document["results"]) == len(POLICIES) * 3
    result = document["results"][0]
    assert result["slots_per_layer"] == 2
    assert result["token_ms"] >= result["bound_ms"] > 0
    assert call(*arguments, "--bandwidth", "1MB/s", "--compute-ms-per-layer", "2")[0] == output


@pytest.mark.parametrize(
    "option",
    [
        ("--slots", "0"),
        ("--slots", "a"),
        ("--share", "1.5"),
        ("--policy", "best"),
        ("--prefetch", "noisy:x"),
        ("--bandwidth", "fast"),
        ("--depth", "0"),
    ],
)
def test_nonsense_is_refused(csv_file: Path, option: tuple[str, str]) -> None:
    _, errors = call(str(csv_file), *option, code=2)
    assert "Invalid value" in errors


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    _, errors = call(str(tmp_path / "absent.csv"), code=1)
    assert errors.startswith("error: cannot read the trace")
    assert errors.count("\n") == 1
