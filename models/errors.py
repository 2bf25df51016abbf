"""Errors about models: what it is about the model that cannot be streamed."""

from __future__ import annotations

from pathlib import Path

from ..io.errors import MoestreamError


class ModelError(MoestreamError):
    """The model cannot be run by moestream."""


class NotMoEModel(ModelError):
    """The model has no routed experts that could be streamed."""

    def __init__(self, directory: Path, model_type: str) -> None:
        super().__init__(
            f"{directory} is not a Mixture-of-Experts model that moestream can stream "
            f"(model type {model_type!r} has no SwitchGLU or SwitchMLP layer); run it with mlx-lm"
        )


class UnsupportedModel(ModelError):
    """mlx-lm does not know the model type or cannot build it from this checkpoint."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"mlx-lm cannot load {directory}: {problem}")
        self.problem = problem


class ExpertsNotStacked(ModelError):
    """The checkpoint does not hold each layer's experts as one stacked tensor."""

    def __init__(self, directory: Path, tensor: str) -> None:
        super().__init__(
            f"{directory} does not store {tensor} stacked over the experts, so single experts "
            "cannot be read in place; make a store of it with `moestream pack`, convert it with "
            "mlx_lm.convert, or hold every expert with memory='all'"
        )
        self.tensor = tensor
