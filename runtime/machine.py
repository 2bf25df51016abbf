"""What the machine has: memory, and the limits set on this process."""

from __future__ import annotations

from pathlib import Path

import psutil

AUTOMATIC_SHARE = 0.7
"""Share of the memory that is free now which ``memory=None`` takes (arbitrary: leaves the rest to
the page cache and to other programs; more cache is not always faster)."""


def resident_bytes() -> int:
    """Memory that this process occupies now."""
    return int(psutil.Process().memory_info().rss)


def available_bytes() -> int:
    """Memory that this process could still take, control group limits included."""
    free = int(psutil.virtual_memory().available)
    for limit, used in _group_limits():
        free = min(free, max(limit - used, 0))
    return free


def automatic_budget() -> int:
    """The budget of the process when the caller names none."""
    return resident_bytes() + int(available_bytes() * AUTOMATIC_SHARE)


def _group_limits() -> list[tuple[int, int]]:
    """(limit, use) in bytes of the control groups that this process is in, if they are limited."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            try:
                limits.append(tuple(int((place / name).read_text()) for name in names))
            except (OSError, ValueError):  # no limit at this level reads as "max"
                continue
    return [(limit, used) for limit, used in limits]
