"""Recorded routing: files, and larger models composed of what was recorded of smaller ones."""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moestream.runtime.errors import InvalidRequest
from moestream.runtime.trace_records import Route
from moestream.runtime.tracefile import read_trace

Ids = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]

DEMO = Path(__file__).with_name("demo-routing.npz")
"""The demo model's, made by ``scripts/record_routing.py``."""


@dataclass(frozen=True)
class Routing:
    """Which experts each step was routed to.

    Attributes:
        chosen: ``[steps, layers, ranks]`` expert ids, the largest weight first.
        weights: ``[steps, layers, ranks]``, positive, falling, of any sum.
        experts: how many a layer has.
        source: what was recorded, in words.
    """

    chosen: Ids
    weights: Floats
    experts: int
    source: str

    @property
    def steps(self) -> int:
        """Number of tokens."""
        return int(self.chosen.shape[0])

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return int(self.chosen.shape[1])

    @property
    def ranks(self) -> int:
        """Experts that a token is routed to in a layer."""
        return int(self.chosen.shape[2])

    def save(self, path: Path) -> None:
        """Write it in the compact form: weights as 255 steps of the first rank's."""
        share = self.weights / self.weights[..., :1]
        np.savez_compressed(
            path,
            chosen=self.chosen.astype(np.uint8 if self.experts <= 256 else np.uint16),
            weights=np.clip(np.rint(share * 255), 1, 255).astype(np.uint8),
            experts=np.array(self.experts),
            source=np.array(self.source),
        )


def load_routing(path: Path) -> Routing:
    """Read a recording: ``.npz`` of ours, a trace of an engine, or a CSV of routed experts.

    Only tokens that were computed by themselves count. Traces of engines tell no weights: these
    are then invented, falling with the rank.

    Raises:
        TraceUnreadable: there is no trace in the file.
        InvalidRequest: no token of it was recorded in all layers.
    """
    if path.suffix == ".npz":
        with np.load(path) as saved:
            weights = saved["weights"].astype(np.float32)
            chosen = saved["chosen"].astype(np.uint16)
            return Routing(chosen, weights, int(saved["experts"]), str(saved["source"]))
    trace = read_trace(path)
    order = {group: place for place, group in enumerate(sorted(trace.layers))}
    forwards: dict[int, dict[int, tuple[Route, list[float]]]] = {}
    singles = [route for route in trace.routes if route.tokens == 1]
    for route, weights in zip(singles, _weights(path, singles), strict=True):
        forwards.setdefault(route.forward, {})[order[route.group]] = route, weights
    ranks = max((len(route.experts) for route in singles), default=0)
    rows = [
        [layers[place] for place in range(len(order))]
        for layers in forwards.values()
        if len(layers) == len(order) and all(len(r.experts) == ranks for r, _ in layers.values())
    ]
    if not rows:
        raise InvalidRequest(f"{path} has no token that was recorded by itself in all layers")
    chosen = np.array([[route.experts for route, _ in row] for row in rows], np.uint16)
    gates = np.array([[weights for _, weights in row] for row in rows], np.float32)
    experts = max(layer.experts for layer in trace.layers.values())
    return Routing(chosen, gates, experts, f"{trace.model or path.name}, {len(rows)} tokens")


def _weights(path: Path, singles: list[Route]) -> list[list[float]]:
    """Gate weights by rank of each route: recorded in a CSV, else invented."""
    if ".csv" in path.suffixes:
        found = _recorded_weights(path)
        if [len(weights) for weights in found] == [len(route.experts) for route in singles]:
            return found
    rng = np.random.default_rng(len(singles))
    return [
        sorted((0.75 ** rng.uniform(0, 2 * len(route.experts), len(route.experts))).tolist())[::-1]
        for route in singles
    ]


def _recorded_weights(path: Path) -> list[list[float]]:
    """The column "weight" of layer calls of one token, in the order of ``Trace.routes``."""
    opened = gzip.open if path.suffix == ".gz" else open
    calls: dict[tuple[str, ...], dict[str, list[float]]] = {}
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            turn, phase, step = row.get("turn") or "0", row.get("phase") or "1", row.get("step", "")
            call = (turn, phase, row.get("layer", ""), "" if phase == "0" else step)
            weights = calls.setdefault(call, {}).setdefault(step, [])
            weights.append(float(row.get("weight") or "nan"))
    found = [steps.popitem()[1] for steps in calls.values() if len(steps) == 1]
    known = all(weight > 0 for weights in found for weight in weights)
    return [sorted(weights, reverse=True) for weights in found] if known else []


@dataclass(frozen=True)
class Composed:
    """Routing for a model, and in words what of it is real.

    Attributes:
        routing: of the model's sizes.
        segments: pieces of the recording that it is made of.
        overlap: whether they overlap in time.
        words: what was done.
    """

    routing: Routing
    segments: int
    overlap: bool
    words: str


def compose(
    recorded: Routing, *, layers: int, experts: int, top_k: int, steps: int, seed: int = 0
) -> Composed:
    """Routing for a model with more layers and experts than were recorded.

    Layers beyond the recorded ones are the same layers at another time of the recording; experts
    beyond them are groups, each of which follows the recording at a time of its own. Of the ranks
    of all groups those with the largest weights are used, ``top_k`` a step, so that groups get
    more or fewer from step to step. Ids within a group are shuffled, but for the first.

    Args:
        recorded: what there is.
        layers: of the model.
        experts: of a layer; a multiple of the recorded ones.
        top_k: ranks; the groups' ranks together have to suffice.
        steps: at most; no more than were recorded.
        seed: of the shuffling.
    """
    groups, rest = divmod(experts, recorded.experts)
    if rest or not groups:
        raise InvalidRequest(
            f"experts={experts} must be a multiple of the {recorded.experts} that were recorded"
        )
    if top_k > groups * recorded.ranks:
        raise InvalidRequest(
            f"top_k={top_k}: the routing has {recorded.ranks} ranks for each {recorded.experts} "
            f"experts, which gives {groups * recorded.ranks}; give --top-k no more than that"
        )
    copies = -(-layers // recorded.layers)
    segments = copies * groups
    count = min(steps, recorded.steps)
    overlap = segments * count > recorded.steps
    stride = max(recorded.steps // segments, 1) if overlap else count
    rng = np.random.default_rng(seed)
    chosen = np.zeros((count, layers, top_k), np.uint16)
    weights = np.zeros((count, layers, top_k), np.float32)
    for layer in range(layers):
        copy, place = divmod(layer, recorded.layers)
        ids, gates = [], []
        for group in range(groups):
            segment = copy * groups + group
            at = (segment * stride + np.arange(count)) % recorded.steps
            names = np.arange(recorded.experts)
            if segment:
                rng.shuffle(names)
            ids.append(group * recorded.experts + names[recorded.chosen[at, place]])
            values = recorded.weights[at, place]
            gates.append(values / values.sum(axis=-1, keepdims=True))
        every, values = np.concatenate(ids, axis=1), np.concatenate(gates, axis=1)
        best = np.argsort(-values, axis=1, kind="stable")[:, :top_k]
        chosen[:, layer] = np.take_along_axis(every, best, axis=1)
        weights[:, layer] = np.take_along_axis(values, best, axis=1)
    words = _words(recorded, layers, groups, top_k, count, segments, stride if overlap else 0)
    made = Routing(chosen, weights, experts, f"composed of {recorded.source}")
    return Composed(made, segments, overlap, words)


def _words(
    recorded: Routing, layers: int, groups: int, top_k: int, count: int, segments: int, turn: int
) -> str:
    words = f"{count} steps of {recorded.source}"
    if segments == 1 and layers <= recorded.layers and top_k == recorded.ranks:
        return words + ": as recorded"
    if layers > recorded.layers:
        words += f"; {layers} layers are the {recorded.layers} recorded ones at several times"
    if groups > 1:
        words += f"; {groups} groups of {recorded.experts} experts, each at a time of its own"
    if top_k != groups * recorded.ranks:
        words += f"; the {top_k} largest of {groups * recorded.ranks} ranks"
    if turn:
        words += f"; the {segments} segments overlap, {turn} steps apart"
    return words
