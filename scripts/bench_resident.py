"""Decode speed with everything resident against mlx-lm, and the host cost of a streamed layer.

Arms, interleaved in one process, end token ignored, fixed token counts, one warm-up each:

- mlx-lm: ``mlx_lm.generate.generate_step`` on the model loaded by mlx-lm, same dtype;
- resident: ``Engine.open(memory="all")``;
- streamed: ``Engine.open(slots=experts - 1)``, whose every layer syncs and looks its slots up but
  seldom misses: its cost over "resident" is the price of streaming without the drive.

    python scripts/bench_resident.py [MODEL] [--tokens 64] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from moestream import Engine

PROMPT = list(range(100, 116))


def time_mlx_lm(model: Any, tokens: int) -> float:
    """Decode tokens per second of mlx-lm, without the prompt and the first token."""
    steps = generate_step(mx.array(PROMPT), model, max_tokens=tokens)
    next(steps)
    begun = time.perf_counter()
    count = sum(1 for _ in steps)
    return count / (time.perf_counter() - begun)


async def time_engine(engine: Engine, tokens: int) -> tuple[float, float]:
    """(decode tokens per second, microseconds of Python per layer sync) of an engine."""
    result = await engine.generate(PROMPT, max_tokens=tokens, ignore_eos=True)
    stats = result.stats
    host = stats.host_seconds / stats.syncs * 1e6 if stats.syncs else 0.0
    return stats.decode_tokens_per_second, host


async def bench(model_path: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Run the arms in turn."""
    model = load_model(model_path)[0]
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    rows: dict[str, list[float]] = {"mlx-lm": [], "resident": [], "streamed": []}
    hosts: list[float] = []
    async with await Engine.open(model_path, memory="all") as resident:
        experts = max(layer for layer in resident.plan.slots)
        async with await Engine.open(model_path, slots=experts - 1) as streamed:
            for index in range(rounds + 1):
                speeds = {
                    "mlx-lm": time_mlx_lm(model, tokens),
                    "resident": (await time_engine(resident, tokens))[0],
                }
                speeds["streamed"], host = await time_engine(streamed, tokens)
                if index:
                    for name, speed in speeds.items():
                        rows[name].append(speed)
                    hosts.append(host)
    base = rows["mlx-lm"]
    ratios = {
        name: [a / b for a, b in zip(speeds, base, strict=True)] for name, speeds in rows.items()
    }
    return {
        "tokens_per_second": {name: statistics.median(speeds) for name, speeds in rows.items()},
        "ratio_to_mlx_lm": {name: statistics.median(values) for name, values in ratios.items()},
        "ratio_spread": {name: (min(values), max(values)) for name, values in ratios.items()},
        "host_microseconds_per_layer": statistics.median(hosts),
        "device": str(mx.default_device()),
        "tokens": tokens,
        "rounds": rounds,
    }


def main() -> None:
    """Parse the command line, run, print."""
    demo = Path(str(files("moestream") / "data" / "demo-moe-4bit"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path, default=demo)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = asyncio.run(bench(arguments.model, arguments.tokens, arguments.rounds))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, speed in result["tokens_per_second"].items():
        low, high = result["ratio_spread"][name]
        ratio = result["ratio_to_mlx_lm"][name]
        print(f"{name:10} {speed:7.1f} tok/s  {ratio:5.2f}x mlx-lm ({low:.2f} to {high:.2f})")
    print(f"host time per streamed layer {result['host_microseconds_per_layer']:.0f} us")


if __name__ == "__main__":
    main()
