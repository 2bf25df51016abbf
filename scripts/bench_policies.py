"""Eviction policies against LRU and Belady on recorded routing; no drive, no guesses.

    python -m scripts.bench_policies TRACE... [--share 0.0625 0.125 0.25 0.5]
                                     [--part all|first|second] [--contenders] [--calls]

A trace is a file of an engine (`--trace`) or routing as CSV, also gzipped. Prompts warm the caches;
hits are counted in decode, in all of it or in one half of its tokens. "recovered" is the part of
the way from LRU to Belady: the mean of the cells that have more than a point to gain, and all
points gained over all points there were to gain. `--calls` prints instead what a layer call costs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from moestream.runtime.policies import POLICIES as ONLINE
from moestream.runtime.policy import Policy
from moestream.runtime.replay_policies import POLICIES, Calls, policy_of, replay_routes
from moestream.runtime.residency import Residency
from moestream.runtime.trace_records import Route, Trace
from moestream.runtime.tracefile import read_trace

from .policy_contenders import CONTENDERS

Make = Callable[[Sequence[Route], int, int], Policy]


@dataclass(frozen=True)
class Routing:
    """The calls of each layer, and the forwards that are counted."""

    name: str
    experts: dict[int, int]
    layers: dict[int, list[Route]]
    counted: frozenset[int]


def routing(trace: Trace, part: str) -> Routing:
    """Sort a trace by layers and choose what is counted."""
    layers: defaultdict[int, list[Route]] = defaultdict(list)
    for route in trace.routes:
        layers[route.group].append(route)
    prompts = {route.forward for route in trace.routes if route.tokens > 1}
    decoded = sorted({route.forward for route in trace.routes} - prompts)
    half = len(decoded) // 2
    chosen = {"all": decoded, "first": decoded[:half], "second": decoded[half:]}[part]
    experts = {group: trace.layers[group].experts for group in layers}
    name = trace.path.name.split(".")[0]
    return Routing(name, experts, dict(layers), frozenset(chosen))


def hit_rate(routing: Routing, share: float, make: Make) -> float:
    """Per cent of the counted experts that were there."""
    hits = asked = 0
    for group, routes in routing.layers.items():
        experts = routing.experts[group]
        slots = max(round(share * experts), 1)
        steps = replay_routes(routes, slots, make(routes, experts, slots))
        for route, (found, _) in zip(routes, steps, strict=True):
            if route.forward in routing.counted:
                hits += found
                asked += len(route.experts)
    return 100 * hits / asked


def _known(name: str, routes: Sequence[Route], experts: int, slots: int) -> Policy:
    policy: Policy = policy_of(POLICIES[name], routes, experts)
    return policy


def _contender(name: str, routes: Sequence[Route], experts: int, slots: int) -> Policy:
    calls: Calls = [route.experts for route in routes]
    return CONTENDERS[name](calls, slots)


def table(routings: Sequence[Routing], shares: Sequence[float], policies: dict[str, Make]) -> None:
    """Print hit rates per cell, and a line of what each policy recovers."""
    cells = [(routing, share) for routing in routings for share in shares]
    rates: dict[str, list[float]] = {}
    print("| policy | " + " | ".join(f"{r.name} {100 * s:g} %" for r, s in cells), end=" |")
    print(" recovered, mean | pooled | worst |\n" + "|---" * (len(cells) + 4) + "|")
    for name, make in policies.items():
        print(f"{name} ...", end="\r", file=sys.stderr)
        rates[name] = [hit_rate(routing, share, make) for routing, share in cells]
    room = [best - lru for best, lru in zip(rates["belady"], rates["lru"], strict=True)]
    for name, row in rates.items():
        gains = [rate - lru for rate, lru in zip(row, rates["lru"], strict=True)]
        shares_won = [g / r for g, r in zip(gains, room, strict=True) if r > 1]
        mean = 100 * fmean(shares_won) if shares_won else 0.0
        print(f"| {name} | " + " | ".join(f"{rate:.1f}" for rate in row), end=" | ")
        print(f"{mean:.1f} | {100 * sum(gains) / sum(room):.1f} | {min(gains):+.2f} |")


def call_costs(tokens: int = 3000) -> None:
    """Print microseconds per layer call of the residency step: 128 experts, top 8, 32 slots.

    Two in five experts stay from token to token, the others come from a Zipf-like distribution.
    """
    chance = random.Random(0)
    heat = [1 / (rank + 3) for rank in range(128)]
    calls: list[list[int]] = []
    for _ in range(tokens):
        chosen = {e for e in (calls[-1] if calls else ()) if chance.random() < 0.4}
        while len(chosen) < 8:
            chosen.add(chance.choices(range(128), heat)[0])
        calls.append(chance.sample(sorted(chosen), 8))
    for name, policy in ONLINE.items():
        residency = Residency(128, 32, policy, reserve=8)
        seconds = []
        for experts in calls:
            before = time.perf_counter()
            got = residency.acquire(experts)
            seconds.append(time.perf_counter() - before)
            for expert in got.reads:
                residency.published(expert)
            residency.release(got.slots)
        seconds = sorted(seconds[tokens // 4 :])
        middle, slow = seconds[len(seconds) // 2], seconds[len(seconds) * 9 // 10]
        print(f"{name}: median {1e6 * middle:.1f} us, nine tenths below {1e6 * slow:.1f} us")


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--share", type=float, nargs="+", default=[0.0625, 0.125, 0.25, 0.5])
    parser.add_argument("--part", choices=["all", "first", "second"], default="all")
    parser.add_argument("--contenders", action="store_true", help="also those that lost")
    parser.add_argument("--calls", action="store_true", help="the cost of a layer call")
    arguments = parser.parse_args()
    if arguments.calls:
        call_costs()
        return
    if not arguments.traces:
        parser.error("name at least one trace")
    routings = [routing(read_trace(path), arguments.part) for path in arguments.traces]
    policies: dict[str, Make] = {name: partial(_known, name) for name in POLICIES}
    if arguments.contenders:
        policies |= {name: partial(_contender, name) for name in CONTENDERS}
    table(routings, arguments.share, policies)


if __name__ == "__main__":
    main()
