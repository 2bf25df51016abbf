"""The HTTP server: an ASGI app over an engine, and the process that `moestream serve` runs.

    from moestream.runtime import server
    application = server.app(engine)        # a Starlette app, to serve or to mount

Needs the extra ``server``.
"""

from .application import app
from .settings import ServerSettings

__all__ = ["ServerSettings", "app"]
