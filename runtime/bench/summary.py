"""From the repetitions of an arm to its row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from .arms import Sample
from .bound import speedups, spread, token_bound
from .rows import Row


@dataclass(frozen=True, slots=True)
class Reference:
    """What the arms of a cell are compared with.

    Attributes:
        bandwidth: of the drive, or of the page cache, in bytes per second.
        off: repetitions of the arm that reads on demand; None when it has not run.
    """

    bandwidth: float | None
    off: Sequence[Sample] | None


def fill(row: Row, samples: Sequence[Sample], reference: Reference) -> Row:
    """A row with the figures of its repetitions.

    Times are medians over repetitions of the time per token; bytes and hits are sums over all
    repetitions by all their tokens, so that they stay what was counted.
    """
    times = [sample.seconds / sample.tokens for sample in samples]
    taken = spread(times)
    total = sum(sample.tokens for sample in samples)
    row = replace(
        row,
        n=taken.count,
        ms_per_token=1e3 * taken.median,
        ms_q1=1e3 * taken.q1,
        ms_q3=1e3 * taken.q3,
        ms_low=1e3 * taken.low,
        ms_high=1e3 * taken.high,
        samples_ms=" ".join(f"{1e3 * time:.6g}" for time in times),
        tokens_per_s=1.0 / taken.median,
        first_token_ms=1e3 * median(sample.first for sample in samples) or None,
        longest_gap_ms=1e3 * max(sample.gap for sample in samples) or None,
    )
    if any(sample.stall is not None for sample in samples):
        row = replace(
            row,
            stall_ms=_per_token(samples, lambda sample: sample.stall),
            compute_ms=1e3 * compute(samples),
        )
    syncs = sum(sample.syncs for sample in samples)
    if syncs:
        host = sum(sample.host or 0.0 for sample in samples)
        row = replace(
            row,
            sync_ms=_per_token(samples, lambda sample: sample.sync),
            host_ms=_per_token(samples, lambda sample: sample.host),
            host_us_per_layer=1e6 * host / syncs,
        )
    nbytes = bytes_per_token(samples)
    hits, misses = sum(s.hits for s in samples), sum(s.misses for s in samples)
    if hits + misses:
        row = replace(
            row, routed_per_token=(hits + misses) / total, hit_rate=hits / (hits + misses)
        )
    if nbytes is not None:
        wasted = sum(sample.wasted for sample in samples) / total
        row = replace(row, bytes_per_token=nbytes, waste=wasted / nbytes if nbytes else 0.0)
    return _compare(row, samples, times, nbytes, reference)


def _compare(
    row: Row,
    samples: Sequence[Sample],
    times: Sequence[float],
    nbytes: float | None,
    reference: Reference,
) -> Row:
    off, bandwidth = reference.off, reference.bandwidth
    if off is not None and len(off) == len(samples):
        ratio = speedups([sample.seconds / sample.tokens for sample in off], times)
        row = replace(row, speedup=ratio.median, speedup_low=ratio.low, speedup_high=ratio.high)
    if nbytes is None or bandwidth is None:
        return row
    taken = median(times)
    row = replace(row, drive_bytes_per_s=bandwidth, drive_share=nbytes / taken / bandwidth)
    if row.compute_ms is not None:
        own = token_bound(row.compute_ms / 1e3, nbytes, bandwidth)
        row = replace(row, own_bound_ms=1e3 * own)
    demanded = None if off is None else bytes_per_token(off)
    if off is not None and demanded is not None:
        # One bound for all arms: what guesses waste, or predicting costs, does not widen it.
        bound = token_bound(compute(off), demanded, bandwidth)
        row = replace(row, bound_ms=1e3 * bound, bound_over_measured=bound / taken)
    return row


def compute(samples: Sequence[Sample]) -> float:
    """Seconds of a token without waiting for reads, median over repetitions."""
    return median((s.seconds - (s.stall or 0.0)) / s.tokens for s in samples)


def bytes_per_token(samples: Sequence[Sample]) -> float | None:
    """Bytes read for a token, over all repetitions; None when nobody has counted."""
    counted = [sample.nbytes for sample in samples if sample.nbytes is not None]
    if len(counted) < len(samples):
        return None
    return sum(counted) / sum(sample.tokens for sample in samples)


def _per_token(samples: Sequence[Sample], part: Callable[[Sample], float | None]) -> float:
    return 1e3 * median((part(sample) or 0.0) / sample.tokens for sample in samples)
