"""Pictures of the rows. The same rows give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import BenchError, MatplotlibMissing
from .figures import SCALES, Setting, arms_of, relative, settings, values_of
from .plot_frames import (
    INK,
    error_bar,
    finish,
    grouped,
    headroom,
    log_axis,
    name_places,
    panels,
    slot_axis,
    style_of,
    styled,
)
from .rows import Row

WIDE = 8
"""Ratio of the longest to the shortest time from which on an axis is logarithmic (arbitrary)."""

LIMIT = 1.15
"""What one more layer, expert or caller may cost at most, against the smallest count."""


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
            with styled():
                figure = picture(setting)
                if figure is not None:
                    finish(figure, setting)
                    paths.append(_save(figure, folder / f"{name}-{setting.slug}.svg"))
    return paths


def _save(figure: Any, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "moestream"})
    except OSError as error:
        raise BenchError(f"{path} cannot be written to: {error.strerror}") from error
    return path


# -- pictures -----------------------------------------------------------------------------------


def _tokens(setting: Setting) -> Any:
    """Time of a token by slots, with the bound."""
    rows = setting.of("decode")
    streamed = [row for row in rows if row.slots is not None]
    if not streamed:
        return None
    contexts = values_of(rows, lambda row: row.context)
    caches = values_of(streamed, lambda row: row.cache)
    counts, names = slot_axis(streamed)
    arms = arms_of(rows)
    times = values_of(rows, lambda row: row.ms_per_token)
    wide = times[-1] > WIDE * times[0]
    figure, axes = panels(len(contexts), len(caches))
    for line, context in zip(axes, contexts, strict=True):
        for axis, cache in zip(line, caches, strict=True):
            panel = [r for r in rows if r.context == context and r.cache == cache]
            for index, arm in enumerate(arms):
                own = [row for row in panel if row.arm == arm]
                if arm == "resident":
                    _level(axis, own, style_of(arm, arms))
                    continue
                shift = 0.11 * (index - (len(arms) - 1) / 2)
                points = [
                    (counts.index(row.slots) + shift, row) for row in own if row.slots is not None
                ]
                _points(axis, sorted(points, key=lambda point: point[0]), style_of(arm, arms))
            _bounds(axis, panel, counts)
            name_places(axis, names, "experts held per layer")
            axis.set_title(f"{_reads(cache)}, behind {context} tokens")
        line[0].set_ylabel("ms per token")
        if wide:
            log_axis(line[0], "ms per token (logarithmic)")
        else:
            headroom(line[:1])
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
            axis.errorbar(
                x, row.ms_per_token, error_bar(row), color=style["color"], capsize=2, lw=1
            )


def _bounds(axis: Any, rows: Sequence[Row], counts: Sequence[float]) -> None:
    label = "bound: max(compute, bytes / bandwidth)"
    for row in rows:
        if row.arm == "off" and row.bound_ms is not None and row.slots in counts:
            at = counts.index(row.slots)
            axis.hlines(row.bound_ms, at - 0.36, at + 0.36, color=INK, lw=2, label=label)
            label = "_nolegend_"


def _bound(setting: Setting) -> Any:
    """How near to the bound each arm comes."""
    rows = [row for row in setting.of("decode") if row.bound_over_measured is not None]
    rows = [row for row in rows if row.slots is not None]
    if not rows:
        return None
    contexts = values_of(rows, lambda row: row.context)
    caches = values_of(rows, lambda row: row.cache)
    counts, names = slot_axis(rows)
    arms = arms_of(rows)
    figure, axes = panels(len(contexts), len(caches), height=2.5)
    for line, context in zip(axes, contexts, strict=True):
        for axis, cache in zip(line, caches, strict=True):
            panel = [r for r in rows if r.context == context and r.cache == cache]
            bars = {
                (arm, counts.index(row.slots)): (row.bound_over_measured, "")
                for arm in arms
                for row in panel
                if row.arm == arm and row.slots is not None
            }
            grouped(axis, bars, arms)
            axis.axhline(1.0, color=INK, lw=1.2)
            name_places(axis, names, "experts held per layer")
            axis.set_title(f"{_reads(cache)}, behind {context} tokens")
        line[0].set_ylabel("bound / measured")
        headroom(line[:1])
    return figure


def _prefill(setting: Setting) -> Any:
    """What prompts read per second, against the drive."""
    rows = [row for row in setting.of("prefill") if row.bytes_per_token]
    rows = [row for row in rows if row.drive_bytes_per_s is not None and row.slots is not None]
    if not rows:
        return None
    places = values_of(rows, lambda row: (row.cache, row.slots))
    lengths = values_of(rows, lambda row: row.context)
    arms = arms_of(rows)
    figure, axes = panels(1, len(places), share_y=False)
    for axis, (cache, slots) in zip(axes[0], places, strict=True):
        panel = [row for row in rows if (row.cache, row.slots) == (cache, slots)]
        bars = {
            (row.arm, lengths.index(row.context)): (_rate(row), f"{row.tokens_per_s:.0f} tok/s")
            for row in panel
        }
        grouped(axis, bars, arms)
        drive = panel[0].drive_bytes_per_s or 0.0
        name = "the drive" if cache == "cold" else "reading from the page cache"
        style = {"color": INK, "lw": 1.6, "ls": "-" if cache == "cold" else (0, (4, 2))}
        axis.axhline(drive / 1e9, label=f"{name}, same size of reads", **style)
        name_places(axis, [str(length) for length in lengths], "tokens of the prompt")
        axis.set_title(f"{_reads(cache)}, {slots:g} slots")
    axes[0][0].set_ylabel("GB read per second")
    headroom(axes)
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
    figure, axes = panels(1, len(places))
    counts = values_of(rows, lambda row: row.callers)
    for axis, (cache, slots) in zip(axes[0], places, strict=True):
        for index, arm in enumerate(arms):
            style = style_of(arm, arms)
            own = [r for r in rows if (r.arm, r.cache, r.slots) == (arm, cache, slots)]
            own.sort(key=lambda row: row.callers or 0)
            shift = 0.06 * (index - (len(arms) - 1) / 2)
            xs = [counts.index(row.callers) + shift for row in own]
            axis.plot(xs, [row.tokens_per_s for row in own], **style)
            for x, row in zip(xs, own, strict=True):
                error = error_bar(row, lambda ms: 1e3 / ms)
                axis.errorbar(x, row.tokens_per_s, error, color=style["color"], capsize=2, lw=1)
        name_places(axis, [str(count) for count in counts], "callers at once")
        axis.set_title(f"{_reads(cache)}, {slots:g} slots")
    axes[0][0].set_ylabel("tokens per second, of all")
    headroom(axes[0, :1])
    return figure


def _scaling(setting: Setting) -> Any:
    """Cost of one more layer, expert or caller."""
    found = {what: setting.of(f"scale-{what}") for what in SCALES}
    found = {what: rows for what, rows in found.items() if rows}
    if not found:
        return None
    figure, axes = panels(1, len(found))
    unit = {"layers": "layer", "experts": "routed expert", "callers": "token of all callers"}
    for axis, (what, rows) in zip(axes[0], found.items(), strict=True):
        arms = arms_of(rows)
        counts = sorted({getattr(row, what) for row in rows})
        for index, arm in enumerate(arms):
            own = [row for row in rows if row.arm == arm]
            shift = 0.12 * (index - (len(arms) - 1) / 2)
            _relative(axis, relative(own, what), counts, shift, style_of(arm, arms))
            python = relative([row for row in own if row.host_ms is not None], what, host=True)
            hollow = {**style_of(arm, arms), "mfc": "white", "ls": ":"}
            hollow["label"] = f"{arm}: Python on the compute thread"
            _relative(axis, python, counts, shift, hollow)
        axis.axhline(LIMIT, color=INK, lw=1.2, ls=(0, (5, 2)), label=f"{LIMIT} times")
        name_places(axis, [str(count) for count in counts], what)
        axis.set_title(f"per {unit[what]}")
    axes[0][0].set_ylabel("time, against the smallest")
    headroom(axes[0, :1])
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
