"""A long prompt with a quarter of the experts resident: how near is it to the drive's bandwidth?

Arms, in turn in one process: "waves" (the engine: the next wave is read while this one is
computed), "layers" (with prefetch: the next layer's first wave is read as well), "in turn" (without
reading ahead of a wave), and "token by token" (no chunks at all, on the first tokens only). The
drive's bandwidth is measured by reading random experts of the same files with the same lanes just
before.

    python scripts/bench_prefill.py MODEL [--share 0.25] [--tokens 1000] [--rounds 3] [--single 40]
                                          [--throttle MB/S]

Prints per arm: ms per prompt token, MB read, GB/s over the whole prompt, and the share of the
drive's bandwidth.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from moestream import Engine, PrefetchConfig
from moestream.runtime import core, streaming
from moestream.runtime.assembly import draw_blueprint
from moestream.runtime.bench.padding import Throttle
from moestream.runtime.store import ExpertStore

LANES = 8


def bandwidth(store: ExpertStore, seconds: float) -> float:
    """Bytes per second of random experts, read into the slots that they would go to."""
    groups, reader = store.groups, store.reader
    end = time.perf_counter() + seconds

    def lane(number: int) -> int:
        numbers, done = random.Random(number), 0
        while time.perf_counter() < end:
            group = numbers.randrange(len(groups))
            pool = groups[group].pool
            slots = range(number, pool.slots, LANES)  # no slot belongs to two lanes
            if slots:
                rows = pool.rows(numbers.choice(slots))
                done += reader.read(group, numbers.randrange(groups[group].record.experts), rows)
        return done

    started = time.perf_counter()
    with ThreadPoolExecutor(LANES) as pool:
        nbytes = sum(pool.map(lane, range(LANES)))
    return nbytes / (time.perf_counter() - started)


async def prompt_of(engine: Engine, count: int, seed: int) -> tuple[float, int]:
    """Seconds to the first token, and bytes read for it."""
    numbers = random.Random(seed)
    prompt = [numbers.randrange(10, 500) for _ in range(count)]
    result = await engine.generate(prompt, max_tokens=1, ignore_eos=True)
    return result.stats.time_to_first_token, result.stats.bytes_read


async def bench(
    model: Path, share: float, tokens: int, rounds: int, single: int, throttle: float | None
) -> None:
    """Open the engines, run the arms in turn, print."""
    slots = round(max(layer.experts for layer in draw_blueprint(model).size.layers) * share)
    patched: Any = core
    chunk = patched.fitting_chunk
    ask = streaming.ExpertStream._ask

    async def opened(prefetch: Any = "off") -> Engine:
        engine = await stack.enter_async_context(
            await Engine.open(model, slots=slots, lanes=LANES, prefetch=prefetch)
        )
        if throttle is not None:
            engine._core.store.reader.preadv = Throttle(throttle)
        return engine

    async with AsyncExitStack() as stack:
        # This engine's experts are spoilt behind it, so it is used for nothing else.
        drive = bandwidth((await opened())._core.store, 2.0)
    print(f"{slots} slots a layer; drive {drive / 1e9:.2f} GB/s with {LANES} lanes", flush=True)
    rows: dict[str, list[tuple[float, float]]] = {}
    async with AsyncExitStack() as stack:
        waves = await opened()
        engines = {"waves": waves, "layers": await opened(PrefetchConfig()), "in turn": waves}
        if single:
            patched.fitting_chunk = lambda *_, **__: 1
            engines["token by token"] = await opened()
            patched.fitting_chunk = chunk
        for arm, engine in engines.items():
            await prompt_of(engine, 8 if arm == "token by token" else tokens, 99)  # kernels
        for seed in range(rounds):
            for arm, engine in engines.items():
                count = single if arm == "token by token" else tokens
                if arm == "in turn":
                    _take_turns()
                seconds, nbytes = await prompt_of(engine, count, seed)
                streaming.ExpertStream._ask = ask  # type: ignore[method-assign]
                rows.setdefault(arm, []).append((seconds / count, nbytes / count))
                rate = nbytes / seconds
                print(
                    f"  {arm:15} {seconds / count * 1e3:8.2f} ms/token  "
                    f"{nbytes / count / 1e6:8.2f} MB/token  {rate / 1e9:5.2f} GB/s  "
                    f"{rate / drive:.2f} of the drive",
                    flush=True,
                )
        ahead = engines["layers"].statistics().prefetch
        print(f"read for the next layer: {ahead.begun}, used {ahead.used}, wasted {ahead.wasted}")
    base = statistics.median(seconds for seconds, _ in rows["waves"])
    for arm, runs_of_arm in rows.items():
        each = [seconds for seconds, _ in runs_of_arm]
        median = statistics.median(each)
        print(
            f"{arm}: {median * 1e3:.2f} ms/token ({min(each) * 1e3:.2f} to {max(each) * 1e3:.2f}), "
            f"{median / base:.2f} x the time of waves"
        )


def _take_turns() -> None:
    """Let waves take the whole room, so that none can be ahead."""
    ask = streaming.ExpertStream._ask

    def whole(self: Any, switch: Any, waiting: list[int], size: int) -> Any:
        return ask(self, switch, waiting, self._store.groups[switch.group].pool.slots)

    streaming.ExpertStream._ask = whole  # type: ignore[method-assign]


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--single", type=int, default=40, help="0 leaves token by token out")
    parser.add_argument("--throttle", type=float, help="MB/s that the drive gives at most")
    arguments = parser.parse_args()
    asyncio.run(
        bench(
            arguments.model,
            arguments.share,
            arguments.tokens,
            arguments.rounds,
            arguments.single,
            arguments.throttle and arguments.throttle * 1e6,
        )
    )


if __name__ == "__main__":
    main()
