"""The caches of requests that are computed together: mlx-lm's batch caches, merged and divided.

A batch of one keeps the request's own caches as mlx-lm makes them, so that a request without
company is computed exactly as by mlx-lm. Rows of different length are padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache


class Cached(Protocol):
    """Whoever has caches: one for each layer, empty while they are part of a batch."""

    cache: list[Any]


def unbatchable(model: Any, cache: Sequence[Any]) -> str:
    """Why requests of this model cannot be computed together; "" when they can.

    Args:
        model: mlx-lm's.
        cache: its caches for one request.
    """
    for _, module in model.named_modules():
        # Padding would move the blocks that keys fall into, and change what is attended to.
        if getattr(module, "index_block_size", None):
            return "its attention selects blocks of the cache by position"
    for entry in cache:
        if problem := _problem(entry):
            return problem
    return ""


def _problem(entry: Any) -> str:
    # Exact types: a subclass may keep more than what mlx-lm merges.
    if type(entry) is CacheList:
        return next(filter(None, map(_problem, entry.caches)), "")
    if type(entry) is RotatingKVCache and entry.keep:
        return "mlx-lm does not batch rotating caches that keep their first tokens"
    if type(entry) in (KVCache, RotatingKVCache, ArraysCache):
        return ""
    return f"mlx-lm does not batch its cache {type(entry).__name__}"


class Batch:
    """Requests whose next tokens are computed in one forward. Compute thread only.

    Attributes:
        rows: in the order of the batch's rows.
    """

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._merged: list[Any] = []  # one per layer, while there are several rows

    @property
    def caches(self) -> list[Any]:
        """One per layer, for the model."""
        if len(self.rows) == 1:
            cache: list[Any] = self.rows[0].cache
            return cache
        return self._merged

    def cache_of(self, row: Cached) -> list[Any]:
        """The caches of one row, taken out of the batch's where these are merged."""
        if len(self.rows) < 2 or row not in self.rows:
            return row.cache
        index = self.rows.index(row)
        return [entry.extract(index) for entry in self._merged]

    def join(self, newcomers: Sequence[Cached]) -> None:
        """Add rows behind the others; layer by layer, so that little is there twice."""
        old = len(self.rows)
        self.rows += newcomers
        if len(self.rows) == 1 or not newcomers:
            return
        sources = self.rows[:1] if old == 1 else []
        layers = len(newcomers[0].cache)
        merged = []
        for layer in range(layers):
            own = [self._merged[layer].extract(row) for row in range(old)] if old > 1 else []
            own += [row.cache[layer] for row in (*sources, *newcomers)]
            entry = type(own[0]).merge(own)
            mx.eval(_arrays(entry))
            merged.append(entry)
            if old > 1:
                self._merged[layer] = None
            for row in (*sources, *newcomers):
                row.cache[layer] = None
        for row in self.rows:
            row.cache = []
        self._merged = merged

    def leave(self, leavers: Sequence[Cached]) -> None:
        """Take rows out and free their caches; the others' stay as they are."""
        keep = [index for index, row in enumerate(self.rows) if row not in leavers]
        before = len(self.rows)
        if len(keep) == before:
            return
        self.rows = [self.rows[index] for index in keep]
        for row in leavers:
            row.cache = []
        if before > 1 and len(keep) == 1:
            cache = []
            for layer, entry in enumerate(self._merged):
                cache.append(entry.extract(keep[0]))
                mx.eval(_arrays(cache[-1]))
                self._merged[layer] = None
            self.rows[0].cache = cache
        if len(keep) <= 1:
            self._merged = []
            return
        kept = mx.array(keep, mx.uint32)
        for entry in self._merged:
            entry.filter(kept)
            mx.eval(_arrays(entry))


def _arrays(entry: Any) -> list[mx.array]:
    """Every array of a cache, also of one that consists of several."""
    parts = getattr(entry, "caches", None)
    if parts is not None:
        return [array for part in parts for array in _arrays(part)]
    values = tree_flatten(list(vars(entry).values()))
    return [value for _, value in values if isinstance(value, mx.array)]
