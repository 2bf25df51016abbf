"""Who may call: API keys, and the origins of web pages."""

from __future__ import annotations

import hmac
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, Style
from .observing import RECORD, Record
from .settings import ServerSettings

_LOCAL = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")


class Guarded:
    """Wraps an endpoint: names it for the logs, and lets in who may call.

    Args:
        app: the endpoint.
        settings: of the server.
        name: of the endpoint.
        style: of its errors.
        open_to_all: whether it needs no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        name: str,
        *,
        style: Style = "openai",
        open_to_all: bool = False,
    ) -> None:
        self._app = app
        self._name = name
        self._style = style
        self._cors = settings.cors
        self._trust_host = settings.trust_host
        key = None if open_to_all else settings.api_key
        self._key = None if key is None else key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope[RECORD]
        record.endpoint, record.style = self._name, self._style
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self._check_origin(scope, headers)
        if self._key is not None and not any(
            hmac.compare_digest(self._key, given) for given in _given_keys(headers)
        ):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        await self._app(scope, receive, send)

    def _check_origin(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Browsers let any page send requests here, even if it may not read the answers."""
        origin = headers.get(b"origin")
        if origin is None or "*" in self._cors:
            return
        text = origin.decode("latin-1")
        _, _, host = text.partition("://")
        own = host == headers.get(b"host", b"").decode("latin-1") and (
            self._trust_host or _LOCAL.fullmatch(host) is not None
        )
        if not own and text not in self._cors:
            raise ApiError(403, "pages of this origin may not call; see --cors", code="origin")


def _given_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    keys = []
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        keys.append(token.strip())
    if b"x-api-key" in headers:
        keys.append(headers[b"x-api-key"].strip())
    return keys
