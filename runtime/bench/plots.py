"""Pictures of the rows. The same rows give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import BenchError, MatplotlibMissing
from .figures import SCALES, Setting, arms_of, relative, settings, values_of
from .rows import Row

WIDTH = 8.6
"""Inches; at 100 dots an inch about what a README shows."""

LIMIT = 1.15
"""What one more layer, expert or caller may cost at most, against the smallest count."""

# By Okabe and Ito: told apart by people who are colour-blind, too. Each has a mark of its own.
_STYLES: Mapping[str, tuple[str, str]] = {
    "resident": ("#555555", "v"),
    "off": ("#0072B2", "o"),
    "fifo": ("#E69F00", "s"),
    "ours": ("#009E73", "D"),
}
_OTHERS = (("#CC79A7", "^"), ("#D55E00", "P"), ("#56B4E9", "X"), ("#B8A800", "*"))
_INK, _SOFT, _GRID = "#222222", "#555555", "#dddddd"

_SETTINGS: Any = {
    "svg.hashsalt": "moestream",
    "svg.fonttype": "none",  # text stays text
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": _SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
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


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the pictures for which there are rows.

    Args:
        rows: of one file.
        folder: gets ``tokens-*.svg``, ``bound-*.svg``, ``prefill-*.svg``, ``callers-*.svg`` and
            ``scaling-*.svg``, where the star names device and model.

    Raises:
        MatplotlibMissing: it says how to install it.
        BenchError: the folder cannot be written to.
    """
    if find_spec("matplotlib") is None:
        raise MatplotlibMissing
    paths = []
    for setting in settings(rows):
        for name, picture in _PICTURES.items():
            with _styled():
                figure = picture(setting)
                if figure is not None:
                    _finish(figure, setting)
                    paths.append(_save(figure, folder / f"{name}-{setting.slug}.svg"))
    return paths


@contextmanager
def _styled() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(_SETTINGS):
        yield


def _save(figure: Any, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "moestream"})
    except OSError as error:
        raise BenchError(f"{path} cannot be written to: {error.strerror}") from error
    return path


# -- frames -------------------------------------------------------------------------------------


def _panels(
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


def _finish(figure: Any, setting: Setting) -> None:
    """One legend for all panels above them, the caption below."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper left", ncols=min(len(handles), 3)
    )
    figure.supxlabel(setting.caption, fontsize=7.5, color=_SOFT, x=0.01, ha="left")


def _headroom(axes: Any) -> None:
    """From zero to a little above the highest mark."""
    for axis in axes.flat:
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])


def _style(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    others = [other for other in arms if other not in _STYLES]
    colour, mark = _STYLES.get(arm) or _OTHERS[others.index(arm) % len(_OTHERS)]
    return {"color": colour, "marker": mark, "label": _NAMES.get(arm, arm)}


def _slots(rows: Sequence[Row]) -> tuple[list[float], list[str]]:
    """Numbers of slots that occur, and what to call them on an axis."""
    counts = values_of(rows, lambda row: row.slots)
    experts = max(row.experts or 0 for row in rows)
    names = [f"{n:g}\n{100 * n / experts:.3g} %" if experts else f"{n:g}" for n in counts]
    return counts, names


def _places(axis: Any, names: Sequence[str], label: str) -> None:
    """An axis of names instead of numbers."""
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.set_xlabel(label)


def _error(row: Row, convert: Callable[[float], float] = float) -> list[list[float]]:
    """Quartiles as matplotlib wants its error bars."""
    assert row.ms_per_token is not None and row.ms_q1 is not None and row.ms_q3 is not None
    middle = convert(row.ms_per_token)
    ends = sorted((convert(row.ms_q1), convert(row.ms_q3)))
    return [[max(middle - ends[0], 0.0)], [max(ends[1] - middle, 0.0)]]


# -- pictures -----------------------------------------------------------------------------------


def _tokens(setting: Setting) -> Any:
    """Time of a token by slots, with the bound."""
    rows = setting.of("decode")
    streamed = [row for row in rows if row.slots is not None]
    if not streamed:
        return None
    contexts = values_of(rows, lambda row: row.context)
    caches = values_of(streamed, lambda row: row.cache)
    counts, names = _slots(streamed)
    arms = arms_of(rows)
    figure, axes = _panels(len(contexts), len(caches))
    for line, context in zip(axes, contexts, strict=True):
        for axis, cache in zip(line, caches, strict=True):
            panel = [r for r in rows if r.context == context and r.cache == cache]
            for index, arm in enumerate(arms):
                own = [row for row in panel if row.arm == arm]
                if arm == "resident":
                    _level(axis, own, _style(arm, arms))
                    continue
                shift = 0.11 * (index - (len(arms) - 1) / 2)
                points = [
                    (counts.index(row.slots) + shift, row) for row in own if row.slots is not None
                ]
                _points(axis, sorted(points, key=lambda point: point[0]), _style(arm, arms))
            _bounds(axis, panel, counts)
            _places(axis, names, "experts held per layer")
            axis.set_title(f"{_reads(cache)}, behind {context} tokens")
        line[0].set_ylabel("ms per token")
        _headroom(line[:1])
    return figure


def _reads(cache: str) -> str:
    return {"cold": "cold (from the drive)", "warm": "warm (page cache)"}.get(cache, cache)


def _level(axis: Any, rows: Sequence[Row], style: Mapping[str, Any]) -> None:
    """What does not depend on slots, with its quartiles."""
    for row in rows[-1:]:
        axis.axhline(row.ms_per_token, color=style["color"], label=style["label"], ls=(0, (1, 1)))
        axis.axhspan(row.ms_q1, row.ms_q3, color=style["color"], alpha=0.15, lw=0)


def _points(axis: Any, points: Sequence[tuple[float, Row]], style: Mapping[str, Any]) -> None:
    if points:
        xs = [x for x, _ in points]
        axis.plot(xs, [row.ms_per_token for _, row in points], **style)
        for x, row in points:
            axis.errorbar(x, row.ms_per_token, _error(row), color=style["color"], capsize=2, lw=1)


def _bounds(axis: Any, rows: Sequence[Row], counts: Sequence[float]) -> None:
    label = "bound: max(compute, bytes / bandwidth)"
    for row in rows:
        if row.arm == "off" and row.bound_ms is not None and row.slots in counts:
            at = counts.index(row.slots)
            axis.hlines(row.bound_ms, at - 0.36, at + 0.36, color=_INK, lw=2, label=label)
            label = "_nolegend_"


def _bound(setting: Setting) -> Any:
    """How near to the bound each arm comes."""
    rows = [row for row in setting.of("decode") if row.bound_over_measured is not None]
    rows = [row for row in rows if row.slots is not None]
    if not rows:
        return None
    contexts = values_of(rows, lambda row: row.context)
    caches = values_of(rows, lambda row: row.cache)
    counts, names = _slots(rows)
    arms = arms_of(rows)
    figure, axes = _panels(len(contexts), len(caches), height=2.5)
    for line, context in zip(axes, contexts, strict=True):
        for axis, cache in zip(line, caches, strict=True):
            panel = [r for r in rows if r.context == context and r.cache == cache]
            bars = {
                (arm, counts.index(row.slots)): (row.bound_over_measured, "")
                for arm in arms
                for row in panel
                if row.arm == arm and row.slots is not None
            }
            _grouped(axis, bars, arms)
            axis.axhline(1.0, color=_INK, lw=1.2)
            _places(axis, names, "experts held per layer")
            axis.set_title(f"{_reads(cache)}, behind {context} tokens")
        line[0].set_ylabel("bound / measured")
        _headroom(line[:1])
    return figure


def _grouped(
    axis: Any, bars: Mapping[tuple[str, int], tuple[Any, str]], arms: Sequence[str]
) -> None:
    """Bars side by side, each with its value, or a text, above."""
    width = 0.8 / max(len(arms), 1)
    for index, arm in enumerate(arms):
        style = _style(arm, arms)
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
                color=_SOFT,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # over lines
                zorder=3,
            )


def _prefill(setting: Setting) -> Any:
    """What prompts read per second, against the drive."""
    rows = [row for row in setting.of("prefill") if row.bytes_per_token]
    rows = [row for row in rows if row.drive_bytes_per_s is not None and row.slots is not None]
    if not rows:
        return None
    places = values_of(rows, lambda row: (row.cache, row.slots))
    lengths = values_of(rows, lambda row: row.context)
    arms = arms_of(rows)
    figure, axes = _panels(1, len(places), share_y=False)
    for axis, (cache, slots) in zip(axes[0], places, strict=True):
        panel = [row for row in rows if (row.cache, row.slots) == (cache, slots)]
        bars = {
            (row.arm, lengths.index(row.context)): (_rate(row), f"{row.tokens_per_s:.0f} tok/s")
            for row in panel
        }
        _grouped(axis, bars, arms)
        drive = panel[0].drive_bytes_per_s or 0.0
        name = "the drive" if cache == "cold" else "reading from the page cache"
        style = {"color": _INK, "lw": 1.6, "ls": "-" if cache == "cold" else (0, (4, 2))}
        axis.axhline(drive / 1e9, label=f"{name}, same size of reads", **style)
        _places(axis, [str(length) for length in lengths], "tokens of the prompt")
        axis.set_title(f"{_reads(cache)}, {slots:g} slots")
    axes[0][0].set_ylabel("GB read per second")
    _headroom(axes)
    return figure


def _rate(row: Row) -> float:
    return (row.bytes_per_token or 0.0) * (row.tokens_per_s or 0.0) / 1e9


def _callers(setting: Setting) -> Any:
    """Tokens per second of all callers."""
    rows = [row for row in setting.of("callers") if row.callers is not None]
    if not rows:
        return None
    places = values_of(
        [row for row in rows if row.slots is not None], lambda row: (row.cache, row.slots)
    )
    if not places:
        return None
    arms = arms_of(rows)
    figure, axes = _panels(1, len(places))
    counts = values_of(rows, lambda row: row.callers)
    for axis, (cache, slots) in zip(axes[0], places, strict=True):
        for index, arm in enumerate(arms):
            style = _style(arm, arms)
            own = [r for r in rows if (r.arm, r.cache, r.slots) == (arm, cache, slots)]
            own.sort(key=lambda row: row.callers or 0)
            shift = 0.06 * (index - (len(arms) - 1) / 2)
            xs = [counts.index(row.callers) + shift for row in own]
            axis.plot(xs, [row.tokens_per_s for row in own], **style)
            for x, row in zip(xs, own, strict=True):
                error = _error(row, lambda ms: 1e3 / ms)
                axis.errorbar(x, row.tokens_per_s, error, color=style["color"], capsize=2, lw=1)
        _places(axis, [str(count) for count in counts], "callers at once")
        axis.set_title(f"{_reads(cache)}, {slots:g} slots")
    axes[0][0].set_ylabel("tokens per second, of all")
    _headroom(axes[0, :1])
    return figure


def _scaling(setting: Setting) -> Any:
    """Cost of one more layer, expert or caller."""
    found = {what: setting.of(f"scale-{what}") for what in SCALES}
    found = {what: rows for what, rows in found.items() if rows}
    if not found:
        return None
    figure, axes = _panels(1, len(found))
    unit = {"layers": "layer", "experts": "routed expert", "callers": "token of all callers"}
    for axis, (what, rows) in zip(axes[0], found.items(), strict=True):
        arms = arms_of(rows)
        counts = sorted({getattr(row, what) for row in rows})
        for index, arm in enumerate(arms):
            own = [row for row in rows if row.arm == arm]
            shift = 0.12 * (index - (len(arms) - 1) / 2)
            _relative(axis, relative(own, what), counts, shift, _style(arm, arms))
            python = relative([row for row in own if row.host_ms is not None], what, host=True)
            hollow = {**_style(arm, arms), "mfc": "white", "ls": ":"}
            hollow["label"] = f"{arm}: Python on the compute thread"
            _relative(axis, python, counts, shift, hollow)
        axis.axhline(LIMIT, color=_INK, lw=1.2, ls=(0, (5, 2)), label=f"{LIMIT} times")
        _places(axis, [str(count) for count in counts], what)
        axis.set_title(f"per {unit[what]}")
    axes[0][0].set_ylabel("time, against the smallest")
    _headroom(axes[0, :1])
    return figure


def _relative(
    axis: Any,
    costs: Sequence[tuple[int, float, float, float]],
    counts: Sequence[int],
    shift: float,
    style: Mapping[str, Any],
) -> None:
    if not costs:
        return
    xs = [counts.index(count) + shift for count, *_ in costs]
    axis.plot(xs, [middle for _, middle, _, _ in costs], **style)
    spreads = [
        [max(middle - low, 0.0) for _, middle, low, _ in costs],
        [max(high - middle, 0.0) for _, middle, _, high in costs],
    ]
    middles = [middle for _, middle, _, _ in costs]
    if any(map(any, spreads)):
        axis.errorbar(xs, middles, spreads, color=style["color"], capsize=2, lw=1, ls="")


_PICTURES: Mapping[str, Callable[[Setting], Any]] = {
    "tokens": _tokens,
    "bound": _bound,
    "prefill": _prefill,
    "callers": _callers,
    "scaling": _scaling,
}
