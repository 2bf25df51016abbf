"""The process behind `moestream serve`: one engine, one socket, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette

from ...io.errors import MoestreamError
from ..arguments import show_path
from ..engine import Engine
from .application import app
from .logs import log
from .service import Service
from .settings import ServerSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CUT_GRACE = 5
"""Seconds in which requests that are cut off have to tell their clients."""

HEADER_BYTES = 64 << 10
"""Most bytes of a request's head."""


class AddressUnavailable(MoestreamError):
    """The address cannot be listened at."""

    def __init__(self, host: str, port: int, error: OSError | UnicodeError) -> None:
        host = show_path(host)
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            what = f"port {port} of {host} is in use; give another with --port"
        elif number in (errno.EACCES, errno.EPERM):
            what = f"port {port} of {host} is not ours to use; give one above 1023 with --port"
        else:
            problem = getattr(error, "strerror", None) or "it is no name of a host"
            what = f"cannot listen at {host}:{port} ({problem}); see --host"
        super().__init__(what)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen.

    Attributes:
        host: name or address of this machine.
        port: 0 for any that is free.
    """

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def bind(address: Address) -> socket.socket:
    """A socket that is bound but does not listen yet: a taken port is known before a model is read.

    Raises:
        AddressUnavailable: another process has the port, or this machine not the address.
    """
    try:
        infos = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = infos[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the latter about names that are too long
        raise AddressUnavailable(address.host, address.port, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise AddressUnavailable(address.host, address.port, error) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The address of a bound socket, for people."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    engine: Engine,
    settings: ServerSettings,
    bound: socket.socket,
    *,
    drain_seconds: float,
    on_ready: Callable[[str], None],
) -> bool:
    """Serve until SIGTERM or SIGINT, then let running requests finish.

    A second signal, or the end of the time given, cuts off what is left.

    Args:
        engine: open; its owner closes it.
        settings: of the server.
        bound: from ``bind``; closed at the end.
        drain_seconds: that running requests get.
        on_ready: called with the address once requests are taken.

    Returns:
        Whether all requests were answered to their end.

    Raises:
        AddressUnavailable: another process has begun to listen there meanwhile.
    """
    application = app(engine, settings)
    config = uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=int(drain_seconds) + CUT_GRACE,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    url, (host, port) = url_of(bound), bound.getsockname()[:2]
    server = _Server(config, application, drain_seconds, lambda: on_ready(url))
    try:
        await server.serve(sockets=[bound])
    except OSError as error:
        if server.started:
            raise
        raise AddressUnavailable(host, port, error) from error
    return server.cut == 0


class _Server(uvicorn.Server):
    """uvicorn's server with an end in steps, and without raising signals again afterwards."""

    def __init__(
        self,
        config: uvicorn.Config,
        application: Starlette,
        drain_seconds: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._service: Service = application.state.service
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._timer: asyncio.TimerHandle | None = None
        self.cut = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            log("ready", model=self._service.name)
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            if self._timer is not None:
                self._timer.cancel()

    def _stop(self, number: signal.Signals) -> None:
        admission = self._service.admission
        if self.should_exit:
            self._cut_off()
            return
        log("stopping", signal=number.name, active=admission.active)
        admission.drain()
        self.should_exit = True
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._drain_seconds, self._cut_off)

    def _cut_off(self) -> None:
        cut = self._service.admission.cut_off()
        self.cut += cut
        if cut:
            log("cut off", level=logging.WARNING, requests=cut)
