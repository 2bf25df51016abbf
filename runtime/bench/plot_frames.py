"""Frames, colours and marks of the pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .figures import Setting, values_of
from .rows import Row

WIDTH = 8.6
"""Inches; at 100 dots an inch about what a README shows."""

# By Okabe and Ito: told apart by people who are colour-blind, too. Each has a mark of its own.
_STYLES: Mapping[str, tuple[str, str]] = {
    "resident": ("#555555", "v"),
    "off": ("#0072B2", "o"),
    "fifo": ("#E69F00", "s"),
    "ours": ("#009E73", "D"),
}
_OTHERS = (("#CC79A7", "^"), ("#D55E00", "P"), ("#56B4E9", "X"), ("#B8A800", "*"))
INK, SOFT, _GRID = "#222222", "#555555", "#dddddd"

_SETTINGS: Any = {
    "svg.hashsalt": "moestream",
    "svg.fonttype": "none",  # text stays text
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.5,
}

_NAMES = {
    "resident": "resident (mlx-lm)",
    "off": "off (on demand)",
    "fifo": "fifo (guesses without rules)",
    "ours": "ours",
}


@contextmanager
def styled() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(_SETTINGS):
        yield


def panels(
    lines: int, columns: int, *, height: float = 2.9, share_y: bool = True
) -> tuple[Any, Any]:
    """A figure with room for a legend above and a caption below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height * lines + 1.15), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey="row" if share_y else False)
    for axis in axes.flat:
        axis.grid(axis="y")
        axis.tick_params(length=0)
    return figure, axes


def finish(figure: Any, setting: Setting) -> None:
    """One legend for all panels above them, the caption below."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper left", ncols=min(len(handles), 3)
    )
    figure.supxlabel(setting.caption, fontsize=7.5, color=SOFT, x=0.01, ha="left")


def headroom(axes: Any) -> None:
    """From zero to a little above the highest mark."""
    for axis in axes.flat:
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])


def log_axis(axis: Any, label: str) -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel(label)


def style_of(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    others = [other for other in arms if other not in _STYLES]
    colour, mark = _STYLES.get(arm) or _OTHERS[others.index(arm) % len(_OTHERS)]
    return {"color": colour, "marker": mark, "label": _NAMES.get(arm, arm)}


def slot_axis(rows: Sequence[Row]) -> tuple[list[float], list[str]]:
    """Numbers of slots that occur, and what to call them on an axis."""
    counts = values_of(rows, lambda row: row.slots)
    experts = max(row.experts or 0 for row in rows)
    names = [f"{n:g}\n{100 * n / experts:.3g} %" if experts else f"{n:g}" for n in counts]
    return counts, names


def name_places(axis: Any, names: Sequence[str], label: str) -> None:
    """An axis of names instead of numbers."""
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.set_xlabel(label)


def error_bar(row: Row, convert: Callable[[float], float] = float) -> list[list[float]]:
    """Quartiles as matplotlib wants its error bars."""
    assert row.ms_per_token is not None and row.ms_q1 is not None and row.ms_q3 is not None
    middle = convert(row.ms_per_token)
    ends = sorted((convert(row.ms_q1), convert(row.ms_q3)))
    return [[max(middle - ends[0], 0.0)], [max(ends[1] - middle, 0.0)]]


def grouped(
    axis: Any, bars: Mapping[tuple[str, int], tuple[Any, str]], arms: Sequence[str]
) -> None:
    """Bars side by side, each with its value, or a text, above."""
    width = min(0.8 / max(len(arms), 1), 0.25)
    for index, arm in enumerate(arms):
        style = style_of(arm, arms)
        own = [(at, *value) for (name, at), value in bars.items() if name == arm]
        if not own:
            continue
        shift = width * (index - (len(arms) - 1) / 2)
        heights = [height for _, height, _ in own]
        axis.bar(
            [at + shift for at, _, _ in own],
            heights,
            width * 0.9,
            color=style["color"],
            label=style["label"],
        )
        for at, height, text in own:
            axis.annotate(
                text or f"{height:.2f}",
                (at + shift, height),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=SOFT,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # over lines
                zorder=3,
            )
