"""Where the kernel says how short of memory it is: pressure stall information, groups, macOS."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from . import machine
from .machine import GroupUse, group_uses
from .pressure import Level, Source

SYSTEM_STALLS = Path("/proc/pressure/memory")

SCARCE = 0.1
"""Share of memory below which stalls count: above, they are about page cache being read again, or
about other control groups (arbitrary)."""

LOW = 0.02
"""Share of free memory that is a warning by itself, stalls or not (arbitrary)."""

EMPTY = 0.01
"""Share of free memory that is critical by itself (arbitrary)."""

STALLED = 10.0
"""Per cent of the last ten seconds: some task stalled is a warning, all of them is critical
(arbitrary; a machine that swaps shows 30 and more)."""

MAC_LEVELS = {1: Level.CALM, 2: Level.WARNING, 4: Level.CRITICAL}
MAC_NAME = b"kern.memorystatus_vm_pressure_level"


def find_source() -> Source | None:
    """What this machine's kernel offers; None when that is nothing."""
    if sys.platform == "darwin":
        return mac_source()
    if sys.platform == "linux":
        return linux_level
    return None


def linux_level() -> Level:
    """The worst of the machine and the limited control groups that this process is in."""
    memory = psutil.virtual_memory()
    level = judge(memory.available / memory.total, _read(SYSTEM_STALLS))
    for group in group_uses(machine.PROCESS_GROUPS, machine.GROUPS):
        level = max(level, _group_level(group))
    return level


def _group_level(group: GroupUse) -> Level:
    free = max(group.limit - group.used, 0) / max(group.limit, 1)
    return judge(free, _read(group.folder / "memory.pressure"))


def judge(free: float, stalls: str) -> Level:
    """The level of a machine or group.

    Args:
        free: share of its memory that is free or page cache.
        stalls: pressure stall information as the kernel writes it; empty where there is none.
    """
    level = Level.CALM
    if free < EMPTY:
        level = Level.CRITICAL
    elif free < LOW:
        level = Level.WARNING
    if free < SCARCE:
        if stall_share(stalls, "full") >= STALLED:
            level = Level.CRITICAL
        elif stall_share(stalls, "some") >= STALLED:
            level = max(level, Level.WARNING)
    return level


def stall_share(stalls: str, kind: str) -> float:
    """Per cent of the last ten seconds in which "some" or "full" were stalled; 0.0 if unknown."""
    for line in stalls.splitlines():
        name, *fields = line.split()
        if name == kind:
            for field in fields:
                key, _, value = field.partition("=")
                if key == "avg10":
                    try:
                        return float(value)
                    except ValueError:
                        return 0.0
    return 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # an older kernel, or one with stall information switched off
        return ""


def mac_source() -> Source | None:
    """A source that asks macOS for its level; None where it does not answer."""
    library = ctypes.util.find_library("c")
    if library is None:
        return None
    by_name = getattr(ctypes.CDLL(library, use_errno=True), "sysctlbyname", None)
    if by_name is None or _mac_number(by_name) is None:
        return None
    return lambda: MAC_LEVELS.get(_mac_number(by_name) or 1, Level.CALM)


def _mac_number(by_name: Callable[..., int]) -> int | None:
    value = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = by_name(MAC_NAME, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.value
