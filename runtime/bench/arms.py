"""The arms that run in this process: engines with different ways of reading ahead, and mlx-lm."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from ..api import Statistics
from ..engine import Engine
from ..machine import return_memory
from ..prefetch import PrefetchConfig
from ..streams import leased_streams
from .padding import Throttle

T = TypeVar("T")

PREFETCH: Mapping[str, Any] = {
    "off": "off",
    "fifo": PrefetchConfig(admission="always", order="fifo", distances=(1, 2), width=1.0),
    "ours": PrefetchConfig(),
}
"""Arms that are engines: on demand, guesses without rules, guesses by the rules."""

ROUTING_KEY = "moestream_routing"
"""In the config of a checkpoint whose routing is made up, so that no router can predict it."""


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
        config: Mapping[str, Any],
        throttle: float | None,
        **arguments: Any,
    ) -> Self:
        """Open an engine.

        Args:
            model: directory.
            arm: of ``PREFETCH``.
            config: of the model.
            throttle: bytes per second that the drive gives at most.
            **arguments: of ``Engine.open``.
        """
        # Slots that memory pressure takes away would be measured as if they were there.
        engine = await Engine.open(model, prefetch=PREFETCH[arm], pressure="off", **arguments)
        try:
            if throttle is not None:
                engine._core.store.reader.preadv = Throttle(throttle)
            if ROUTING_KEY in config and PREFETCH[arm] != "off":
                follow_routing(engine)
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


def follow_routing(engine: Engine) -> None:
    """Let guesses know as much of made-up routing as a predictor knows of a trained router.

    The module that makes such routing offers this; without it guesses are made by the routers, and
    are mostly wrong.
    """
    name = f"{__package__}.routing"
    if find_spec(name) is not None:
        import_module(name).noisy_lookahead(engine)


# -- mlx-lm -------------------------------------------------------------------------------------


class ResidentArm:
    """mlx-lm itself, with everything in memory, on a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moestream-bench-resident")
        self._stack = ExitStack()
        self._given_up = threading.Event()
        self._model: Any = None

    @classmethod
    async def open(cls, model: Path, *, widen: bool) -> Self:
        """Load a model.

        Args:
            model: directory.
            widen: compute in float32, as engines do on the CPU backend.
        """
        arm = cls()
        try:
            await arm._run(arm._load, model, widen)
        except BaseException:
            await arm.aclose()
            raise
        return arm

    alive = True

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        self._given_up.clear()
        future = self._thread.submit(work, *arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._given_up.set()
            raise

    def _load(self, model: Path, widen: bool) -> None:
        self._stack.enter_context(leased_streams())
        self._model = load_model(model)[0]
        if widen:
            self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())

    def _decode(self, prompt: Sequence[int], tokens: int) -> Sample:
        begun = time.perf_counter()
        steps = self._steps(prompt, tokens + 1)
        next(steps)
        first = last = time.perf_counter()
        gap = 0.0
        for _ in steps:
            now = time.perf_counter()
            gap, last = max(gap, now - last), now
            if self._given_up.is_set():
                break
        return Sample(last - first, tokens, first=first - begun, gap=gap)

    def _prefill(self, prompt: Sequence[int]) -> Sample:
        begun = time.perf_counter()
        next(self._steps(prompt, 1))
        seconds = time.perf_counter() - begun
        return Sample(seconds, len(prompt), first=seconds)

    def _steps(self, prompt: Sequence[int], tokens: int) -> Iterator[Any]:
        stream = mx.default_stream(mx.default_device())  # a leased one
        return generate_step(mx.array(list(prompt)), self._model, max_tokens=tokens, stream=stream)

    def _release(self) -> None:
        self._model = None
        return_memory()
        self._stack.close()

    async def decode(self, prompt: Sequence[int], tokens: int) -> Sample:
        return await self._run(self._decode, prompt, tokens)

    async def prefill(self, prompt: Sequence[int]) -> Sample:
        return await self._run(self._prefill, prompt)

    async def together(self, prompts: Sequence[Sequence[int]], tokens: int) -> Sample:
        raise NotForThisArm("mlx-lm's generate_step answers one prompt at a time")

    async def aclose(self) -> None:
        self._given_up.set()
        self._thread.submit(self._release)
        await asyncio.to_thread(self._thread.shutdown)
