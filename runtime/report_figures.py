"""The figures of a report, as records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .report_series import CAUSES


@dataclass(frozen=True, slots=True)
class TimeFigures:
    """Milliseconds a token; ``tokens`` counts prompt chunks if nothing was decoded."""

    tokens: int
    prompt_tokens: int
    prompt_ms: float
    mean_ms: float
    median_ms: float
    p95_ms: float
    parts_ms: dict[str, float]

    @property
    def stall_ms(self) -> float:
        return sum(self.parts_ms[cause] for cause in CAUSES)

    @property
    def stall_share(self) -> float:
        return self.stall_ms / self.mean_ms if self.mean_ms else 0.0


@dataclass(frozen=True, slots=True)
class DriveFigures:
    """What was read during decode.

    Attributes:
        busy_share: share of the time in which a read was running.
        busy_rate: bytes per second while one was.
        utilisation: of the drive's bandwidth over all of the time; None if that is not on record.
        bound_ms: token time if computing and reading overlapped perfectly; None likewise.
    """

    reads: int
    nbytes: int
    bytes_per_token: float
    busy_share: float
    busy_rate: float
    rate: float
    bandwidth: float | None
    utilisation: float | None
    bound_ms: float | None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Reads on a guess, over the whole trace; None where the file does not tell them apart."""

    reads: int | None
    nbytes: int
    used_bytes: int
    evicted_unused_bytes: int
    unused_bytes: int
    waste: float
    lead_ms: dict[str, float]


@dataclass(slots=True)
class LayerFigures:
    """One layer during decode; hits are None without routing on record."""

    group: int
    layer: int
    experts: int | None = None
    slots: int | None = None
    routed: int = 0
    late: int = 0
    evicted: int = 0
    unpredicted: int = 0
    unknown: int = 0
    stall_ms: float = 0.0
    nbytes: int = 0
    belady_hits: int | None = None
    lru_hits: int | None = None

    @property
    def hits(self) -> int | None:
        waited = self.late + self.evicted + self.unpredicted + self.unknown
        return max(self.routed - waited, 0) if self.routed else None


@dataclass(frozen=True, slots=True)
class Usefulness:
    """How often guesses of this distance and rank were routed, and how often they were said to."""

    distance: int
    rank: int
    guesses: int
    useful: int
    expected: float


@dataclass(slots=True)
class Report:
    """Everything that is told about a trace."""

    file: str
    model: str | None
    version: str | None
    config: dict[str, Any]
    notices: list[str]
    missing: list[str]
    decoded: bool
    time: TimeFigures
    drive: DriveFigures
    speculation: Speculation
    layers: list[LayerFigures]
    usefulness: list[Usefulness]
    hit_rates: dict[str, float]
    parts: list[dict[str, float]] = field(repr=False)
    summary: str = ""

    def to_json(self) -> dict[str, Any]:
        """The figures, without the series that are only drawn."""
        document = {name: value for name, value in asdict(self).items() if name != "parts"}
        for entry, layer in zip(document["layers"], self.layers, strict=True):
            entry["hits"] = layer.hits
        return {"summary": document.pop("summary"), **document}
