"""Gets a request's body, within bounds of size, time, depth and kinds of values."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from .errors import ApiError, refused

DEEPEST = 64
"""Nesting that is taken; far below what Python's recursion bears."""


async def read_body(scope: Scope, receive: Receive, *, limit: int, timeout: float) -> bytes:  # noqa: ASYNC109
    """The whole body.

    Args:
        scope, receive: of the request.
        limit: most bytes.
        timeout: seconds in which it has to be there.

    Raises:
        ApiError: it is too large (413) or slow (408).
        ClientDisconnect: the client has gone.
    """
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        with anyio.fail_after(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body was not there within {timeout:g} s") from None


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: it is none, is nested too deeply, or holds what JSON has no word for.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refused(f"the body is not UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
        # Half a surrogate pair is JSON but no text: neither a tokenizer nor an answer can have it.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise _too_deep() from None
    except UnicodeEncodeError:
        raise refused("the body holds half a surrogate pair, which is no text") from None
    except ValueError as error:
        raise refused(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise refused("the body must be a JSON object")
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return refused(f"the body is nested more than {DEEPEST} levels deep")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
