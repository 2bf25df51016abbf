"""What decoding has cost an engine: noted token by token, kept for ``moestream plan``.

Cheap while it runs (some additions per token, an append per layer call); the figures are made when
the engine is closed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from .forecast import SYNC_SECONDS, WAIT_SECONDS, Costs, Curve, hit_rate, stack_curve
from .sizes import LayerSize

if TYPE_CHECKING:
    from .streaming import StepCounters

KEPT_TOKENS = 256
"""Of which times and routing are kept (arbitrary: a curve takes 0.1 s to make of so many)."""

FIRST_TOKENS = 4
"""Of a request that are left out: caches grow, kernels are compiled."""

ENOUGH_TOKENS = 32
"""Fewer make no profile."""

BLOCK = 16
"""Tokens of which the mean is taken (arbitrary)."""

LEAST_MISSES = 0.5
"""Of those of least-recently-used slots; fewer misses are not believed (arbitrary)."""

VERSION = 1


@dataclass(frozen=True, slots=True)
class TokenCost:
    """One decoded token. Seconds and bytes."""

    seconds: float
    stall_seconds: float
    misses: int
    nbytes: int


class DecodeLog:
    """Costs and routing of the last decoded tokens. Compute thread only.

    Args:
        groups: number of streamed layers.
        clock: seconds.
    """

    def __init__(self, groups: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._before: tuple[float, float, int, int] | None = None
        self._counters: StepCounters | None = None
        self._number = 0
        self.tokens: deque[TokenCost] = deque(maxlen=KEPT_TOKENS)
        self.routes: list[deque[Sequence[int]]] = [deque(maxlen=KEPT_TOKENS) for _ in range(groups)]

    def forward(self, counters: StepCounters, *, single: bool) -> None:
        """A forward begins: of one decoded token, or of something else, which ends the series."""
        if not single or counters is not self._counters:
            self.end()
            self._counters = counters
        if not single:
            return
        now = (self._clock(), counters.stall_seconds, counters.misses, counters.bytes_read)
        if self._before is not None:
            self._number += 1
            if self._number > FIRST_TOKENS:
                seconds, stall, misses, nbytes = self._before
                self.tokens.append(
                    TokenCost(now[0] - seconds, now[1] - stall, now[2] - misses, now[3] - nbytes)
                )
        self._before = now

    def end(self) -> None:
        """The request has ended: the time until the next one is nobody's."""
        self._before, self._number = None, 0

    def route(self, group: int, experts: Sequence[int]) -> None:
        """A decoded token has been routed to these distinct experts of a layer."""
        self.routes[group].append(experts)


@dataclass(frozen=True, slots=True)
class Profile:
    """What a model costs on this machine.

    Attributes:
        tokens: that it was made of.
        costs: of the hardware; ``byte_seconds`` is 0.0 when nothing was read.
        curves: number of a layer -> hit rates at shares of the experts.
    """

    tokens: int
    costs: Costs
    curves: Mapping[int, Curve]

    def completed(self, older: Profile | None) -> Profile:
        """This profile, with what only an older one knows: a run without reads learns less."""
        if older is None:
            return self
        costs = self.costs
        if not costs.byte_seconds:
            costs = replace(older.costs, compute_seconds=costs.compute_seconds)
        return Profile(self.tokens, costs, {**older.curves, **self.curves})

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return {
            "version": VERSION,
            "tokens": self.tokens,
            "compute_seconds": self.costs.compute_seconds,
            "byte_seconds": self.costs.byte_seconds,
            "wait_seconds": self.costs.wait_seconds,
            "curves": {str(layer): list(curve) for layer, curve in self.curves.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> Profile | None:
        """The profile of a file; None when the file is of another version or damaged."""
        try:
            if value["version"] != VERSION:
                return None
            costs = Costs(
                float(value["compute_seconds"]),
                float(value["byte_seconds"]),
                float(value["wait_seconds"]),
            )
            curves = {
                int(layer): [float(rate) for rate in curve]
                for layer, curve in value["curves"].items()
                if len(curve) > 1
            }
            profile = cls(int(value["tokens"]), costs, curves)
        except (TypeError, ValueError, KeyError, AttributeError):
            return None
        return profile if costs.compute_seconds > 0 else None


def make_profile(
    log: DecodeLog,
    streamed: Sequence[LayerSize],
    whole: int,
    slots: Sequence[int] | None = None,
) -> Profile | None:
    """The profile of what an engine has decoded; None of too few tokens.

    Args:
        log: of the engine.
        streamed: its streamed layers.
        whole: how many more MoE layers it holds whole.
        slots: of the streamed layers, if misses tell how good their policy is: not when some of
            them were saved by guesses.
    """
    if len(log.tokens) < ENOUGH_TOKENS:
        return None
    compute = _typical([token.seconds - token.stall_seconds for token in log.tokens])
    curves: dict[int, Curve] = {}
    for layer, calls in zip(streamed, log.routes, strict=True):
        curve = stack_curve(calls, layer.experts)
        if curve is not None:
            curves[layer.layer] = curve
    if slots is not None:
        curves = _by_misses(curves, log, streamed, slots)
    wait, byte = _read_costs(log, streamed)
    return Profile(len(log.tokens), Costs(compute + whole * SYNC_SECONDS, byte, wait), curves)


def _by_misses(
    curves: Mapping[int, Curve],
    log: DecodeLog,
    streamed: Sequence[LayerSize],
    slots: Sequence[int],
) -> dict[int, Curve]:
    """The curves of the engine's policy, which misses less than least-recently-used slots would.

    By the same factor everywhere: with 10, 16 and 40 of 64 slots it was .86, .80 and .88 (from
    hits measured and said before, docs/bench).
    """
    missed = sum(token.misses for token in log.tokens) / len(log.tokens)
    said = sum(
        layer.top_k * (1.0 - hit_rate(curves[layer.layer], count / layer.experts))
        for layer, count in zip(streamed, slots, strict=True)
        if layer.layer in curves
    )
    factor = min(max(missed / said, LEAST_MISSES), 1.0) if said else 1.0
    return {
        layer: [round(1.0 - factor * (1.0 - rate), 4) for rate in curve]
        for layer, curve in curves.items()
    }


def _read_costs(log: DecodeLog, streamed: Sequence[LayerSize]) -> tuple[float, float]:
    """Seconds of a wait and of a byte."""
    nbytes = _typical([token.nbytes for token in log.tokens])
    if nbytes <= 0:
        return WAIT_SECONDS, 0.0
    stall = _typical([token.stall_seconds for token in log.tokens])
    wanted = sum(layer.top_k for layer in streamed)
    rate = 1.0 - min(_typical([token.misses for token in log.tokens]) / wanted, 1.0)
    waits = sum(1.0 - rate**layer.top_k for layer in streamed)
    # Where reads come from memory, starting them is most of what they take.
    wait = min(WAIT_SECONDS, stall / 2 / waits)
    return wait, (stall - waits * wait) / nbytes


def _typical(values: Sequence[float]) -> float:
    """The median of the means of blocks: like a rate, but for what other programs disturb."""
    blocks = [values[at : at + BLOCK] for at in range(0, len(values) - BLOCK + 1, BLOCK)]
    return median(sum(block) / len(block) for block in blocks)
