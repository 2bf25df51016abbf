"""What happened over time, in few enough points to be drawn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from .trace_records import Depth, Span, Stall, Trace

CAUSES = ("late", "evicted", "unpredicted", "unknown")
PARTS = ("device", *CAUSES, "other")
"""Where the time of a token goes: the device, stalls by cause, Python and everything else."""

BARS = 160
BINS = 240


def token_parts(trace: Trace, spans: Sequence[Span]) -> list[dict[str, float]]:
    """Microseconds of each span by part. Stalls are divided by how many experts had each cause."""
    parts = [dict.fromkeys(PARTS, 0.0) for _ in spans]

    def span_of(event: Span) -> int | None:
        at = bisect_right(spans, event.ts, key=lambda span: span.ts) - 1
        inside = at >= 0 and event.ts < spans[at].end
        return at if inside and event.tid == spans[at].tid else None

    for sync in trace.syncs:
        if (at := span_of(sync)) is not None:
            parts[at]["device"] += sync.dur
    for stall in trace.stalls:
        if (at := span_of(stall)) is not None:
            for cause, share in stall_shares(stall).items():
                parts[at][cause] += share * stall.dur
    for part, span in zip(parts, spans, strict=True):
        part["other"] = max(span.dur - sum(part.values()), 0.0)
    return parts


def stall_shares(stall: Stall) -> dict[str, float]:
    """The shares of the causes in a stall."""
    if not stall.experts:
        return {"unknown": 1.0}
    return {cause: getattr(stall, cause) / stall.experts for cause in CAUSES}


def bars(parts: Sequence[dict[str, float]]) -> list[tuple[int, dict[str, float]]]:
    """(first token, mean milliseconds by part): one a token, or one for some tokens in a row."""
    width = max(-(-len(parts) // BARS), 1)
    result = []
    for first in range(0, len(parts), width):
        some = parts[first : first + width]
        mean = {name: sum(part[name] for part in some) / len(some) / 1000 for name in PARTS}
        result.append((first, mean))
    return result


def period(trace: Trace) -> tuple[float, float]:
    """Beginning and end of everything in the trace, in microseconds."""
    spans: list[Span] = [*trace.tokens, *trace.prompts, *trace.reads, *trace.stalls]
    starts = [span.ts for span in spans] + [depth.ts for depth in trace.queue_depth]
    ends = [span.end for span in spans] + [depth.ts for depth in trace.queue_depth]
    return (min(starts), max(ends)) if starts else (0.0, 0.0)


def deepest(depths: Sequence[Depth], start: float, end: float) -> list[tuple[float, float]]:
    """The largest (demands, guesses) in each of ``BINS`` equal parts of the time."""
    bins = [(0.0, 0.0)] * BINS
    if not depths or end <= start:
        return []
    known = (0.0, 0.0)
    at = 0
    for depth in depths:
        now = min(max(int((depth.ts - start) / (end - start) * BINS), 0), BINS - 1)
        for passed in range(at, now + 1):  # what there was lasts until it changes
            bins[passed] = (max(bins[passed][0], known[0]), max(bins[passed][1], known[1]))
        at, known = now, (float(depth.demand), float(depth.guesses))
        bins[at] = (max(bins[at][0], known[0]), max(bins[at][1], known[1]))
    return bins


def rates(trace: Trace, start: float, end: float) -> list[tuple[float, float]]:
    """Bytes per second for (demands, guesses) in each of ``BINS`` equal parts of the time."""
    if not trace.reads or end <= start:
        return []
    width = (end - start) / BINS
    bins = [[0.0, 0.0] for _ in range(BINS)]
    for read in trace.reads:
        first = min(max(int((read.ts - start) / width), 0), BINS - 1)
        last = min(max(int((read.end - start) / width), first), BINS - 1)
        for at in range(first, last + 1):
            begin, stop = start + at * width, start + (at + 1) * width
            overlap = min(read.end, stop) - max(read.ts, begin)
            share = overlap / read.dur if read.dur else 1.0
            bins[at][bool(read.speculative)] += read.nbytes * share
    return [(demand / width * 1e6, guess / width * 1e6) for demand, guess in bins]


def covered(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of the spans was going on."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.ts):
        total += max(span.end - max(span.ts, reached), 0.0)
        reached = max(reached, span.end)
    return total


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which so many of them lie; 0 without any."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def histogram(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many values lie from each edge up to the next; those outside count at the ends."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(max(bisect_right(edges, value) - 1, 0), len(counts) - 1)] += 1
    return counts
