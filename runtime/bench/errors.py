"""What can be wrong with a benchmark or its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...io.errors import MoestreamError


class BenchError(MoestreamError):
    """A benchmark cannot be run as asked; says what would do."""


class SuiteInvalid(BenchError):
    """A file with a suite says something that makes no sense."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class HeaderChanged(BenchError):
    """A file with rows has other columns than the rows to be appended."""

    def __init__(self, path: Path, missing: Sequence[str], extra: Sequence[str]) -> None:
        parts = [
            f"{what} {', '.join(names)}"
            for what, names in (("lacks", missing), ("has besides", extra))
            if names
        ]
        how = " and ".join(parts) or "has them in another order"
        super().__init__(
            f"{path} has other columns than this version writes (it {how}); "
            "give another file with --csv, or move that one away"
        )


class RivalFailed(BenchError):
    """The program of another system did not do as the protocol says."""


class MatplotlibMissing(BenchError):
    """The package that draws is not installed."""

    def __init__(self) -> None:
        super().__init__(
            'matplotlib is not installed; drawing needs: pip install "moestream[analysis]"'
        )
