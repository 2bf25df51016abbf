"""The module that the model calls in the place of mlx-lm's SwitchGLU or SwitchMLP."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn


class SwitchRunner(Protocol):
    """Gets the experts of a call into slots and runs the switch module on them."""

    def run(self, switch: StreamingSwitch, x: mx.array, indices: mx.array) -> mx.array:
        """As ``StreamingSwitch.__call__``."""


class StreamingSwitch:
    """Hands each call of a MoE block to the runner.

    A plain object rather than an ``nn.Module``: the model's parameter tree then holds the trunk
    only, and tree functions do not follow the reference to the runner.

    Attributes:
        inner: mlx-lm's own switch module. Its parameters are slot pools ``[slots, ...]``, so it
            takes slot ids where it took expert ids; activation, bias and sorting stay its own.
        group: ordinal of the streamed layer in the order of the forward pass.
        layer: number of the transformer layer.
    """

    __slots__ = ("group", "inner", "layer", "runner")

    def __init__(self, inner: nn.Module, group: int, layer: int, runner: SwitchRunner) -> None:
        self.inner = inner
        self.group = group
        self.layer = layer
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        """Whatever else a block keeps in its switch module (muse_spark: a norm)."""
        return getattr(self.inner, name)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Run the routed experts.

        Args:
            x: ``[..., hidden]``.
            indices: ``[..., top_k]`` expert ids, any integer dtype.

        Returns:
            ``[..., top_k, hidden]``, as mlx-lm's module would.
        """
        return self.runner.run(self, x, indices)
