"""Routing traces in CSV: per step, layer and rank the routed expert.

Columns: step, layer, slot (the rank), expert; optionally turn, phase (0: the prompt) and
expert_bytes. Comment lines give the model and the size of each layer's records.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from .trace_records import Layer, Route, Trace

PROMPT_TAIL = 64
"""Last tokens of a prompt that are kept one by one, as many as an engine records."""

PROMPT, DECODE = 0, 1
"""Values of the column "phase"."""


@dataclass(frozen=True, slots=True)
class _Row:
    turn: int
    phase: int
    step: int
    layer: int
    rank: int
    expert: int
    nbytes: int

    @property
    def call(self) -> tuple[int, ...]:
        """Equal in the rows of one layer call. A prompt is computed in one go."""
        return (self.turn, self.phase, self.layer, 0 if self.phase == PROMPT else self.step)


def read_csv(text: str, trace: Trace) -> bool:
    """Add the routing to the trace; False if there is none in the text."""
    lines = text.splitlines()
    comments = [line for line in lines if line.startswith("#")]
    rows = list(_rows((line for line in lines if not line.startswith("#")), trace))
    if not rows:
        return False
    facts = [dict(_pairs(comment)) for comment in comments]
    model = next((fact for fact in facts if "model" in fact), {})
    trace.model = model["model"].rsplit("/", 1)[-1] if model else None
    sizes = {
        int(fact["layer"]): int(fact["expert_bytes"])
        for fact in facts
        if {"layer", "expert_bytes"} <= fact.keys()
    }
    for row in rows:  # as a fallback: 0 there means that the expert was not read
        if row.nbytes:
            sizes.setdefault(row.layer, row.nbytes)
    forwards: dict[tuple[int, ...], int] = {}
    for call, members in groupby(rows, key=lambda row: row.call):
        forward = forwards.setdefault((call[0], call[1], call[3]), len(forwards))
        trace.routes.append(_call(list(members), forward, float(len(trace.routes))))
    for layer in sorted({route.layer for route in trace.routes}):
        top_k = 1 + max(row.rank for row in rows if row.layer == layer)
        experts = int(model.get("n_expert", 0)) or 1 + max(row.expert for row in rows)
        trace.layers[layer] = Layer(layer, layer, experts, top_k, None, sizes.get(layer))
    return True


def _call(rows: list[_Row], forward: int, ts: float) -> Route:
    """One layer call; that of a prompt names its hottest experts last, to be kept longest."""
    tokens = len({row.step for row in rows})
    count = Counter(row.expert for row in rows)
    experts: Iterable[int] = sorted(count, key=lambda expert: (count[expert], expert))
    tail: list[tuple[int, ...]] = []
    if tokens == 1:
        experts = dict.fromkeys(row.expert for row in sorted(rows, key=lambda row: row.rank))
    else:
        rows = sorted(rows, key=lambda row: (row.step, row.rank))
        steps = [list(step) for _, step in groupby(rows, key=lambda row: row.step)]
        tail = [tuple(dict.fromkeys(row.expert for row in step)) for step in steps[-PROMPT_TAIL:]]
    return Route(ts, rows[0].layer, rows[0].layer, forward, tuple(experts), tokens, tuple(tail))


def _pairs(comment: str) -> Iterator[tuple[str, str]]:
    for word in comment.lstrip("# ").split():
        name, equals, value = word.partition("=")
        if equals and (name in ("model", "arch") or (value.isdecimal() and len(value) < 20)):
            yield name, value


def _rows(lines: Iterable[str], trace: Trace) -> Iterator[_Row]:
    damaged = 0
    table = iter(csv.DictReader(lines))
    while True:
        try:
            row = next(table, None)
        except csv.Error:  # a field without an end
            trace.notices.append("the table is damaged: the rows before that were read")
            break
        if row is None:
            break
        try:
            yield _Row(
                turn=int(row.get("turn") or 0),
                phase=int(row.get("phase") or DECODE),
                step=int(row["step"]),
                layer=int(row["layer"]),
                rank=int(row["slot"]),
                expert=int(row["expert"]),
                nbytes=int(row.get("expert_bytes") or 0),
            )
        except (KeyError, TypeError, ValueError):
            damaged += 1
    if damaged:
        trace.notices.append(f"{damaged} rows are damaged and were left out")
