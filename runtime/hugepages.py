"""Large pages for memory that direct reads write to.

A direct read pins the pages it writes to, one by one, and the processor looks each of them up again
when it computes. Pages of 2 MiB instead of 4 KiB took 8 to 25 % off the stalls on two cores, and
the differences between pools that happen to lie in better or worse memory (docs/bench).
"""

from __future__ import annotations

import ctypes
import sys

SIZE = 2 << 20
"""Bytes of a large page on x86, and on ARM with pages of 4 KiB; others the kernel refuses."""

_HUGEPAGE = 14
_COLLAPSE = 25  # Linux 6.1


def use_large_pages(address: int, nbytes: int) -> bool:
    """Have the kernel back the whole large pages in this range with such; a hint.

    Args:
        address: of memory that is there already.
        nbytes: of it.

    Returns:
        Whether that was done: only on Linux, where it is not switched off, and for a range that
        holds a large page.
    """
    start = -(-address // SIZE) * SIZE
    length = (address + nbytes) // SIZE * SIZE - start
    if sys.platform != "linux" or length <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise(start, length, _HUGEPAGE)  # where it fails, the next one does
    return bool(madvise(start, length, _COLLAPSE) == 0)
