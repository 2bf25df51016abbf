"""Arguments and options of the command line that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from .plan import parse_size
from .policies import PolicyName

DEBUG = "moestream.debug"
"""Key of the debug switch in the context that all commands of one call share."""

MEMORY = "moestream.memory"
"""Key of the text given for --memory in the same place."""

PAGE = 4096
"""What sizes of reads are multiples of."""

_SAMPLING, _ENGINE = "Sampling", "Memory and reading"
_NO_VALUE = ""  # metavar of flags, for which typer would write "<bool>"


class Command(TyperCommand):
    """A command whose --help is shown as the flag that it is."""

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


class Group(TyperGroup):
    """The same for a group of commands."""

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


def _as_flag(option: Any) -> Any:
    if option is not None:
        option.metavar = _NO_VALUE
    return option


def _remember_debug(context: typer.Context, value: bool) -> bool:
    context.meta[DEBUG] = value or context.meta.get(DEBUG, False)
    return value


def _remember_memory(context: typer.Context, value: str | None) -> str | None:
    context.meta[MEMORY] = value
    return value


def forgotten_unit(memory: str | None) -> str | None:
    """What was meant by a size such as "8", which no model fits; None for other sizes."""
    if memory is None or re.fullmatch(r"[0-9]{1,5}(\.[0-9]+)?", memory.strip()) is None:
        return None
    return f"{memory.strip()}GB"


def flag(name: str, help: str, **more: Any) -> Any:  # noqa: A002
    """An option that takes no value."""
    return typer.Option(name, metavar=_NO_VALUE, help=help, **more)


def _read_size(value: str) -> int:
    size = _size(value)
    if size % PAGE:
        raise typer.BadParameter(f"{value!r} must be a multiple of 4KiB")
    return size


def _size(value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not a size; give a text like '8GB'") from error


Debug = Annotated[bool, flag("--debug", "Show tracebacks.", callback=_remember_debug)]
Json = Annotated[bool, flag("--json", "Print one JSON object and nothing else.")]

Model = Annotated[str, typer.Argument(help="Directory of a model, or its id on the Hub.")]

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[
    float,
    typer.Option(help="0 always takes the most likely token.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float,
    typer.Option(help="Sample from this share of the probability.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float,
    typer.Option(
        help="Drop tokens less likely than this share of the best one's.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int, typer.Option(help="Sample from so many best tokens.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option(help="Makes sampling repeatable.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Divides the scores of recent tokens.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="End at this text and cut it off; may be repeated.",
        rich_help_panel=_SAMPLING,
    ),
]
IgnoreEos = Annotated[
    bool,
    flag("--ignore-eos", "Go on behind the end token.", rich_help_panel=_SAMPLING),
]

Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the whole process, such as 8GB, or 'all' to hold every expert; "
        "otherwise a share of what is free.",
        callback=_remember_memory,
        rich_help_panel=_ENGINE,
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Experts to hold per layer, instead of what --memory gives.",
        rich_help_panel=_ENGINE,
    ),
]
Bandwidth = Annotated[
    int | None,
    typer.Option(
        parser=_size,
        metavar="SIZE",
        help="What the drive reads in a second, such as 2GB, instead of what was measured.",
    ),
]
DemoSlots = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="a quarter of them",
        help="Experts to hold per layer in the first run.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most tokens of prompt and answer together; unless given 4096, or the model's own "
        "limit where that is less.",
        rich_help_panel=_ENGINE,
    ),
]
Dtype = Annotated[
    Literal["float32", "checkpoint"] | None,
    typer.Option(
        help="Type to compute in; chosen by the device unless given.",
        rich_help_panel=_ENGINE,
    ),
]
NoDirect = Annotated[
    bool,
    flag("--no-direct", "Read through the page cache.", rich_help_panel=_ENGINE),
]
Lanes = Annotated[
    int | None,
    typer.Option(min=1, help="Reads in flight at once.", rich_help_panel=_ENGINE),
]
Prefetch = Annotated[
    Literal["on", "prompts", "off"],
    typer.Option(
        help="'off' reads experts only when they are routed to, 'on' also ahead where that pays, "
        "'prompts' ahead in prompts alone.",
        rich_help_panel=_ENGINE,
    ),
]
Policy = Annotated[
    PolicyName,
    typer.Option(
        help="Which expert gives up its slot first; 'moestream trace replay' compares them.",
        rich_help_panel=_ENGINE,
    ),
]
Trace = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Write a trace, for 'moestream trace'.", rich_help_panel=_ENGINE
    ),
]
Checksum = Annotated[
    bool,
    flag(
        "--checksum",
        "Check every expert that is read from a packed store.",
        rich_help_panel=_ENGINE,
    ),
]
Chaos = Annotated[
    bool, flag("--chaos", "Run the model at PATH on a drive with faults, and measure nothing.")
]
ReadTimeout = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="SECONDS",
        show_default="60",
        help="Fail a request when the drive does not answer to a read for so long.",
        rich_help_panel=_ENGINE,
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-cache",
        metavar="FILE",
        help="Keep computed prompts in this .safetensors file: read when it is there, and written "
        "at the end.",
        rich_help_panel=_ENGINE,
    ),
]
PromptCacheSize = Annotated[
    int | None,
    typer.Option(
        "--prompt-cache",
        metavar="SIZE",
        parser=_size,
        help="Memory for computed prompts, such as 1GB: one that begins like one before computes "
        "only the rest.",
        rich_help_panel=_ENGINE,
    ),
]
NoStats = Annotated[bool, flag("--no-stats", "Print no figures behind the answer.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the chat.")]

FileSize = Annotated[
    int | None,
    typer.Option(
        "--size",
        metavar="SIZE",
        parser=_size,
        show_default="1GiB",
        help="Size of the temporary file; at most so much of an existing file is read in a pass.",
    ),
]
ReadSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--read-size",
        metavar="SIZE",
        parser=_read_size,
        show_default="64KiB, 512KiB, 2MiB, 8MiB",
        help="Size of a read; may be repeated.",
    ),
]
Depths = Annotated[
    list[int] | None,
    typer.Option(
        "--depth",
        metavar="<int>",
        min=1,
        show_default="1, 2, 4, 8, 16",
        help="Reads in flight; may be repeated.",
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(min=0.001, show_default="0.4", help="How long each combination is measured."),
]
