"""What ``moestream plan`` predicts against what an engine does: demo model, several budgets.

An engine with one number of slots is what an earlier run would have been: its profile (compute,
cost of reads, hit-rate curve) predicts engines with other numbers. All are open at once in one
process and take turns, question by question, and each turn is predicted from its own costs, so that
other programs on the machine count on both sides; end tokens are ignored, counts fixed. Once with
the model's own records, which come from the page cache, and once with records padded on disk to
the size of a large model's and read with direct I/O, as in bench_prefetch.py.

    python scripts/bench_plan.py [--record-mb 0.5] [--slots 10 16 40] [--profile-slots 24]
                                 [--tokens 20] [--turns 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

# The padded records must not become what later plans of the demo model go by.
os.environ["MOESTREAM_CACHE_DIR"] = ""

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moestream import Engine
from moestream.runtime.assembly import draw_blueprint
from moestream.runtime.bench.padding import padded_records
from moestream.runtime.forecast import Costs, forecast
from moestream.runtime.profile import ENOUGH_TOKENS, DecodeLog, TokenCost, make_profile
from moestream.runtime.sizes import LayerSize
from scripts.bench_prefetch import QUESTIONS, Run, answer

GOAL = 0.15
"""How far a prediction may be off."""


def costs_of(tokens: Sequence[TokenCost], layers: Sequence[LayerSize]) -> Costs:
    """What a profile of these tokens alone would say."""
    log = DecodeLog(len(layers))
    log.tokens.extend(list(tokens) * -(-ENOUGH_TOKENS // len(tokens)))
    profile = make_profile(log, layers, 0)
    assert profile is not None
    return profile.costs


async def measure(
    model: Path, arguments: argparse.Namespace, record_bytes: int | None
) -> list[dict[str, Any]]:
    """Predicted and measured figures, a row for each number of slots."""
    layers = draw_blueprint(model).size.layers
    if record_bytes is not None:
        layers = tuple(replace(layer, record_bytes=record_bytes) for layer in layers)
    runs: dict[int, list[Run]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        engines = {}
        for count in [arguments.profile_slots, *arguments.slots]:
            engine = await Engine.open(model, slots=count, pressure="off")
            engines[count] = await stack.enter_async_context(engine)
            await answer(engine, "Hello!", 24)
        log = engines[arguments.profile_slots]._core.loaded.stream.log
        tokens: list[TokenCost] = []
        everyone = list(engines)
        costs = []
        for turn in range(arguments.turns):
            question = QUESTIONS[turn % len(QUESTIONS)]
            log.tokens.clear()
            for count in everyone[turn % len(everyone) :] + everyone[: turn % len(everyone)]:
                runs[count].append(await answer(engines[count], question, arguments.tokens))
            costs.append(costs_of(list(log.tokens), layers))
            tokens += log.tokens
        log.tokens.extend(tokens)
        profile = make_profile(log, layers, 0, [arguments.profile_slots] * len(layers))
        assert profile is not None
    rows = []
    for count in arguments.slots:
        said = [forecast(layers, [count] * len(layers), cost, profile.curves) for cost in costs]
        # Turn by turn: what other programs do to one engine they do to all of a turn.
        ratios = [
            promise.tokens_per_second * run.token
            for promise, run in zip(said, runs[count], strict=True)
        ]
        rows.append(
            {
                "records": "own" if record_bytes is None else f"{record_bytes / 1e6:.2f} MB",
                "slots": count,
                "hit": round(statistics.median(run.hit for run in runs[count]), 3),
                "hit_said": round(said[0].hit_rate, 3),
                "mb_token": round(statistics.median(r.nbytes for r in runs[count]) / 1e6, 2),
                "mb_said": round(said[0].bytes_per_token / 1e6, 2),
                "tok_s": round(statistics.median(1 / run.token for run in runs[count]), 1),
                "tok_s_said": round(statistics.median(one.tokens_per_second for one in said), 1),
                "off_by": round(statistics.median(ratios) - 1, 3),
                "off_by_low": round(min(ratios) - 1, 3),
                "off_by_high": round(max(ratios) - 1, 3),
            }
        )
    return rows


def main() -> None:
    """Parse the command line, measure, print and save rows."""
    demo = Path(str(files("moestream") / "data" / "demo-moe-4bit"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record-mb", type=float, default=0.5)
    parser.add_argument("--slots", type=int, nargs="+", default=[10, 16, 40])
    parser.add_argument("--profile-slots", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = asyncio.run(measure(demo, arguments, None))
    record_bytes = int(arguments.record_mb * 1e6)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
        padded_records(Path(folder), record_bytes),
    ):
        rows += asyncio.run(measure(demo, arguments, record_bytes))
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    missed = [row for row in rows if abs(row["off_by"]) > GOAL]
    print(f"{len(rows) - len(missed)} of {len(rows)} within {GOAL:.0%}")


if __name__ == "__main__":
    main()
