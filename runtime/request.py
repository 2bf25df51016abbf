"""One call of ``generate`` or ``stream`` between the caller's loop and the compute thread."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from dataclasses import dataclass
from enum import Enum

from .api import Chunk, Generation
from .sampling import Prompt, Sampling

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


class Request:
    """A request and its way back to the caller.

    The caller's side is an asyncio queue on the caller's loop; the compute thread posts plain
    Python values into it with ``call_soon_threadsafe``. Made on the caller's loop. Exactly one
    ``Generation`` or ``Failed`` is posted, as the last message.

    Args:
        prompt: text, token ids or chat messages.
        sampling: checked arguments.
        chunks: whether each token is to be posted.
    """

    def __init__(self, prompt: Prompt, sampling: Sampling, *, chunks: bool) -> None:
        self.number = next(_numbers)
        self.prompt = prompt
        self.sampling = sampling
        self.chunks = chunks
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
        """The next message; raises the request's error."""
        message = await self._messages.get()
        if isinstance(message, Failed):
            raise message.error
        return message

    # -- compute thread -----------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether the caller has given the request up, or its loop is gone."""
        return self._cancelled.is_set() or self._loop.is_closed()

    def post(self, message: Message) -> None:
        """Send to the caller; a caller whose loop is gone has given the request up."""
        try:
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)
        except RuntimeError:  # the caller's loop is closed
            self.cancel()
