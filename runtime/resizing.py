"""Pools that follow the share of memory they may have; between forwards, on the compute thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..io.loop import IoLoop
from ..models.experts import install_parameters
from .errors import EngineClosed, EngineDead
from .machine import trim_memory
from .pressure import Level, Pressure, Source, watch
from .slots import SlotPool
from .store import ExpertStore

if TYPE_CHECKING:
    from .compute import ComputeThread
    from .core import Core

logger = logging.getLogger("moestream")

PAUSE_SECONDS = 0.05
"""After so long the other layers wait for the next forward (arbitrary: about one slow token)."""


class Resizer:
    """Brings the pools of all streamed layers to the share that the pressure allows.

    Layer after layer, so that beside the pools there is never more than one new pool of one layer.
    A layer is left for later while its slots are pinned or being read into.

    Args:
        store: owner of the pools.
        modules: switch module of each streamed layer, whose parameters are its pool.
        floors: slots of each layer that always stay.
        pressure: whose share counts.

    Attributes:
        planned: slots of each layer without pressure.
        resizes: pools rebuilt so far.
        wake: called when the share has changed, so that an idle engine does not wait for a request;
            from any thread.
        clock: seconds, for the bound on a pause.
        spare: lets go of what leaves before any slot does; whether there was anything.
    """

    def __init__(
        self,
        store: ExpertStore,
        modules: Sequence[Any],
        floors: Sequence[int],
        pressure: Pressure,
    ) -> None:
        self._store = store
        self._modules = list(modules)
        self._floors = floors
        self.pressure = pressure
        self.planned = tuple(group.residency.slots for group in store.groups)
        self.resizes = 0
        self.wake: Callable[[], None] = lambda: None
        self.clock: Callable[[], float] = time.monotonic
        self.spare: Callable[[], bool] = lambda: False
        self._done_share = 1.0  # all pools have the sizes of this share

    def target(self, group: int) -> int:
        """Slots that a layer should have now."""
        planned = self.planned[group]
        return max(int(planned * self.pressure.share), min(self._floors[group], planned))

    def apply(self, seconds: float = PAUSE_SECONDS) -> None:
        """Resize pools until all fit the share or the time is over. Between forwards only.

        What can be spared leaves at the first sign of pressure, and stays away while it lasts.
        Shrinks before it grows: the layers that shrink make room for others.
        """
        if self.pressure.level is not Level.CALM and self.spare():
            mx.clear_cache()
            trim_memory()
        share = self.pressure.share
        if share == self._done_share or not self._modules:
            return
        ends = self.clock() + seconds
        sizes = [group.residency.slots for group in self._store.groups]
        waiting = [group for group, slots in enumerate(sizes) if slots != self.target(group)]
        waiting.sort(key=lambda group: self.target(group) > sizes[group])
        left = len(waiting)
        for group in waiting:
            if not self._resize(group):
                continue
            left -= 1
            if self.clock() >= ends:
                break
        if left < len(waiting):
            # What MLX keeps of the old pools, and the C library of what MLX has freed.
            mx.clear_cache()
            trim_memory()
        if not left:
            self._done_share = share
            slots = sum(group.residency.slots for group in self._store.groups)
            logger.info("memory pressure: %d of %d slots", slots, sum(self.planned))

    def _resize(self, group: int) -> bool:
        module = self._modules[group]

        def swap(pool: SlotPool) -> None:
            install_parameters(module, pool.arrays)

        try:
            done = self._store.resize(group, self.target(group), swap)
        except (RuntimeError, MemoryError) as error:  # no memory for the new pool: later, perhaps
            logger.info("memory pressure: a pool stays as it is: %s", error)
            return False
        self.resizes += done
        return done

    def release(self) -> None:
        """The engine is being closed: let go of the modules."""
        self._modules.clear()


@contextmanager
def watching(loop: IoLoop, source: Source, resizer: Resizer) -> Iterator[None]:
    """Follow the memory pressure on the I/O loop."""
    follow = partial(watch, source, resizer.pressure, lambda: resizer.wake())
    task = loop.start(follow)
    try:
        yield
    finally:
        task.cancel()


class ResizeJob:
    """Resizes the pools of an engine that is idle."""

    def run(self, core: Core) -> None:
        core.resizer.apply(seconds=float("inf"))
        core.sample_memory()

    def abort(self, error: BaseException) -> None:
        """Nobody waits for it."""


def wake_with(thread: ComputeThread[Core], resizer: Resizer) -> None:
    """Let changes of the share reach an idle engine; a busy one looks before each forward."""

    def wake() -> None:
        with suppress(EngineClosed, EngineDead):
            thread.submit(ResizeJob())

    resizer.wake = wake
    if resizer.pressure.share < 1.0:  # it has changed before anybody could be told
        wake()
