"""Listening to single modules of a model: what they are called with, where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Tap(nn.Module):
    """Stands in for a module and remembers what it was last called with.

    The module stays a child, so its parameters stay in the model's tree; other attributes are the
    module's own.
    """

    def __init__(self, inner: nn.Module, on_input: Callable[[mx.array], None] | None = None):
        super().__init__()
        self.inner = inner
        self.held = Held(on_input)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        held = self.held
        held.array = x
        if held.on_input is not None:
            held.on_input(x)
        return self["inner"](x, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self:
            raise AttributeError(name)
        inner = self["inner"]
        return inner if name == "inner" else getattr(inner, name)

    def take(self) -> mx.array | None:
        """The input of the last call, once."""
        return self.held.take()


class Held:
    """What a tap remembers; a plain object, or the array would be a parameter."""

    __slots__ = ("array", "on_input")

    def __init__(self, on_input: Callable[[mx.array], None] | None = None) -> None:
        self.array: mx.array | None = None
        self.on_input = on_input

    def take(self) -> mx.array | None:
        array, self.array = self.array, None
        return array


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """An attribute of a module, or an entry of a list, that holds a module."""

    owner: Any
    key: Any

    def get(self) -> Any:
        """The module that is there now."""
        return self.owner[self.key] if self.listed else getattr(self.owner, self.key)

    def put(self, module: Any) -> None:
        """Replace it."""
        if self.listed:
            self.owner[self.key] = module
        else:
            setattr(self.owner, self.key, module)

    @property
    def listed(self) -> bool:
        return isinstance(self.owner, list)
