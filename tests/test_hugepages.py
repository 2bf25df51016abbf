"""Large pages: only whole ones inside the range, and really there where the system has them."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import pytest

from moestream.runtime.hugepages import SIZE, use_large_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(address: int) -> int:
    """Bytes of large pages in the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if borders := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(borders[1], 16) <= address < int(borders[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(
    sys.platform != "linux" or not SETTING.exists() or "[never]" in SETTING.read_text(),
    reason="the system has no large pages",
)
def test_pages_are_large_and_keep_their_bytes() -> None:
    with mmap.mmap(-1, 4 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes([7]) * len(memory)
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(anchor)
        if not use_large_pages(address, len(memory)):
            pytest.skip("the kernel cannot do it")
        assert huge_bytes(address) >= 3 * SIZE
        assert memory[:] == bytes([7]) * len(memory)
        del anchor


def test_nothing_is_done_without_a_whole_page() -> None:
    memory = bytearray(SIZE)
    anchor = ctypes.c_char.from_buffer(memory)
    assert not use_large_pages(ctypes.addressof(anchor) + 1, SIZE - 1)
