"""What the machine has: memory, and the limits set on this process."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

AUTOMATIC_SHARE = 0.7
"""Share of the memory that is free now which ``memory=None`` takes (arbitrary: leaves the rest to
other programs)."""

BUFFERED_SHARE = 0.5
"""The same where reads pass through the page cache, which then is a second cache of experts and
wants room (arbitrary: more slots are not always faster)."""

PROCESS_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")

NO_LIMIT = 1 << 60
"""From here on a limit of the first version of control groups means that there is none."""


def resident_bytes() -> int:
    """Memory that this process occupies now."""
    return int(psutil.Process().memory_info().rss)


def return_memory() -> None:
    """Give unused memory back to the system: models lie in reference cycles, glibc keeps pages."""
    gc.collect()
    trim_memory()


def trim_memory() -> None:
    """Give back what the C library keeps of freed memory; much cheaper than ``return_memory``."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


_process_bytes: int | None = None


def process_bytes() -> int:
    """What the process occupies beside models: measured once, when the first model is planned.

    Later measurements would count what other engines hold and what the allocator has not returned,
    and the smallest budget would grow with every attempt.
    """
    global _process_bytes
    if _process_bytes is None:
        _process_bytes = resident_bytes()
    return _process_bytes


def available_bytes() -> int:
    """Memory that this process could still take, control group limits included."""
    free = int(psutil.virtual_memory().available)
    for group in group_uses(PROCESS_GROUPS, GROUPS):
        free = min(free, max(group.limit - group.used, 0))
    return free


def automatic_budget(*, buffered: bool = False) -> int:
    """The budget of the process when the caller names none.

    Args:
        buffered: experts are read through the page cache.
    """
    share = BUFFERED_SHARE if buffered else AUTOMATIC_SHARE
    return resident_bytes() + int(available_bytes() * share)


@dataclass(frozen=True, slots=True)
class GroupUse:
    """A control group with a memory limit.

    Attributes:
        folder: of its files.
        limit, used: bytes, page cache not counted as used.
    """

    folder: Path
    limit: int
    used: int


def group_uses(process_groups: Path, groups: Path) -> list[GroupUse]:
    """The control groups that this process is in, if they are limited.

    Args:
        process_groups: the kernel's list of them, ``PROCESS_GROUPS``.
        groups: where their file systems are mounted, ``GROUPS``.
    """
    try:
        lines = process_groups.read_text().splitlines()
    except OSError:
        return []
    uses = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = groups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            try:
                limit, used = (int((place / name).read_text()) for name in names)
            except (OSError, ValueError):  # no limit at this level reads as "max"
                continue
            if limit < NO_LIMIT:
                cached = _cached_bytes(place / "memory.stat")
                uses.append(GroupUse(place, limit, max(used - cached, 0)))
    return uses


def _cached_bytes(statistics: Path) -> int:
    """Page cache that a group is charged with and gives up before it runs out of memory."""
    try:
        fields = dict(line.split() for line in statistics.read_text().splitlines())
        total = "total_" if "total_inactive_file" in fields else ""  # v1: with the groups inside
        return int(fields[f"{total}inactive_file"]) + int(fields[f"{total}active_file"])
    except (OSError, ValueError, KeyError):
        return 0
