"""The command `moestream serve`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..io.errors import MoestreamError
from . import cli_options as options
from .policies import DEFAULT_POLICY
from .scheduling import DEFAULT_PREFILL_CHUNK, DEFAULT_RUNNING
from .terminal import note

if TYPE_CHECKING:
    from .engine import SamplingArguments

_SERVER = "Server"
KEY_VARIABLE = "MOESTREAM_API_KEY"

Host = Annotated[str, typer.Option(help="Address or name to listen at.", rich_help_panel=_SERVER)]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=_SERVER)
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar=KEY_VARIABLE,
        show_envvar=True,
        help="What clients have to show; the variable keeps it out of the list of processes.",
        rich_help_panel=_SERVER,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of the model, as clients ask for it; unless given, its directory's.",
        rich_help_panel=_SERVER,
    ),
]
MaxWaiting = Annotated[
    int,
    typer.Option(
        min=0, help="Most requests that wait; more get status 429.", rich_help_panel=_SERVER
    ),
]
MaxRunning = Annotated[
    int,
    typer.Option(
        min=1,
        help="Most requests computed together; fewer where the memory does not suffice.",
        rich_help_panel=_SERVER,
    ),
]
PrefillChunk = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="TOKENS",
        help="Most tokens of a new prompt computed between two tokens of running answers.",
        rich_help_panel=_SERVER,
    ),
]
MaxBody = Annotated[
    int,
    typer.Option(
        metavar="SIZE",
        parser=options._size,
        show_default="8MiB",
        help="Most bytes of a request.",
        rich_help_panel=_SERVER,
    ),
]
Cors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Let web pages of this origin call, '*' for all; may be repeated.",
        rich_help_panel=_SERVER,
    ),
]
Drain = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="How long running requests may go on after SIGTERM or Ctrl-C.",
        rich_help_panel=_SERVER,
    ),
]
DefaultMaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="what the context holds",
        help="Most tokens of an answer whose request does not say.",
        rich_help_panel=options._SAMPLING,
    ),
]


class ExtraMissing(MoestreamError):
    """The packages of the extra ``server`` are not installed."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f'{module} is not installed; serving needs: pip install "moestream[server]"'
        )


def serve(
    model: options.Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    name: Name = None,
    max_running: MaxRunning = DEFAULT_RUNNING,
    max_waiting: MaxWaiting = 64,
    prefill_chunk: PrefillChunk = DEFAULT_PREFILL_CHUNK,
    max_body: MaxBody = 8 << 20,
    cors: Cors = None,
    drain: Drain = 30.0,
    max_tokens: DefaultMaxTokens = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 0.0,
    min_p: options.MinP = 0.0,
    top_k: options.TopK = 0,
    memory: options.Memory = None,
    slots: options.Slots = None,
    context: options.Context = None,
    dtype: options.Dtype = None,
    no_direct: options.NoDirect = False,
    lanes: options.Lanes = None,
    policy: options.Policy = DEFAULT_POLICY,
    prefetch: options.Prefetch = "off",
    checksum: options.Checksum = False,
    trace: options.Trace = None,
    read_timeout: options.ReadTimeout = None,
    prompt_cache: options.PromptCacheSize = None,
    debug: options.Debug = False,
) -> None:
    """Answer over HTTP as OpenAI's and Anthropic's APIs do, with a page at /.

    Sampling options are for requests that do not say. Logs are lines of JSON on standard error.
    Exit code 1 when requests had to be cut off.
    """
    for module in ("starlette", "uvicorn", "prometheus_client"):
        if find_spec(module) is None:
            raise ExtraMissing(module)
    from .server import ServerSettings
    from .session import EngineOptions

    sampling: SamplingArguments = {
        "temperature": temperature,
        "top_p": top_p,
        "min_p": min_p,
        "top_k": top_k,
    }
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    settings = ServerSettings(
        name=name,
        api_key=api_key,
        max_waiting=max_waiting,
        max_body=max_body,
        cors=tuple(cors or ()),
        # A page whose name leads here could talk to a server that asks for no key.
        trust_host=api_key is not None,
        sampling=sampling,
    )
    opened = EngineOptions(
        model,
        memory,
        slots,
        context,
        dtype,
        not no_direct,
        lanes,
        prefetch,
        trace,
        read_timeout=read_timeout,
        max_running=max_running,
        # The server refuses what is too much; those who have left it may still be in the engine.
        max_waiting=max_waiting + max_running,
        prefill_chunk=prefill_chunk,
        prompt_cache=prompt_cache,
        policy=policy,
        checksum=checksum,
    )
    if not run_server(opened, settings, host=host, port=port, drain=drain):
        raise typer.Exit(1)


def run_server(opened: Any, settings: Any, *, host: str, port: int, drain: float) -> bool:
    """Open the engine and serve until a signal; whether all requests were answered."""
    import asyncio

    import uvloop

    from .server.logs import logging_to
    from .server.process import Address, bind, serve
    from .session import note_changes, open_engine

    address = Address(host, port)

    def ready(url: str) -> None:
        typer.echo(f"Serving at {url} (Ctrl-C stops)")

    async def run() -> bool:
        with bind(address) as bound:
            if not address.is_local and settings.api_key is None:
                note(f"anyone who reaches {host} may use the model: set a key in {KEY_VARIABLE}")
            async with await open_engine(opened) as engine:
                note_changes(opened, engine.plan, settings.sampling)
                with logging_to(sys.stderr):
                    return await serve(engine, settings, bound, drain_seconds=drain, on_ready=ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())
