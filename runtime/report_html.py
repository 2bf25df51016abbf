"""The page of a report: one file with everything in it, for light and dark screens."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .cli_output import percent, size
from .report_figures import Report
from .report_plots import Plot, heat, legend, number, table
from .report_series import BINS, PARTS, bars, deepest, histogram, period, rates
from .report_style import STYLE
from .report_words import NAMES
from .trace_records import Trace

Section = tuple[str, str, str]
"""Heading, what it shows, and the picture."""

LEAD_EDGES_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def page(trace: Trace, report: Report) -> str:
    """The whole page."""
    name = report.model or trace.path.name
    body = "".join(
        f"<section><h2>{heading}</h2><p>{text}</p>{picture}</section>"
        for heading, text, picture in _sections(trace, report)
    )
    gaps = "".join(f"<li>{escape(line)}</li>" for line in (*report.notices, *report.missing))
    remarks = f'<ul class="notices">{gaps}</ul>' if gaps else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: trace</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(name)}</h1><p class='plan'>{escape(_plan(trace, report))}</p>"
        f'<p class="summary">{escape(report.summary)}</p>{remarks}</header>'
        f"{body}<footer>{escape(str(trace.path))}; moestream {escape(report.version or '')}"
        "</footer></main></body></html>\n"
    )


def _plan(trace: Trace, report: Report) -> str:
    layers = list(trace.layers.values())
    words = []
    if layers:
        words.append(f"{len(layers)} MoE layers")
        words.append(f"{_range([layer.experts for layer in layers])} experts")
        words.append(f"top {_range([layer.top_k for layer in layers])}")
    slots = [layer.slots for layer in layers if layer.slots is not None]
    if slots:
        words.append(f"{_range(slots)} slots a layer")
    records = [layer.record_bytes for layer in layers if layer.record_bytes is not None]
    if records:
        words.append(f"record {size(sum(records) / len(records))}")
    if report.drive.bandwidth:
        words.append(f"drive {size(report.drive.bandwidth)}/s")
    words += [f"{key} {value}" for key, value in report.config.items() if not _nested(value)]
    return ", ".join(words)


def _nested(value: object) -> bool:
    return value is None or isinstance(value, dict | list)


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _sections(trace: Trace, report: Report) -> Iterator[Section]:
    yield "Totals", "Of decode, unless said otherwise.", _totals(report)
    if report.parts:
        yield from _timeline(report)
    if any(layer.routed for layer in report.layers):
        yield from _by_layer(report)
        yield from _perfect(report)
    elif any(layer.stall_ms or layer.nbytes for layer in report.layers):
        yield from _stall_by_layer(report)
    if report.usefulness:
        yield from _useful(report)
    if trace.uses:
        yield from _leads(trace, report)
    start, end = period(trace)
    if trace.queue_depth:
        yield from _queue(trace, start, end)
    if trace.reads:
        yield from _drive(trace, report, start, end)
    if report.speculation.nbytes:
        yield from _waste(report)


def _totals(report: Report) -> str:
    time, drive, guesses = report.time, report.drive, report.speculation
    what = "token" if report.decoded else "prompt chunk"
    rows = [
        (f"{what}s", f"{time.tokens}"),
        ("prompt", f"{time.prompt_tokens} tokens in {number(time.prompt_ms)} ms"),
        (
            f"time a {what}",
            f"mean {time.mean_ms:.2f} ms, median {time.median_ms:.2f}, 95 % {time.p95_ms:.2f}",
        ),
    ]
    if drive.bound_ms is not None:
        rows.append(
            (
                "bound",
                f"{drive.bound_ms:.2f} ms if computing and reading overlapped perfectly "
                f"({percent(drive.bound_ms / time.mean_ms if time.mean_ms else 0)} of measured)",
            )
        )
    rows += [
        (f"stall a {what}", f"{time.stall_ms:.2f} ms ({percent(time.stall_share)})"),
        ("reads", f"{drive.reads}, {size(drive.nbytes)}; {size(drive.bytes_per_token)} a {what}"),
        (
            "drive",
            f"busy {percent(drive.busy_share)} of the time, {size(drive.busy_rate)}/s while busy",
        ),
    ]
    rates = report.hit_rates
    if "measured" in rates:
        rows.append(("hit rate", percent(rates["measured"])))
    if guesses.reads:
        lead = guesses.lead_ms
        rows.append(("guesses read", f"{guesses.reads}, {size(guesses.nbytes)}, prompts included"))
        rows.append(("of them wasted", percent(guesses.waste)))
        rows.append(("lead time", f"median {lead['p50']:.2f} ms, 5 % below {lead['p5']:.2f}"))
    return table((), rows, "totals")


def _timeline(report: Report) -> Iterator[Section]:
    drawn = bars(report.parts)
    shown = [part for part in PARTS if any(parts[part] for _, parts in drawn)]
    count, highest = len(report.parts), max(sum(parts.values()) for _, parts in drawn)
    what = "token" if report.decoded else "prompt chunk"
    plot = Plot((0, count), (0, 1.05 * highest), what, f"ms a {what}", 280)
    width = drawn[1][0] if len(drawn) > 1 else count
    for first, parts in drawn:
        last = min(first + width, count)
        # Narrow gaps, but only where there is room for them.
        gap = 0.15 * width if len(drawn) <= 80 else 0.0
        tip = f"{what} {first}" if width == 1 else f"{what}s {first} to {last - 1}"
        plot.stack(first, last - gap, {part: parts[part] for part in shown}, tip)
    each = f"One bar a {what}." if width == 1 else f"Each bar is the mean of {width} {what}s."
    text = f"{each} A stall's time is divided among its experts."
    named = {part: NAMES[part] for part in shown}
    if "device" not in named:
        named["other"] = "computing and the rest"
    picture = legend(named) + plot.svg("time per token by part")
    yield "Where the time went", text, picture


_ACCESS = {
    "hit": "hit",
    "late": "late",
    "evicted": "evicted before use",
    "unpredicted": "never predicted",
    "unknown": "missed, cause not recorded",
}


def _by_layer(report: Report) -> Iterator[Section]:
    layers = report.layers
    plot = Plot((-0.5, len(layers) - 0.5), (0, 100), "layer", "% of routed experts")
    every = -(-len(layers) // 32)
    plot.x_ticks([(at, str(layer.layer)) for at, layer in enumerate(layers) if at % every == 0])
    seen: set[str] = {"hit"}
    for at, layer in enumerate(layers):
        if not layer.routed:
            continue
        counts = {"hit": layer.hits or 0} | {k: getattr(layer, k) for k in _ACCESS if k != "hit"}
        seen |= {kind for kind, count in counts.items() if count}
        shares = {kind: 100 * count / layer.routed for kind, count in counts.items()}
        tip = f"layer {layer.layer}, % of {layer.routed}"
        plot.stack(at - 0.4, at + 0.4, shares, tip)
        if layer.belady_hits is not None:
            best = 100 * layer.belady_hits / layer.routed
            plot.dash(at - 0.45, at + 0.45, best, "mark", f"perfect cache: {best:.1f} %")
    names = {kind: name for kind, name in _ACCESS.items() if kind in seen}
    if any(layer.belady_hits is not None for layer in layers):
        names["mark"] = "what a perfect cache hits"
    text = "Experts that were there when their router chose them, and why the others were not."
    yield "Hits by layer", text, legend(names) + plot.svg("hits and misses per layer")


def _stall_by_layer(report: Report) -> Iterator[Section]:
    layers = report.layers
    most = max(layer.stall_ms for layer in layers)
    plot = Plot((-0.5, len(layers) - 0.5), (0, 1.05 * most), "layer", "ms of stall in all")
    every = -(-len(layers) // 32)
    plot.x_ticks([(at, str(layer.layer)) for at, layer in enumerate(layers) if at % every == 0])
    for at, layer in enumerate(layers):
        tip = f"layer {layer.layer}: {number(layer.stall_ms)} ms, {size(layer.nbytes)} read"
        plot.bar(at - 0.4, at + 0.4, 0, layer.stall_ms, "unknown", tip)
    yield "Stalls by layer", "Time that the compute thread waited.", plot.svg("stall per layer")


def _perfect(report: Report) -> Iterator[Section]:
    rates = report.hit_rates
    if "belady" not in rates:
        return
    names = {
        "measured": "measured, guesses included",
        "lru": "LRU without guesses",
        "belady": "perfect cache (Belady) without guesses",
    }
    rows = [(names[name], percent(rate)) for name, rate in rates.items()]
    text = (
        "Hit rates with the same slots, layer by layer and call by call. A perfect cache knows the "
        "routing to come and gives up what is needed last; only guesses can beat it."
    )
    yield "Against a perfect cache", text, table((), rows, "totals")


def _useful(report: Report) -> Iterator[Section]:
    cells = {(cell.distance, cell.rank): cell for cell in report.usefulness}
    ranks = sorted({rank for _, rank in cells})[:24]
    rows: list[tuple[str, list[tuple[float, str] | None]]] = []
    for distance in sorted({distance for distance, _ in cells}):
        row: list[tuple[float, str] | None] = []
        for rank in ranks:
            cell = cells.get((distance, rank))
            if cell is None:
                row.append(None)
                continue
            tip = f"{cell.useful} of {cell.guesses}; predicted {percent(cell.expected)}"
            row.append((cell.useful / cell.guesses, tip))
        early = distance > len(report.layers)
        rows.append(("token's start" if early else f"{distance} ahead", row))
    text = "Share of the guesses that were routed, in %, by layers ahead and rank."
    yield "Usefulness of guesses", text, heat(["rank", *map(str, ranks)], rows)


def _leads(trace: Trace, report: Report) -> Iterator[Section]:
    counts = histogram([use.lead / 1000 for use in trace.uses], LEAD_EDGES_MS)
    plot = Plot((0, len(counts)), (0, 1.05 * max(counts)), "lead time, ms", "guesses used", 210)
    plot.x_ticks([(at, f"{edge:g}") for at, edge in enumerate(LEAD_EDGES_MS)])
    for at, count in enumerate(counts):
        tip = f"{LEAD_EDGES_MS[at]:g} to {LEAD_EDGES_MS[at + 1]:g} ms: {count}"
        plot.bar(at + 0.04, at + 0.96, 0, count, "guess", tip)
    text = "From asking for a read on a guess to the first use; the ends hold what lies beyond."
    yield "Lead times", text, plot.svg("lead times")


def _areas(
    bins: list[tuple[float, float]], plot: Plot, title: str, unit: float, extra: str = ""
) -> str:
    demand = [below / unit for below, _ in bins]
    both = [(below + above) / unit for below, above in bins]
    plot.steps(demand, [0.0] * len(bins), "demand")
    plot.steps(both, demand, "guess")
    names = {"demand": "demands"}
    if any(above for _, above in bins):
        names["guess"] = "guesses"
    if extra:
        names["limit"] = extra
    return legend(names) + plot.svg(title)


def _queue(trace: Trace, start: float, end: float) -> Iterator[Section]:
    bins = deepest(trace.queue_depth, start, end)
    most = max((a + b for a, b in bins), default=0)
    plot = Plot((0, (end - start) / 1e6), (0, 1.05 * most), "s", "queued reads", 210)
    picture = _areas(bins, plot, "queue depth", 1)
    yield "Queue", f"Most reads waiting in each of {BINS} equal parts of the time.", picture


def _drive(trace: Trace, report: Report, start: float, end: float) -> Iterator[Section]:
    bins = rates(trace, start, end)
    bandwidth = report.drive.bandwidth
    most = max([a + b for a, b in bins] + ([bandwidth] if bandwidth else []), default=0) / 1e9
    plot = Plot((0, (end - start) / 1e6), (0, 1.05 * most), "s", "GB/s", 210)
    if bandwidth:
        limit = f"bandwidth of the drive, {size(bandwidth)}/s"
        plot.dash(0, (end - start) / 1e6, bandwidth / 1e9, "limit", limit)
    picture = _areas(bins, plot, "bytes read", 1e9, "bandwidth of the drive" if bandwidth else "")
    yield "Drive", "Bytes read over time, prompts included.", picture


def _waste(report: Report) -> Iterator[Section]:
    guesses = report.speculation
    parts = {
        "used": (guesses.used_bytes, "used"),
        "evicted": (guesses.evicted_unused_bytes, "evicted unused"),
        "other": (guesses.unused_bytes, "not used by the end"),
    }
    bar = "".join(
        f'<i class="{kind}" style="width:{100 * nbytes / guesses.nbytes:.2f}%"></i>'
        for kind, (nbytes, _) in parts.items()
    )
    names = {kind: f"{name}: {size(nbytes)}" for kind, (nbytes, name) in parts.items()}
    text = f"What became of {size(guesses.nbytes)} read on guesses."
    yield "Waste", text, f'<div class="share">{bar}</div>{legend(names)}'
