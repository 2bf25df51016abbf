"""What can be chosen about a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...io.errors import MoestreamError
from ..engine import SamplingArguments
from ..sampling import make_sampling


class InvalidSetting(MoestreamError, ValueError):
    """A setting of the server makes no sense; says which."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of ``moestream.runtime.server.app``. Bytes and seconds.

    Attributes:
        name: of the model, as clients ask for it; None takes its directory's name.
        api_key: what clients have to show; None asks for none.
        max_waiting: most generations that may wait for their turn; more are refused with 429.
        max_body: most bytes of a request's body; more are refused with 413.
        cors: origins whose pages may call, "*" for all; pages of the server itself always may.
        trust_host: pages are the server's own when their origin is the host that they ask for;
            False takes names of this machine only, since any name can be made to lead here.
        sampling: arguments of requests that do not say.
        keep_alive: silence in a stream after which a comment is sent.
        body_timeout: in which a request's body has to be there.
        send_timeout: in which a client has to take what it is sent.
        most_choices: most answers to one request.
    """

    name: str | None = None
    api_key: str | None = None
    max_waiting: int = 64
    max_body: int = 8 << 20
    cors: tuple[str, ...] = ()
    trust_host: bool = True
    sampling: SamplingArguments = field(default_factory=SamplingArguments)
    keep_alive: float = 15.0
    body_timeout: float = 30.0
    send_timeout: float = 60.0
    most_choices: int = 16

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidSetting("the API key must be of printable ASCII characters")
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidSetting("the API key is empty; give one, or none at all")
        if self.max_waiting < 0:
            raise InvalidSetting(f"max_waiting={self.max_waiting} must be at least 0")
        if self.max_body < 1:
            raise InvalidSetting(f"max_body={self.max_body} must be at least 1 byte")
        for origin in self.cors:
            scheme, mark, host = origin.partition("://")
            if origin != "*" and not (scheme and mark and host and "/" not in host):
                raise InvalidSetting(
                    f"{origin!r} is no origin; give one such as https://example.org, or '*'"
                )
        for name in ("keep_alive", "body_timeout", "send_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidSetting(f"{name} must be above 0 seconds")
        make_sampling(self.sampling, function="app")
