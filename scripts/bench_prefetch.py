"""Off, FIFO and ours, side by side: does reading ahead pay, and does it ever cost?

Routing is real: the trained demo model answers questions. Its records are small, so each is padded
on disk to the size of a large model's record: a component of noise that is read with direct I/O
into the slot and never used. The engines of all arms are open at once in one process and take
turns, question by question, in rotating order; end tokens are ignored and counts fixed.

    python scripts/bench_prefetch.py [--record-mb 0.5] [--share 0.125 0.25 0.5] [--throttle MB/s]
                                     [--tokens 48] [--questions 4] [--csv FILE]

Per cell: ms per token (median over questions, spread), stall, MB read per token, waste, hit rate,
the bound max(compute, demanded bytes / bandwidth) of the off arm, and ratios to the off arm.
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

from moestream import Engine, PrefetchConfig
from moestream.runtime.bench.padding import Throttle, padded_records

QUESTIONS = (
    "Tell me a story about a cat.",
    "Why do birds sing?",
    "Tell me a short story about a brave little mouse.",
    "Describe a garden in spring.",
    "Give me three tips for a rainy day.",
    "Write a short letter to a friend.",
)
ARMS: dict[str, Any] = {
    "off": "off",
    "fifo": PrefetchConfig(admission="always", order="fifo", distances=(1, 2), width=1.0),
    "ours": PrefetchConfig(),
    "predict": PrefetchConfig(predict_only=True),
}


@dataclass
class Run:
    """One question answered by one arm; seconds and bytes per token."""

    token: float
    stall: float
    nbytes: float
    wasted: float
    hit: float
    bandwidth: float = 0.0


async def answer(engine: Engine, question: str, tokens: int) -> Run:
    """Decode a fixed number of tokens and take the differences of all counters."""
    prompt = [{"role": "user", "content": question}]
    first = 0.0
    before = engine.statistics()
    async for chunk in engine.stream(prompt, max_tokens=tokens + 1, ignore_eos=True):
        if not first:
            first, before = time.perf_counter(), engine.statistics()
        last = chunk
    seconds = time.perf_counter() - first
    after = engine.statistics()
    assert last.result is not None
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return Run(
        token=seconds / tokens,
        stall=(after.stall_seconds - before.stall_seconds) / tokens,
        nbytes=(after.bytes_read - before.bytes_read) / tokens,
        wasted=(after.wasted_bytes - before.wasted_bytes) / tokens,
        hit=hits / max(hits + misses, 1),
    )


async def cell(
    model: Path, slots: int, arms: Sequence[str], tokens: int, questions: int, rate: float | None
) -> dict[str, list[Run]]:
    """All arms with one number of slots."""
    runs: dict[str, list[Run]] = {arm: [] for arm in arms}
    async with AsyncExitStack() as stack:
        engines = {}
        for arm in arms:
            engine = await Engine.open(model, slots=slots, prefetch=ARMS[arm])
            engines[arm] = await stack.enter_async_context(engine)
            if rate:
                engine._core.store.reader.preadv = Throttle(rate)
            await answer(engine, "Hello!", 48)
        for turn, question in enumerate(QUESTIONS[:questions]):
            order = list(arms[turn % len(arms) :]) + list(arms[: turn % len(arms)])
            for arm in order:
                runs[arm].append(await answer(engines[arm], question, tokens))
        for arm in arms:
            drive = engines[arm]._core.loop.statistics()
            print(f"    {arm:8} {engines[arm].statistics().prefetch}", file=sys.stderr)
            for run in runs[arm]:
                run.bandwidth = drive.bytes_read / max(drive.busy_seconds, 1e-9)
    return runs


def summarize(name: str, runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """A row per arm; ratios are medians of the ratios question by question."""
    off = runs["off"]
    fastest = max(arm[0].bandwidth for arm in runs.values())
    compute = statistics.median(run.token - run.stall for run in off)
    demanded = statistics.median(run.nbytes for run in off)
    bound = max(compute, demanded / fastest)
    rows = []
    for arm, arm_runs in runs.items():
        ratios = [a.token / b.token for a, b in zip(off, arm_runs, strict=True)]
        rows.append(
            {
                "cell": name,
                "arm": arm,
                "ms_per_token": round(statistics.median(r.token for r in arm_runs) * 1e3, 2),
                "stall_ms": round(statistics.median(r.stall for r in arm_runs) * 1e3, 2),
                "mb_per_token": round(statistics.median(r.nbytes for r in arm_runs) / 1e6, 2),
                "wasted_mb": round(statistics.median(r.wasted for r in arm_runs) / 1e6, 2),
                "hit_rate": round(statistics.median(r.hit for r in arm_runs), 3),
                "speedup": round(statistics.median(ratios), 3),
                "speedup_low": round(min(ratios), 3),
                "speedup_high": round(max(ratios), 3),
                "bound_over_measured": round(
                    bound / statistics.median(r.token for r in arm_runs), 3
                ),
                "drive_mb_s": round(fastest / 1e6),
            }
        )
    return rows


def main() -> None:
    """Parse the command line, run all cells, print and save rows."""
    demo = Path(str(files("moestream") / "data" / "demo-moe-4bit"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record-mb", type=float, default=0.5)
    parser.add_argument("--share", type=float, nargs="+", default=[0.125, 0.25, 0.5])
    parser.add_argument("--throttle", type=float, help="MB/s")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--arms", nargs="+", default=["off", "fifo", "ours"])
    parser.add_argument("--model", type=Path, default=demo, help="the demo model, or a store of it")
    parser.add_argument("--device", choices=["cpu", "gpu"])
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    if arguments.device:
        mx.set_default_device(mx.Device(getattr(mx, arguments.device), 0))
    rows = []
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
        padded_records(Path(folder), int(arguments.record_mb * 1e6)),
    ):
        for share in arguments.share:
            slots = round(64 * share)
            rate = arguments.throttle * 1e6 if arguments.throttle else None
            name = f"{share:.1%} of experts, {arguments.record_mb} MB"
            name += f", {arguments.throttle:.0f} MB/s" if rate else ""
            runs = asyncio.run(
                cell(
                    arguments.model,
                    slots,
                    arguments.arms,
                    arguments.tokens,
                    arguments.questions,
                    rate,
                )
            )
            for row in summarize(name, runs):
                rows.append(row)
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if arguments.csv:
        machine = {"device": str(mx.default_device()), "machine": platform.machine()}
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *machine])
            writer.writeheader()
            writer.writerows([{**row, **machine} for row in rows])


if __name__ == "__main__":
    main()
