"""The rows of a benchmark, and the file that they are appended to."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from .errors import BenchError, HeaderChanged

Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Row:
    """One arm of one cell. Empty is what does not apply or is not known.

    Times per token are medians over repetitions in milliseconds; of a prompt (``prefill``) per
    token of the prompt; of several callers per token of all of them. docs/bench/README.md says
    more about each column.
    """

    # When, where, with what.
    time: str = ""
    status: Status = "ok"
    note: str = ""
    suite: str = ""
    cpu: str = ""
    gpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    os: str = ""
    device: str = ""
    commit: str = ""
    python: str = ""
    moestream: str = ""
    mlx: str = ""
    mlx_lm: str = ""
    # The model as it was run.
    model: str = ""
    model_type: str = ""
    layers: int | None = None
    experts: int | None = None
    top_k: int | None = None
    record_bytes: int | None = None
    bits: float | None = None
    routing: str = ""
    conditions: str = ""
    # The cell.
    kind: str = ""
    arm: str = ""
    cache: str = ""
    slots: float | None = None
    share: float | None = None
    expert_bytes: int | None = None
    context: int | None = None
    callers: int | None = None
    tokens: int | None = None
    n: int | None = None
    turns: str = ""
    direct_share: float | None = None
    # What a token took.
    ms_per_token: float | None = None
    ms_q1: float | None = None
    ms_q3: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    samples_ms: str = ""
    tokens_per_s: float | None = None
    stall_ms: float | None = None
    sync_ms: float | None = None
    host_ms: float | None = None
    compute_ms: float | None = None
    host_us_per_layer: float | None = None
    first_token_ms: float | None = None
    longest_gap_ms: float | None = None
    # What it read.
    routed_per_token: float | None = None
    hit_rate: float | None = None
    bytes_per_token: float | None = None
    waste: float | None = None
    drive_bytes_per_s: float | None = None
    drive_share: float | None = None
    # How that compares.
    bound_ms: float | None = None
    bound_over_measured: float | None = None
    own_bound_ms: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values without what is empty."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    def failed(self, reason: str, *, status: Status = "failed") -> Row:
        """The row of an arm that has no figures, with the reason in a line."""
        return replace(self, status=status, note=" ".join(reason.split()))


COLUMNS = tuple(field.name for field in fields(Row))


class Ledger:
    """A CSV file that rows are appended to. Nothing in it is ever rewritten.

    Raises:
        HeaderChanged: the file has other columns.
        BenchError: it cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                header = next(csv.reader(file), None)
                if header is None:
                    csv.writer(file).writerow(COLUMNS)
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"{path} cannot be written to: {error}") from error
        if header is not None:
            _check_header(path, header)

    def append(self, row: Row) -> None:
        """Write a row; it is in the file when this returns.

        Raises:
            BenchError: the drive is full, or the file has become unwritable.
        """
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow([_text(value) for value in asdict(row).values()])
        except OSError as error:
            raise BenchError(f"{self.path} cannot be written to: {error.strerror}") from error


def read_rows(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        HeaderChanged: the file has other columns.
        BenchError: it cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            _check_header(path, next(lines, []))
            return list(_rows(path, lines))
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error


def _rows(path: Path, lines: Any) -> Iterator[Row]:
    types = get_type_hints(Row)
    for number, line in enumerate(lines, 2):
        if len(line) != len(COLUMNS):
            raise BenchError(f"{path}, line {number}: {len(line)} cells, not {len(COLUMNS)}")
        try:
            yield Row(
                **{
                    name: _value(text, types[name])
                    for name, text in zip(COLUMNS, line, strict=True)
                    if text
                }
            )
        except ValueError as error:
            raise BenchError(f"{path}, line {number}: {error}") from error


def _check_header(path: Path, header: list[str]) -> None:
    if tuple(header) != COLUMNS:
        missing = [name for name in COLUMNS if name not in header]
        raise HeaderChanged(path, missing, [name for name in header if name not in COLUMNS])


def _text(value: Any) -> str:
    """Six digits are more than any of these figures is worth."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(text: str, kind: Any) -> Any:
    if kind == int | None:
        return int(text)
    return float(text) if kind == float | None else text
