"""Callers together against callers in turn: tokens per second and bytes read per token.

The trained demo model goes on with texts, so routing is real; its records are padded on disk to the
size of a large model's (see bench_prefetch.py). Two engines are open in one process with the same
slots: one computes its callers together, the other takes them in turn (``max_running=1``). They
alternate, round by round; end tokens are ignored and counts fixed.

    python scripts/bench_batch.py [--record-mb 0.5] [--slots 32] [--callers 1 2 4 8 16]
                                  [--tokens 20] [--rounds 2] [--texts KIND] [--csv FILE]

Texts: "different", "seeds" (one text that goes on at random, another way for each caller), "equal"
(greedy answers to one prompt).

Per number of callers and arm: tokens per second of all callers (median over rounds, lowest and
highest), MB read and distinct experts demanded per token, waves, the longest gap between two tokens
of a stream, and the median of the rounds' ratios to the arm in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx

from moestream import Engine
from moestream.runtime.bench.padding import padded_records

OPENINGS = (
    "Once upon a time",
    "One day, a little girl",
    "The cat sat on",
    "Tom and his dog",
    "It was raining and",
    "In the big forest",
    "Lily had a red",
    "A bird sang in",
    "The old man said",
    "Two friends went to",
    "Mom made a cake",
    "The sun was hot",
    "Ben found a box",
    "At the zoo, the",
    "My brother likes to",
    "There was a boat",
)
ARMS = {"together": 16, "in turn": 1}


@dataclass(frozen=True)
class Run:
    """One round of one arm."""

    rate: float
    nbytes: float
    experts: float
    waves: int
    gap: float


async def ask(engine: Engine, number: int, tokens: int, texts: str) -> float:
    """Stream one answer; returns its longest gap between two tokens."""
    last, gap = 0.0, 0.0
    prompt = OPENINGS[number % len(OPENINGS) if texts == "different" else 0]
    chance: Any = {"temperature": 0.8, "seed": number} if texts == "seeds" else {}
    async for _ in engine.stream(prompt, max_tokens=tokens, ignore_eos=True, **chance):
        now = time.perf_counter()
        gap = max(gap, now - last) if last else 0.0
        last = now
    return gap


async def once(engine: Engine, callers: int, tokens: int, texts: str) -> Run:
    """All callers at once, until the last one has its answer."""
    before, started = engine.statistics(), time.perf_counter()
    gaps = await asyncio.gather(*[ask(engine, n, tokens, texts) for n in range(callers)])
    seconds, after = time.perf_counter() - started, engine.statistics()
    count = callers * tokens
    experts = after.hits + after.misses - before.hits - before.misses
    return Run(
        rate=count / seconds,
        nbytes=(after.bytes_read - before.bytes_read) / count,
        experts=experts / count,
        waves=after.waves - before.waves,
        gap=max(gaps),
    )


async def measure(
    model: Path, slots: int, callers: Sequence[int], tokens: int, rounds: int, texts: str
) -> dict[tuple[int, str], list[Run]]:
    """Every number of callers with both arms."""
    runs: dict[tuple[int, str], list[Run]] = {}
    async with AsyncExitStack() as stack:
        engines = {}
        for arm, running in ARMS.items():
            engine = await Engine.open(model, slots=slots, max_running=running)
            engines[arm] = await stack.enter_async_context(engine)
            figures = engine.statistics()
            print(f"{arm}: {figures.most_running} rows {figures.batch_limit}", file=sys.stderr)
            await once(engine, 2, 8, texts)
        for turn in range(rounds):
            for count in callers:
                for arm in list(ARMS) if turn % 2 else list(reversed(ARMS)):
                    run = await once(engines[arm], count, tokens, texts)
                    runs.setdefault((count, arm), []).append(run)
    return runs


def summarize(runs: dict[tuple[int, str], list[Run]]) -> list[dict[str, Any]]:
    """A row per number of callers and arm."""
    rows = []
    for (count, arm), own in sorted(runs.items()):
        ratios = [a.rate / b.rate for a, b in zip(own, runs[count, "in turn"], strict=True)]
        rates = [run.rate for run in own]
        rows.append(
            {
                "callers": count,
                "arm": arm,
                "tokens_per_s": round(statistics.median(rates), 1),
                "lowest": round(min(rates), 1),
                "highest": round(max(rates), 1),
                "mb_per_token": round(statistics.median(run.nbytes for run in own) / 1e6, 2),
                "experts_per_token": round(statistics.median(run.experts for run in own), 1),
                "waves": round(statistics.median(run.waves for run in own)),
                "gap_ms": round(statistics.median(run.gap for run in own) * 1e3),
                "ratio": round(statistics.median(ratios), 2),
            }
        )
    return rows


def main() -> None:
    """Parse the command line, measure, print and save rows."""
    demo = Path(str(files("moestream") / "data" / "demo-moe-4bit"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record-mb", type=float, default=0.5)
    parser.add_argument("--slots", type=int, default=32, help="of 64 per layer")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--texts", choices=["different", "seeds", "equal"], default="different")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
        padded_records(Path(folder), int(arguments.record_mb * 1e6)),
    ):
        given = arguments
        runs = asyncio.run(
            measure(demo, given.slots, given.callers, given.tokens, given.rounds, given.texts)
        )
    rows = summarize(runs)
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.csv:
        machine = {"device": str(mx.default_device()), "machine": platform.machine()}
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *machine])
            writer.writeheader()
            writer.writerows([{**row, **machine} for row in rows])


if __name__ == "__main__":
    main()
