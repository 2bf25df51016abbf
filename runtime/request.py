"""One call of ``generate`` or ``stream`` between the caller's loop and the compute thread."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from .api import Chunk, Generation
from .errors import RequestTimeout
from .sampling import Prompt, Sampling

GRACE = 2.0
"""Seconds that a caller waits behind the end of its timeout for the compute thread to say so."""

_numbers = itertools.count(1)


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Cancelled(Exception):
    """Unwinds the model's forward pass of a request that its caller has given up. Never escapes."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has ended in an error."""

    error: BaseException


Message = Chunk | Generation | Failed

PromptProgress = Callable[[int, int], None]
"""Gets how many tokens of a prompt have been computed, and how many there are."""


class Request:
    """A request and its way back to the caller.

    The caller's side is an asyncio queue on the caller's loop; the compute thread posts plain
    Python values into it with ``call_soon_threadsafe``. Made on the caller's loop. Exactly one
    ``Generation`` or ``Failed`` is posted, as the last message.

    Args:
        prompt: text, token ids or chat messages.
        sampling: checked arguments.
        chunks: whether each token is to be posted.
        priority: larger ones go first among those that wait.
        timeout: seconds from now in which it has to end; None for no limit.
        progress: called on the caller's loop with (prompt tokens computed, prompt tokens).
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        chunks: bool,
        priority: int = 0,
        timeout: float | None = None,
        progress: PromptProgress | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.prompt = prompt
        self.sampling = sampling
        self.chunks = chunks
        self.priority = priority
        self.timeout = timeout
        self.progress = progress
        self.created = time.perf_counter()
        self.state = State.WAITING
        self._cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()

    # -- caller -------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop the request at its next layer. Any thread; idempotent."""
        self._cancelled.set()

    async def receive(self) -> Chunk | Generation:
        """The next message; raises the request's error.

        The compute thread keeps the timeout. A drive that does not answer keeps the compute thread:
        then this gives up by itself, a little later.
        """
        if self.timeout is None:
            message = await self._messages.get()
        else:
            left = self.created + self.timeout + GRACE - time.perf_counter()
            try:
                async with asyncio.timeout(max(left, 0.0)):
                    message = await self._messages.get()
            except TimeoutError:
                raise RequestTimeout(self.timeout) from None
        if isinstance(message, Failed):
            raise message.error
        return message

    # -- compute thread -----------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether the caller has given the request up, or its loop is gone."""
        return self._cancelled.is_set() or self._loop.is_closed()

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return self.timeout is not None and time.perf_counter() > self.created + self.timeout

    @property
    def given_up(self) -> bool:
        """Whether nothing more is to be computed for it."""
        return self._cancelled.is_set() or self.expired or self._loop.is_closed()

    def tell(self, computed: int, tokens: int) -> None:
        """Say how far the prompt is."""
        if self.progress is not None:
            with suppress(RuntimeError):  # the caller's loop is closed
                self._loop.call_soon_threadsafe(self.progress, computed, tokens)

    def post(self, message: Message) -> None:
        """Send to the caller; a caller whose loop is gone has given the request up."""
        try:
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)
        except RuntimeError:  # the caller's loop is closed
            self.cancel()
