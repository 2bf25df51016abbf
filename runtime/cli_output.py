"""Figures for people: units, and the tables that the commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from .errors import budget_text
from .terminal import output_console

if TYPE_CHECKING:
    from ..io.drive import DriveReport
    from .chaos import ChaosReport
    from .demo import Comparison
    from .forecast import Forecast
    from .inspection import PlanReport

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def size(nbytes: float) -> str:
    """Bytes in decimal units, three digits or so."""
    value = float(nbytes)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    if unit == "bytes":
        return f"{value:.0f} {unit}"
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"


def binary_size(nbytes: int) -> str:
    """Sizes of reads, which are powers of two."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g} {unit}"
    return f"{nbytes} bytes"


def percent(share: float) -> str:
    """A share of one."""
    return f"{100 * share:.1f} %"


def ranges(numbers: Sequence[int]) -> str:
    """``"0-3, 5"`` for 0, 1, 2, 3, 5."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ", ".join(runs)


# -- plan ---------------------------------------------------------------------------------------

_PARTS = {
    "process": "process: interpreter and libraries",
    "trunk": "trunk: all that is no routed expert",
    "kv": "KV cache at full context",
    "prompt_cache": "prompt cache",
    "scratch": "scratch of a prompt chunk",
    "cache": "buffers that MLX keeps",
    "staging": "staging of experts read ahead",
    "slots": "slots for experts",
    "reserve": "reserve: for the allocator, and what makes no slot",
}


def _part(name: str, requests: int) -> str:
    if name == "kv" and requests > 1:
        return f"KV caches of {requests} requests at full context"
    return _PARTS[name]


def print_plan(report: PlanReport) -> None:
    """How the memory would be divided."""
    console = output_console()
    plan = report.plan
    if plan.budget is None:
        budget = "none given: what the slots need"
    else:
        budget = size(plan.budget) + (" (chosen from what is free)" if report.automatic else "")
    console.print(Text.assemble(("model ", "bold"), f"{report.model} ({report.model_type})"))
    console.print(Text.assemble(("budget ", "bold"), budget))
    console.print()
    table = _table("part", "memory")
    for name, nbytes in report.parts.items():
        if nbytes or name not in ("staging", "prompt_cache"):
            table.add_row(_part(name, plan.sequences), size(nbytes))
    table.add_row("in all", size(report.total), style="bold")
    console.print(table)
    console.print(f"context {plan.context} tokens, prompt chunks of {plan.chunk_tokens}")
    console.print()
    for group in report.groups:
        whole = ", resident" if group.slots >= group.experts else ""
        console.print(
            f"{'layers' if len(group.layers) > 1 else 'layer'} {ranges(group.layers)}: "
            f"{group.experts} experts, top {group.top_k}, record {size(group.record_bytes)}, "
            f"slots {group.slots} of {group.experts}{whole}"
        )
    console.print()
    console.print(
        f"experts {size(report.expert_bytes)} on disk, {percent(report.resident_share)} resident"
    )
    console.print(f"the smallest budget that would do is {budget_text(plan.minimum)}")
    console.print(
        f"everything resident needs {budget_text(report.everything_resident)}, "
        f"with prompt chunks of {report.resident_chunk}"
    )
    console.print()
    _print_forecast(report.forecast)


def _print_forecast(forecast: Forecast) -> None:
    console = output_console()
    table = _table("expected", "each token")
    table.add_row("hit rate", percent(forecast.hit_rate))
    table.add_row("read from the drive", size(forecast.bytes_per_token))
    table.add_row("computing", f"{1000 * forecast.compute_seconds:.1f} ms")
    table.add_row("waiting for reads", f"{1000 * forecast.read_seconds:.1f} ms")
    table.add_row("tokens/s", f"{forecast.tokens_per_second:.1f}", style="bold")
    console.print(table)
    for line in forecast.assumptions:
        console.print(Text(f"assumed: {line}", style="dim"))


# -- doctor -------------------------------------------------------------------------------------


def print_machine(facts: Mapping[str, Any]) -> None:
    """What the machine has."""
    console = output_console()
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        text = size(value) if name.endswith("_bytes") else str(value)
        label = name.removesuffix("_bytes").replace("_", " ")
        console.print(Text.assemble(label.ljust(width), (text, "bold")))


def print_drive(report: DriveReport) -> None:
    """Bandwidths by mode, size and depth, and the choice."""
    console = output_console()
    choice = report.choice
    depths = sorted({cell.depth for cell in report.cells})
    table = _table("GB/s, reads in flight:", *(str(depth) for depth in depths))
    for (mode, nbytes), cells in groupby(report.cells, key=lambda cell: (cell.mode, cell.size)):
        rates = {cell.depth: cell.bandwidth for cell in cells}
        row = [f"{rates[depth] / 1e9:.2f}" if depth in rates else "" for depth in depths]
        table.add_row(f"{mode}, {binary_size(nbytes)}", *row)
    console.print()
    console.print(
        Text.assemble(("drive ", "bold"), f"{report.path} (file of {size(report.file_bytes)})")
    )
    console.print(table)
    for line in _remarks(report):
        console.print(Text(line, style="dim"))
    lanes = f"{choice.lanes} lane" + ("s" if choice.lanes > 1 else "")
    console.print(
        Text.assemble(("choice ", "bold"), f"{choice.mode}, {lanes}, {size(choice.bandwidth)}/s")
    )
    console.print(Text(f"why: {choice.why}"))
    direct = choice.mode == "direct"
    flags = f"{'' if direct else '--no-direct '}--lanes {choice.lanes}"
    arguments = f"{'' if direct else 'direct=False, '}lanes={choice.lanes}"
    console.print(Text(f"use it with: {flags}"))
    console.print(Text(f"in Python:   Engine.open(..., {arguments})"))


def _remarks(report: DriveReport) -> list[str]:
    lines = []
    if report.direct_refused is not None:
        lines.append(f"no direct reads: {report.direct_refused}")
    if not report.cache_dropped:
        lines.append("the page cache could not be dropped: buffered reads may show memory")
    if report.skipped_sizes:
        left_out = ", ".join(binary_size(nbytes) for nbytes in report.skipped_sizes)
        lines.append(f"left out, since the file is too small: {left_out}")
    return lines


def print_chaos(report: ChaosReport) -> None:
    """What each fault has done to the requests."""
    console = output_console()
    table = _table("fault", "expected", "victim", "beside it", "after it", "verdict")
    for trial in report.trials:
        row = (trial.expected, trial.victim, trial.beside, trial.after, trial.verdict)
        table.add_row(trial.fault, *row)
    console.print(Text(f"{report.model}, {report.slots} slots a layer, {report.reads} reads"))
    console.print(table)
    for trial in report.trials:
        if trial.note:
            console.print(Text(f"{trial.fault}: {trial.note}", style="dim"))
    if report.passed:
        console.print(Text("Each fault failed the request that needed the read, and no other."))


# -- demo ---------------------------------------------------------------------------------------


def print_comparison(comparison: Comparison) -> None:
    """The two runs of the demo side by side."""
    streamed, resident = comparison.streamed, comparison.resident
    first = "streamed" if streamed.slots < streamed.experts else "first run, resident too"
    table = _table("", first, "everything resident")
    for name, cell in (
        ("slots a layer", lambda run: f"{run.slots} of {run.experts}"),
        ("tokens/s", lambda run: f"{run.tokens_per_second:.1f}"),
        ("time to first token", lambda run: f"{1000 * run.time_to_first_token:.0f} ms"),
        ("hit rate", lambda run: percent(run.hit_rate)),
        ("bytes read a token", lambda run: size(run.bytes_per_token)),
        ("share of time stalled", lambda run: percent(run.stall_share)),
        ("memory of experts", lambda run: size(run.expert_bytes)),
        ("memory of the process", lambda run: size(run.process_bytes)),
    ):
        table.add_row(name, cell(streamed), cell(resident))
    output_console().print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table
