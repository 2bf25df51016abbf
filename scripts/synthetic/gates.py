"""Gates whose logits say what a recording says, for embeddings that are orthogonal signs.

The embedding of step t is a row e_t of a Hadamard matrix. The experts' outputs are made so small
that the residual stream stays e_t in every layer, so a gate sum_t s_t e_t^T / |e|^2 gives exactly
the logits s_t that were asked for.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Signs = npt.NDArray[np.int8]

FLOOR = 6.0
"""Logit of the last routed expert; all others have 0. On 2048 steps of the real shapes gates
rounded to bf16 gave logits that were off by 0.06 at most, to 8 bits by 0.08, to 4 bits by 1.2."""

GAP = 0.25
"""Least distance between the logits of two ranks: bf16 has steps of 0.06 between 8 and 16."""

SPAN = 4.0
"""Most distance between the logits of the first and the last rank, unless ``GAP`` asks for more."""


def sign_rows(hidden: int, count: int) -> Signs:
    """Orthogonal rows ``[count, hidden]`` of -1 and 1, in some sizes with zeros behind them.

    A Hadamard matrix of Sylvester's kind times one of Paley's first kind: all powers of two, and
    such widths as 2880 = 2879 + 1. Else the largest power of two, the other columns zero.
    """
    order, prime = factor(hidden)
    width = order * (prime + 1 if prime else 1)
    if count > width:
        raise ValueError(f"there are {width} such rows of {hidden} columns, not {count}")
    rows = np.zeros((count, hidden), np.int8)
    index = np.arange(count)
    outer = _sylvester(index // (width // order), order)
    inner = _paley(prime)[index % (width // order)] if prime else np.ones((count, 1), np.int8)
    rows[:, :width] = (outer[:, :, None] * inner[:, None, :]).reshape(count, width)
    return rows


def factor(hidden: int) -> tuple[int, int]:
    """(power of two, prime of Paley's matrix or 0) of the matrix for a width."""
    order, rest = 1, hidden
    while True:
        if rest == 1:
            return order, 0
        prime = rest - 1
        if prime % 4 == 3 and all(prime % d for d in range(2, math.isqrt(prime) + 1)):
            return order, prime
        if rest % 2:
            return 1 << (hidden.bit_length() - 1), 0
        order, rest = 2 * order, rest // 2


def most_steps(hidden: int) -> int:
    """How many rows there are for a width."""
    order, prime = factor(hidden)
    return order * (prime + 1 if prime else 1)


def _sylvester(rows: npt.NDArray[np.int64], order: int) -> Signs:
    matrix = np.ones((1, 1), np.int8)
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix[rows])


def _paley(prime: int) -> Signs:
    residue = np.full(prime, -1, np.int8)
    residue[np.arange(1, prime, dtype=np.int64) ** 2 % prime] = 1
    residue[0] = 0
    index = np.arange(prime)
    matrix = np.ones((prime + 1, prime + 1), np.int8)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = residue[(index[:, None] - index[None, :]) % prime]
    matrix[index + 1, index + 1] = 1  # the unit matrix is added
    return matrix


def rank_logits(weights: Floats) -> Floats:
    """Logits ``[..., ranks]`` of gate weights of the same shape, the largest first.

    Differences are those of the logarithms, but for ``GAP`` and ``SPAN``.
    """
    last = weights[..., -1:]
    above = np.clip(np.log(np.maximum(weights, 1e-9) / np.maximum(last, 1e-9)), 0.0, SPAN)
    logits = FLOOR + above.astype(np.float32)
    for rank in range(weights.shape[-1] - 2, -1, -1):
        np.maximum(logits[..., rank], logits[..., rank + 1] + GAP, out=logits[..., rank])
    return logits


def make_gate(chosen: npt.NDArray[np.uint16], weights: Floats, rows: Signs, experts: int) -> Floats:
    """Matrix ``[experts, hidden]`` of one layer.

    Args:
        chosen: ``[steps, ranks]``, experts of each step, the largest weight first.
        weights: ``[steps, ranks]``.
        rows: ``[steps, hidden]``, embeddings.
        experts: how many there are.
    """
    logits = np.zeros((len(chosen), experts), np.float32)
    np.put_along_axis(logits, chosen.astype(np.int64), rank_logits(weights), axis=1)
    return np.asarray(logits.T @ rows.astype(np.float32) / np.float32(normed_length(rows)))


def normed_length(rows: Signs) -> float:
    """Product of an embedding with itself behind an RMS norm."""
    return math.sqrt(int(np.count_nonzero(rows[0])) * rows.shape[1])
