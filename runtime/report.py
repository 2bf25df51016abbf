"""What a trace tells: figures, one sentence about them, and the files made of them.

Hit rates, causes and the drive are about decode; prompts only warm the caches. A trace without
a decoded token is told about as a whole.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..io.errors import MoestreamError
from .policy import LeastRecentlyUsed
from .replay_policies import Belady, replay_layer
from .report_figures import (
    DriveFigures,
    LayerFigures,
    Report,
    Speculation,
    TimeFigures,
    Usefulness,
)
from .report_perfetto import guesses_used, perfetto_events
from .report_series import CAUSES, PARTS, covered, quantile, token_parts
from .report_words import missing_lines, summary
from .trace_records import Read, Route, Span, Trace, inside, split_tokens


class ReportUnwritable(MoestreamError):
    """The files of a report cannot be written."""

    def __init__(self, directory: Path, error: OSError) -> None:
        super().__init__(f"cannot write a report to {directory}: {error.strerror or error}")


def make_report(trace: Trace) -> Report:
    """Work out the figures."""
    decoded, first = split_tokens(trace)
    prompts: list[Span] = sorted((*trace.prompts, *first), key=lambda span: span.ts)
    spans: list[Span] = list(decoded) or prompts
    scope = _Scope(prompts if decoded else ())
    parts = token_parts(trace, spans)
    time = _time(trace, spans, prompts, parts)
    layers = _layers(trace, scope)
    report = Report(
        file=str(trace.path),
        model=trace.model,
        version=trace.version,
        config=trace.config,
        notices=list(trace.notices),
        missing=missing_lines(trace),
        decoded=bool(decoded),
        time=time,
        drive=_drive(trace, scope, time, spans),
        speculation=_speculation(trace),
        layers=layers,
        usefulness=list(_usefulness(trace)),
        hit_rates=_hit_rates(layers),
        parts=parts,
    )
    report.summary = summary(report)
    return report


def write_report(trace: Trace, report: Report, directory: Path) -> list[Path]:
    """Write ``report.html`` and ``trace.json``.

    Raises:
        ReportUnwritable: the directory or a file in it cannot be written.
    """
    from .report_html import page

    document = {"displayTimeUnit": "ms", "traceEvents": perfetto_events(trace)}
    files = {"report.html": page(trace, report), "trace.json": json.dumps(document)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportUnwritable(directory, error) from error
    return [directory / name for name in files]


class _Scope:
    """Whether a moment counts: it is outside of the prompts."""

    def __init__(self, prompts: Sequence[Span]) -> None:
        self._prompts = prompts

    def __contains__(self, ts: float) -> bool:
        return not inside(self._prompts, ts)


def _time(
    trace: Trace,
    spans: Sequence[Span],
    prompts: Sequence[Span],
    parts: Sequence[dict[str, float]],
) -> TimeFigures:
    count = max(len(spans), 1)
    took = [span.dur / 1000 for span in spans]
    return TimeFigures(
        tokens=len(spans),
        prompt_tokens=_prompt_tokens(trace, prompts),
        prompt_ms=sum(prompt.dur for prompt in prompts) / 1000,
        mean_ms=sum(took) / count,
        median_ms=quantile(took, 0.5),
        p95_ms=quantile(took, 0.95),
        parts_ms={name: sum(part[name] for part in parts) / count / 1000 for name in PARTS},
    )


def _prompt_tokens(trace: Trace, prompts: Sequence[Span]) -> int:
    """From what the chunks say, and from the routing of those that ended in a first token."""
    said = {prompt.ts: prompt.tokens for prompt in trace.prompts}
    total = 0
    for span in prompts:
        first = bisect_left(trace.routes, span.ts, key=lambda route: route.ts)
        last = bisect_right(trace.routes, span.end, key=lambda route: route.ts)
        widest = max((route.tokens for route in trace.routes[first:last]), default=0)
        total += said.get(span.ts, widest)
    return total


def _drive(trace: Trace, scope: _Scope, time: TimeFigures, spans: Sequence[Span]) -> DriveFigures:
    reads = [read for read in trace.reads if read.ts in scope]
    nbytes = sum(read.nbytes for read in reads)
    # The time from token to token may be longer than the tokens: the caller may make a break.
    seconds = sum(span.dur for span in spans) / 1e6 or covered(reads) / 1e6
    busy = covered(reads) / 1e6
    per_token = nbytes / max(time.tokens, 1)
    bandwidth = trace.bandwidth
    return DriveFigures(
        reads=len(reads),
        nbytes=nbytes,
        bytes_per_token=per_token,
        busy_share=min(busy / seconds, 1.0) if seconds else 0.0,
        busy_rate=nbytes / busy if busy else 0.0,
        rate=nbytes / seconds if seconds else 0.0,
        bandwidth=bandwidth,
        utilisation=nbytes / seconds / bandwidth if bandwidth and seconds else None,
        bound_ms=max(time.mean_ms - time.stall_ms, per_token / bandwidth * 1e3)
        if bandwidth
        else None,
    )


def _speculation(trace: Trace) -> Speculation:
    told = any(read.speculative is not None for read in trace.reads)
    reads = [read for read in trace.reads if read.speculative]
    used = {id(read): read.nbytes for read, _ in guesses_used(trace)}
    nbytes, used_bytes = sum(read.nbytes for read in reads), sum(used.values())
    evicted = _evicted_unused(trace, reads)
    leads = [use.lead / 1000 for use in trace.uses]
    return Speculation(
        reads=len(reads) if told else None,
        nbytes=nbytes,
        used_bytes=used_bytes,
        evicted_unused_bytes=min(evicted, nbytes - used_bytes),
        unused_bytes=max(nbytes - used_bytes - evicted, 0),
        waste=(nbytes - used_bytes) / nbytes if nbytes else 0.0,
        lead_ms={
            name: quantile(leads, q) for name, q in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95))
        },
    )


def _evicted_unused(trace: Trace, reads: Sequence[Read]) -> int:
    size = {(read.group, read.expert): read.nbytes for read in reads}
    return sum(size.get((gone.group, gone.expert), 0) for gone in trace.evictions if gone.unused)


def _layers(trace: Trace, scope: _Scope) -> list[LayerFigures]:
    layers: dict[int, LayerFigures] = {}
    for known in trace.layers.values():
        layers[known.group] = LayerFigures(known.group, known.layer, known.experts, known.slots)
    calls: dict[int, list[Route]] = {}
    for route in trace.routes:
        calls.setdefault(route.group, []).append(route)
        if route.ts in scope:
            layers[route.group].routed += len(route.experts)
    for stall in trace.stalls:
        if stall.ts in scope:
            figures = layers.setdefault(stall.group, LayerFigures(stall.group, stall.layer))
            figures.stall_ms += stall.dur / 1000
            for cause in CAUSES:
                setattr(figures, cause, getattr(figures, cause) + getattr(stall, cause))
    for read in trace.reads:
        if read.ts in scope:
            figures = layers.setdefault(read.group, LayerFigures(read.group, read.layer))
            figures.nbytes += read.nbytes
    for group, routes in calls.items():
        _compare(layers[group], routes, scope)
    return sorted(layers.values(), key=lambda figures: figures.group)


def _compare(figures: LayerFigures, routes: Sequence[Route], scope: _Scope) -> None:
    """What other caches of the same size would have hit, from empty and without guesses."""
    if figures.slots is not None and figures.slots > 0:
        experts = [route.experts for route in routes]
        for name, policy in (("belady", Belady(experts)), ("lru", LeastRecentlyUsed())):
            hits = zip(routes, replay_layer(experts, figures.slots, policy), strict=True)
            setattr(figures, f"{name}_hits", sum(n for route, n in hits if route.ts in scope))


def _hit_rates(layers: Sequence[LayerFigures]) -> dict[str, float]:
    """Measured, and what LRU and a perfect cache would have hit without guesses."""
    rates = {}
    known = [layer for layer in layers if layer.routed]
    for name, attribute in (("measured", "hits"), ("lru", "lru_hits"), ("belady", "belady_hits")):
        told = [layer for layer in known if getattr(layer, attribute) is not None]
        if told:
            hits = sum(getattr(layer, attribute) for layer in told)
            rates[name] = hits / sum(layer.routed for layer in told)
    return rates


def _usefulness(trace: Trace) -> Iterator[Usefulness]:
    routed = {(route.forward, route.group): set(route.experts) for route in trace.routes}
    cells: dict[tuple[int, int], list[tuple[bool, float]]] = {}
    for guess in trace.predictions:
        chosen = routed.get((guess.forward, guess.group))
        if chosen is not None:
            ranked = zip(guess.experts, guess.probabilities, strict=False)
            for rank, (expert, probability) in enumerate(ranked):
                cell = cells.setdefault((guess.distance, rank), [])
                cell.append((expert in chosen, probability))
    for (distance, rank), cell in sorted(cells.items()):
        expected = sum(probability for _, probability in cell) / len(cell)
        yield Usefulness(distance, rank, len(cell), sum(useful for useful, _ in cell), expected)
