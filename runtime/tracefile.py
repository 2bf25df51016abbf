"""Reads a trace into typed records: Chrome traces of an engine, and routing recorded as CSV.

What is wrong with a file is said in ``Trace.notices``; only a file without any trace is an error.
Times are in microseconds, of whichever clock the file has.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..io.errors import MoestreamError
from .trace_csv import read_csv
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
    Use,
)

GZIP = b"\x1f\x8b"


class TraceUnreadable(MoestreamError):
    """The file cannot be read or holds no trace."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot read the trace {path}: {why}")


def read_trace(path: Path) -> Trace:
    """Read a Chrome trace of an engine or a CSV routing trace, either of them also gzipped.

    Raises:
        TraceUnreadable: there is no such file, or there is no trace in it.
    """
    text, cut = _text(path)
    trace = Trace(path)
    if cut:
        trace.notices.append("the compressed file is cut off; what lies before the cut was read")
    start = text.lstrip()[:1]
    if start in ("{", "["):
        _read_chrome(text, trace)
    elif not start:
        raise TraceUnreadable(path, "it is empty")
    elif not read_csv(text, trace):
        raise TraceUnreadable(path, "it is neither a Chrome trace nor a CSV of routed experts")
    _derive_layers(trace)
    return trace


def _text(path: Path) -> tuple[str, bool]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceUnreadable(path, error.strerror or str(error)) from error
    cut = False
    if data.startswith(GZIP):
        try:
            data, cut = _unpacked(data)
        except (OSError, zlib.error) as error:
            raise TraceUnreadable(path, f"damaged compression ({error})") from error
    return data.decode("utf-8", errors="replace"), cut


def _unpacked(data: bytes) -> tuple[bytes, bool]:
    try:
        return gzip.decompress(data), False
    except EOFError:
        return zlib.decompressobj(wbits=31).decompress(data), True


def _derive_layers(trace: Trace) -> None:
    """Complete the layers from the routing, for files that do not list them."""
    unlisted: dict[int, list[Route]] = {}
    for route in trace.routes:
        if route.group not in trace.layers:
            unlisted.setdefault(route.group, []).append(route)
    for group, routes in unlisted.items():
        experts = 1 + max(expert for route in routes for expert in route.experts)
        single = [len(route.experts) for route in routes if route.tokens == 1]
        top_k = max(single or [len(route.experts) for route in routes])
        trace.layers[group] = Layer(group, routes[0].layer, experts, top_k)
    if unlisted:
        trace.notices.append("numbers of experts are taken from the routing (highest id + 1)")
    trace.layers = dict(sorted(trace.layers.items()))


# -- Chrome traces --------------------------------------------------------------------------------


def _read_chrome(text: str, trace: Trace) -> None:
    try:
        document = json.loads(text)
    except ValueError:
        events, header = _salvage(text, trace.path)
        trace.notices.append(
            f"the file is cut off or damaged: the {len(events)} events before that were read"
        )
    else:
        whole = document if isinstance(document, dict) else {"traceEvents": document}
        if not isinstance(whole.get("traceEvents"), list):
            raise TraceUnreadable(trace.path, "it has no list of events (traceEvents)")
        events, header = whole["traceEvents"], whole.get("moestream")
    malformed = sum(not _take(event, trace) for event in events)
    if malformed:
        trace.notices.append(f"{malformed} events lack what they should have and were left out")
    if isinstance(header, dict):
        _take_header(header, trace)
    _order(trace)


def _salvage(text: str, path: Path) -> tuple[list[Any], Any]:
    """The events up to where the JSON breaks off, and the header if it stands before that."""
    decoder = json.JSONDecoder()
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
            except ValueError:
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
        except ValueError:
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


def _take_header(header: dict[str, Any], trace: Trace) -> None:
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
    except (KeyError, TypeError, ValueError):
        trace.notices.append("the description of the model in the file is damaged")


def _order(trace: Trace) -> None:
    timed: list[list[Any]] = [
        *(trace.tokens, trace.prompts, trace.stalls, trace.reads, trace.syncs, trace.routes),
        *(trace.predictions, trace.operations, trace.evictions, trace.uses),
        *(trace.queue_depth, trace.inflight),
    ]
    for records in timed:
        records.sort(key=lambda record: record.ts)
