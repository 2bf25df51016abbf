"""What the endpoints of one server share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
from anyio import to_thread

from ..engine import Engine
from .admission import Admission
from .metrics import Metrics
from .settings import ServerSettings

T = TypeVar("T")

Health = Literal["ready", "degraded", "stopping", "dead"]

PREPARING = 2
"""Requests that are read and tokenized at once, each on a worker thread."""


class Service:
    """An engine with everything around it. On one event loop.

    Attributes:
        engine: open.
        settings: of the server.
        name: of the model.
        admission: counts generations.
        metrics: for Prometheus.
        tokens: generated for clients so far, counted as they come.
        failing: the last generation has failed in the engine.
        started: seconds since 1970.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.name = settings.name or _name_of(engine.tokenizer)
        self.admission = Admission(settings.max_waiting, lambda: engine.statistics().most_running)
        self.metrics = Metrics(self)
        self.tokens = 0
        self.failing = False
        self.started = time.time()
        self._limiter: anyio.CapacityLimiter | None = None  # made on the loop

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that takes its time on a worker thread."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(PREPARING)
        return await to_thread.run_sync(function, *arguments, limiter=self._limiter)

    @property
    def health(self) -> Health:
        """How the server is: degraded when the last request or the trace has failed."""
        if not self.engine.alive:
            return "dead"
        if self.admission.draining:
            return "stopping"
        broken = self.failing or self.engine.statistics().trace_error is not None
        return "degraded" if broken else "ready"


def _name_of(tokenizer: Any) -> str:
    """The name of a model by the place its tokenizer comes from."""
    place = getattr(tokenizer, "name_or_path", None)
    if not isinstance(place, str):
        return "moestream"
    for part in Path(place).parts:  # of the Hub's cache: models--OWNER--NAME/snapshots/COMMIT
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return Path(place).name or "moestream"
