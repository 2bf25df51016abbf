"""Puts the endpoints together into a Starlette app."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from ..engine import Engine
from .anthropic_calls import read_messages_call
from .anthropic_replies import MessageStream, MessageWhole
from .errors import ApiError, encode
from .generating import Generating
from .guard import Guarded
from .observing import Observed
from .openai_calls import read_chat, read_completion
from .openai_chat import ChatStream, ChatWhole
from .openai_text import TextStream, TextWhole
from .pages import CountTokens, HealthCheck, MetricsText, ModelList, OneModel, Page, Stats
from .service import Service
from .settings import ServerSettings


def app(engine: Engine, settings: ServerSettings | None = None, **changes: Any) -> Starlette:
    """An ASGI app that answers for an engine, to be served or mounted in another app.

    It needs no lifespan events, and leaves the engine to its owner: close that one behind the
    server. Requests that are running when the engine closes get an error. The app's
    ``state.service`` holds what the endpoints share.

    Args:
        engine: open.
        settings: of the server; None for the defaults.
        **changes: single settings, by the names in ``ServerSettings``.

    Raises:
        InvalidSetting: a setting makes no sense.
        TypeError: there is no such setting.
    """
    settings = replace(settings or ServerSettings(), **changes)
    service = Service(engine, settings)
    middleware = [Middleware(Observed, service)]
    if settings.cors:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    application = Starlette(
        routes=_routes(service),
        middleware=middleware,
        exception_handlers={ApiError: _answer_error, HTTPException: _answer_http_error},
    )
    application.state.service = service
    return application


def _routes(service: Service) -> list[BaseRoute]:
    guarded = partial(Guarded, settings=service.settings)

    def get(path: str, endpoint: ASGIApp, name: str, **more: Any) -> Route:
        return Route(path, guarded(endpoint, name=name, **more), methods=["GET"], name=name)

    def post(path: str, endpoint: ASGIApp, name: str, **more: Any) -> Route:
        return Route(path, guarded(endpoint, name=name, **more), methods=["POST"], name=name)

    chat = Generating(service, read_chat, "chatcmpl-", ChatStream, ChatWhole)
    text = Generating(service, read_completion, "cmpl-", TextStream, TextWhole)
    messages = Generating(service, read_messages_call, "msg_", MessageStream, MessageWhole)
    return [
        get("/", Page(service), "page", open_to_all=True),
        get("/health", HealthCheck(service), "health", open_to_all=True),
        get("/metrics", MetricsText(service), "metrics"),
        get("/stats", Stats(service), "stats"),
        get("/v1/models", ModelList(service), "models"),
        get("/v1/models/{name:path}", OneModel(service), "model"),
        post("/v1/chat/completions", chat, "chat"),
        post("/v1/completions", text, "completions"),
        post("/v1/messages", messages, "messages", style="anthropic"),
        post("/v1/messages/count_tokens", CountTokens(service), "count_tokens", style="anthropic"),
    ]


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    record = request.scope["moestream.record"]
    record.code = error.code
    return Response(
        encode(error.body(record.style)),
        error.status,
        media_type="application/json",
        headers=error.headers,
    )


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    answer = ApiError(error.status_code, f"{error.detail}: {what}", code="not_found")
    return Response(
        encode(answer.body("openai")),
        error.status_code,
        media_type="application/json",
        headers=dict(error.headers or {}),
    )
