"""The commands `moestream bench` and `moestream bench plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import cli_options as options
from .plan import parse_size
from .terminal import interrupts_held, note, print_json, run_until_signal
from .trace_cli import _count, _list, _share

if TYPE_CHECKING:
    from .bench.cells import Cell
    from .bench.job import Bench
    from .bench.rows import Row
    from .bench.suite_file import Suite

_CELLS, _HOW = "What to measure", "How to measure"

Lanes = Annotated[
    int | None,
    typer.Option(min=1, help="Reads in flight at once.", rich_help_panel=_HOW),
]


class _Group(options.Group):
    """Without the name of a command it measures: `moestream bench MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    help="Measure a model on this machine, or draw what was measured.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _listed(metavar: str, help: str) -> Any:  # noqa: A002
    return typer.Option(metavar=metavar, help=help, rich_help_panel=_CELLS)


@app.command(cls=options.Command)
def run(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Directory of a model, or its id on the Hub; unless given the suite's, or the "
            "small model that comes with moestream."
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="quick, cpu, gpu, or a file.toml like theirs; instead of the options of this box.",
            rich_help_panel=_CELLS,
        ),
    ] = None,
    only: Annotated[
        str | None,
        _listed("N-N,N", "Of the cells, those with these numbers; --list shows them."),
    ] = None,
    list_cells: Annotated[
        bool, options.flag("--list", "Print the cells with their numbers, and measure nothing.")
    ] = False,
    slots: Annotated[str | None, _listed("N,N", "Experts to hold per layer.")] = None,
    share: Annotated[str | None, _listed("X,X", "Share of each layer's experts to hold.")] = None,
    memory: Annotated[str | None, _listed("SIZE,SIZE", "Memory of each engine's process.")] = None,
    cache: Annotated[
        str | None,
        _listed("cold,warm", "Reads from the drive (cold) unless given, or from the page cache."),
    ] = None,
    arms: Annotated[
        str | None,
        _listed("NAME,NAME", "Of resident (mlx-lm), off (on demand), fifo, ours; else all."),
    ] = None,
    context: Annotated[
        str | None,
        _listed("N,N", "Tokens of the prompts behind which decoding is timed; 128 unless given."),
    ] = None,
    prefill: Annotated[str | None, _listed("N,N", "Tokens of prompts to be timed.")] = None,
    callers: Annotated[str | None, _listed("N,N", "Requests at once.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Decoded by each request; 48 or as the suite says.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Repetitions of each arm; 5 or as the suite says.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    record_mb: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="MB",
            help="Pad the experts on disk to this size; needs room in the current directory.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    throttle: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What the drive is to give per second at most, such as 500MB/s.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    lanes: Lanes = None,
    rival: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help="Another system as an arm of its own; docs/bench says what the command gets and "
            "prints. May be repeated.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    rival_timeout: Annotated[
        float,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            help="Give one run of it up after so long.",
            rich_help_panel=_HOW,
        ),
    ] = 1800.0,
    device: Annotated[
        Literal["cpu", "gpu"] | None,
        typer.Option(
            help="What MLX computes on; its own choice unless given.", rich_help_panel=_HOW
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where rows are appended; unless given docs/bench/results.csv inside the "
            "repository, elsewhere moestream-bench.csv.",
        ),
    ] = None,
    trace_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write a trace of each engine's first repetition, made once more."
        ),
    ] = None,
    json_output: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure token time, stalls, bytes and prompts, arm by arm, and append a row for each.

    Arms take turns under the same conditions, after a warm-up; end tokens are ignored and counts
    fixed. Exit code 1 when an arm failed. `moestream bench plot` draws the rows.
    """
    with interrupts_held():
        import mlx.core as mx

        from .bench.job import Bench
        from .bench.rivals import parse_rival
        from .core import DEFAULT_LANES

    given = {
        "slots": slots,
        "share": share,
        "memory": memory,
        "context": context,
        "prefill": prefill,
        "callers": callers,
        "cache": cache,
        "arms": arms,
    }
    chosen = _suite(suite, given) if suite is not None else None
    cells = tuple(
        cell.with_counts(tokens, repeats)
        for cell in (_cells(given) if chosen is None else chosen.cells)
    )
    numbers = _numbers(only, len(cells))
    if list_cells:
        _print_cells(cells, numbers, json_output)
        return
    if device is not None:
        mx.set_default_device(mx.Device(mx.cpu if device == "cpu" else mx.gpu, 0))
    bench = Bench(
        model=_model(model, chosen),
        cells=tuple(cells[number - 1] for number in numbers),
        suite="" if chosen is None else chosen.name,
        record_mb=record_mb if chosen is None or record_mb is not None else chosen.record_mb,
        throttle=None if throttle is None else _rate(throttle),
        rivals=tuple(parse_rival(text) for text in rival or ()),
        rival_seconds=rival_timeout,
        trace_dir=trace_dir,
        lanes=DEFAULT_LANES if lanes is None else lanes,
    )
    if trace_dir is not None:
        trace_dir.mkdir(parents=True, exist_ok=True)
    _measure(bench, _default_csv() if csv is None else csv, json_output)


def _measure(bench: Bench, csv: Path, json_output: bool) -> None:
    """Run, write, print; Ctrl-C keeps what there is."""
    from .bench.display import print_tables, row_line, summary_json, watching
    from .bench.job import Listener
    from .bench.rows import Ledger
    from .bench.runner import run_bench

    ledger = Ledger(csv)
    rows: list[Row] = []
    try:
        with watching(len(bench.cells), bench.steps) as watch:

            def row(made: Row) -> None:
                ledger.append(made)
                rows.append(made)
                if not json_output:
                    typer.echo(row_line(made))

            run_until_signal(run_bench(bench, Listener(row, watch.cell, watch.step)))
    finally:
        if json_output:
            print_json(summary_json(rows, str(csv)))
        elif rows:
            typer.echo()
            print_tables(rows)
            note(f"{len(rows)} rows in {csv}; draw them with: moestream bench plot {csv}")
    if any(made.status == "failed" for made in rows):
        raise typer.Exit(1)


@app.command(cls=options.Command)
def plot(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Rows that `moestream bench` has written.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the pictures.")] = Path(),
    json_output: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Draw token times, bounds, prompts, callers and scaling as SVG."""
    from .bench.plots import draw
    from .bench.rows import read_rows

    paths = draw(read_rows(file), out)
    if json_output:
        print_json({"files": [str(path) for path in paths]})
        return
    for path in paths:
        typer.echo(str(path))
    if not paths:
        note(f"{file} has no rows to draw")


# -- arguments ----------------------------------------------------------------------------------


def _suite(name: str, given: dict[str, str | None]) -> Suite:
    from .bench.suite_file import load_suite

    for option, value in given.items():
        if value is not None:
            raise typer.BadParameter(f"--suite says what to measure: leave --{option} out")
    return load_suite(name)


def _cells(given: dict[str, str | None]) -> Sequence[Cell]:
    from .bench.cells import CACHES, OUR_ARMS, Budget, expand

    def listed(name: str, parse: Any, what: str) -> list[Any]:
        text = given[name]
        return [] if text is None else _list(text, parse, what)

    budgets = [
        *(Budget(slots=value) for value in listed("slots", _count, "a number of slots")),
        *(Budget(share=value) for value in listed("share", _share, "a share between 0 and 1")),
        *(Budget(memory=value) for value in listed("memory", _memory, "a size such as 8GB")),
    ]
    contexts, prefills, callers = (
        listed(name, _count, "a number") for name in ("context", "prefill", "callers")
    )
    if not contexts and not prefills and not callers:
        contexts = [128]
    return expand(
        budgets or [Budget(share=0.25)],
        listed("cache", _one_of(CACHES), " or ".join(CACHES)) or CACHES[:1],
        listed("arms", _one_of(OUR_ARMS), ", ".join(OUR_ARMS)) or OUR_ARMS,
        contexts=contexts,
        prefills=prefills,
        callers=callers,
    )


def _numbers(text: str | None, last: int) -> list[int]:
    """The cells that are meant by ``"1-3,5"``."""
    if text is None:
        return list(range(1, last + 1))
    found: list[int] = []
    for part in text.split(","):
        first, dash, end = part.strip().partition("-")
        try:
            found += range(_count(first), _count(end if dash else first) + 1)
        except ValueError as error:
            raise typer.BadParameter(f"--only {text!r}: give numbers such as 1-3,5") from error
    if not found or max(found) > last:
        raise typer.BadParameter(f"--only {text!r}: there are cells 1 to {last}")
    return sorted(set(found))


def _print_cells(cells: Sequence[Cell], numbers: Sequence[int], json_output: bool) -> None:
    if json_output:
        from dataclasses import asdict

        print_json({"cells": [{"number": n, **asdict(cells[n - 1])} for n in numbers]})
        return
    for number in numbers:
        cell = cells[number - 1]
        typer.echo(f"{number:3}  {cell}: {', '.join(cell.arms)}; {cell.repeats} times")


def _one_of(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> str:
        if text.strip() not in allowed:
            raise ValueError(text)
        return text.strip()

    return parse


def _memory(text: str) -> str:
    if text.strip() != "all":
        parse_size(text)
    return text.strip()


def _rate(text: str) -> float:
    try:
        return float(parse_size(text.strip().removesuffix("/s")))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a rate; give a text like '500MB/s'") from error


def _model(model: str | None, suite: Suite | None) -> str:
    from .bench.cells import demo_directory

    if model is None and suite is not None and suite.model != "demo":
        raise typer.BadParameter(f"--suite {suite.name} needs a model: moestream bench MODEL ...")
    return demo_directory() if model is None else model


def _default_csv() -> Path:
    for folder in (here := Path.cwd(), *here.parents):
        try:
            if 'name = "moestream"' in (folder / "pyproject.toml").read_text(encoding="utf-8"):
                return folder / "docs" / "bench" / "results.csv"
        except (OSError, UnicodeDecodeError):
            continue
    return Path("moestream-bench.csv")
