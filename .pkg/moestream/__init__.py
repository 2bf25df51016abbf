"""moestream: run Mixture-of-Experts models larger than memory on MLX, streaming experts from SSD.

    async with await moestream.Engine.open("path/to/model", memory="8GB") as engine:
        result = await engine.generate("Once upon a time", max_tokens=64)

Names are imported on first use, so that `import moestream` costs nothing and needs no MLX.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .io.errors import (
        CheckpointError,
        CheckpointNotFound,
        CorruptCheckpoint,
        MoestreamError,
        ReadFailed,
    )
    from .runtime.api import Chunk, Generation, Statistics, TokenLogprob
    from .runtime.engine import Engine
    from .runtime.prefetch import PrefetchConfig

__version__: str

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "Chunk",
    "CorruptCheckpoint",
    "Engine",
    "Generation",
    "MoestreamError",
    "PrefetchConfig",
    "ReadFailed",
    "Statistics",
    "TokenLogprob",
    "__version__",
]

# Where each public name lives. The imports and `__all__` above say the same to type checkers,
# which cannot read a table; tests/test_layout.py holds the three together.
_MODULES = {
    "CheckpointError": ".io.errors",
    "CheckpointNotFound": ".io.errors",
    "Chunk": ".runtime.api",
    "CorruptCheckpoint": ".io.errors",
    "Engine": ".runtime.engine",
    "Generation": ".runtime.api",
    "MoestreamError": ".io.errors",
    "PrefetchConfig": ".runtime.prefetch",
    "ReadFailed": ".io.errors",
    "Statistics": ".runtime.api",
    "TokenLogprob": ".runtime.api",
}


if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value = metadata.version("moestream")
        elif name in _MODULES:
            value = getattr(import_module(_MODULES[name], __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # found without this function from now on
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
