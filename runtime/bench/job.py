"""What a benchmark is asked to do, and who is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..core import DEFAULT_LANES
from ..user_cache import VARIABLE
from .cells import Cell
from .rivals import Rival
from .rows import Row


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark.

    Attributes:
        model: directory or Hub id.
        cells: what to measure.
        suite: its name.
        record_mb: size that records are padded to; None leaves them as they are.
        throttle: bytes per second that the drive gives at most.
        lanes: reads in flight at once.
        rivals: other systems; arms of every cell but those of several callers.
        rival_seconds: most time of one run of one of them.
        trace_dir: gets a trace for each engine of each cell.
        scratch: folder on the drive that is measured, for the padding.
    """

    model: str | Path
    cells: tuple[Cell, ...]
    suite: str = ""
    record_mb: float | None = None
    throttle: float | None = None
    lanes: int = DEFAULT_LANES
    rivals: tuple[Rival, ...] = ()
    rival_seconds: float = 1800.0
    trace_dir: Path | None = None
    scratch: Path = field(default_factory=Path.cwd)

    @property
    def steps(self) -> int:
        """Repetitions of all arms, as progress counts them."""
        return sum(cell.repeats * (len(cell.arms) + len(self.rivals)) for cell in self.cells)

    @property
    def conditions(self) -> str:
        """What is not as it would be without being asked for."""
        parts = []
        if self.record_mb is not None:
            parts.append(f"records padded to {self.record_mb:g} MB")
        if self.throttle is not None:
            parts.append(f"drive throttled to {self.throttle / 1e6:g} MB/s")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what happens.

    Attributes:
        row: gets each row.
        cell: called with a cell that is worked on now, and its number from 1.
        step: called with the number of repetitions that are done, or will not be.
    """

    row: Callable[[Row], None]
    cell: Callable[[Cell, int], None] = lambda cell, number: None
    step: Callable[[int], None] = lambda count: None


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Keep no profile of these engines: plans of the model would go by them."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
