"""Replays a trace once per setting: what is taken from the file, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from .errors import InvalidRequest
from .replay import Drive, Outcome, Replay
from .replay_forecast import LOOKAHEAD, Forecast, foretold, recorded
from .replay_policies import POLICIES
from .terminal import Report
from .trace_records import Trace, inside, prompt_forwards, split_tokens

DEFAULT_BANDWIDTH = 2e9
DEFAULT_COMPUTE = 1e-3
DEFAULT_SHARES = (0.0625, 0.125, 0.25, 0.5)
AS_RECORDED = "as recorded"


class NoRouting(InvalidRequest):
    """The trace holds no routing to replay."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(
            f"{trace.path} holds no routing (events `route`), so there is nothing to replay; "
            "record it again with this version"
        )


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How guesses are made: "off", "recorded", "perfect" or "noisy" with a recall."""

    kind: str
    recall: float = 1.0

    def __str__(self) -> str:
        return f"noisy:{self.recall:g}" if self.kind == "noisy" else self.kind


def parse_prefetch(text: str) -> Prefetch:
    """Understand ``"off"``, ``"recorded"``, ``"perfect"`` and ``"noisy:0.8"``.

    Raises:
        ValueError: it is something else.
    """
    kind, colon, recall = text.strip().partition(":")
    if kind in ("off", "recorded", "perfect") and not colon:
        return Prefetch(kind)
    if kind == "noisy" and 0.0 <= float(recall) <= 1.0:
        return Prefetch(kind, float(recall))
    raise ValueError(text)


@dataclass(frozen=True, slots=True)
class Options:
    """What to replay; None takes what the file says, or else what is usual."""

    slots: Sequence[int] = ()
    shares: Sequence[float] = ()
    policies: Sequence[str] = tuple(POLICIES)
    prefetch: Sequence[Prefetch] = (Prefetch("off"),)
    bandwidth: float | None = None
    latency: float = 100e-6
    depth: int = 16
    compute: float | None = None
    record_bytes: int | None = None
    lookahead: int = LOOKAHEAD
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One setting and what it gave."""

    cache: str
    slots: int
    policy: str
    prefetch: str
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            **{"cache": self.cache, "slots_per_layer": self.slots},
            **{"policy": self.policy, "prefetch": self.prefetch},
            "hit_rate": outcome.hit_rate,
            "bytes_per_token": outcome.bytes_per_token,
            "stall_ms_per_token": 1000 * outcome.stall_per_token,
            "token_ms": 1000 * outcome.token_seconds,
            "bound_ms": 1000 * outcome.bound_seconds,
            "waste": outcome.waste,
            "counts": asdict(outcome),
        }


class Sweep:
    """Every combination of cache, policy and guesses.

    Attributes:
        assumed: lines about what neither the file nor the caller has said.

    Raises:
        NoRouting: the trace holds no routing.
        InvalidRequest: something is needed that the trace does not hold.
    """

    def __init__(self, trace: Trace, options: Options) -> None:
        if not trace.routes:
            raise NoRouting(trace)
        self._trace = trace
        self._options = options
        self.assumed: list[str] = []
        self._layers = {route.group: trace.layers[route.group] for route in trace.routes}
        self.record_bytes = self._sizes()
        self.drive = Drive(self._bandwidth(), options.latency, options.depth)
        self.compute = self._compute()
        self._caches = list(self._settings())
        self._forecasts = {prefetch: self._forecast(prefetch) for prefetch in options.prefetch}

    def __len__(self) -> int:
        return len(self._caches) * len(self._options.policies) * len(self._forecasts)

    def run(self, report: Report | None = None) -> list[Result]:
        """Replay every setting; sorted by slots, policy and guesses."""
        results: list[Result] = []
        calls = len(self._trace.routes)
        for (name, slots), policy, prefetch in product(
            self._caches, self._options.policies, self._forecasts
        ):
            outcome = Replay(
                self._trace.routes,
                {group: layer.experts for group, layer in self._layers.items()},
                slots,
                self.record_bytes,
                POLICIES[policy],
                self.drive,
                self.compute,
                self._forecasts[prefetch],
            ).run(_shifted(report, len(results) * calls, len(self) * calls))
            mean = round(sum(slots.values()) / len(slots))
            results.append(Result(name, mean, policy, str(prefetch), outcome))
        return sorted(results, key=lambda r: (r.slots, r.cache, r.policy, r.prefetch))

    def _settings(self) -> Iterator[tuple[str, Mapping[int, int]]]:
        options, layers = self._options, self._layers
        for count in options.slots:
            yield str(count), {g: min(count, layer.experts) for g, layer in layers.items()}
        shares = options.shares
        if not shares and not options.slots:
            shares = DEFAULT_SHARES
            known = {g: layer.slots for g, layer in layers.items() if layer.slots}
            if known.keys() == layers.keys():
                yield AS_RECORDED, known
        for share in shares:
            name = f"{100 * share:g} %"
            yield name, {g: max(round(share * layer.experts), 1) for g, layer in layers.items()}

    def _sizes(self) -> dict[int, int]:
        if self._options.record_bytes is not None:
            return dict.fromkeys(self._layers, self._options.record_bytes)
        read = {read.group: read.nbytes for read in self._trace.reads if read.nbytes}
        sizes = {g: layer.record_bytes or read.get(g, 0) for g, layer in self._layers.items()}
        if not all(sizes.values()):
            known = [size for size in sizes.values() if size]
            if not known:
                raise InvalidRequest(
                    f"{self._trace.path} does not say how large an expert is; give --record-bytes"
                )
            sizes = {g: size or max(known) for g, size in sizes.items()}
            self.assumed.append("some layers' experts are taken to be as large as the largest")
        return sizes

    def _bandwidth(self) -> float:
        given = self._options.bandwidth or self._trace.bandwidth
        if given is None:
            self.assumed.append("the drive's bandwidth is not on record; give --bandwidth")
        return given or DEFAULT_BANDWIDTH

    def _compute(self) -> float:
        """Seconds per layer: of a recorded token what was no stall, divided by its layer calls."""
        if self._options.compute is not None:
            return self._options.compute
        trace = self._trace
        prompts = prompt_forwards(trace.routes)
        calls = sum(route.forward not in prompts for route in trace.routes)
        tokens, _ = split_tokens(trace)
        if tokens and calls:
            stalled = sum(stall.dur for stall in trace.stalls if inside(tokens, stall.ts))
            computed = (sum(token.dur for token in tokens) - stalled) / 1e6
            if computed > 0:
                return computed / calls
        self.assumed.append("computing time is not on record; give --compute-ms-per-layer")
        return DEFAULT_COMPUTE

    def _forecast(self, prefetch: Prefetch) -> Forecast | None:
        trace, options = self._trace, self._options
        if prefetch.kind == "off":
            return None
        if prefetch.kind == "recorded":
            if not trace.predictions:
                raise InvalidRequest(f"{trace.path} holds no predictions; try --prefetch noisy:0.8")
            return recorded(trace.routes, trace.predictions)
        experts = {group: layer.experts for group, layer in self._layers.items()}
        return foretold(
            trace.routes,
            experts,
            recall=prefetch.recall,
            lookahead=options.lookahead,
            seed=options.seed,
        )


def _shifted(report: Report | None, before: int, total: int) -> Report | None:
    """Progress of one replay as a part of that of all."""
    if report is None:
        return None
    tell = report

    def part(done: int, _total: int) -> None:
        tell(before + done, total)

    return part
