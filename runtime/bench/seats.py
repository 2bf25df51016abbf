"""Which arms are open at once, and their opening."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import mlx.core as mx

from ..machine import available_bytes
from .arms import Arm, EngineArm
from .cells import Cell
from .model import BenchModel
from .resident import ResidentArm

WARM_UP = 48
"""Tokens that an engine decodes before anything is measured: its slots fill, guesses are tried."""

WARM_UP_PROMPT = 16
SEED = 1 << 20
"""Of prompts that are not measured."""

MEMORY_SHARE = 0.8
"""Of the free memory, what arms that are open at once may take (arbitrary)."""

RESIDENT = "resident"


def memory_left() -> int:
    """Bytes that models could still take where MLX computes."""
    left = available_bytes()
    if mx.default_device() == mx.gpu:
        facts = mx.device_info(mx.default_device())
        for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if isinstance(size := facts.get(name), int) and size > 0:
                return min(left, size - mx.get_active_memory())
    return left


def batches(needs: Mapping[str, int], room: int) -> list[list[str]]:
    """Arms that are open at once; the first that does not fit begins another batch. Pure.

    Args:
        needs: bytes that each arm takes, in order.
        room: bytes that there are.
    """
    made: list[list[str]] = []
    filled = room + 1
    for arm, need in needs.items():
        if filled + need > room:
            made.append([])
            filled = 0
        made[-1].append(arm)
        filled += need
    return made


class Seats:
    """The open arms of a batch. An async context manager that closes them.

    Args:
        model: to open.
        arms: names.
        arguments: of ``Engine.open``.
        throttle: bytes per second that the drive gives at most.
    """

    def __init__(
        self,
        model: BenchModel,
        arms: Sequence[str],
        arguments: Mapping[str, Any],
        *,
        throttle: float | None,
    ) -> None:
        self._model = model
        self._arms = arms
        self._arguments = dict(arguments)
        self._throttle = throttle
        self._open: dict[str, Arm] = {}
        self.problems: dict[str, Exception] = {}
        """Why arms could not be opened."""

    async def __aenter__(self) -> Self:
        try:
            for arm in self._arms:
                try:
                    await self.arm(arm)
                except Exception as error:
                    self.problems[arm] = error
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        while self._open:
            _, arm = self._open.popitem()
            await arm.aclose()

    async def arm(self, name: str) -> Arm:
        """An arm; opened, and warmed up, if it is not or has died.

        Raises:
            Exception: it cannot be opened, or fails at once.
        """
        arm = self._open.get(name)
        if arm is not None and arm.alive:
            return arm
        if arm is not None:
            del self._open[name]
            await arm.aclose()
        if name == RESIDENT:
            widen = mx.default_device() == mx.cpu
            arm = await ResidentArm.open(self._model.directory, widen=widen)
        else:
            arm = await EngineArm.open(
                self._model.directory,
                name,
                routed=self._model.routing is not None,
                throttle=self._throttle,
                **self._arguments,
            )
        self._open[name] = arm
        context = self._arguments["context"]
        prompt = self._model.prompt(min(WARM_UP_PROMPT, context // 2), SEED)
        await arm.decode(prompt, min(WARM_UP, context - len(prompt) - 1))
        return arm


async def warm_up(arm: Arm, cell: Cell, model: BenchModel) -> None:
    """What a cell does, once and shorter: kernels for its shapes are compiled, buffers taken."""
    prompts = [model.prompt(cell.context, SEED + n) for n in range(cell.callers)]
    if cell.kind == "decode":
        await arm.decode(prompts[0], min(cell.tokens, 8))
    elif cell.kind == "prefill":
        await arm.prefill(prompts[0])
    else:
        await arm.together(prompts, min(cell.tokens, 4))
