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
        ChecksumMismatch,
        CorruptCheckpoint,
        LoopClosed,
        MoestreamError,
        ReadFailed,
        ReadTimeout,
        StoreMismatch,
    )
    from .models.errors import (
        ExpertsNotStacked,
        ModelError,
        NotMoEModel,
        UnsupportedModel,
    )
    from .runtime.api import (
        Chunk,
        Generation,
        GenerationStats,
        PrefetchStatistics,
        Statistics,
        TokenLogprob,
    )
    from .runtime.engine import (
        Engine,
        SamplingArguments,
    )
    from .runtime.errors import (
        BudgetTooSmall,
        EngineBusy,
        EngineClosed,
        EngineDead,
        GenerationFailed,
        HubUnavailable,
        InvalidRequest,
        OpenFailed,
        PromptCacheFileError,
        PromptTooLong,
        RequestTimeout,
        TokenizerBroken,
        TraceUnwritable,
    )
    from .runtime.plan import (
        Plan,
    )
    from .runtime.prefetch import (
        PrefetchConfig,
    )
    from .runtime.residency import (
        IntegrityError,
    )

__version__: str

__all__ = [
    "BudgetTooSmall",
    "CheckpointError",
    "CheckpointNotFound",
    "ChecksumMismatch",
    "Chunk",
    "CorruptCheckpoint",
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "EngineDead",
    "ExpertsNotStacked",
    "Generation",
    "GenerationFailed",
    "GenerationStats",
    "HubUnavailable",
    "IntegrityError",
    "InvalidRequest",
    "LoopClosed",
    "ModelError",
    "MoestreamError",
    "NotMoEModel",
    "OpenFailed",
    "Plan",
    "PrefetchConfig",
    "PrefetchStatistics",
    "PromptCacheFileError",
    "PromptTooLong",
    "ReadFailed",
    "ReadTimeout",
    "RequestTimeout",
    "SamplingArguments",
    "Statistics",
    "StoreMismatch",
    "TokenLogprob",
    "TokenizerBroken",
    "TraceUnwritable",
    "UnsupportedModel",
    "__version__",
]

# Where each public name lives. The imports and `__all__` above say the same to type checkers,
# which cannot read a table; tests/test_layout.py holds the three together.
_MODULES = {
    "BudgetTooSmall": ".runtime.errors",
    "CheckpointError": ".io.errors",
    "CheckpointNotFound": ".io.errors",
    "ChecksumMismatch": ".io.errors",
    "Chunk": ".runtime.api",
    "CorruptCheckpoint": ".io.errors",
    "Engine": ".runtime.engine",
    "EngineBusy": ".runtime.errors",
    "EngineClosed": ".runtime.errors",
    "EngineDead": ".runtime.errors",
    "ExpertsNotStacked": ".models.errors",
    "Generation": ".runtime.api",
    "GenerationFailed": ".runtime.errors",
    "GenerationStats": ".runtime.api",
    "HubUnavailable": ".runtime.errors",
    "IntegrityError": ".runtime.residency",
    "InvalidRequest": ".runtime.errors",
    "LoopClosed": ".io.errors",
    "ModelError": ".models.errors",
    "MoestreamError": ".io.errors",
    "NotMoEModel": ".models.errors",
    "OpenFailed": ".runtime.errors",
    "Plan": ".runtime.plan",
    "PrefetchConfig": ".runtime.prefetch",
    "PrefetchStatistics": ".runtime.api",
    "PromptCacheFileError": ".runtime.errors",
    "PromptTooLong": ".runtime.errors",
    "ReadFailed": ".io.errors",
    "ReadTimeout": ".io.errors",
    "RequestTimeout": ".runtime.errors",
    "SamplingArguments": ".runtime.engine",
    "Statistics": ".runtime.api",
    "StoreMismatch": ".io.errors",
    "TokenLogprob": ".runtime.api",
    "TokenizerBroken": ".runtime.errors",
    "TraceUnwritable": ".runtime.errors",
    "UnsupportedModel": ".models.errors",
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
