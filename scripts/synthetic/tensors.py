"""The tensors of a checkpoint under mlx-lm's names; their bytes are made when they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .gates import Signs, make_gate, normed_length, sign_rows
from .routing import Routing
from .shapes import BITS, GROUP, MX_GROUP, Shape

Array = npt.NDArray[Any]
Blocks = Callable[["Noise"], Iterator[Array]]

BLOCK = 4 << 20
"""Bytes that are written at once."""

POOL = 32 << 20
SIZES = {"U32": 4, "BF16": 2, "U8": 1}

TINY = 1e-6
"""Size of what a layer adds to the residual stream with recorded routing: nothing in bf16, and
96 times this in float32 after 48 layers."""

FIRST_TOKEN = 512
"""Id of the token that stands for step 0: special tokens and single bytes lie before it."""

CERTAINTY = 32.0
"""Logit of the token that comes next; all others have 0."""


class Noise:
    """Random bytes, used again and again from random places: new ones are slower than a drive.

    Args:
        seed: of the bytes and the places.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._pool: npt.NDArray[np.uint8] | None = None

    def block(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """``nbytes`` of them, at most ``BLOCK``."""
        if self._pool is None:
            words = self.rng.integers(0, 1 << 64, (POOL + BLOCK) // 8, np.uint64)
            self._pool = words.view(np.uint8)
        start = int(self.rng.integers(0, POOL))
        return self._pool[start : start + nbytes]


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: ``blocks(noise)`` gives its bytes piece by piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Blocks

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return int(np.prod(self.shape)) * SIZES[self.dtype]


def bf16(values: Array) -> npt.NDArray[np.uint16]:
    """float32 rounded to bfloat16, as its bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _random(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Random bits: any are valid 4-bit numbers."""
    total = int(np.prod(shape)) * SIZES[dtype]

    def blocks(noise: Noise) -> Iterator[Array]:
        for start in range(0, total, BLOCK):
            yield noise.block(min(BLOCK, total - start))

    return Tensor(name, dtype, shape, blocks)


def _constant(name: str, value: float, *shape: int, dtype: str = "BF16") -> Tensor:
    """One number again and again."""
    item = bf16(np.array([value])) if dtype == "BF16" else np.array([value], np.uint8)
    total = int(np.prod(shape))
    most = BLOCK // item.itemsize

    def blocks(noise: Noise) -> Iterator[Array]:
        block = np.full(min(most, total), item[0], item.dtype)
        for start in range(0, total, most):
            yield block[: total - start]

    return Tensor(name, dtype, shape, blocks)


def _normal(name: str, deviation: float, *shape: int) -> Tensor:
    """Gaussian numbers."""
    total = int(np.prod(shape))

    def blocks(noise: Noise) -> Iterator[Array]:
        for start in range(0, total, BLOCK):
            count = min(BLOCK, total - start)
            yield bf16(noise.rng.standard_normal(count, np.float32) * np.float32(deviation))

    return Tensor(name, "BF16", shape, blocks)


def _made(name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], Array]) -> Tensor:
    """An array that is made when its turn comes."""

    def blocks(noise: Noise) -> Iterator[Array]:
        yield make()

    return Tensor(name, dtype, shape, blocks)


def _affine(
    prefix: str, *lead: int, rows: int, columns: int, size: float = 1.0, bias: bool = False
) -> Iterator[Tensor]:
    """A random 4-bit matrix whose products with numbers of size 1 have about ``size``."""
    scale = size / (4.6 * columns**0.5)  # random 4-bit numbers around 7.5 deviate by 4.6
    groups = columns // GROUP
    yield _random(f"{prefix}.weight", "U32", (*lead, rows, columns * BITS // 32))
    yield _constant(f"{prefix}.scales", scale, *lead, rows, groups)
    yield _constant(f"{prefix}.biases", -7.5 * scale, *lead, rows, groups)
    if bias:
        yield _normal(f"{prefix}.bias", 0.1 * size, *lead, rows)


def _mxfp4(prefix: str, *lead: int, rows: int, columns: int, size: float = 1.0) -> Iterator[Tensor]:
    """The same in mxfp4, with a bias."""
    exponent = round(np.log2(size / (2.9 * columns**0.5)))  # random numbers deviate by 2.9
    yield _random(f"{prefix}.weight", "U32", (*lead, rows, columns * BITS // 32))
    groups = columns // MX_GROUP
    yield _constant(f"{prefix}.scales", 127 + exponent, *lead, rows, groups, dtype="U8")
    yield _normal(f"{prefix}.bias", 0.1 * size, *lead, rows)


class Tensors:
    """All tensors of a model.

    Args:
        shape: sizes.
        routing: what its routers shall choose, of the sizes of ``shape``; None for random gates
            and experts that do change the residual stream.
    """

    def __init__(self, shape: Shape, routing: Routing | None) -> None:
        self._shape = shape
        self._routing = routing
        self._rows: Signs | None = None
        self._added = 1.0 if routing is None else TINY

    def shards(self) -> Iterator[list[Tensor]]:
        """The tensors file by file: what is outside of the layers, then one layer each."""
        yield list(self._outer())
        for number in range(self._shape.layers):
            yield list(self._layer(number))

    # -- embedding and head -------------------------------------------------------------------

    def _outer(self) -> Iterator[Tensor]:
        shape, size = self._shape, (self._shape.vocabulary, self._shape.hidden)
        yield _constant("model.norm.weight", 1.0, shape.hidden)
        if self._routing is None:
            # An embedding is no product: its own numbers have to be of size 1.
            gain = shape.hidden**0.5
            yield from _affine("model.embed_tokens", rows=size[0], columns=size[1], size=gain)
            yield _normal("lm_head.weight", shape.hidden**-0.5, *size)
            return
        steps = self._routing.steps
        tokens = np.arange(shape.vocabulary) - FIRST_TOKEN
        yield from self._signs("model.embed_tokens", tokens % steps)
        shown = (tokens >= 0) & (tokens < steps)
        yield self._head("lm_head.weight", np.where(shown, (tokens - 1) % steps, -1))

    def _embeddings(self) -> Signs:
        """``[steps, hidden]`` signs."""
        assert self._routing is not None
        if self._rows is None:
            self._rows = sign_rows(self._shape.hidden, self._routing.steps)
        return self._rows

    def _signs(self, prefix: str, index: npt.NDArray[np.int64]) -> Iterator[Tensor]:
        """The embeddings of steps in 4 bits: exact, since -1 and 1 are two of 16 numbers."""
        count, hidden = len(index), self._shape.hidden

        def weight() -> Array:
            nibbles = (self._embeddings() > 0).astype(np.uint8)
            packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
            return np.asarray(packed.view(np.uint32)[index])

        def groups(value: float) -> Array:
            used = self._embeddings()[0, ::GROUP] != 0
            return np.broadcast_to(bf16(np.float32(value) * used), (count, len(used))).copy()

        yield _made(f"{prefix}.weight", "U32", (count, hidden // 8), weight)
        table = (count, hidden // GROUP)
        yield _made(f"{prefix}.scales", "BF16", table, lambda: groups(2.0))
        yield _made(f"{prefix}.biases", "BF16", table, lambda: groups(-1.0))

    def _head(self, name: str, index: npt.NDArray[np.int64]) -> Tensor:
        """The row of a token is the embedding of the step before it; zeros for the index -1.

        Not quantized: MLX's CPU backend adds up 16-bit quantized products in 16 bits, and so many
        equal numbers as there are here would get stuck at an eighth of their sum.
        """
        size = (len(index), self._shape.hidden)
        lines = max(BLOCK // (2 * size[1]), 1)

        def blocks(noise: Noise) -> Iterator[Array]:
            scale = np.float32(CERTAINTY / normed_length(self._embeddings()))
            rows = bf16(self._embeddings().astype(np.float32) * scale)
            for start in range(0, size[0], lines):
                part = index[start : start + lines]
                yield np.where(part[:, None] >= 0, rows[part], np.uint16(0))

        return Tensor(name, "BF16", size, blocks)

    # -- layers -------------------------------------------------------------------------------

    def _layer(self, number: int) -> Iterator[Tensor]:
        """One layer, the experts first: an aligned file begins with them."""
        shape, layer = self._shape, f"model.layers.{number}"
        gpt = shape.kind == "gpt_oss"
        experts = f"{layer}.mlp.{'experts' if gpt else 'switch_mlp'}"
        for name, rows, columns, size in (
            ("gate_proj", shape.inner, shape.hidden, 1.0),
            ("up_proj", shape.inner, shape.hidden, 1.0),
            ("down_proj", shape.hidden, shape.inner, self._added),
        ):
            make = _mxfp4 if gpt else _affine
            prefix = f"{experts}.{name}"
            yield from make(prefix, shape.experts, rows=rows, columns=columns, size=size)
        if shape.kind == "qwen3_next":
            yield from self._shared(f"{layer}.mlp")
        yield from self._gate(f"{layer}.mlp.{'router' if gpt else 'gate'}", number)
        if shape.kind == "qwen3_next" and not shape.full_attention(number):
            yield from self._delta_net(f"{layer}.linear_attn")
        else:
            yield from self._attention(f"{layer}.self_attn")
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield _constant(f"{layer}.{name}.weight", 1.0, shape.hidden)

    def _gate(self, prefix: str, number: int) -> Iterator[Tensor]:
        shape, routing = self._shape, self._routing
        size = (shape.experts, shape.hidden)
        if routing is None:
            yield _normal(f"{prefix}.weight", 2.0 / shape.hidden**0.5, *size)
        else:
            chosen, weights = routing.chosen[:, number], routing.weights[:, number]
            yield _made(
                f"{prefix}.weight",
                "BF16",
                size,
                lambda: bf16(make_gate(chosen, weights, self._embeddings(), shape.experts)),
            )
        if shape.kind == "gpt_oss":
            yield _constant(f"{prefix}.bias", 0.0, shape.experts)

    def _shared(self, block: str) -> Iterator[Tensor]:
        inner, hidden = self._shape.inner, self._shape.hidden
        prefix = f"{block}.shared_expert"
        yield from _affine(f"{prefix}.gate_proj", rows=inner, columns=hidden)
        yield from _affine(f"{prefix}.up_proj", rows=inner, columns=hidden)
        yield from _affine(f"{prefix}.down_proj", rows=hidden, columns=inner, size=self._added)
        yield _normal(f"{block}.shared_expert_gate.weight", hidden**-0.5, 1, hidden)

    def _attention(self, prefix: str) -> Iterator[Tensor]:
        shape = self._shape
        bias = shape.kind == "gpt_oss"
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        gated = 2 if shape.kind == "qwen3_next" else 1
        for name, rows, columns, size in (
            ("q_proj", gated * queries, shape.hidden, 1.0),
            ("k_proj", keys, shape.hidden, 1.0),
            ("v_proj", keys, shape.hidden, 1.0),
            ("o_proj", shape.hidden, queries, self._added),
        ):
            yield from _affine(f"{prefix}.{name}", rows=rows, columns=columns, size=size, bias=bias)
        if shape.kind == "gpt_oss":
            yield _normal(f"{prefix}.sinks", 1.0, shape.heads)
        else:
            yield _constant(f"{prefix}.q_norm.weight", 1.0, shape.head_size)
            yield _constant(f"{prefix}.k_norm.weight", 1.0, shape.head_size)

    def _delta_net(self, prefix: str) -> Iterator[Tensor]:
        shape, size = self._shape, self._shape.linear_head_size
        keys, values = shape.key_heads * size, shape.value_heads * size
        for name, rows, columns, added in (
            ("in_proj_qkvz", 2 * keys + 2 * values, shape.hidden, 1.0),
            ("in_proj_ba", 2 * shape.value_heads, shape.hidden, 1.0),
            ("out_proj", shape.hidden, values, self._added),
        ):
            yield from _affine(f"{prefix}.{name}", rows=rows, columns=columns, size=added)
        yield _normal(f"{prefix}.conv1d.weight", 0.5, 2 * keys + values, 4, 1)
        yield _constant(f"{prefix}.A_log", 1.0, shape.value_heads)
        yield _constant(f"{prefix}.dt_bias", 1.0, shape.value_heads)
        yield _constant(f"{prefix}.norm.weight", 1.0, size)
