"""A trace as ui.perfetto.dev shows it best: few tracks with names, and arrows from guess to use."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from .trace_records import Read, Span, Trace, Use, inside

COMPUTE, DECISIONS, FIRST_LANE = 1, 2, 10
"""Tracks of the file."""

Event = dict[str, Any]


def guesses_used(trace: Trace) -> list[tuple[Read, Use]]:
    """Reads on a guess with the first use of what they brought."""
    reads: dict[tuple[int, int], list[Read]] = {}
    for read in trace.reads:
        if read.speculative:
            reads.setdefault((read.group, read.expert), []).append(read)
    pairs = []
    for use in trace.uses:
        known = reads.get((use.group, use.expert), [])
        before = bisect_right(known, use.ts, key=lambda read: read.ts)
        if before:
            pairs.append((known[before - 1], use))
    return pairs


def perfetto_events(trace: Trace) -> list[Event]:
    """The events of the file, metadata first and then by time."""
    lanes = {tid: FIRST_LANE + at for at, tid in enumerate(sorted({r.tid for r in trace.reads}))}
    timed = [
        *_compute(trace),
        *_reads(trace, lanes),
        *_decisions(trace),
        *_counters(trace),
        *_arrows(trace, lanes),
    ]
    # Longer spans first where they begin together: they hold the others.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return [*_names(trace, lanes), *timed]


def _names(trace: Trace, lanes: dict[int, int]) -> Iterator[Event]:
    tracks = {COMPUTE: "compute", DECISIONS: "decisions"}
    for at, (tid, track) in enumerate(lanes.items()):
        tracks[track] = trace.threads.get(tid, f"lane {at}")
    yield _event("M", "process_name", 0, None, name=f"moestream {trace.model or ''}".strip())
    for track, name in tracks.items():
        yield _event("M", "thread_name", track, None, name=name)
        yield _event("M", "thread_sort_index", track, None, sort_index=track)


def _compute(trace: Trace) -> Iterator[Event]:
    for prompt in trace.prompts:
        about = {"request": prompt.request, "tokens": prompt.tokens}
        yield _span(f"prompt of {prompt.tokens}", COMPUTE, prompt, **about)
    for token in trace.tokens:
        yield _span("token", COMPUTE, token, request=token.request, token=token.token)
    for sync in trace.syncs:
        yield _span(f"sync layer {sync.layer}", COMPUTE, sync, group=sync.group)
    for stall in trace.stalls:
        about = {name: getattr(stall, name) for name in ("late", "evicted", "unpredicted")}
        yield _span(f"stall layer {stall.layer}", COMPUTE, stall, experts=stall.experts, **about)


def _reads(trace: Trace, lanes: dict[int, int]) -> Iterator[Event]:
    for read in trace.reads:
        kind = "guess" if read.speculative else "read"
        waited = None if read.asked is None else round((read.ts - read.asked) / 1000, 3)
        about = {"layer": read.layer, "expert": read.expert, "bytes": read.nbytes}
        name = f"{kind} {read.layer}/{read.expert}"
        yield _span(name, lanes[read.tid], read, **about, queued_ms=waited)


def _decisions(trace: Trace) -> Iterator[Event]:
    for route in trace.routes:
        about: Event = {"forward": route.forward, "experts": list(route.experts)}
        yield _event("i", f"route layer {route.layer}", DECISIONS, route.ts, **about)
    for guess in trace.predictions:
        ranked = dict(zip(map(str, guess.experts), guess.probabilities, strict=False))
        about = {"forward": guess.forward, "distance": guess.distance, "experts": ranked}
        yield _event("i", f"predict layer {guess.layer}", DECISIONS, guess.ts, **about)
    for operation in trace.operations:
        about = {"group": operation.group, "expert": operation.expert}
        about["probability"] = operation.probability
        yield _event("i", f"queue {operation.op}", DECISIONS, operation.ts, **about)
    for eviction in trace.evictions:
        about = {"group": eviction.group, "expert": eviction.expert, "unused": eviction.unused}
        yield _event("i", "evict", DECISIONS, eviction.ts, **about)


def _counters(trace: Trace) -> Iterator[Event]:
    for name, depths in (("queue depth", trace.queue_depth), ("in flight", trace.inflight)):
        for depth in depths:
            about = {"demand": depth.demand, "guesses": depth.guesses}
            yield _event("C", name, 0, depth.ts, **about)


def _arrows(trace: Trace, lanes: dict[int, int]) -> Iterator[Event]:
    """An arrow begins and ends in spans; a use outside of all of them gets none."""
    spans: list[Span] = sorted((*trace.tokens, *trace.prompts), key=lambda span: span.ts)
    for number, (read, use) in enumerate(guesses_used(trace), start=1):
        if inside(spans, use.ts):
            begin = min(read.ts + read.dur / 2, use.ts)
            for phase, track, ts in (("s", lanes[read.tid], begin), ("f", COMPUTE, use.ts)):
                arrow = _event(phase, "guess to use", track, ts, lead_ms=round(use.lead / 1000, 3))
                arrow |= {"cat": "guess", "id": number}
                yield arrow | {"bp": "e"} if phase == "f" else arrow


def _event(phase: str, name: str, track: int, at: float | None, /, **args: object) -> Event:
    event: Event = {"ph": phase, "name": name, "pid": 1, "tid": track, "args": args}
    if at is not None:
        event["ts"] = round(at, 3)
    if phase == "i":
        event["s"] = "t"
    return event


def _span(name: str, track: int, span: Span, /, **args: object) -> Event:
    return _event("X", name, track, span.ts, **args) | {"dur": round(span.dur, 3)}
