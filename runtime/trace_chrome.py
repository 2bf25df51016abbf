"""Reads Chrome traces, which the first versions of the engine wrote, and headers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .trace_records import (
    Depth,
    Eviction,
    Layer,
    Prediction,
    Prompt,
    QueueOperation,
    Read,
    Route,
    Stall,
    Sync,
    Token,
    Trace,
    TraceUnreadable,
    Use,
)

MOST = 1e15
"""Beyond this a number is damage (arbitrary): times are microseconds, so some thirty years."""


def _number(text: str) -> float | None:
    value = float(text)
    return value if abs(value) <= MOST else None


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=lambda name: None)
"""Such numbers, and what is none, are missing from their events."""


def read_chrome(text: str, trace: Trace) -> None:
    """File the events of a Chrome trace; those before the break where the JSON is cut off.

    Raises:
        TraceUnreadable: there is no list of events in it.
    """
    try:
        document = _DECODER.decode(text)
    except (ValueError, RecursionError):  # brackets in brackets: no shape of such a depth
        events, header = _salvage(text, trace.path)
        trace.notices.append(cut_notice(len(events)))
    else:
        whole = document if isinstance(document, dict) else {"traceEvents": document}
        if not isinstance(whole.get("traceEvents"), list):
            raise TraceUnreadable(trace.path, "it has no list of events (traceEvents)")
        events, header = whole["traceEvents"], whole.get("moestream")
    malformed = sum(not _take(event, trace) for event in events)
    if malformed:
        trace.notices.append(f"{malformed} events lack what they should have and were left out")
    if isinstance(header, dict):
        take_header(header, trace)


def _salvage(text: str, path: Path) -> tuple[list[Any], Any]:
    """The events up to where the JSON breaks off, and the header if it stands before that."""
    decoder = _DECODER
    header: Any = None
    at = text.find("[") if text.lstrip().startswith("[") else -1
    if at < 0:
        key = text.find('"traceEvents"')
        at = text.find("[", key) if key >= 0 else -1
        before = text.find('"moestream":', 0, max(key, 0))
        if before >= 0:
            start = text.index(":", before) + 1
            try:
                header, _ = decoder.raw_decode(text, len(text) - len(text[start:].lstrip()))
            except (ValueError, RecursionError):
                header = None
    if at < 0:
        raise TraceUnreadable(path, "it is neither JSON nor the beginning of a trace")
    return list(_events(text, at + 1, decoder)), header


def _events(text: str, at: int, decoder: json.JSONDecoder) -> Iterator[Any]:
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            event, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield event


def _take(event: Any, trace: Trace) -> bool:
    """File one event; False if it is malformed. Kinds that are not known are fine."""
    try:
        phase, name = event["ph"], event["name"]
        take = _KINDS.get((phase, name))
        if take is not None:
            take(trace, event, event.get("args") or {})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return False
    return True


def _span(event: dict[str, Any]) -> tuple[float, float, int]:
    return float(event["ts"]), max(float(event["dur"]), 0.0), int(event["tid"])


def _place(args: dict[str, Any]) -> tuple[int, int]:
    """(group, layer); the first files had no groups."""
    layer = int(args["layer"])
    return int(args.get("group", layer)), layer


def _stall(trace: Trace, event: dict[str, Any], args: dict[str, Any]) -> None:
    late, evicted, unpredicted = (int(args.get(k, 0)) for k in ("late", "evicted", "unpredicted"))
    unknown = max(int(args["experts"]) - late - evicted - unpredicted, 0)
    trace.stalls.append(Stall(*_span(event), *_place(args), late, evicted, unpredicted, unknown))


def _read(trace: Trace, event: dict[str, Any], args: dict[str, Any]) -> None:
    guess, asked = args.get("speculative"), args.get("asked")
    trace.reads.append(
        Read(
            *_span(event),
            *_place(args),
            int(args["expert"]),
            int(args["bytes"]),
            None if guess is None else bool(guess),
            None if asked is None else float(asked),
        )
    )


def _route(trace: Trace, event: dict[str, Any], args: dict[str, Any]) -> None:
    experts = tuple(dict.fromkeys(int(expert) for expert in args["experts"]))
    if not experts or min(experts) < 0:
        raise ValueError("no experts")
    trace.routes.append(
        Route(
            float(event["ts"]),
            *_place(args),
            int(args["forward"]),
            experts,
            int(args.get("tokens", 1)),
            tuple(tuple(int(expert) for expert in row) for row in args.get("tail", ())),
        )
    )


def _predict(trace: Trace, event: dict[str, Any], args: dict[str, Any]) -> None:
    trace.predictions.append(
        Prediction(
            float(event["ts"]),
            *_place(args),
            int(args["forward"]),
            int(args["distance"]),
            tuple(int(expert) for expert in args["experts"]),
            tuple(float(probability) for probability in args["probabilities"]),
        )
    )


def _operation(trace: Trace, event: dict[str, Any], args: dict[str, Any]) -> None:
    probability = args.get("probability")
    trace.operations.append(
        QueueOperation(
            float(event["ts"]),
            str(args["op"]),
            int(args["group"]),
            int(args["expert"]),
            1.0 if probability is None else float(probability),
        )
    )


def _depth(event: dict[str, Any], args: dict[str, Any]) -> Depth:
    return Depth(float(event["ts"]), int(args.get("demand", 0)), int(args.get("guesses", 0)))


_Taker = Callable[[Trace, dict[str, Any], dict[str, Any]], None]

_KINDS: dict[tuple[str, str], _Taker] = {
    ("X", "token"): lambda trace, event, args: trace.tokens.append(
        Token(*_span(event), int(args.get("request", 0)), int(args.get("token", 0)))
    ),
    ("X", "prompt"): lambda trace, event, args: trace.prompts.append(
        Prompt(*_span(event), int(args.get("request", 0)), int(args["tokens"]))
    ),
    ("X", "stall"): _stall,
    ("X", "read"): _read,
    ("X", "sync"): lambda trace, event, args: trace.syncs.append(
        Sync(*_span(event), *_place(args))
    ),
    ("i", "route"): _route,
    ("i", "predict"): _predict,
    ("i", "queue"): _operation,
    ("i", "evict"): lambda trace, event, args: trace.evictions.append(
        Eviction(float(event["ts"]), int(args["group"]), int(args["expert"]), bool(args["unused"]))
    ),
    ("i", "use"): lambda trace, event, args: trace.uses.append(
        Use(float(event["ts"]), int(args["group"]), int(args["expert"]), float(args["lead_us"]))
    ),
    ("C", "queue_depth"): lambda trace, event, args: trace.queue_depth.append(_depth(event, args)),
    ("C", "inflight"): lambda trace, event, args: trace.inflight.append(_depth(event, args)),
    ("M", "thread_name"): lambda trace, event, args: trace.threads.update(
        {int(event["tid"]): str(args["name"])}
    ),
    ("M", "drive"): lambda trace, event, args: _take_bandwidth(args, trace),
}


def _take_bandwidth(args: dict[str, Any], trace: Trace) -> None:
    rate = args.get("bandwidth_bytes_per_s")
    trace.bandwidth = float(rate) if rate else None


def take_header(header: dict[str, Any], trace: Trace) -> None:
    """What the file says about the engine and its model."""
    try:
        model, version = header.get("model"), header.get("version")
        trace.model = None if model is None else str(model)
        trace.version = None if version is None else str(version)
        if trace.bandwidth is None:  # older files have it here
            _take_bandwidth(header, trace)
        trace.config = dict(header.get("config") or {})
        for entry in header.get("layers") or []:
            layer = Layer(**{name: int(entry[name]) for name in Layer.__slots__})
            trace.layers[layer.group] = layer
    except (KeyError, TypeError, ValueError, OverflowError):
        trace.notices.append("the description of the model in the file is damaged")


def cut_notice(events: int) -> str:
    """What to tell of a file that ends too early."""
    return f"the file is cut off or damaged: the {events} events before that were read"
