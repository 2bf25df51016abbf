"""Measure moestream itself in the way of the other runners: the same arguments, loop and lines.

    python scripts/rivals/moestream_runner.py --model DIR --budget-bytes N --prompt-file FILE \\
        [--tokens 32] [--repeats 3] [--cold | --warm] [--prefetch off | on]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moestream import Engine, MoestreamError, PrefetchConfig
from moestream.runtime.assembly import draw_blueprint
from scripts.rivals import page_cache, protocol
from scripts.rivals.errors import RivalError
from scripts.rivals.protocol import Line, Measured, Sample


def read_prefetch(text: str) -> PrefetchConfig | Literal["off"]:
    """The argument ``--prefetch``.

    Raises:
        RivalError: there is no such configuration.
    """
    if text == "off":
        return "off"
    if text == "on":
        return PrefetchConfig()
    try:
        return PrefetchConfig(**json.loads(text))
    except (ValueError, TypeError, MoestreamError) as error:
        raise RivalError(f"--prefetch {text}: {error}") from error


def look(engine: Engine) -> Sample:
    """Clock and counters."""
    seen, ours = page_cache.counters(), engine.statistics()
    return Sample(
        time.perf_counter(),
        ours.bytes_read,
        ours.stall_seconds,
        seen.device_bytes,
        seen.major_faults,
        ours.hits,
        ours.misses,
    )


async def answer(
    engine: Engine, prompt: Sequence[int], tokens: int
) -> tuple[list[Sample], list[int]]:
    """Looks before, at the first token and at the last one; all tokens."""
    marks = [look(engine)]
    output = []
    async for chunk in engine.stream(list(prompt), max_tokens=tokens + 1, ignore_eos=True):
        output.append(chunk.token)
        if len(output) == 1:
            marks.append(look(engine))
    return [*marks, look(engine)], output


async def measure_engine(options: argparse.Namespace) -> Measured:
    """Open, warm up, repeat."""
    prompts = protocol.read_prompts(options.prompt_file)
    files = sorted(options.model.glob("*.safetensors"))
    sizes = [layer.record_bytes for layer in draw_blueprint(options.model).size.layers]
    slots = options.slots or protocol.slots_for(options.budget_bytes, sizes)
    result = Measured(f"moestream, prefetch {options.prefetch}", tokens=options.tokens)
    engine = await Engine.open(
        options.model,
        slots=slots,
        direct=options.reads == "direct",
        prefetch=read_prefetch(options.prefetch),
        context=max(map(len, prompts)) + max(options.tokens, options.warm_tokens) + 2,
        pressure="off",  # the number of slots is the same for all systems
    )
    async with engine:
        if options.warm:
            page_cache.read_in(files)
        await answer(engine, prompts[0], options.warm_tokens)
        for turn in range(options.repeats):
            protocol.cool(options, files)
            prompt = prompts[turn % len(prompts)]
            (begun, first, last), output = await answer(engine, prompt, options.tokens)
            result.prefill.append(protocol.between(begun, first))
            result.decode.append(protocol.between(first, last))
            result.prompt_tokens.append(len(prompt))
            result.outputs.append(output)
        store = engine._core.store
        read = {part.path for group in store.groups for part in group.record.components}
        aside = read - store.reader.direct_files if options.reads == "direct" else set()
    result.extra = {"slots": slots}
    result.note = protocol.condition(options)
    if aside:
        result.note += f"; buffered in {len(aside)} of {len(read)} files, which are not aligned"
    return result


def measure(options: argparse.Namespace) -> Measured:
    """The same, and errors of the engine as errors of the runner."""
    try:
        return asyncio.run(measure_engine(options))
    except MoestreamError as error:
        raise RivalError(str(error)) from error


def run(arguments: Sequence[str]) -> list[Line]:
    """The whole program but for printing."""
    parser = protocol.make_parser(__doc__)
    parser.add_argument(
        "--prefetch",
        default="off",
        metavar="off|on|JSON",
        help="reading ahead: not, by the defaults, or with the given fields of PrefetchConfig",
    )
    options = parser.parse_args(arguments)
    protocol.check_conditions(options)
    return protocol.launch(measure, options, __file__)


if __name__ == "__main__":
    # What is measured here must not become what later plans of the model go by.
    os.environ["MOESTREAM_CACHE_DIR"] = ""
    protocol.run_main(run)
