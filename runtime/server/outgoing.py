"""Sends responses: to clients that may be slow, and may go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from .errors import encode

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the tokens
]


async def send_json(
    send: Send, status: int, body: Any, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole response of JSON."""
    await send_bytes(send, status, encode(body), "application/json", headers)


async def send_bytes(
    send: Send,
    status: int,
    content: bytes,
    kind: str,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a whole response."""
    listed = {"content-type": kind, "content-length": str(len(content)), **(headers or {})}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in listed.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


class EventStream:
    """A response of server-sent events.

    Nothing is collected here: a client that does not take its frames keeps the sender waiting, and
    is given up after a while.

    Args:
        send: of the request.
        timeout: seconds that a client may take for a frame.
    """

    def __init__(self, send: Send, timeout: float) -> None:
        self._send = send
        self._timeout = timeout
        self.begun = False

    async def write(self, frames: bytes) -> None:
        """Send frames, the first ones with the headers.

        Raises:
            ClientDisconnect: the client does not take them.
        """
        if not self.begun:
            self.begun = True
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await self._put(start)
        if frames:
            await self._put({"type": "http.response.body", "body": frames, "more_body": True})

    async def close(self) -> None:
        """End the response."""
        await self._put({"type": "http.response.body", "body": b""})

    async def _put(self, message: Message) -> None:
        try:
            with anyio.fail_after(self._timeout):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientDisconnect from None


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has gone. Only behind the end of the request's body."""
    while (await receive())["type"] != "http.disconnect":
        pass
