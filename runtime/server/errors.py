"""What can go wrong with a request, and how each API says it."""

from __future__ import annotations

import json
from typing import Any, Literal

from ...io.errors import LoopClosed, MoestreamError, ReadFailed
from ..errors import EngineBusy, EngineClosed, EngineDead, InvalidRequest, PromptTooLong

Style = Literal["openai", "anthropic"]

_OPENAI = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

RETRY_SECONDS = 2
"""What Retry-After says where nothing better is known."""


class ApiError(Exception):
    """A request is answered with an error.

    Args:
        status: of HTTP, 4xx or 5xx.
        message: for the person behind the client: what is wrong and what would do.
        param: the field of the body that it is about.
        code: a word for programs.
        retry_after: seconds after which another try makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self, style: Style) -> dict[str, Any]:
        """The error as the client's library expects it."""
        if style == "anthropic":
            other = "api_error" if self.status >= 500 else "invalid_request_error"
            kind = _ANTHROPIC.get(self.status, other)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _OPENAI.get(self.status, other)
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the error."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An error about the body: the client has to send something else."""
    return ApiError(400, message, param=param, code=code)


def from_engine(error: BaseException) -> ApiError:
    """What a client gets to know of an error of the engine. Paths of files stay here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return refused(str(error), code="context_length_exceeded")
    if isinstance(error, InvalidRequest):
        return refused(str(error))
    if isinstance(error, EngineBusy):
        message = "too many requests are running or waiting; try again later"
        return ApiError(429, message, code="too_many_requests", retry_after=RETRY_SECONDS)
    if isinstance(error, EngineDead | EngineClosed | LoopClosed):
        return ApiError(503, "the engine has stopped; restart the server", code="engine_dead")
    if isinstance(error, ReadFailed):
        message = "an expert could not be read from the drive; try again"
        return ApiError(500, message, code="read_failed", retry_after=RETRY_SECONDS)
    if isinstance(error, MoestreamError):
        return ApiError(500, "the model failed on this request; see the server's log")
    return ApiError(500, "something unexpected failed; see the server's log")


def encode(value: Any) -> bytes:
    """JSON as it is sent; only finite numbers."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
