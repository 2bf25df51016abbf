"""What a replay guesses at each layer call: recorded predictions, or made from what really came."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .trace_records import Prediction, Route, prompt_forwards

LOOKAHEAD = 2
"""Layers that made-up predictions look ahead."""


@dataclass(frozen=True, slots=True)
class Guess:
    """An expert that a later call may use."""

    position: int
    expert: int
    probability: float


Forecast = Sequence[Sequence[Guess]]
"""Per call, the guesses known when its router is; best first."""


def recorded(routes: Sequence[Route], predictions: Sequence[Prediction]) -> Forecast:
    """The guesses that the engine had. Those for calls that never came are left out.

    A guess of distance d is known at the call d layers before its target, or at the first of the
    forward, and one from before the target's own call (distance 0) with the call before that.
    """
    position_of = {(route.forward, route.group): at for at, route in enumerate(routes)}
    first: dict[int, int] = {}
    for at, route in enumerate(routes):
        first.setdefault(route.forward, at)
    forecast: list[list[Guess]] = [[] for _ in routes]
    for prediction in predictions:
        target = position_of.get((prediction.forward, prediction.group))
        if target is None:
            continue
        wanted = (prediction.forward, prediction.group - prediction.distance)
        source = min(position_of.get(wanted, first[prediction.forward]), target - 1)
        if source >= 0:
            forecast[source] += [
                Guess(target, expert, min(max(probability, 1e-9), 1.0))
                for expert, probability in zip(
                    prediction.experts, prediction.probabilities, strict=False
                )
            ]
    return forecast


def foretold(
    routes: Sequence[Route],
    experts: dict[int, int],
    *,
    recall: float = 1.0,
    lookahead: int = LOOKAHEAD,
    seed: int = 0,
) -> Forecast:
    """Guesses made from the routing to come, as many for a call as it uses experts.

    Each of a call's experts is guessed with the chance ``recall``; a wrong one takes its place
    otherwise. As in the engine, nothing is guessed across tokens or for prompts.

    Args:
        routes: the calls.
        experts: number of experts by group.
        recall: share of the guesses that is right.
        lookahead: how many calls ahead the guesses are known.
        seed: makes the wrong ones.
    """
    forecast: list[list[Guess]] = [[] for _ in routes]
    prompts = prompt_forwards(routes)
    behind: dict[int, list[int]] = {}  # positions of the calls of a forward so far
    for position, route in enumerate(routes):
        sources = behind.setdefault(route.forward, [])
        if route.forward not in prompts and sources:
            wrong = [e for e in range(experts[route.group]) if e not in route.experts]
            chance = random.Random(f"{seed}/{position}")
            chance.shuffle(wrong)
            names = [
                expert if chance.random() < recall or not wrong else wrong.pop()
                for expert in route.experts
            ]
            for source in sources[-lookahead:]:
                forecast[source] += [Guess(position, name, recall or 1e-9) for name in names]
        sources.append(position)
    return forecast
