"""Reads a trace into typed records: an engine's, Chrome traces, and routing recorded as CSV.

What is wrong with a file is said in ``Trace.notices``; only a file without any trace is an error.
Times are in microseconds, of whichever clock the file has.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .trace_chrome import cut_notice, read_chrome, take_header
from .trace_csv import read_csv
from .trace_decoding import Decoder
from .trace_format import FAMILY, MAGIC
from .trace_records import Layer, Route, Trace
from .trace_records import TraceUnreadable as TraceUnreadable

MOST_EXPERTS = 1 << 14
"""Of a layer (arbitrary: some times what any model has): replays make tables of its square."""

GZIP = b"\x1f\x8b"


def read_trace(path: Path) -> Trace:
    """Read an engine's trace, a Chrome trace as earlier versions wrote it, or a CSV routing trace.

    Each of them may be gzipped.

    Raises:
        TraceUnreadable: there is no such file, or there is no trace in it.
    """
    data, cut = _bytes(path)
    trace = Trace(path)
    if cut:
        trace.notices.append("the compressed file is cut off; what lies before the cut was read")
    if data.startswith(FAMILY):
        _read_records(data, trace)
    else:
        _read_text(data.decode("utf-8", errors="replace"), trace)
    _check_layers(trace)
    _derive_layers(trace)
    return trace


def _read_text(text: str, trace: Trace) -> None:
    path, start = trace.path, text.lstrip()[:1]
    if start in ("{", "["):
        read_chrome(text, trace)
        _order(trace)
    elif not start:
        raise TraceUnreadable(path, "it is empty")
    elif not read_csv(text, trace):
        raise TraceUnreadable(path, "it is neither a trace nor a CSV of routed experts")


def _bytes(path: Path) -> tuple[bytes, bool]:
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
    return data, cut


def _unpacked(data: bytes) -> tuple[bytes, bool]:
    try:
        return gzip.decompress(data), False
    except EOFError:
        return zlib.decompressobj(wbits=31).decompress(data), True


def _check_layers(trace: Trace) -> None:
    """Leave out what cannot be, so that nobody else meets it."""
    damaged = [group for group, layer in trace.layers.items() if not _is_possible(layer)]
    for group in damaged:
        del trace.layers[group]
    if damaged:
        trace.notices.append("the description of the model in the file is damaged")
    most = {group: layer.experts for group, layer in trace.layers.items()}
    before = len(trace.routes), len(trace.predictions)
    trace.routes = [
        route
        for route in trace.routes
        if _are_below(most.get(route.group, MOST_EXPERTS), route.experts, *route.tail)
    ]
    trace.predictions = [
        prediction
        for prediction in trace.predictions
        if _are_below(most.get(prediction.group, MOST_EXPERTS), prediction.experts)
    ]
    left_out = sum(before) - len(trace.routes) - len(trace.predictions)
    if left_out:
        trace.notices.append(
            f"{left_out} events name experts that their layer does not have and were left out"
        )


def _is_possible(layer: Layer) -> bool:
    return 1 <= layer.experts <= MOST_EXPERTS and (layer.slots is None or layer.slots >= 1)


def _are_below(experts: int, *lists: Sequence[int]) -> bool:
    return all(0 <= min(ids) and max(ids) < experts for ids in lists if ids)


def _derive_layers(trace: Trace) -> None:
    """Complete the layers from the routing, for files that do not list them."""
    unlisted: dict[int, list[Route]] = {}
    for route in trace.routes:
        if route.group not in trace.layers:
            unlisted.setdefault(route.group, []).append(route)
    for group, routes in unlisted.items():
        experts = 1 + max(
            max(ids) for route in routes for ids in (route.experts, *route.tail) if ids
        )
        single = [len(route.experts) for route in routes if route.tokens == 1]
        top_k = max(single or [len(route.experts) for route in routes])
        trace.layers[group] = Layer(group, routes[0].layer, experts, top_k)
    if unlisted:
        trace.notices.append("numbers of experts are taken from the routing (highest id + 1)")
    trace.layers = dict(sorted(trace.layers.items()))


# -- records --------------------------------------------------------------------------------------


def _read_records(data: bytes, trace: Trace) -> None:
    if not data.startswith(MAGIC):
        number = data[len(FAMILY) :].split(b"\n")[0][:8].decode("utf-8", errors="replace")
        raise TraceUnreadable(
            trace.path, f"it is of format {number}, which this version of moestream does not know"
        )
    end = data.find(b"\n", len(MAGIC))
    try:
        header = json.loads(data[len(MAGIC) : end])
        epoch = float(header["epoch"])
    except (
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # without an end, too: its last byte lacks
        why = "its first lines are damaged" if end >= 0 else "it is cut off before the first event"
        raise TraceUnreadable(trace.path, why) from error
    take_header(header, trace)
    decoder = Decoder(data, end + 1, epoch, trace)
    if not decoder.run():
        trace.notices.append(cut_notice(decoder.records))
    _order(trace)


def _order(trace: Trace) -> None:
    timed: list[list[Any]] = [
        *(trace.tokens, trace.prompts, trace.stalls, trace.reads, trace.syncs, trace.routes),
        *(trace.predictions, trace.operations, trace.evictions, trace.uses),
        *(trace.queue_depth, trace.inflight),
    ]
    for records in timed:
        records.sort(key=lambda record: record.ts)
