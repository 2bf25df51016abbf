"""The routers of neighbouring layers as one matrix: all distances ranked in a few operations.

A pre-MoE RMS norm multiplies the residual by its weight and by one positive number, and a gate is
linear. Norm weight and gate therefore fold into one matrix per layer, and the matrices of the
layers ahead lie one behind the other: one product gives the scores of all of them. Host and launch
time per operation is what prediction costs, so this is worth the copy of the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

AGREEMENT = 0.97
SAMPLES = 32
LARGE = 1e3
"""Length of the probing vectors: large enough that a norm's epsilon does not count."""

Scores = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Foldable:
    """What folding needs to know of a layer.

    Attributes:
        norm: pre-MoE norm.
        gate: linear map of the router, ``[..., hidden]`` to ``[..., experts]``.
        activation: makes selection scores of logits; None where their order is the logits'.
        bias: added to the scores, ``[experts]`` or None.
        hidden: width of the residual.
        experts: number of experts.
        dtype: of the residual.
    """

    norm: Scores
    gate: Scores
    activation: Scores | None
    bias: mx.array | None
    hidden: int
    experts: int
    dtype: mx.Dtype


class FoldedGates:
    """Ranks the experts of several layers from one residual.

    Args:
        layers: what to fold; None for layers that cannot be.
    """

    def __init__(self, layers: Sequence[Foldable | None]) -> None:
        self._layers = list(layers)
        self._matrix: mx.array | None = None
        self._offset: mx.array | None = None
        self._bias: mx.array | None = None
        self._activation: Scores | None = None
        self._at: dict[int, int] = {}
        self._parts: dict[tuple[int, int], mx.array] = {}  # neighbouring layers of the matrix

    @property
    def nbytes(self) -> int:
        """Memory of the folded matrices."""
        return 0 if self._matrix is None else self._matrix.nbytes

    def fold(self, rank: Callable[[int, mx.array, int], mx.array]) -> None:
        """Make the matrices and keep the layers whose ranks agree with ``rank(layer, x, width)``.

        Evaluates; the parameters must be in memory.
        """
        first = next((layer for layer in self._layers if layer is not None), None)
        if first is None:
            return
        alike = [
            index
            for index, layer in enumerate(self._layers)
            if layer is not None
            and (layer.hidden, layer.experts) == (first.hidden, first.experts)
            and (layer.bias is None) == (first.bias is None)
            and layer.activation is first.activation
        ]
        rows, offsets, biases = [], [], []
        for index in alike:
            layer = self._layers[index]
            assert layer is not None
            matrix, offset = _fold(layer)
            rows.append(matrix)
            offsets.append(offset)
            if layer.bias is not None:
                biases.append(layer.bias.astype(mx.float32))
            mx.eval(matrix, offset)
        self._matrix = mx.stack(rows)
        offset = mx.stack(offsets)
        self._bias = mx.stack(biases) if biases else None
        self._activation = first.activation
        mx.eval(self._matrix, offset)
        has_offset: Any = mx.max(mx.abs(offset)).item()
        self._offset = offset if has_offset > 0 else None
        self._at = {index: place for place, index in enumerate(alike)}
        x = mx.random.normal((1, SAMPLES, first.hidden), key=mx.random.key(1)).astype(first.dtype)
        for index in alike:
            if _agreement(self._rank_many(index, x), rank(index, x, 4)) < AGREEMENT:
                del self._at[index]

    def covers(self, targets: Sequence[int]) -> bool:
        """Whether these layers can be ranked in one go: neighbours, all folded."""
        places = [self._at.get(target, -1) for target in targets]
        if not places or -1 in places:
            return False
        return places == list(range(places[0], places[0] + len(places)))

    def rank(self, targets: Sequence[int], residual: mx.array, width: int) -> mx.array:
        """Ids ``[len(targets), width]`` of the likeliest experts of one token, best first.

        Args:
            targets: layers that ``covers`` has agreed to.
            residual: ``[1, 1, hidden]``.
            width: how many experts.
        """
        first = self._at[targets[0]]
        scores = self._scores(first, first + len(targets), residual.reshape(1, -1))[0]
        return mx.argsort(scores, axis=-1)[:, : -width - 1 : -1]

    def _scores(self, first: int, last: int, x: mx.array) -> mx.array:
        """Selection scores ``[tokens, last - first, experts]`` for residuals ``[tokens, hidden]``.

        The residual stands on the left: MLX's CPU backend takes 97 us for a matrix times a column
        of this size and 16 us for a row times the transposed matrix (measured).
        """
        assert self._matrix is not None
        matrix = self._parts.get((first, last))
        if matrix is None:
            part = self._matrix[first:last]
            matrix = self._parts[first, last] = part.reshape(-1, part.shape[-1]).T
        shape = (x.shape[0], last - first, -1)
        if self._activation is None and self._bias is None and self._offset is None:
            # One positive factor per token changes no order: the norm's division is left out.
            return (x @ matrix).reshape(shape)
        scores = (mx.fast.rms_norm(x, None, 1e-6) @ matrix).reshape(shape)
        if self._offset is not None:
            scores = scores + self._offset[first:last]
        if self._activation is not None:
            scores = self._activation(scores)
        if self._bias is not None:
            scores = scores + self._bias[first:last]
        return scores

    def _rank_many(self, target: int, x: mx.array) -> mx.array:
        place = self._at[target]
        scores = self._scores(place, place + 1, x[0])[:, 0]
        return mx.argsort(scores, axis=-1)[:, :-5:-1]


def _fold(layer: Foldable) -> tuple[mx.array, mx.array]:
    """Matrix ``[experts, hidden]`` and offset ``[experts]`` of a norm and a gate in one.

    Logits of a vector of any length are matrix @ (x / rms(x)) + offset.
    """
    zero = layer.gate(layer.norm(mx.zeros((1, layer.hidden), layer.dtype)))[0].astype(mx.float32)
    probe = mx.eye(layer.hidden, dtype=layer.dtype) * LARGE
    logits = layer.gate(layer.norm(probe)).astype(mx.float32)
    matrix = (logits - zero).T / layer.hidden**0.5
    return mx.contiguous(matrix.astype(layer.dtype)), zero


def _agreement(ours: mx.array, theirs: mx.array) -> float:
    a: Any = ours.tolist()
    b: Any = theirs.tolist()
    found = sum(len(set(x) & set(y)) for x, y in zip(a, b, strict=True))
    return found / sum(len(set(y)) for y in b)


def foldable(target: Any, rule: Any) -> Foldable | None:
    """What of a verified layer can be folded: an RMS norm, a linear gate, an elementwise rule.

    Args:
        target: the layer, as ``lookahead`` has probed it.
        rule: how its scores are made of the gate's logits, or None when only the block knows.
    """
    if rule is None or target.norm is None:
        return None
    kind, *rest = rule.label.split("+")
    biased = "bias" in rest
    if set(rest) - {"bias", "wide"} or kind not in _ACTIVATIONS:
        return None
    gate = rule.gate
    if gate.outputs != target.use.site.experts or (kind != "logits" and not biased):
        return None
    bias = gate.biases[0] if biased else None
    activation = _ACTIVATIONS[kind]
    norm, apply = target.norm, gate.apply
    hidden, experts = target.hidden, target.use.site.experts
    return Foldable(norm, apply, activation, bias, hidden, experts, target.dtype)


def _sqrt_softplus(x: mx.array) -> mx.array:
    return mx.sqrt(mx.logaddexp(x, 0))


_ACTIVATIONS: dict[str, Scores | None] = {
    "logits": None,
    "sigmoid": mx.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}
