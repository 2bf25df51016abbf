"""A conversation, turn by turn: what does the prompt cache save?

Two engines answer the same turns, each of which repeats all before it: one computes the whole
prompt each time, one keeps what it has computed. Answers have a fixed length (the end token is
ignored); token ids are random, so routing is as wide as it gets.

    python scripts/bench_prompt_cache.py MODEL [--share 0.25] [--system 400] [--turns 5]

Prints per turn, for both: prompt tokens computed, MB read for prompt and answer, seconds to the
first token; and the ratio of these seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

from moestream import Engine, Generation
from moestream.runtime.assembly import draw_blueprint

QUESTION, ANSWER = 60, 40
"""Tokens of each."""


def cost(result: Generation) -> tuple[int, float, float]:
    """Prompt tokens computed, MB read, seconds to the first token."""
    stats = result.stats
    computed = result.prompt_tokens - result.cached_tokens
    return computed, stats.bytes_read / 1e6, stats.time_to_first_token


async def bench(model: Path, share: float, system: int, turns: int) -> None:
    """Talk with both engines and print."""
    slots = round(max(layer.experts for layer in draw_blueprint(model).size.layers) * share)
    dice = random.Random(1)
    talk = [dice.randrange(10, 500) for _ in range(system)]
    print(f"{slots} slots a layer; computed, MB, s to the first token: whole | cached | ratio")
    same = 0
    async with (
        await Engine.open(model, slots=slots, max_running=1) as plain,
        await Engine.open(model, slots=slots, max_running=1, prompt_cache=True) as engine,
    ):
        for turn in range(turns):
            talk += [dice.randrange(10, 500) for _ in range(QUESTION)]
            whole, rest = [
                await each.generate(talk, max_tokens=ANSWER, ignore_eos=True)
                for each in (plain, engine)
            ]
            same += whole.tokens == rest.tokens
            sides = [f"{n:5d} {mb:7.1f} {s:6.3f}" for n, mb, s in map(cost, (whole, rest))]
            ratio = cost(rest)[2] / cost(whole)[2]
            print(f"turn {turn + 1}: {' | '.join(sides)} | {ratio:.2f}", flush=True)
            talk += whole.tokens
        kept = engine.statistics()
    print(
        f"{same} of {turns} answers have the same tokens; "
        f"{kept.prompt_cache_sequences} sequences take {kept.prompt_cache_bytes / 1e6:.1f} MB"
    )


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--system", type=int, default=400)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(bench(options.model, options.share, options.system, options.turns))


if __name__ == "__main__":
    main()
