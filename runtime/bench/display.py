"""What a benchmark shows at the terminal: a line for each row, a bar, and a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..cli_output import percent, size
from ..terminal import error_console, output_console
from .cells import Cell
from .rows import Row


class Watch:
    """Tells how far it is: a bar on a terminal, otherwise nothing.

    Args:
        cells: how many there are.
        steps: of all of them.
        bar: to draw with; None when nobody watches.
    """

    def __init__(self, cells: int, steps: int, bar: Progress | None) -> None:
        self._cells = cells
        self._bar = bar
        self._task = None if bar is None else bar.add_task("opening", total=steps, cells="")

    def cell(self, cell: Cell, number: int) -> None:
        """A cell is worked on now."""
        if self._bar is not None and self._task is not None:
            done = f"{number - 1} of {self._cells} cells done"
            self._bar.update(self._task, description=str(cell), cells=done)

    def step(self, count: int) -> None:
        """So many steps are done."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)


@contextmanager
def watching(cells: int, steps: int) -> Iterator[Watch]:
    """A bar with what is done and the time that remains; it vanishes at the end."""
    if not sys.stderr.isatty():
        yield Watch(cells, steps, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[cells]}"),
        TimeRemainingColumn(),
    )
    # Standard output that goes to a file must not be drawn into the bar.
    with Progress(
        *columns, console=error_console(), transient=True, redirect_stdout=sys.stdout.isatty()
    ) as bar:
        yield Watch(cells, steps, bar)


def row_line(row: Row) -> str:
    """A row in a line."""
    head = f"{_what(row)}, {row.arm}: "
    if row.status != "ok":
        return f"{head}{row.status}, {row.note}"
    parts = [f"{_ms(row.ms_per_token)} ms/token ({_ms(row.ms_q1)} to {_ms(row.ms_q3)}, n={row.n})"]
    if row.stall_ms is not None:
        parts.append(f"stalled {_ms(row.stall_ms)}")
    if row.bytes_per_token is not None:
        parts.append(f"{size(row.bytes_per_token)}/token")
    if row.hit_rate is not None:
        parts.append(f"hits {percent(row.hit_rate)}")
    if row.bound_over_measured is not None:
        parts.append(f"bound/measured {row.bound_over_measured:.2f}")
    if row.speedup is not None and row.arm != "off":
        parts.append(f"{row.speedup:.2f}x off")
    return head + ", ".join(parts)


def _what(row: Row) -> str:
    held = f"{row.slots:g} slots" if row.slots is not None else "all experts"
    what = {
        "decode": f"{row.tokens} tokens behind {row.context}",
        "prefill": f"prompt of {row.context}",
        "callers": f"{row.callers} at once",
    }.get(row.kind, row.kind)
    return f"{held}, {row.cache}, {what}"


def print_tables(rows: Sequence[Row]) -> None:
    """A table for each kind of cell, and what failed."""
    console = output_console()
    good = [row for row in rows if row.status == "ok"]
    for kind, title, columns in _TABLES:
        own = [row for row in good if row.kind == kind]
        if not own:
            continue
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column(title, no_wrap=True)
        table.add_column("arm", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for what, group in groupby(own, _place):
            for index, row in enumerate(group):
                cells = [cell(row) for cell in columns.values()]
                table.add_row("" if index else what, row.arm, *cells)
        # A table that is wider than the screen is better wrapped than cut.
        wide = Measurement.get(console, console.options.update(width=1000), table).maximum
        console.width = max(console.width, wide)
        console.print(table)
        console.print()
    for row in rows:
        if row.status != "ok":
            console.print(Text(row_line(row), style="dim" if row.status == "skipped" else "red"))


def _place(row: Row) -> str:
    """The cell of a row; an arm that holds everything stands with the others."""
    what = {"decode": row.context, "prefill": row.context, "callers": row.callers}[row.kind]
    return f"{row.cache}, {what}"


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _size(value: float | None) -> str:
    return "" if value is None else size(value)


_Columns = dict[str, Callable[[Row], str]]
_TIMES: _Columns = {
    "slots": lambda row: "all" if row.slots is None else f"{row.slots:g}",
    "ms/token": lambda row: _ms(row.ms_per_token),
    "quartiles": lambda row: f"{_ms(row.ms_q1)}-{_ms(row.ms_q3)}",
}
_READS: _Columns = {
    "read/token": lambda row: _size(row.bytes_per_token),
    "x off": lambda row: _ratio(row.speedup),
}
_TABLES: tuple[tuple[str, str, _Columns], ...] = (
    (
        "decode",
        "decode, behind",
        {
            **_TIMES,
            "stall": lambda row: _ms(row.stall_ms),
            "hits": lambda row: "" if row.hit_rate is None else f"{100 * row.hit_rate:.0f} %",
            **_READS,
            "bound/meas.": lambda row: _ratio(row.bound_over_measured),
        },
    ),
    (
        "prefill",
        "prompt of",
        {
            **_TIMES,
            "tokens/s": lambda row: _ms(row.tokens_per_s),
            **_READS,
            "of the drive": lambda row: _ratio(row.drive_share),
        },
    ),
    (
        "callers",
        "callers",
        {
            **_TIMES,
            "tokens/s": lambda row: _ms(row.tokens_per_s),
            **_READS,
            "longest gap": lambda row: _ms(row.longest_gap_ms),
        },
    ),
)


def summary_json(rows: Sequence[Row], csv: str) -> dict[str, Any]:
    """Everything as one value."""
    return {"csv": csv, "rows": [row.to_json() for row in rows]}
