"""What an arm is, and the arms that are engines with different ways of reading ahead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from ..api import Statistics
from ..engine import Engine
from ..prefetch import PrefetchConfig
from .padding import Throttle

T = TypeVar("T")

PREFETCH: Mapping[str, Any] = {
    "off": "off",
    "fifo": PrefetchConfig(admission="always", order="fifo", distances=(1, 2), width=1.0),
    "ours": PrefetchConfig(),
}
"""Arms that are engines: on demand, guesses without rules, guesses by the rules."""


class NotForThisArm(Exception):
    """The arm has nothing to do with this kind of cell; says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition of one arm. Seconds, bytes and counts of the timed part.

    Attributes:
        seconds: wall time.
        tokens: that it was for.
        first: seconds until the first token, the prompt being part of it; the longest of several.
        gap: the longest time between two tokens of an answer.
        stall, sync, host: see ``GenerationStats``; None where nobody counts.
        syncs: layer syncs.
        nbytes, wasted: read, and of these for nothing.
        hits, misses: routed experts.
    """

    seconds: float
    tokens: int
    first: float = 0.0
    gap: float = 0.0
    stall: float | None = None
    sync: float | None = None
    host: float | None = None
    syncs: int = 0
    nbytes: int | None = None
    wasted: int = 0
    hits: int = 0
    misses: int = 0


class Arm(Protocol):
    """What is measured."""

    @property
    def alive(self) -> bool:
        """Whether it can go on."""

    async def decode(self, prompt: Sequence[int], tokens: int) -> Sample:
        """Time so many tokens behind the first one."""

    async def prefill(self, prompt: Sequence[int]) -> Sample:
        """Time a prompt up to the first token."""

    async def together(self, prompts: Sequence[Sequence[int]], tokens: int) -> Sample:
        """Time several requests from the first prompt to the last token."""

    def remark(self, callers: int) -> str:
        """What is to be said of so many callers at once, if anything."""

    async def aclose(self) -> None:
        """Free the memory."""


# -- engines ------------------------------------------------------------------------------------


class EngineArm:
    """An engine of ours."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    async def open(
        cls,
        model: Path,
        arm: str,
        *,
        routed: bool,
        throttle: float | None,
        **arguments: Any,
    ) -> Self:
        """Open an engine.

        Args:
            model: directory.
            arm: of ``PREFETCH``.
            routed: whether the model's routing is recorded, see ``follow_routing``.
            throttle: bytes per second that the drive gives at most.
            **arguments: of ``Engine.open``.
        """
        # Slots that memory pressure takes away would be measured as if they were there.
        engine = await Engine.open(model, prefetch=PREFETCH[arm], pressure="off", **arguments)
        try:
            if throttle is not None:
                engine._core.store.reader.preadv = Throttle(throttle)
            if routed:
                await follow_routing(engine)
        except BaseException:
            await engine.aclose()
            raise
        return cls(engine)

    @property
    def alive(self) -> bool:
        return self.engine.alive

    async def decode(self, prompt: Sequence[int], tokens: int) -> Sample:
        begun = time.perf_counter()
        before, first, last, gap = self.engine.statistics(), 0.0, 0.0, 0.0
        answer = self.engine.stream(list(prompt), max_tokens=tokens + 1, ignore_eos=True)
        async with aclosing(answer) as chunks:
            async for _ in chunks:
                now = time.perf_counter()
                if first:
                    gap = max(gap, now - last)
                else:
                    first, before = now, self.engine.statistics()
                last = now
        after = self.engine.statistics()
        return _difference(before, after, last - first, tokens, first=first - begun, gap=gap)

    async def prefill(self, prompt: Sequence[int]) -> Sample:
        before, begun = self.engine.statistics(), time.perf_counter()
        await self.engine.generate(list(prompt), max_tokens=1, ignore_eos=True)
        seconds = time.perf_counter() - begun
        after = self.engine.statistics()
        return _difference(before, after, seconds, len(prompt), first=seconds)

    async def together(self, prompts: Sequence[Sequence[int]], tokens: int) -> Sample:
        before, begun = self.engine.statistics(), time.perf_counter()

        async def ask(prompt: Sequence[int]) -> tuple[float, float]:
            first, last, gap = 0.0, 0.0, 0.0
            answer = self.engine.stream(list(prompt), max_tokens=tokens, ignore_eos=True)
            async with aclosing(answer) as chunks:
                async for _ in chunks:
                    now = time.perf_counter()
                    gap = max(gap, now - last) if last else 0.0
                    first, last = first or now, now
            return first - begun, gap

        answers = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        seconds = time.perf_counter() - begun
        after = self.engine.statistics()
        firsts, gaps = zip(*answers, strict=True)
        count = len(prompts) * tokens
        return _difference(before, after, seconds, count, first=max(firsts), gap=max(gaps))

    def remark(self, callers: int) -> str:
        known = self.engine.statistics()
        if known.most_running >= callers:
            return ""
        reason = f": {known.batch_limit}" if known.batch_limit else ""
        return f"computes {known.most_running} at once{reason}"

    async def aclose(self) -> None:
        await self.engine.aclose()


def _difference(
    before: Statistics,
    after: Statistics,
    seconds: float,
    tokens: int,
    *,
    first: float = 0.0,
    gap: float = 0.0,
) -> Sample:
    return Sample(
        seconds=seconds,
        tokens=tokens,
        first=first,
        gap=gap,
        stall=after.stall_seconds - before.stall_seconds,
        sync=after.sync_seconds - before.sync_seconds,
        host=after.host_seconds - before.host_seconds,
        syncs=after.syncs - before.syncs,
        nbytes=after.bytes_read - before.bytes_read,
        wasted=after.wasted_bytes - before.wasted_bytes,
        hits=after.hits - before.hits,
        misses=after.misses - before.misses,
    )


async def follow_routing(engine: Engine) -> None:
    """Let predictions be as wrong as a trained model's, where routing comes from a recording.

    There the residual stream tells the routing of all layers, so that looking ahead would always be
    right. The module ``routing`` adds the errors; without it predictions stay perfect.
    """
    if engine._core.ahead is None:
        return
    try:
        routing = import_module(f"{__package__}.routing")
    except ModuleNotFoundError:
        return
    await asyncio.wrap_future(routing.noisy_lookahead(engine))
