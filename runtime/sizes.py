"""What a model asks of memory, as far as headers tell. Plain numbers, no MLX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Caches that keep their last rows.

    Attributes:
        rows: how many.
        row_bytes: of one row of all these caches.
    """

    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Sizes of the caches of one sequence. Bytes.

    Attributes:
        fixed: of what does not grow.
        token: growth per token of what keeps every row.
        step: rows that these grow by at once.
        largest: the part of ``token`` that is of the largest cache.
        windows: caches that keep their last rows.
    """

    fixed: int = 0
    token: int = 0
    step: int = 1
    largest: int = 0
    windows: tuple[Window, ...] = ()

    def held(self, context: int) -> int:
        """Bytes of a sequence of ``context`` tokens while it is decoded."""
        rows = context + self.step - 1 if self.token else 0
        windows = sum(min(window.rows, context) * window.row_bytes for window in self.windows)
        return self.fixed + rows * self.token + windows

    def passing(self, context: int, chunk: int) -> int:
        """Bytes that come on top while a prompt is computed in chunks.

        Windows keep the rows of a chunk until the next one, and the largest cache is there twice
        while it grows.
        """
        more = sum(
            (min(window.rows + chunk, context) - min(window.rows, context)) * window.row_bytes
            for window in self.windows
        )
        return more + context * self.largest


@dataclass(frozen=True, slots=True)
class LayerSize:
    """What one MoE layer asks of the plan.

    Attributes:
        layer: number of the transformer layer.
        experts: how many there are.
        top_k: how many a token is routed to.
        slot_bytes: memory of one slot.
        record_bytes: bytes of one expert on disk.
    """

    layer: int
    experts: int
    top_k: int
    slot_bytes: int
    record_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Everything about a model that its memory depends on. Bytes.

    Attributes:
        layers: the MoE layers in the order of the forward pass.
        trunk_bytes: all other parameters, as they lie in memory.
        cache: of the caches of one sequence.
        scratch_token_bytes: activations of a prompt chunk per token of it.
        scratch_pair_bytes: the same per pair of a chunk token and a context token (scores).
        vocabulary: number of logits.
        longest_context: tokens that the model was made for.
    """

    layers: tuple[LayerSize, ...]
    trunk_bytes: int
    cache: CacheSize
    scratch_token_bytes: int
    scratch_pair_bytes: int
    vocabulary: int
    longest_context: int
