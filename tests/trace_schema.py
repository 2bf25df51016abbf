"""The Chrome trace event format, as far as we write it: a schema, and what no schema can say."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

NUMBER, WHOLE, TEXT, OBJECT = (int, float), (int,), (str,), (dict,)

COMMON: dict[str, tuple[type, ...]] = {
    "ph": TEXT,
    "name": TEXT,
    "pid": WHOLE,
    "tid": WHOLE,
    "args": OBJECT,
}
EVENTS: dict[str, dict[str, tuple[type, ...]]] = {
    "X": {**COMMON, "ts": NUMBER, "dur": NUMBER},  # a span
    "i": {**COMMON, "ts": NUMBER, "s": TEXT},  # an instant
    "C": {**COMMON, "ts": NUMBER},  # a counter
    "M": COMMON,  # a name
    "s": {**COMMON, "ts": NUMBER, "cat": TEXT, "id": WHOLE},  # the begin of an arrow
    "f": {**COMMON, "ts": NUMBER, "cat": TEXT, "id": WHOLE, "bp": TEXT},  # its end
}
"""Phase of an event -> its fields, all of which it must have, and no others."""

METADATA: dict[str, dict[str, tuple[type, ...]]] = {
    "thread_name": {"name": TEXT},
    "process_name": {"name": TEXT},
    "thread_sort_index": {"sort_index": WHOLE},
    "drive": {"bandwidth_bytes_per_s": WHOLE},
}

ROUNDING = 0.002
"""Microseconds by which rounded ends of spans may overlap: begin and length have 3 decimals."""


class BadTrace(AssertionError):
    """The document is not what Perfetto and chrome://tracing expect."""


def check_trace(document: Any) -> dict[str, int]:
    """Check a whole document; returns the number of events of each name.

    Raises:
        BadTrace: says which event is wrong, and how.
    """
    _require(isinstance(document, dict), "it is no object", document)
    _require(document.get("displayTimeUnit") in ("ms", "ns"), "its time unit is unknown", None)
    events = document.get("traceEvents")
    _require(isinstance(events, list), "it has no list of events", None)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        _check_event(event)
        counts[event["name"]] += 1
    _check_nesting(events)
    _check_counters(events)
    _check_arrows(events)
    _check_names(events)
    return dict(counts)


def _check_event(event: Any) -> None:
    _require(isinstance(event, dict), "it is no object", event)
    fields = EVENTS.get(event.get("ph"))
    _require(fields is not None, "its phase is unknown", event)
    assert fields is not None
    _require(set(event) == set(fields), f"its fields are not {sorted(fields)}", event)
    for name, types in fields.items():
        value = event[name]
        fits = isinstance(value, types) and not isinstance(value, bool)
        _require(fits, f"its {name} is no {types}", event)
    _require(event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0, "its time is negative", event)
    _require(0 <= event["tid"] < 1 << 31, "Perfetto cuts its thread id", event)
    if event["ph"] == "i":
        _require(event["s"] in ("t", "p", "g"), "its scope is unknown", event)
    if event["ph"] == "C":
        numbers = all(isinstance(value, NUMBER) for value in event["args"].values())
        _require(bool(event["args"]) and numbers, "it counts no numbers", event)
    if event["ph"] == "M":
        expected = METADATA.get(event["name"])
        _require(expected is not None, "it is unknown metadata", event)
        assert expected is not None
        _require(set(event["args"]) == set(expected), "its arguments are others", event)
        for name, types in expected.items():
            _require(isinstance(event["args"][name], types), f"its {name} is no {types}", event)


def _check_nesting(events: list[Any]) -> None:
    """Spans of one thread contain each other or do not touch: else they hide each other."""
    tracks: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    for spans in tracks.values():
        spans.sort(key=lambda span: (span["ts"], -span["dur"]))
        ends: list[float] = []
        for span in spans:
            end = span["ts"] + span["dur"]
            while ends and ends[-1] <= span["ts"] + ROUNDING:
                ends.pop()
            _require(not ends or end <= ends[-1] + ROUNDING, "it overlaps another", span)
            ends.append(end)


def _check_counters(events: list[Any]) -> None:
    """Each counter goes on in time."""
    last: dict[tuple[str, int], float] = {}
    for event in events:
        if event["ph"] == "C":
            place = (event["name"], event["tid"])
            _require(event["ts"] >= last.get(place, 0.0), "it goes back in time", event)
            last[place] = event["ts"]


def _check_arrows(events: list[Any]) -> None:
    """Each arrow has one begin and one end, which is not before it."""
    ends: dict[str, dict[Any, Any]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            place = (event["cat"], event["id"])
            _require(place not in ends[event["ph"]], "its arrow has another such end", event)
            ends[event["ph"]][place] = event
    _require(ends["s"].keys() == ends["f"].keys(), "an arrow has only one end", None)
    for place, begin in ends["s"].items():
        _require(begin["ts"] <= ends["f"][place]["ts"], "it goes back in time", begin)


def _check_names(events: list[Any]) -> None:
    """Each thread with events has one name."""
    named = [e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    _require(len(named) == len(set(named)), "a thread has two names", named)
    used = {event["tid"] for event in events if event["ph"] in "Xi"}
    _require(used <= set(named), "a thread has no name", sorted(used - set(named)))


def _require(holds: bool, problem: str, what: Any) -> None:
    if not holds:
        raise BadTrace(f"{problem}: {what!r}")
