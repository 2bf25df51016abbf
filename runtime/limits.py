"""MLX's own limits on memory, set while engines are open."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from .plan import CACHE_BYTES


class Limits:
    """MLX's limits, which are the process's: those of all open engines together.

    The buffer cache is kept small while any engine is open, and the memory limit above the largest
    budget; the last engine to close restores what was there before the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._budgets: list[int | None] = []
        self._before = (0, 0)

    @contextmanager
    def hold(self, budget: int | None) -> Iterator[None]:
        with self._lock:
            if not self._budgets:
                cache = mx.set_cache_limit(CACHE_BYTES)
                memory = mx.set_memory_limit(1 << 62)
                mx.set_memory_limit(memory)
                self._before = (cache, memory)
            self._budgets.append(budget)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._budgets.remove(budget)
                self._apply()

    def _apply(self) -> None:
        cache, memory = self._before
        if self._budgets:
            budgets = [budget for budget in self._budgets if budget is not None]
            # Without a budget an engine lives with the limit that was there.
            free = len(budgets) < len(self._budgets) or not budgets
            mx.set_memory_limit(max(memory, *budgets, 0) if free else sum(budgets))
        else:
            mx.set_cache_limit(cache)
            mx.set_memory_limit(memory)


limits = Limits()
