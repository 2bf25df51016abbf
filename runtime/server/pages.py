"""The endpoints that tell something: models, health, figures, the built-in page."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib import resources
from typing import Any

from starlette.types import Receive, Scope, Send

from .anthropic_calls import read_messages_call
from .body import parse_body, read_body
from .calls import check_model
from .fields import Fields
from .outgoing import send_bytes, send_json
from .prompts import encode_call
from .service import Service

_PAGE_HEADERS = {
    # Everything is in the page itself, and it talks with this server only.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Endpoint:
    """An endpoint of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "moestream",
            "context_length": service.engine.plan.context,
        }


class ModelList(Endpoint):
    """`/v1/models`: the one that is served."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"object": "list", "data": [self._model()]})


class OneModel(Endpoint):
    """`/v1/models/NAME`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_model(Fields({"model": scope["path_params"]["name"]}), self._service.name)
        await send_json(send, 200, self._model())


class HealthCheck(Endpoint):
    """`/health`: 200 while requests are taken."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        health = self._service.health
        status = 200 if health in ("ready", "degraded") else 503
        await send_json(send, status, {"status": health}, {"cache-control": "no-store"})


class MetricsText(Endpoint):
    """`/metrics`: for Prometheus."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = self._service.metrics.text()
        await send_bytes(send, 200, content, "text/plain; version=0.0.4; charset=utf-8")


class Stats(Endpoint):
    """`/stats`: what the page shows, as JSON."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        statistics = service.engine.statistics()
        body = {
            "model": service.name,
            "health": service.health,
            "context": service.engine.plan.context,
            "uptime_seconds": time.time() - service.started,
            "monotonic_seconds": time.monotonic(),
            "active": service.admission.active,
            "refused": service.admission.refused,
            "generated_tokens": service.tokens,
            "engine": {**asdict(statistics), "hit_rate": statistics.hit_rate},
        }
        await send_json(send, 200, body, {"cache-control": "no-store"})


class CountTokens(Endpoint):
    """`/v1/messages/count_tokens`: how long a prompt is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._service.settings
        with self._service.admission.admit():
            body = await read_body(
                scope, receive, limit=settings.max_body, timeout=settings.body_timeout
            )
            tokens = await self._service.work(self._count, body)
        await send_json(send, 200, {"input_tokens": tokens})

    def _count(self, body: bytes) -> int:
        service = self._service
        call = read_messages_call(parse_body(body), service.settings, service.name, counting=True)
        (prompt,) = encode_call(service.engine.tokenizer, call)
        return len(prompt)


class Page(Endpoint):
    """`/`: a page with live figures and a chat."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        page = resources.files("moestream") / "runtime" / "server" / "page.html"
        self._content = page.read_bytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, self._content, "text/html; charset=utf-8", _PAGE_HEADERS)
