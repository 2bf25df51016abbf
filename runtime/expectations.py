"""What `moestream plan` knows for its forecast: earlier runs, measured drives, or estimates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .forecast import LAYER_SECONDS, Costs, Curve, Forecast, forecast
from .profile import Profile
from .user_cache import drive_key, load

if TYPE_CHECKING:
    from ..io.records import Record
    from .core import Prepared
    from .sizes import ModelSize

GUESSED_BANDWIDTH = 1e9
"""Bytes per second of a drive of which nothing is known."""

JOB_BYTES = 1 << 20
"""Reads of large records are divided into pieces of about this size, see ``io.records``."""

PROBE = (2048, 8192)
"""Shape of the 4-bit matrix that is multiplied to estimate computing."""


def expect(prepared: Prepared, *, bandwidth: int | None, lanes: int) -> Forecast:
    """The forecast of a plan from the best that is known. MLX thread.

    Args:
        prepared: headers and plan.
        bandwidth: of the drive, bytes per second, if the caller knows.
        lanes: reads in flight.
    """
    from .profiling import profile_key

    blueprint, plan = prepared.blueprint, prepared.plan
    size = blueprint.size
    profile = Profile.from_json(load("profile", profile_key(blueprint)))
    said: list[str] = []
    curves = _curves(profile, said) if prepared.records else {}
    compute = _compute(profile, size, said)
    waits = forecast(size.layers, plan.slots, Costs(compute, 0.0), curves)
    costs = Costs(compute, 1.0)
    if prepared.records:
        misses = max((1.0 - waits.hit_rate) * max(layer.top_k for layer in size.layers), 1.0)
        costs = _reads(profile, prepared.records, compute, bandwidth, lanes, misses, said)
    said.append("one request is decoded, nothing is read ahead, no prompt is counted")
    return forecast(size.layers, plan.slots, costs, curves, said)


def _curves(profile: Profile | None, said: list[str]) -> Mapping[int, Curve]:
    if profile is not None and profile.curves:
        said.append(f"hit rates: from the routing of {profile.tokens} tokens of an earlier run")
        return profile.curves
    said.append(
        "hit rates: a cautious curve by share of the experts, as no run of this model is kept"
    )
    return {}


def _compute(profile: Profile | None, size: ModelSize, said: list[str]) -> float:
    if profile is not None:
        said.append(f"computing: measured in an earlier run ({profile.tokens} tokens)")
        return profile.costs.compute_seconds
    active = size.trunk_bytes + sum(layer.top_k * layer.slot_bytes for layer in size.layers)
    rate = weight_rate()
    said.append(
        f"computing: a rough estimate from {active / 1e6:.0f} MB of weights a token at "
        f"{rate / 1e9:.1f} GB/s and {1000 * LAYER_SECONDS:g} ms a layer; --measure runs the model"
    )
    return active / rate + LAYER_SECONDS * len(size.layers)


def _reads(
    profile: Profile | None,
    records: Sequence[Record],
    compute: float,
    bandwidth: int | None,
    lanes: int,
    misses: float,
    said: list[str],
) -> Costs:
    direct = any(run.direct for run in records[0].runs)
    if bandwidth is not None:
        said.append(f"reading: {bandwidth / 1e9:.2f} GB/s, as given")
        return Costs(compute, 1.0 / bandwidth)
    if profile is not None and profile.costs.byte_seconds > 0:
        seen = 1e-9 / profile.costs.byte_seconds
        said.append(f"reading: {seen:.2f} GB/s, measured in an earlier run of this model")
        return Costs(compute, profile.costs.byte_seconds, profile.costs.wait_seconds)
    path = records[0].components[0].path
    size = min(records[0].stored_bytes, JOB_BYTES)
    depth = min(misses * max(len(records[0].jobs), 1), float(lanes))
    measured = drive_bandwidth(load("drive", drive_key(path)), direct, size, depth)
    if measured is None:
        said.append(
            f"reading: {GUESSED_BANDWIDTH / 1e9:g} GB/s, a guess: measure the drive with "
            "`moestream doctor MODEL`, or give --bandwidth"
        )
        return Costs(compute, 1.0 / GUESSED_BANDWIDTH)
    mode = "direct" if direct else "buffered"
    rate = f"{measured / 1e9:.2f} GB/s"
    said.append(f"reading: {rate}, as `moestream doctor` measured {mode} reads like these")
    if not direct:
        said.append("reads are buffered: what the page cache holds comes faster than that")
    return Costs(compute, 1.0 / measured)


def drive_bandwidth(report: Any, direct: bool, size: int, depth: float) -> float | None:
    """Bytes per second in the measurement that is most like these reads; None without any.

    Args:
        report: a saved ``DriveReport``.
        direct: whether reads pass by the page cache.
        size: bytes of a read.
        depth: reads in flight, on average.
    """
    try:
        cells = [
            (cell["mode"], cell["size"], cell["depth"], float(cell["bandwidth"]))
            for cell in report["cells"]
        ]
        mode = "direct" if direct else "buffered"
        like = [cell for cell in cells if cell[0] == mode] or cells
        nearest = min(like, key=lambda cell: (abs(log(cell[1] / size)), abs(log(cell[2] / depth))))
    except (TypeError, KeyError, ValueError, ZeroDivisionError):
        return None
    return nearest[3] if nearest[3] > 0 else None


def weight_rate() -> float:
    """Bytes of 4-bit weights per second in a product with one vector, timed now (some 20 ms)."""
    import mlx.core as mx

    rows, columns = PROBE
    weight, scales, biases = mx.quantize(mx.zeros((rows, columns)), group_size=64, bits=4)
    x = mx.zeros((1, columns))
    mx.eval(x, weight, scales, biases)
    nbytes = weight.nbytes + scales.nbytes + biases.nbytes
    best = float("inf")
    for _ in range(4):
        begun = time.perf_counter()
        mx.eval(mx.quantized_matmul(x, weight, scales, biases, group_size=64, bits=4))
        best = min(best, time.perf_counter() - begun)
    return nbytes / max(best, 1e-9)


def remember_drive(path: Path, report: dict[str, object]) -> bool:
    """Keep a measurement for later plans; returns whether that was possible."""
    from .user_cache import save

    return save("drive", drive_key(path), report)
