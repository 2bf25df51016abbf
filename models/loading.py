"""Builds the mlx-lm model without reading a tensor, and finds where each parameter came from.

mlx-lm's ``sanitize`` renames (and sometimes transforms) tensors between file and module. A renamed
tensor is still the same array object, so identity tells which file tensor a parameter is; one that
``sanitize`` has computed has no source in the file. Runs on the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class LazyModel:
    """A model whose parameters are all unevaluated.

    Attributes:
        model: the mlx-lm model.
        config: its config, as mlx-lm read it.
        sources: parameter path -> name of the tensor in the checkpoint, for each parameter that
            is a tensor of the checkpoint unchanged.
    """

    model: nn.Module
    config: dict[str, Any]
    sources: dict[str, str]


def load_lazily(directory: Path, elsewhere: Mapping[str, mx.array] | None = None) -> LazyModel:
    """Load a checkpoint directory with mlx-lm, evaluating nothing.

    Args:
        directory: of the checkpoint.
        elsewhere: stand-ins for tensors that lie outside of its safetensors files, by name.
            mlx-lm takes them for tensors of the checkpoint.

    Raises:
        UnsupportedModel: mlx-lm does not know the type, or config and tensors do not fit it.
    """
    from mlx_lm.utils import _get_classes, load_model

    tensors: dict[int, str] = {}
    kept: list[mx.array] = []  # keeps the ids above from being reused

    def classes(config: dict[str, Any]) -> tuple[Callable[[Any], nn.Module], Any]:
        model_class, args_class = _get_classes(config)

        def build(args: Any) -> nn.Module:
            model: nn.Module = model_class(args)
            sanitize = getattr(model, "sanitize", lambda weights: weights)

            def traced(weights: dict[str, mx.array]) -> dict[str, mx.array]:
                weights.update(elsewhere or {})
                for name, array in weights.items():
                    tensors[id(array)] = name
                    kept.append(array)
                result: dict[str, mx.array] = sanitize(weights)
                return result

            # On the instance, past nn.Module's bookkeeping: mlx-lm's class stays untouched.
            object.__setattr__(model, "sanitize", traced)
            return model

        return build, args_class

    try:
        model, config = load_model(directory, lazy=True, get_model_classes=classes)
    except Exception as error:
        raise UnsupportedModel(directory, _first_line(error)) from error
    object.__delattr__(model, "sanitize")
    sources = {
        path: tensors[id(array)]
        for path, array in tree_flatten(model.parameters())
        if id(array) in tensors
    }
    return LazyModel(model, config, sources)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    if isinstance(error, KeyError):
        return f"the config lacks {text}"
    return text.splitlines()[0]
