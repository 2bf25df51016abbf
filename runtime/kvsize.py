"""How large the caches of a sequence become, from their shapes after one token never computed.

The classes are mlx-lm's; what counts is how they keep their arrays ``[1, heads, rows, size]``:

- growing by blocks of rows (``KVCache``, also of latents: what is stored is what has a shape);
- growing row by row (``ConcatenateKVCache``);
- a window that keeps its last rows (``RotatingKVCache``, ``ChunkedKVCache``) and, between two
  prompt chunks, a chunk's rows beside them;
- states of a fixed size (``ArraysCache``: convolutions, linear attention).

A class that none of this is known of is measured by building longer prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache

from .sizes import CacheSize, Window

PROBE_TOKENS = (1023, 2047)
"""Lengths of the prompts that caches of an unknown class are measured with. Arbitrary: more than
usual windows have (with a longer one the growth is overestimated), and one less than a power of
two, so that groups of tokens that are compressed together are as full as they get."""


def measure_caches(cache: Sequence[Any], build: Callable[[int], Sequence[Any]]) -> CacheSize:
    """Sizes of caches.

    Args:
        cache: of the model, behind one token that need not be computed.
        build: makes caches behind a prompt of so many tokens, not computed either; only called
            when there is a cache of an unknown class.
    """
    fixed = token = largest = 0
    step = 1
    windows: dict[int, int] = {}
    unknown: list[int] = []
    for index, entry in enumerate(parts(cache)):
        keys = getattr(entry, "keys", None)
        if isinstance(entry, ArraysCache):
            fixed += _nbytes(entry)
        elif not isinstance(keys, mx.array) or keys.ndim != 4:
            unknown.append(index)
        else:
            rows = keys.shape[2]
            row_bytes = -(-_nbytes(entry) // rows)
            most = getattr(entry, "max_size", None)
            if isinstance(entry, ChunkedKVCache):
                most = entry.chunk_size + entry.step
            if most:
                windows[most] = windows.get(most, 0) + row_bytes
            else:
                token += row_bytes
                largest = max(largest, row_bytes)
                step = max(step, rows)
    if unknown:
        short, long = (
            [_nbytes(entry) for entry in parts(build(length))] for length in PROBE_TOKENS
        )
        first, second = PROBE_TOKENS
        for index in unknown:
            growth = -(-(long[index] - short[index]) // (second - first))
            token += growth
            largest = max(largest, growth)
            fixed += max(short[index] - growth * first, 0)
    sizes = tuple(Window(rows, row_bytes) for rows, row_bytes in sorted(windows.items()))
    return CacheSize(fixed, token, step, largest, sizes)


def nbytes(cache: Sequence[Any]) -> int:
    """Bytes of all arrays of these caches."""
    return sum(_nbytes(entry) for entry in parts(cache))


def parts(cache: Sequence[Any]) -> Iterator[Any]:
    """The caches, those inside of lists of caches one by one."""
    for entry in cache:
        inner = getattr(entry, "caches", None)
        if inner is None:
            yield entry
        else:
            yield from parts(inner)


def arrays(cache: Sequence[Any]) -> list[mx.array]:
    """All arrays of these caches."""
    values = tree_flatten([list(vars(entry).values()) for entry in parts(cache)])
    return [value for _, value in values if isinstance(value, mx.array)]


def _nbytes(entry: Any) -> int:
    return sum(array.nbytes for array in arrays([entry]))
