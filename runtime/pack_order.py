"""The order of experts on disk, from recorded routing. Pure: a permutation from counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from .errors import InvalidRequest
from .trace_records import Route, Trace


def places_by_layer(trace: Trace, experts: dict[int, int], by: str) -> dict[int, tuple[int, ...]]:
    """Layer -> the place of each expert among its records, for the layers that the trace has.

    Args:
        trace: with routing of the model.
        experts: layer -> how many experts it has.
        by: "frequency" or "coactivation".

    Raises:
        InvalidRequest: the trace is of another model, or holds no routing.
    """
    calls: dict[int, list[Route]] = {}
    for route in trace.routes:
        calls.setdefault(route.layer, []).append(route)
    places = {}
    for layer, routes in calls.items():
        if layer not in experts or any(max(r.experts) >= experts[layer] for r in routes):
            raise InvalidRequest(f"order={trace.path} is a trace of another model")
        # A prompt's call names nearly every expert and tells little.
        single = [route.experts for route in routes if route.tokens == 1]
        chosen = single or [route.experts for route in routes]
        rank = by_frequency if by == "frequency" else by_coactivation
        order = rank(chosen, experts[layer])
        place = [0] * len(order)
        for position, expert in enumerate(order):
            place[expert] = position
        places[layer] = tuple(place)
    if not places:
        raise InvalidRequest(f"order={trace.path} holds no routed experts")
    return places


def by_frequency(calls: Sequence[Sequence[int]], experts: int) -> list[int]:
    """The most used experts first."""
    counts = Counter(expert for call in calls for expert in call)
    return sorted(range(experts), key=lambda expert: (-counts[expert], expert))


def by_coactivation(calls: Sequence[Sequence[int]], experts: int) -> list[int]:
    """Each expert behind the one it is most often used together with, the most used one first."""
    counts = Counter(expert for call in calls for expert in call)
    pairs = Counter(pair for call in calls for pair in combinations(sorted(set(call)), 2))
    left = set(range(experts))
    order: list[int] = []
    while left:
        last = order[-1] if order else -1
        best = max(
            left,
            key=lambda expert: (
                pairs[min(last, expert), max(last, expert)],
                counts[expert],
                -expert,
            ),
        )
        left.remove(best)
        order.append(best)
    return order
