"""What a trace says, as typed records; times are in microseconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..io.errors import MoestreamError


class TraceUnreadable(MoestreamError):
    """The file cannot be read or holds no trace."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot read the trace {path}: {why}")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a thread."""

    ts: float
    dur: float
    tid: int

    @property
    def end(self) -> float:
        return self.ts + self.dur


@dataclass(frozen=True, slots=True)
class Token(Span):
    request: int
    token: int


@dataclass(frozen=True, slots=True)
class Prompt(Span):
    request: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Stall(Span):
    """The compute thread waited; ``unknown`` experts have no cause on record."""

    group: int
    layer: int
    late: int
    evicted: int
    unpredicted: int
    unknown: int

    @property
    def experts(self) -> int:
        return self.late + self.evicted + self.unpredicted + self.unknown


@dataclass(frozen=True, slots=True)
class Read(Span):
    group: int
    layer: int
    expert: int
    nbytes: int
    speculative: bool | None
    asked: float | None


@dataclass(frozen=True, slots=True)
class Sync(Span):
    group: int
    layer: int


@dataclass(frozen=True, slots=True)
class Route:
    """One layer call: the distinct experts that its router chose, in routed order.

    Those of a prompt are in the order of their heat, the hottest last; ``tail`` are the experts of
    its last tokens, token by token.
    """

    ts: float
    group: int
    layer: int
    forward: int
    experts: tuple[int, ...]
    tokens: int
    tail: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """Ranked guesses for a layer call to come; ``group`` and ``layer`` are the target's."""

    ts: float
    group: int
    layer: int
    forward: int
    distance: int
    experts: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class QueueOperation:
    ts: float
    op: str
    group: int
    expert: int
    probability: float


@dataclass(frozen=True, slots=True)
class Eviction:
    ts: float
    group: int
    expert: int
    unused: bool


@dataclass(frozen=True, slots=True)
class Use:
    """The first use of an expert that was read on a guess."""

    ts: float
    group: int
    expert: int
    lead: float


@dataclass(frozen=True, slots=True)
class Depth:
    """How many demands and guesses there were from here on."""

    ts: float
    demand: int
    guesses: int


@dataclass(frozen=True, slots=True)
class Layer:
    """An MoE layer; ``slots`` and ``record_bytes`` are None where the file does not say."""

    group: int
    layer: int
    experts: int
    top_k: int
    slots: int | None = None
    record_bytes: int | None = None


@dataclass(slots=True)
class Trace:
    """Everything a file says, each kind in order of time."""

    path: Path
    model: str | None = None
    version: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    bandwidth: float | None = None
    layers: dict[int, Layer] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    operations: list[QueueOperation] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    queue_depth: list[Depth] = field(default_factory=list)
    inflight: list[Depth] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def prompt_forwards(routes: Iterable[Route]) -> set[int]:
    """The forwards that computed prompts: of several tokens, if not in the last layer too."""
    return {route.forward for route in routes if route.tokens > 1}


def split_tokens(trace: Trace) -> tuple[list[Token], list[Token]]:
    """Tokens that took a forward of their own, and those that came out of a prompt's forward."""
    prompts = [route.ts for route in trace.routes if route.tokens > 1]
    decoded: list[Token] = []
    first: list[Token] = []
    for token in trace.tokens:
        at = bisect_left(prompts, token.ts)
        of_prompt = at < len(prompts) and prompts[at] < token.end
        (first if of_prompt else decoded).append(token)
    return decoded, first


def inside(spans: Sequence[Span], ts: float) -> bool:
    """Whether the moment lies in one of the spans, which are in order and do not overlap."""
    at = bisect_right(spans, ts, key=lambda span: span.ts)
    return bool(at) and ts <= spans[at - 1].end
