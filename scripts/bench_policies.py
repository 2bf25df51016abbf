"""Eviction policies against LRU and Belady on recorded routing; no drive, no guesses.

    python -m scripts.bench_policies TRACE... [--share 0.0625 0.125 0.25 0.5]
                                     [--part all|first|second] [--contenders] [--calls]

A trace is a file of an engine (`--trace`) or routing as CSV, also gzipped. Prompts warm the caches;
hits are counted in decode, in all of it or in one half of its tokens. "recovered" is the part of
the way from LRU to Belady: the mean of the cells that have more than a point to gain, and all
points gained over all there were to gain ("pooled"). `--calls` prints what a layer call costs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from moestream.runtime.policies import POLICIES as ONLINE
from moestream.runtime.policy import Policy
from moestream.runtime.replay_policies import (
    POLICIES,
    Calls,
    PolicyOfCalls,
    policies_of,
    replay_routes,
)
from moestream.runtime.residency import Residency
from moestream.runtime.trace_records import Route, Trace
from moestream.runtime.tracefile import read_trace

from .policy_contenders import CONTENDERS

Make = Callable[[float], PolicyOfCalls]
"""Makes policies for caches that hold a share of the experts."""


@dataclass(frozen=True)
class Routing:
    """Layer calls in the order in which they were made, and the forwards that are counted."""

    name: str
    experts: dict[int, int]
    routes: list[Route]
    counted: frozenset[int]


def routing(trace: Trace, part: str) -> Routing:
    """Choose what is counted of a trace."""
    prompts = {route.forward for route in trace.routes if route.tokens > 1}
    decoded = sorted({route.forward for route in trace.routes} - prompts)
    half = len(decoded) // 2
    chosen = {"all": decoded, "first": decoded[:half], "second": decoded[half:]}[part]
    experts = {route.group: trace.layers[route.group].experts for route in trace.routes}
    name = trace.path.name.split(".")[0]
    return Routing(name, experts, trace.routes, frozenset(chosen))


def slots_of(share: float, experts: int) -> int:
    """Slots of a layer for a share of its experts."""
    return max(round(share * experts), 1)


def hit_rate(routing: Routing, share: float, make: Make) -> float:
    """Per cent of the counted experts that were there."""
    hits = asked = 0
    slots = {group: slots_of(share, experts) for group, experts in routing.experts.items()}
    policies = policies_of(make(share), routing.routes, routing.experts)
    steps = replay_routes(routing.routes, slots, policies)
    for route, (found, _) in zip(routing.routes, steps, strict=True):
        if route.forward in routing.counted:
            hits += found
            asked += len(route.experts)
    return 100 * hits / asked


def _known(name: str, share: float) -> PolicyOfCalls:
    return POLICIES[name]


def _contender(name: str, share: float) -> PolicyOfCalls:
    def make(calls: Calls, experts: int, width: int) -> Policy:
        return CONTENDERS[name](calls, slots_of(share, experts))

    return make


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
        won = [gain / r for gain, r in zip(gains, room, strict=True) if r > 1]
        means = (fmean(won or [0.0]), sum(gains) / sum(room))
        print(f"| {name} | " + " | ".join(f"{rate:.1f}" for rate in row), end=" | ")
        print(" | ".join(f"{100 * mean:.1f}" for mean in means) + f" | {min(gains):+.2f} |")


def call_costs(tokens: int = 3000) -> None:
    """Print microseconds per layer call of the residency step: 128 experts, top 8, 32 slots.

    The call that is timed is the one of the last of four layers, all with the same routing.
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
        layers = [Residency(128, 32, policy, reserve=8) for _ in range(4)]
        for lower, layer in pairwise(layers):
            layer.behind(lower)
        seconds = []
        for experts in calls:
            for layer in layers:
                before = time.perf_counter()
                got = layer.acquire(experts)
                seconds.append(time.perf_counter() - before)
                for expert in got.reads:
                    layer.published(expert)
                layer.release(got.slots)
        seconds = sorted(seconds[3::4][tokens // 4 :])
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
