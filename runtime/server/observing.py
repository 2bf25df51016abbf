"""The outermost layer: ids, logs and figures of requests, and answers to surprises."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, Style, from_engine
from .logs import log
from .outgoing import send_json
from .service import Service

RECORD = "moestream.record"
"""Key of a request's ``Record`` in its scope."""

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class Record:
    """What is noted about one HTTP request.

    Attributes:
        key: the request's id: the client's own, or a new one.
        begun: reading of the monotonic clock.
        endpoint: a name for logs and figures.
        style: of error bodies.
        status: of the response; 0 while none has begun.
        complete: the end of the answer is on its way, so that the client may go.
        disconnected: the client left before that.
        code: of the error, if any.
        figures: further ones for the log.
    """

    key: str
    begun: float
    endpoint: str = "other"
    style: Style = "openai"
    status: int = 0
    complete: bool = False
    disconnected: bool = False
    code: str | None = None
    figures: dict[str, Any] | None = None


class Observed:
    """Wraps the application.

    Args:
        app: what answers.
        service: gets the figures.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(_request_id(scope), time.monotonic())
        scope[RECORD] = record

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                name = b"request-id" if record.style == "anthropic" else b"x-request-id"
                key = record.key.encode()
                headers = [*message.get("headers", ()), (b"x-request-id", key)]
                if name != b"x-request-id":  # what that client's library looks for
                    headers.append((name, key))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_observed)
        except ClientDisconnect:
            record.disconnected = True
        except ApiError as error:
            await self._fail(error, record, send_observed)
        except Exception as error:
            log("request failed", level=logging.ERROR, error=True, request_id=record.key)
            await self._fail(from_engine(error), record, send_observed)
        finally:
            self._note(scope, record)

    async def _fail(self, error: ApiError, record: Record, send: Send) -> None:
        record.code = error.code
        if not record.status:  # else it has been said inside the stream
            await send_json(send, error.status, error.body(record.style), error.headers)

    def _note(self, scope: Scope, record: Record) -> None:
        seconds = time.monotonic() - record.begun
        metrics = self._service.metrics
        if record.disconnected:
            metrics.disconnects.inc()
        if record.status:
            metrics.answered(record.endpoint, record.status, seconds)
        quiet = record.endpoint in ("health", "metrics", "stats", "page")
        log(
            "request",
            level=logging.DEBUG if quiet else logging.INFO,
            request_id=record.key,
            method=scope["method"],
            endpoint=record.endpoint,
            status=record.status or None,
            seconds=round(seconds, 4),
            disconnected=record.disconnected or None,
            code=record.code,
            **(record.figures or {}),
        )


def _request_id(scope: Scope) -> str:
    """The client's own id where it is a decent one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return str(value.decode("ascii"))
    return uuid.uuid4().hex
