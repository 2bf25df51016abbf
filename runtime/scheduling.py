"""Who runs together with whom: limits and decisions, without MLX and without waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .errors import EngineBusy
from .plan import Plan, spare_bytes
from .sizes import CacheSize

DEFAULT_RUNNING = 8
"""Requests computed together at most; more rows per forward read less for each token."""

DEFAULT_WAITING = 1024
"""Requests that wait at most (arbitrary: a queue of hours helps nobody)."""

DEFAULT_PREFILL_CHUNK = 512
"""Prompt tokens computed between two tokens of running requests at most. A chunk of a streamed
model reads nearly every expert, however short it is: shorter ones cost more than they save."""

SHORT_PROMPT = 64
"""Tokens that a prompt counts as at least, since a few read nearly as much as these (eight prompts
of any length take a whole ``DEFAULT_PREFILL_CHUNK``)."""

MOST_WAVES = 3
"""Waves that a forward of rows without common experts may take. Rows share experts, and a second
wave costs little beside the reads that it saves: 8 rows on slots for 2.7 gave 55 tokens/s where one
row gave 29 and two rows gave 34 (demo model, 16 of 64 slots, records of 0.5 MB)."""

KV_STEP = 256
"""mlx-lm's caches grow by so many tokens."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the running requests may take together.

    Attributes:
        rows: most requests in one forward; 1 when they run in turn.
        prefill_chunk: most prompt tokens computed between two tokens of running requests.
        kv_budget: bytes for the caches of all running requests; None for no bound.
        cache: sizes of the caches of one request.
        reason: why ``rows`` is smaller than what was asked for; "" when it is not.
    """

    rows: int
    prefill_chunk: int
    kv_budget: int | None = None
    cache: CacheSize = field(default_factory=CacheSize)
    reason: str = ""

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of the caches of requests with so many tokens: a batch pads all to the longest."""
        if not lengths:
            return 0
        padded = -(-max(lengths) // KV_STEP) * KV_STEP
        return len(lengths) * self.cache.held(padded)

    def fit(self, lengths: Sequence[int]) -> bool:
        """Whether requests with so many tokens may run together; one always may."""
        if len(lengths) <= 1:
            return True
        if len(lengths) > self.rows:
            return False
        return self.kv_budget is None or self.cache_bytes(lengths) <= self.kv_budget

    def admits(self, lengths: Sequence[int], newcomer: int) -> bool:
        """Whether one more may join, with room for the next tokens of all."""
        return self.fit([length + KV_STEP for length in (*lengths, newcomer)])


def make_limits(
    plan: Plan,
    *,
    max_running: int,
    prefill_chunk: int,
    streamed: Iterable[tuple[int, int]],
    cache: CacheSize,
    unbatchable: str,
) -> Limits:
    """The limits of an engine.

    Args:
        plan: how the memory was divided; its KV cache is what all running requests share.
        max_running: asked for.
        prefill_chunk: asked for.
        streamed: (slots, top_k) of each streamed layer.
        cache: sizes of the caches of one request.
        unbatchable: why mlx-lm's caches of this model cannot be batched; "" when they can.
    """
    room = min((MOST_WAVES * slots // top_k for slots, top_k in streamed), default=max_running)
    rows, reason = max_running, ""
    if room < rows:
        rows = max(room, 1)
        reason = f"a layer has slots for the experts of {rows} (in {MOST_WAVES} waves)"
    if unbatchable and max_running > 1:
        rows, reason = 1, unbatchable
    return Limits(
        rows=rows,
        prefill_chunk=prefill_chunk,
        kv_budget=None if plan.budget is None else plan.kv_bytes,
        cache=cache,
        reason=reason,
    )


def planned_requests(plan: Plan, max_running: int) -> int:
    """For how many requests at full context caches are worth their memory.

    As many as what can be spared holds beyond the first one's: requests that run together need
    fewer bytes from the drive for each token, but slots save bytes as well.

    Args:
        plan: with caches for one request.
        max_running: asked for.
    """
    if plan.budget is None or not plan.kv_bytes:
        return 1
    return max(min(max_running, 1 + spare_bytes(plan) // plan.kv_bytes), 1)


class Entrance:
    """Counts the requests in an engine and refuses those that are too many. Any thread.

    Args:
        waiting: most that wait behind those that run.

    Attributes:
        running: most that run at once; known when the engine is open.
    """

    def __init__(self, waiting: int) -> None:
        self.running = 1
        self._waiting = waiting
        self._lock = threading.Lock()
        self._inside: set[int] = set()

    def enter(self, number: int) -> None:
        """Take a request in.

        Raises:
            EngineBusy: as many as may run and wait are there.
        """
        with self._lock:
            if len(self._inside) >= self.running + self._waiting:
                raise EngineBusy(self.running, self._waiting)
            self._inside.add(number)

    def leave(self, number: int) -> None:
        """The request has ended or was given up while it waited. Idempotent."""
        with self._lock:
            self._inside.discard(number)
