"""Quantizes the projections of expert modules again, piece by piece. Runs on an MLX thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
"""What MLX supports; of several the one that mlx-lm takes unless told otherwise is 64."""

BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}

PIECE_BYTES = 256 << 20
"""Unquantized numbers that are made at once (arbitrary)."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a projection is quantized.

    Attributes:
        bits, group_size, mode: as in mlx-lm's config.
        global_scale: whether each expert has an nvfp4 scale of its own.
    """

    bits: int
    group_size: int
    mode: str
    global_scale: bool = False

    def to_config(self) -> dict[str, int | str | bool]:
        """The entry in mlx-lm's config."""
        entry: dict[str, int | str | bool] = {
            "group_size": self.group_size,
            "bits": self.bits,
            "mode": self.mode,
        }
        return {**entry, "global_scale": True} if self.global_scale else entry

    def __str__(self) -> str:
        return f"{self.mode} {self.bits} bits in groups of {self.group_size}"


def scheme_of(linear: Any) -> Scheme | None:
    """How a SwitchLinear or QuantizedSwitchLinear is quantized; None where it is not."""
    if "scales" not in linear:
        return None
    scaled = isinstance(linear.get("global_scale"), mx.array)
    return Scheme(linear.bits, linear.group_size, linear.mode, scaled)


def parameters(linear: Any) -> dict[str, mx.array]:
    """The arrays of a switch linear, ``[experts, ...]``."""
    return {name: array for name, array in linear.items() if isinstance(array, mx.array)}


def numbers_per_expert(linear: Any) -> int:
    """Weights of one expert's projection."""
    return int(linear.input_dims) * int(linear.output_dims)


def convert(linear: Any, scheme: Scheme | None, begin: int, end: int) -> dict[str, mx.array]:
    """Parameters of experts ``begin`` to ``end`` under another scheme, unevaluated.

    Args:
        linear: with arrays ``[experts, ...]``.
        scheme: None, or the one that it has, keeps them as they are.
        begin, end: range of experts; a single one where ``global_scale`` is set.
    """
    given = {name: array[begin:end] for name, array in parameters(linear).items()}
    before = scheme_of(linear)
    if scheme is None or scheme == before:
        return given
    weight = given.pop("weight") if before is None else _dequantize(given, before)
    given["weight"], given["scales"], *biases = mx.quantize(
        weight, scheme.group_size, scheme.bits, mode=scheme.mode
    )
    if biases:
        given["biases"] = biases[0]
    return given


def _dequantize(given: dict[str, mx.array], scheme: Scheme) -> mx.array:
    """The numbers that a quantized projection stands for; takes its arrays out of ``given``."""
    weight, scales = given.pop("weight"), given.pop("scales")
    biases, scale = given.pop("biases", None), given.pop("global_scale", None)
    group_size, bits, mode = scheme.group_size, scheme.bits, scheme.mode
    if scale is None:
        return mx.dequantize(weight, scales, biases, group_size, bits, mode)
    one: Any = mx.dequantize(weight[0], scales[0], None, group_size, bits, mode, scale[0])
    result: mx.array = one[None]
    return result


def converted(linear: Any, scheme: Scheme | None) -> Iterator[tuple[int, dict[str, mx.array]]]:
    """All experts under another scheme, in evaluated pieces: (first expert, its arrays).

    At most about ``PIECE_BYTES`` of unquantized numbers exist at once, besides the source.
    """
    experts = int(linear.num_experts)
    step = max(PIECE_BYTES // (4 * numbers_per_expert(linear)), 1)
    before = scheme_of(linear)
    if before is not None and before.global_scale and scheme not in (None, before):
        step = 1
    for begin in range(0, experts, step):
        piece = {
            name: mx.contiguous(array)
            for name, array in convert(linear, scheme, begin, min(begin + step, experts)).items()
        }
        mx.eval(piece)
        yield begin, piece


def shapes(linear: Any, scheme: Scheme | None) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    """Shape (of one expert) and dtype of each parameter under a scheme, computing nothing."""
    return {
        name: (tuple(array.shape[1:]), array.dtype)
        for name, array in convert(linear, scheme, 0, 1).items()
    }
