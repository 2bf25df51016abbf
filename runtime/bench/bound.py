"""The arithmetic of the rows: spreads, bounds and ratios. Pure functions of numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """What some values are like."""

    median: float
    q1: float
    q3: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles (linear between the values), extremes.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values to summarize")
    if len(values) == 1:
        (only,) = values
        return Spread(only, only, only, only, only, 1)
    q1, middle, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, q1, q3, min(values), max(values), len(values))


def missed_bytes(routed: float, record_bytes: float, hit_rate: float) -> float:
    """Bytes that a token has to wait for.

    Args:
        routed: experts that it asks for, over all streamed layers.
        record_bytes: of an expert on disk.
        hit_rate: share of them that were resident.
    """
    return routed * record_bytes * (1.0 - hit_rate)


def token_bound(compute: float, nbytes: float, bandwidth: float) -> float:
    """Seconds that a token takes at least: the drive and the processor work side by side at best.

    Args:
        compute: seconds of a token without waiting for reads.
        nbytes: read for it.
        bandwidth: of the drive, in bytes per second.
    """
    return max(compute, nbytes / bandwidth)


def speedups(base: Sequence[float], own: Sequence[float]) -> Spread:
    """How many times as fast as the base, repetition by repetition; above 1 is faster.

    Args:
        base, own: seconds of the same repetitions.
    """
    return spread([a / b for a, b in zip(base, own, strict=True)])
