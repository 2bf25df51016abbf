"""How fast a plan will be: hit rate, bytes and seconds per token, with what was assumed. Pure.

A token takes the time of computing, and for the experts that miss the time of reading them:

    seconds = compute + sum over layers (calls that wait * start of a wait) + bytes / bandwidth

Reads are not taken to overlap with computing, which is so without reading ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .sizes import LayerSize

GRID = 32
"""A saved curve gives the hit rate at so many shares of the experts, equally far apart."""

WAIT_SECONDS = 0.00015
"""What a layer call that waits for reads takes beside their bytes: messages between three threads
(measured on two slow cores)."""

SYNC_SECONDS = 0.00008
"""What a layer held whole saves: its synchronisation and its books (measured, same place)."""

LAYER_SECONDS = 0.0005
"""Of a layer whose computing was never measured: building the graph and starting small kernels
(0.2 to 0.8 ms on the machines that were measured)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What the hardware takes.

    Attributes:
        compute_seconds: of a token with nothing to read, all layers streamed.
        byte_seconds: of a byte that is read.
        wait_seconds: of a layer call that waits, beside its bytes.
    """

    compute_seconds: float
    byte_seconds: float
    wait_seconds: float = WAIT_SECONDS


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan promises for decoding one request without reading ahead.

    Attributes:
        hit_rate: of the routed experts of streamed layers; 1.0 when there are none.
        bytes_per_token: read from the drive.
        compute_seconds, read_seconds: of a token.
        assumptions: where the figures come from, a sentence each.
    """

    hit_rate: float
    bytes_per_token: float
    compute_seconds: float
    read_seconds: float
    assumptions: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """One over the sum of the seconds."""
        return 1.0 / (self.compute_seconds + self.read_seconds)

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return {
            "hit_rate": self.hit_rate,
            "bytes_per_token": self.bytes_per_token,
            "compute_seconds": self.compute_seconds,
            "read_seconds": self.read_seconds,
            "tokens_per_second": self.tokens_per_second,
            "assumptions": list(self.assumptions),
        }


Curve = Sequence[float]
"""Hit rate at shares of the experts from 0 to 1, equally far apart."""


def hit_rate(curve: Curve, share: float) -> float:
    """The curve at a share, straight between its points; 1.0 where every expert has a slot."""
    if share >= 1.0:
        return 1.0
    last = len(curve) - 1
    at = min(max(share, 0.0) * last, last)
    low = min(int(at), last - 1)
    return curve[low] + (curve[low + 1] - curve[low]) * (at - low)


def default_curve(layer: LayerSize) -> list[float]:
    """The hit rate of least-recently-used slots for a layer of which nothing is known.

    ``1 - (1 - share) ** p``. For evenly used, unrelated experts p is 1. Recorded decoding has p
    from 4 to 9 with 6 of 128 experts a token (Qwen3-30B-A3B, Gemma 4), from 3 with 2 of 128
    (gpt-oss, a short recording), and 1.6 with 6 of 64 of the demo model, whose routing is trained
    to be even. The more experts there are for each that is routed to, the more tokens the slots
    remember; taken is the lower end.
    """
    power = min(max(1.6 + 0.24 * (layer.experts / layer.top_k - 10), 1.6), 4.0)
    return [1.0 - (1.0 - point / GRID) ** power for point in range(GRID + 1)]


def mean_curve(curves: Collection[Curve]) -> list[float]:
    """For layers that were held whole while the others were recorded."""
    return [sum(rates) / len(curves) for rates in zip(*curves, strict=True)]


def forecast(
    layers: Sequence[LayerSize],
    slots: Sequence[int],
    costs: Costs,
    curves: Mapping[int, Curve],
    assumptions: Sequence[str] = (),
) -> Forecast:
    """What a plan promises.

    Args:
        layers: of the model.
        slots: of each of them.
        costs: of the hardware.
        curves: number of a layer -> its hit rates; others get the mean of these, or the default.
        assumptions: to hand on.
    """
    wanted = missed = nbytes = waits = 0.0
    whole = 0
    mean = mean_curve(curves.values()) if curves else None
    for layer, count in zip(layers, slots, strict=True):
        if count >= layer.experts:
            whole += 1
            continue
        curve = curves.get(layer.layer) or mean or default_curve(layer)
        rate = hit_rate(curve, count / layer.experts)
        misses = layer.top_k * (1.0 - rate)
        wanted += layer.top_k
        missed += misses
        nbytes += misses * layer.record_bytes
        waits += 1.0 - rate**layer.top_k
    read = nbytes * costs.byte_seconds + waits * costs.wait_seconds
    # Never less than half: what is whole still has to be computed.
    compute = max(costs.compute_seconds - whole * SYNC_SECONDS, costs.compute_seconds / 2)
    rate = 1.0 - missed / wanted if wanted else 1.0
    return Forecast(rate, nbytes, compute, read, tuple(assumptions))


def stack_curve(calls: Sequence[Sequence[int]], experts: int) -> list[float] | None:
    """Hit rates of least-recently-used slots from the routing of one layer.

    One pass gives all numbers of slots: an expert hits when fewer others than there are slots have
    been used since its last use (Mattson's stack distance), here with a call as one event. The
    first quarter of the calls only fills the stack.

    Args:
        calls: distinct experts of each layer call, in order.
        experts: of the layer.

    Returns:
        hit rates at ``GRID`` + 1 shares; None of fewer than 16 calls.
    """
    if len(calls) < 16:
        return None
    stack: list[int] = []  # the last used in front
    depths: list[int] = []
    warm = len(calls) // 4
    for number, call in enumerate(calls):
        if number >= warm:
            place = {expert: depth for depth, expert in enumerate(stack)}
            depths += [place.get(expert, experts) for expert in call]
        now = set(call)
        stack = [*call, *(expert for expert in stack if expert not in now)]
    depths.sort()
    return [
        round(bisect_right(depths, point * experts / GRID - 1) / len(depths), 4)
        for point in range(GRID + 1)
    ]
