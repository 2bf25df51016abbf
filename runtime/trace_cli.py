"""The commands `moestream trace report` and `moestream trace replay`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from . import cli_options as options
from .plan import parse_size
from .terminal import note, print_json, progress_bar

if TYPE_CHECKING:
    from .replay_sweep import Result, Sweep
    from .report_figures import Report

T = TypeVar("T")

app = typer.Typer(
    cls=options.Group,
    help="Look into a trace, or replay its routing with other caches.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TraceFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A trace that `--trace FILE` has written.")
]


def _list(text: str, parse: Callable[[str], T], what: str) -> list[T]:
    """Understand a list with commas."""
    try:
        return list(dict.fromkeys(parse(part) for part in text.split(",")))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: give {what}, or several with commas") from error


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise ValueError(text)
    return share


def _policy(text: str) -> str:
    from .replay_policies import POLICIES

    if text.strip() not in POLICIES:
        raise ValueError(text)
    return text.strip()


def _bytes(text: str) -> int:
    try:
        return parse_size(text.strip().removesuffix("/s"))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a size; give a text like '2GB'") from error


@app.command(cls=options.Command)
def report(
    file: TraceFile,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where to write report.html and trace.json; needed unless --json is given.",
        ),
    ] = None,
    json_output: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Tell where the time went: a page to read, and a trace for ui.perfetto.dev."""
    from .report import make_report, write_report
    from .tracefile import read_trace

    if out is None and not json_output:
        raise typer.BadParameter("give --out DIR, or --json to print the figures")
    trace = read_trace(file)
    made = make_report(trace)
    paths = [] if out is None else write_report(trace, made, out)
    if json_output:
        print_json(made.to_json())
    else:
        _print_report(made, paths)


def _print_report(made: Report, paths: Iterable[Path]) -> None:
    typer.echo(made.summary)
    for line in (*made.notices, *made.missing):
        note(line)
    for path in paths:
        typer.echo(str(path))


@app.command(cls=options.Command)
def replay(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A trace of moestream, or routing as .csv or .csv.gz."),
    ],
    slots: Annotated[
        str | None, typer.Option(metavar="N,N", help="Experts to hold per layer.")
    ] = None,
    share: Annotated[
        str | None, typer.Option(metavar="X,X", help="Share of each layer's experts to hold.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME", help="Of neighbours, successors, lfu-decay, lru, fifo, belady."
        ),
    ] = "neighbours,successors,lfu-decay,lru,fifo,belady",
    prefetch: Annotated[
        str,
        typer.Option(
            metavar="KIND,KIND",
            help="Of off, recorded, perfect and noisy:RECALL (made from the routing to come).",
        ),
    ] = "off",
    bandwidth: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of the drive per second, such as 2GB/s.")
    ] = None,
    latency_us: Annotated[float, typer.Option(min=0, help="Of a read, in microseconds.")] = 100.0,
    depth: Annotated[int, typer.Option(min=1, help="Reads in flight at once.")] = 16,
    compute_ms_per_layer: Annotated[
        float | None, typer.Option(min=0, help="Computing time between two routers.")
    ] = None,
    record_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of an expert.")
    ] = None,
    lookahead: Annotated[
        int, typer.Option(min=1, help="Layers that perfect and noisy guesses look ahead.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Of the wrong guesses of noisy.")] = 0,
    json_output: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Replay recorded routing with other cache sizes, policies, guesses and drives."""
    from .replay_sweep import Options, Sweep, parse_prefetch
    from .tracefile import read_trace

    chosen = Options(
        slots=_list(slots, _count, "a number of slots") if slots else (),
        shares=_list(share, _share, "a share between 0 and 1") if share else (),
        policies=_list(policy, _policy, "neighbours, successors, lfu-decay, lru, fifo or belady"),
        prefetch=_list(prefetch, parse_prefetch, "off, recorded, perfect or noisy:0.8"),
        bandwidth=None if bandwidth is None else _bytes(bandwidth),
        latency=latency_us / 1e6,
        depth=depth,
        compute=None if compute_ms_per_layer is None else compute_ms_per_layer / 1e3,
        record_bytes=None if record_bytes is None else _bytes(record_bytes),
        lookahead=lookahead,
        seed=seed,
    )
    trace = read_trace(file)
    sweep = Sweep(trace, chosen)
    with progress_bar("replaying") as progress:
        results = sweep.run(progress)
    if json_output:
        document = {
            "file": str(file),
            "model": trace.model,
            **_premises(sweep),
            "notices": [*trace.notices, *sweep.assumed],
            "results": [result.to_json() for result in results],
        }
        print_json(document)
    else:
        _print_results(results, sweep)
        for line in (*trace.notices, *sweep.assumed):
            note(line)


def _premises(sweep: Sweep) -> dict[str, Any]:
    sizes = sweep.record_bytes.values()
    return {
        "bandwidth_bytes_per_s": sweep.drive.bandwidth,
        "latency_us": 1e6 * sweep.drive.latency,
        "depth": sweep.drive.depth,
        "compute_ms_per_layer": 1e3 * sweep.compute,
        "mean_record_bytes": sum(sizes) / len(sizes),
    }


def _print_results(results: Sequence[Result], sweep: Sweep) -> None:
    from rich.measure import Measurement
    from rich.table import Table

    from .cli_output import percent, size
    from .terminal import output_console

    several = len({result.prefetch for result in results}) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("slots", "cache", "policy", *(["prefetch"] if several else [])):
        table.add_column(name, justify="right" if name == "slots" else "left", no_wrap=True)
    for name in ("hit", "read", "waste", "stall ms", "token ms", "bound ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        outcome = result.outcome
        table.add_row(
            *(str(result.slots), result.cache, result.policy),
            *([result.prefetch] if several else []),
            percent(outcome.hit_rate),
            size(outcome.bytes_per_token),
            percent(outcome.waste),
            *(_ms(s) for s in (outcome.stall_per_token, outcome.token_seconds)),
            _ms(outcome.bound_seconds),
        )
    console = output_console()
    # A table that is wider than the screen is better wrapped than cut.
    wide = Measurement.get(console, console.options.update(width=1000), table).maximum
    console.width = max(console.width, wide)
    console.print(table)
    premises = _premises(sweep)
    console.print(
        f"per token; drive {size(premises['bandwidth_bytes_per_s'])}/s, "
        f"{premises['latency_us']:g} us a read, {premises['depth']} in flight; "
        f"{premises['compute_ms_per_layer']:.3g} ms computing a layer; "
        f"experts of {size(premises['mean_record_bytes'])}"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
