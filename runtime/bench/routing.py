"""Makes predictions as bad as a trained model's, for checkpoints on which they would be perfect.

In a synthetic checkpoint with recorded routing the residual stream of a token is its embedding in
every layer, so that a router applied to an earlier layer's residual is always right. Here the
routers that predict get noise, as much as makes them find as many of the routed experts as were
found in the trained demo model, by distance. The embeddings are orthogonal, so one fixed random
matrix gives each token its own, independent errors; a token that comes again makes the same ones.
The routers that route are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from ...models.folded import FoldedGates
from ..core import Core
from ..engine import Engine
from ..errors import InvalidRequest
from ..readahead import EMBEDDING

Floats = npt.NDArray[np.float32]

MEASURED: Mapping[int, tuple[float, float]] = {
    0: (0.7952, 0.9317),
    1: (0.7238, 0.8948),
    2: (0.6150, 0.8078),
    3: (0.5480, 0.7404),
}
"""Distance -> recall of the demo model's makers at top_k and at twice top_k, on held-out texts."""

SAMPLE = 128
"""Tokens on which the size of the noise is found."""

ALIKE = 0.01
"""Cosine below which embeddings count as orthogonal; above 1 - ALIKE as equal."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Noise of one distance.

    Attributes:
        sigma: deviation of the noise of a logit.
        at_top_k, at_twice_top_k: recall with it, on samples.
        wanted: recall asked for, at top_k and at twice top_k.
    """

    sigma: float
    at_top_k: float
    at_twice_top_k: float
    wanted: tuple[float, float]


def fit_noise(scores: Floats, top_k: int, wanted: tuple[float, float], *, seed: int = 0) -> Fit:
    """The Gaussian noise with which the best ``top_k`` are found as often as asked for.

    One number is fitted, so only the recall at top_k is met; that at twice top_k is what it is.

    Args:
        scores: logits ``[tokens, experts]``, of any number of layers one behind the other.
        top_k: experts that are routed to.
        wanted: recall at top_k, and at twice top_k to compare with.
        seed: of the noise.
    """
    least = top_k / scores.shape[-1]
    if not least < wanted[0] <= 1.0:
        raise InvalidRequest(f"recall={wanted[0]} must be above chance ({least:.3f}), at most 1")
    draws = np.random.default_rng(seed).standard_normal(scores.shape, np.float32)
    true = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(true, _best(scores, top_k), True, axis=-1)

    def recall(sigma: float, width: int) -> float:
        found = np.take_along_axis(true, _best(scores + np.float32(sigma) * draws, width), axis=-1)
        return float(found.sum() / true.sum())

    low, high = 0.0, float(np.ptp(scores)) + 1e-6
    while recall(high, top_k) > wanted[0]:
        low, high = high, 2 * high
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if recall(middle, top_k) > wanted[0] else (low, middle)
    twice = min(2 * top_k, scores.shape[-1])
    return Fit(high, recall(high, top_k), recall(high, twice), wanted)


def _best(scores: Floats, width: int) -> npt.NDArray[np.intp]:
    if width == scores.shape[-1]:
        return np.broadcast_to(np.arange(width), scores.shape)
    return np.argpartition(-scores, width - 1, axis=-1)[..., :width]


# -- a router by itself -----------------------------------------------------------------------


class NoisyGate(nn.Module):
    """A gate for predictions only: its logits have noise of deviation ``sigma``.

    For other systems that apply the next layer's router to this layer's residual.

    Args:
        gate: linear, quantized or not; it is not changed.
        sigma: for inputs of size 1, as a norm without weights makes them.
        seed: of the noise; give each pair of layer and distance its own.
    """

    def __init__(self, gate: nn.Module, sigma: float, seed: int) -> None:
        super().__init__()
        weight: mx.array = gate["weight"]
        if isinstance(gate, nn.QuantizedLinear):
            hidden = gate["scales"].shape[-1] * gate.group_size
        else:
            hidden = weight.shape[-1]
        kind = weight.dtype if mx.issubdtype(weight.dtype, mx.floating) else gate["scales"].dtype
        noise = _noise(weight.shape[0], hidden, sigma, seed)
        if type(gate) is nn.Linear:  # no dearer than the gate itself
            own = nn.Linear(hidden, weight.shape[0], bias="bias" in gate)
            own.update({**gate.parameters(), "weight": (weight + noise).astype(kind)})
            self.gate: nn.Module = own
            self.noise: mx.array | None = None
        else:
            self.gate = gate
            self.noise = noise.astype(kind)

    def __call__(self, x: mx.array) -> mx.array:
        logits: mx.array = self.gate(x)
        return logits if self.noise is None else logits + x @ self.noise.T


def noisy_gate(gate: nn.Module, sigma: float, seed: int) -> NoisyGate:
    """``NoisyGate``, evaluated on this thread."""
    noisy = NoisyGate(gate, sigma, seed)
    mx.eval(noisy.parameters())
    return noisy


def _noise(experts: int, hidden: int, sigma: float, seed: int) -> mx.array:
    """``[experts, hidden]`` float32, whose product with a vector of size 1 deviates by sigma."""
    values: mx.array = mx.random.normal((experts, hidden), key=mx.random.key(seed))
    return values * (sigma / math.sqrt(hidden))


# -- an engine's predictions ------------------------------------------------------------------


def noisy_lookahead(
    engine: Engine,
    recall: Mapping[int, tuple[float, float]] = MEASURED,
    *,
    seed: int = 0,
) -> Future[dict[int, Fit]]:
    """Make the predictions of an idle engine noisy; tokens and routing stay what they are.

    Predicting costs as much as before. The noisy routers take memory beside the engine's budget:
    one for each layer and distance, in place of one for each layer.

    Args:
        engine: opened with ``prefetch``, on a checkpoint with recorded routing.
        recall: distance -> recall asked for at top_k, and at twice top_k to compare with; every
            distance of the engine's configuration, 99 for predictions from the embedding.
        seed: of the noise.

    Returns:
        A future of the noise by distance; it fails with ``InvalidRequest`` when the engine cannot
        be treated like this.
    """
    job = _NoiseJob(dict(recall), seed)
    job.done.set_running_or_notify_cancel()
    engine._thread.submit(job)
    return job.done


class _NoiseJob:
    """Runs on the compute thread."""

    def __init__(self, recall: dict[int, tuple[float, float]], seed: int) -> None:
        self._recall, self._seed = recall, seed
        self.done: Future[dict[int, Fit]] = Future()

    def run(self, core: Core) -> None:
        try:
            self.done.set_result(add_noise(core, self._recall, seed=self._seed))
        except Exception as error:  # the caller's business, not the engine's end
            self.done.set_exception(error)

    def abort(self, error: BaseException) -> None:
        self.done.set_exception(error)


def add_noise(
    core: Core, recall: Mapping[int, tuple[float, float]], *, seed: int = 0
) -> dict[int, Fit]:
    """``noisy_lookahead`` for a core; on its compute thread."""
    ahead: Any = core.ahead
    if ahead is None:
        raise InvalidRequest("nothing is predicted: open the engine with prefetch, and fewer slots")
    calls = _calls(ahead)
    missing = {d for pairs in calls.values() for d, _ in pairs} - recall.keys()
    if missing:
        raise InvalidRequest(f"no recall is given for distances {sorted(missing)}")
    predictor = ahead._predictor
    folded: FoldedGates = predictor.folded
    if not all(folded.covers([target]) for pairs in calls.values() for _, target in pairs):
        raise InvalidRequest("noise is for plain linear routers behind an RMS norm, used once")
    residuals = _embeddings(predictor, core.loaded.vocabulary)
    top_k = max(ahead._top_k)
    logits = {
        target: np.array((residuals @ matrix.astype(mx.float32).T), np.float32)
        for target, matrix in _matrices(folded, calls).items()
    }
    fits = {}
    for distance in sorted({d for pairs in calls.values() for d, _ in pairs}):
        targets = sorted({t for pairs in calls.values() for d, t in pairs if d == distance})
        scores = np.concatenate([logits[target] for target in targets])
        fits[distance] = fit_noise(scores, top_k, recall[distance], seed=seed)
    _Noisy(folded, calls, {d: fit.sigma for d, fit in fits.items()}, seed).install(ahead)
    return fits


Calls = dict[tuple[str, int], list[tuple[int, int]]]
"""(kind of call, its group) -> (distance, group) of each prediction that it makes."""


def _calls(ahead: Any) -> Calls:
    """Everything that the engine predicts."""
    allowed, config = ahead._allowed, ahead._config
    calls: Calls = {("layer", g): list(pairs) for g, pairs in enumerate(ahead._targets) if pairs}
    if 0 in config.distances:
        calls |= {("input", g): [(0, g)] for g, can in enumerate(allowed) if can}
    if config.embedding:
        reach = min(max(config.distances, default=0), len(allowed))
        calls["embedding", 0] = [(EMBEDDING, g) for g in range(reach) if allowed[g]]
    return calls


def _matrices(folded: FoldedGates, calls: Calls) -> dict[int, mx.array]:
    """Router ``[experts, hidden]`` of each group that is predicted."""
    matrix: Any = folded._matrix
    targets = {target for pairs in calls.values() for _, target in pairs}
    return {target: matrix[folded._at[target]] for target in sorted(targets)}


def _embeddings(predictor: Any, vocabulary: int) -> mx.array:
    """Residuals ``[tokens, hidden]`` of size 1 of tokens from all over the vocabulary."""
    ids = np.unique(np.linspace(0, vocabulary - 1, SAMPLE).astype(np.uint32))
    found = predictor.embedding_residual(mx.array(ids[None]))
    if found is not None:
        x = found[0].astype(mx.float32)
        x = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True))
        cosines = np.abs(np.array(x @ x.T) / x.shape[-1])
        if np.all((cosines < ALIKE) | (cosines > 1 - ALIKE)):
            return mx.array(x)
    raise InvalidRequest("noise is for checkpoints with recorded routing: orthogonal embeddings")


class _Noisy:
    """Stands in for ``Predictor.rank_ahead``.

    Args:
        folded: routers without noise.
        calls: what will be predicted.
        sigmas: by distance.
        seed: of the noise.
    """

    def __init__(
        self, folded: FoldedGates, calls: Calls, sigmas: Mapping[int, float], seed: int
    ) -> None:
        clean = _matrices(folded, calls)
        self._call = ("layer", 0)
        self._parts: dict[tuple[str, int], mx.array] = {}
        for call, pairs in calls.items():
            rows = []
            for distance, target in pairs:
                experts, hidden = clean[target].shape
                own = (seed * 1_000_003 + target) * 101 + distance  # another one for each pair
                noise = _noise(experts, hidden, sigmas[distance], own)
                rows.append((clean[target] + noise).astype(clean[target].dtype))
            self._parts[call] = mx.contiguous(mx.concatenate(rows)).T
            mx.eval(self._parts[call])

    def install(self, ahead: Any) -> None:
        """Have the engine predict with these."""
        for kind, name in (
            ("layer", "build"),
            ("input", "build_at_input"),
            ("embedding", "build_from_embedding"),
        ):
            setattr(ahead, name, self._noting(kind, getattr(ahead, name)))
        ahead._predictor.rank_ahead = self.rank_ahead
        ahead._predictor.folded = FoldedGates([])
        # The plan knows nothing of these, and MLX slows down beyond its limit.
        limit = mx.set_memory_limit(1 << 62)
        mx.set_memory_limit(limit + sum(part.nbytes for part in self._parts.values()))

    def _noting(self, kind: str, build: Any) -> Any:
        """``build``, after noting which call it is."""

        def noted(group: int, *rest: mx.array) -> Any:
            self._call = (kind, 0 if kind == "embedding" else group)
            return build(group, *rest)

        return noted

    def rank_ahead(
        self, targets: Sequence[int], residual: mx.array, widths: Sequence[int]
    ) -> list[mx.array]:
        """As ``Predictor.rank_ahead``."""
        if not targets:
            return []
        scores = (residual.reshape(1, -1) @ self._parts[self._call]).reshape(len(targets), -1)
        order = mx.argsort(scores, axis=-1)
        if len(set(widths)) == 1:
            return [order[:, : -widths[0] - 1 : -1]]
        return [order[n : n + 1, : -width - 1 : -1] for n, width in enumerate(widths)]
