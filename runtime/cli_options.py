"""Arguments and options of the command line that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from .plan import parse_size

DEBUG = "moestream.debug"
"""Key of the debug switch in the context that all commands of one call share."""

_MODEL, _SAMPLING, _ENGINE = "Input", "Sampling", "Memory and reading"


def _remember_debug(context: typer.Context, value: bool) -> bool:
    context.meta[DEBUG] = value or context.meta.get(DEBUG, False)
    return value


def _size(value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not a size; give a text like '8GB'") from error


Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.", callback=_remember_debug)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

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
    typer.Option("--ignore-eos", help="Go on behind the end token.", rich_help_panel=_SAMPLING),
]

Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the whole process, such as 8GB, or 'all' to hold every expert; "
        "otherwise a share of what is free.",
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
Context = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most tokens of prompt and answer together; at most 4096 unless given.",
        rich_help_panel=_ENGINE,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|checkpoint",
        help="Type to compute in; chosen by the device unless given.",
        rich_help_panel=_ENGINE,
    ),
]
NoDirect = Annotated[
    bool,
    typer.Option("--no-direct", help="Read through the page cache.", rich_help_panel=_ENGINE),
]
Lanes = Annotated[
    int | None,
    typer.Option(min=1, help="Reads in flight at once.", rich_help_panel=_ENGINE),
]
Prefetch = Annotated[
    str | None,
    typer.Option(
        metavar="off",
        help="'off' reads experts only when they are routed to.",
        rich_help_panel=_ENGINE,
    ),
]
Trace = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write a trace of every event.", rich_help_panel=_ENGINE),
]
NoStats = Annotated[bool, typer.Option("--no-stats", help="Print no figures behind the answer.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the chat.")]

FileSize = Annotated[
    int | None,
    typer.Option(
        "--size",
        metavar="SIZE",
        parser=_size,
        help="Size of the temporary file; at most so much of an existing file is read in a pass.",
    ),
]
ReadSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--read-size",
        metavar="SIZE",
        parser=_size,
        help="Size of a read, such as 64KiB; may be repeated.",
    ),
]
Depths = Annotated[
    list[int] | None,
    typer.Option("--depth", min=1, help="Reads in flight; may be repeated."),
]
Seconds = Annotated[float | None, typer.Option(help="How long each combination is measured.")]
