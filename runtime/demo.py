"""`moestream demo`: the model in the package, streamed and with everything resident."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .session import EngineOptions, check_request, follow, messages, open_engine

if TYPE_CHECKING:
    from .api import Chunk, Generation
    from .engine import Engine, SamplingArguments

DEMO_MODEL = "demo-moe-4bit"
DEMO_PROMPT = "Tell me a short story about a brave little mouse."
"""One of several that were tried; the model finishes this story within the default length."""

WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One of the two runs. Seconds and bytes.

    Attributes:
        slots: slots of a layer.
        experts: experts of a layer.
        tokens_per_second: behind the first token.
        time_to_first_token: loading and a warm-up come before it and are not in it.
        hit_rate: share of routed experts that were resident.
        bytes_per_token: read from the drive for prompt and answer, by token of the answer.
        stall_share: share of the time in which the compute thread waited for reads.
        expert_bytes: memory of the experts that are held.
        process_bytes: memory of the whole process at the end of the run.
    """

    slots: int
    experts: int
    tokens_per_second: float
    time_to_first_token: float
    hit_rate: float
    bytes_per_token: float
    stall_share: float
    expert_bytes: int
    process_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs.

    Attributes:
        prompt: what was asked.
        text: the streamed answer.
        tokens: its token ids.
        first_difference: index of the first token that differs; None if none does.
        streamed, resident: figures.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    first_difference: int | None
    streamed: DemoRun
    resident: DemoRun

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return {**asdict(self), "same_tokens": self.first_difference is None}


@contextmanager
def demo_model() -> Iterator[Path]:
    """The directory of the model that comes with the package."""
    with resources.as_file(resources.files("moestream") / "data" / DEMO_MODEL) as path:
        yield path


def compare(
    prompt: str,
    *,
    slots: int | None = None,
    max_tokens: int,
    on_chunk: Callable[[Chunk], None],
) -> Comparison:
    """Answer a prompt twice, streamed first.

    Args:
        prompt: the user's message.
        slots: slots of a layer of the streamed run; None for a quarter of the experts.
        max_tokens: most tokens of the answer.
        on_chunk: called with the tokens of the streamed run.
    """
    check_request(prompt, {"max_tokens": max_tokens})
    with demo_model() as path:
        experts = int(json.loads((path / "config.json").read_bytes())["num_experts"])
        slots = min(slots or max(experts // 4, 1), experts)

        def ignore(chunk: Chunk) -> None:
            """The second answer is not shown."""

        async def both() -> Comparison:
            first, streamed = await _run(
                EngineOptions(str(path), slots=slots), slots, experts, prompt, max_tokens, on_chunk
            )
            second, resident = await _run(
                EngineOptions(str(path), memory="all"), experts, experts, prompt, max_tokens, ignore
            )
            difference = _first_difference(first.tokens, second.tokens)
            return Comparison(prompt, first.text, first.tokens, difference, streamed, resident)

        return asyncio.run(both())


async def _run(
    options: EngineOptions,
    slots: int,
    experts: int,
    prompt: str,
    max_tokens: int,
    on_chunk: Callable[[Chunk], None],
) -> tuple[Generation, DemoRun]:
    sampling: SamplingArguments = {"max_tokens": max_tokens}
    async with await open_engine(options) as engine:
        # On its first run MLX compiles its kernels. Another text, so that the slots hold other
        # experts than the ones that the prompt asks for.
        await engine.generate("Hello", max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        result = await follow(engine, messages(prompt, None), sampling, on_chunk)
        return result, _figures(engine, result, slots, experts)


def _figures(engine: Engine, result: Generation, slots: int, experts: int) -> DemoRun:
    from .machine import resident_bytes

    stats = result.stats
    rate = stats.decode_tokens_per_second
    seconds = stats.time_to_first_token + ((len(result.tokens) - 1) / rate if rate else 0.0)
    return DemoRun(
        slots=slots,
        experts=experts,
        tokens_per_second=rate,
        time_to_first_token=stats.time_to_first_token,
        hit_rate=stats.hit_rate,
        bytes_per_token=stats.bytes_read / len(result.tokens),
        stall_share=stats.stall_seconds / seconds,
        expert_bytes=engine.plan.slot_bytes,
        process_bytes=resident_bytes(),
    )


def _first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    if left == right:
        return None
    same = (a == b for a, b in zip(left, right, strict=False))
    return next(
        (index for index, equal in enumerate(same) if not equal), min(len(left), len(right))
    )
