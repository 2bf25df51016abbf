"""How many generations are taken at once, and the end of taking any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from .errors import RETRY_SECONDS, ApiError, refused


class Ticket:
    """Leave to generate, for one HTTP request.

    Attributes:
        size: generations that it is for.
        scope: cancelled to cut the request off.
        cut: whether it has been cut off because the server stops.
    """

    def __init__(self) -> None:
        self.size = 1
        self.scope = anyio.CancelScope()
        self.cut = False


class Admission:
    """Counts generations. On one event loop; no method waits.

    Args:
        max_waiting: most generations that wait for their turn.
        running: tells how many the engine works on at once.
    """

    def __init__(self, max_waiting: int, running: Callable[[], int]) -> None:
        self._max_waiting = max_waiting
        self._running = running
        self._tickets: set[Ticket] = set()
        self.active = 0
        self.refused = 0
        self.draining = False

    @contextmanager
    def admit(self) -> Iterator[Ticket]:
        """Take one generation, or refuse it.

        Raises:
            ApiError: too many are waiting (429), or the server is stopping (503).
        """
        ticket = Ticket()
        self._take(1)
        self._tickets.add(ticket)
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)
            self.active -= ticket.size

    def enlarge(self, ticket: Ticket, size: int) -> None:
        """Make a ticket one for several generations.

        Raises:
            ApiError: too many are waiting, or so many are never taken.
        """
        if size > self._most:
            raise refused(f"{size} answers in one request are more than this server takes")
        self._take(size - ticket.size)
        ticket.size = size

    def _take(self, count: int) -> None:
        if self.draining:
            raise ApiError(
                503, "the server is stopping", code="stopping", retry_after=RETRY_SECONDS
            )
        if count and self.active + count > self._most:
            self.refused += 1
            raise ApiError(
                429,
                f"{self.active} requests are running or waiting; try again later",
                code="too_many_requests",
                retry_after=RETRY_SECONDS,
            )
        self.active += count

    @property
    def _most(self) -> int:
        # Whatever the engine works on does not wait; it can always work on one.
        return max(self._running(), 1) + self._max_waiting

    def drain(self) -> None:
        """Take no more."""
        self.draining = True

    def cut_off(self) -> int:
        """Cancel what is left; returns how many requests that were."""
        self.drain()
        for ticket in self._tickets:
            ticket.cut = True
            ticket.scope.cancel()
        return len(self._tickets)
