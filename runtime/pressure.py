"""Memory pressure: how much of their planned slots the pools may keep. The decision is pure.

The kernel says how pressed the machine is (``machine_pressure.py``); ``Pressure`` turns a series of
such readings into a share, and ``watch`` feeds it as a task on the I/O loop. What is done about it
on the compute thread is in ``resizing.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import anyio


class Level(IntEnum):
    """How short of memory the machine, or a control group of this process, is."""

    CALM = 0
    WARNING = 1
    CRITICAL = 2


Source = Callable[[], Level]
"""Reads the level now: some small files of the kernel, or a system call."""

POLL_SECONDS = 1.0
"""Between two readings (arbitrary; a reading takes about 0.2 ms)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When pools shrink and grow. All arbitrary: shrink at once, grow slowly.

    Attributes:
        warning: factor of the share when a warning lasts.
        critical: factor of the share under critical pressure.
        patience: readings with a warning, one after the other, that shrink the pools.
        settle_seconds: after a shrink, until the next one: what was given up has to show first.
        calm_seconds: without pressure, until the first growth and between two of them.
        growth: added to the share by each growth.
        least: share that always stays.
    """

    warning: float = 0.8
    critical: float = 0.5
    patience: int = 3
    settle_seconds: float = 5.0
    calm_seconds: float = 30.0
    growth: float = 0.1
    least: float = 0.05


class Pressure:
    """Follows the level with hysteresis.

    Attributes:
        level: of the last reading.
        share: of the planned slots, that may be held now.
        shrinks: how often the share has fallen.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self.level = Level.CALM
        self.share = 1.0
        self.shrinks = 0
        self._warnings = 0  # readings in a row that were not calm
        self._shrunk: float | None = None
        self._calm_since: float | None = None

    def step(self, level: Level, now: float) -> float:
        """Take a reading; returns the share.

        Args:
            level: what was read.
            now: seconds of any clock that does not go backwards.
        """
        rules, self.level = self._rules, level
        if level is Level.CALM:
            self._warnings = 0
            if self._calm_since is None:
                self._calm_since = now
            elif self.share < 1.0 and now - self._calm_since >= rules.calm_seconds:
                self.share = min(self.share + rules.growth, 1.0)
                self._calm_since = now
            return self.share
        self._calm_since = None
        self._warnings += 1
        if level is Level.WARNING and self._warnings < rules.patience:
            return self.share
        if self._shrunk is not None and now - self._shrunk < rules.settle_seconds:
            return self.share
        factor = rules.critical if level is Level.CRITICAL else rules.warning
        share = max(self.share * factor, rules.least)
        if share < self.share:
            self.share = share
            self.shrinks += 1
            self._shrunk = now
            self._warnings = 0
        return self.share


async def watch(
    source: Source,
    pressure: Pressure,
    changed: Callable[[], None],
    *,
    seconds: float = POLL_SECONDS,
) -> None:
    """Read the level again and again, until cancelled.

    Args:
        source: of the levels.
        pressure: takes them.
        changed: called when the share is another one, or the pressure has just begun.
        seconds: between two readings.
    """
    while True:
        before, calm = pressure.share, pressure.level is Level.CALM
        try:
            level = source()
        except (OSError, ValueError):  # a group that is being moved or removed
            level = Level.CALM
        share = pressure.step(level, time.monotonic())
        if share != before or (calm and level is not Level.CALM):
            changed()
        await anyio.sleep(seconds)
