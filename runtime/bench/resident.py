"""The arm that is mlx-lm itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from ..limits import limits
from ..machine import return_memory
from ..streams import leased_streams
from .arms import NotForThisArm, Sample

T = TypeVar("T")


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
        # Budgets of engines that are open beside it would limit it, too.
        self._stack.enter_context(limits.hold(None))
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

    def remark(self, callers: int) -> str:
        return ""

    async def aclose(self) -> None:
        self._given_up.set()
        self._thread.submit(self._release)
        await asyncio.to_thread(self._thread.shutdown)
