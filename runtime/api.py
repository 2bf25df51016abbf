"""What callers get back: plain frozen records without any MLX in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one generated token.

    Attributes:
        token: token id.
        logprob: of this token, before temperature and the other sampling steps.
        top: the most likely tokens with their log-probabilities, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def __float__(self) -> float:
        return self.logprob


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one request cost. Seconds, bytes and counts.

    A forward for several requests is divided equally between them, times and counts alike.

    Attributes:
        queued_seconds: from the call to its turn on the compute thread.
        time_to_first_token: from its turn to the first token.
        decode_tokens_per_second: of the tokens behind the first one; 0.0 when there is only one.
        hits: routed experts (per layer call, distinct) that were resident.
        misses: those that had to be waited for.
        bytes_read: read from the drive for this request's misses.
        stall_seconds: time that the compute thread waited for reads.
        sync_seconds: time inside MLX's evaluations, that is mostly compute.
        host_seconds: Python between them: building the graph, residency, hand-off.
        syncs: layer syncs.
        waves: parts of calls that routed to more experts than there were slots.
    """

    queued_seconds: float
    time_to_first_token: float
    decode_tokens_per_second: float
    hits: int
    misses: int
    bytes_read: int
    stall_seconds: float
    sync_seconds: float
    host_seconds: float
    syncs: int
    waves: int

    @property
    def hit_rate(self) -> float:
        """Share of routed experts that were resident; 1.0 when none had to be looked up."""
        total = self.hits + self.misses
        return self.hits / total if total else 1.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One generated token of a stream.

    Attributes:
        text: text that this token completed; may be empty (an unfinished character, or the
            possible start of a stop string).
        token: token id.
        logprob: when asked for.
        finish_reason: set on the last chunk only.
        result: the whole generation with its stats; on the last chunk only.
    """

    text: str
    token: int
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    result: Generation | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of ``Engine.generate``.

    Attributes:
        text: the generated text, without the stop string or end token.
        tokens: all generated token ids, the end token included.
        finish_reason: "stop" (end token or stop string), "length" or "cancelled".
        prompt_tokens: length of the prompt in tokens.
        stats: what it cost.
        logprobs: one per token when asked for, else None.
        cached_tokens: of the prompt, that were not computed again but taken from the prompt cache.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: GenerationStats
    logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    """What reading ahead has done since the engine was opened.

    Attributes:
        predictions: ranked lists made.
        recall: distance -> (share of the routed experts found among as many candidates, share
            found among all candidates).
        guesses: experts asked for ahead.
        begun: of these, reads that began; others were overtaken, stale, refused, not admitted.
        refused: guesses that found no slot to take.
        used, wasted: guesses read that were then routed to, or given up before.
        late, evicted, unpredicted: experts that were waited for, by cause.
        share: of the drive's idle time that guesses may use now (the governor's rule).
        pays: whether guesses have made tokens faster, by trial.
        seconds_with, seconds_without: mean time of a token with and without guesses; 0.0 while
            untried.
        layers_off: layers whose guesses are switched off at the moment.
        windows: layer -> median seconds from the begin of a guess until it was there (``profile``).
        drive_busy_seconds: time in which at least one lane was reading.
        drive_bandwidth: bytes per second while it was busy, of late.
    """

    predictions: int = 0
    recall: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    guesses: int = 0
    begun: int = 0
    refused: int = 0
    used: int = 0
    wasted: int = 0
    late: int = 0
    evicted: int = 0
    unpredicted: int = 0
    share: float = 0.0
    pays: bool = False
    seconds_with: float = 0.0
    seconds_without: float = 0.0
    layers_off: tuple[int, ...] = ()
    windows: Mapping[int, float] = field(default_factory=dict)
    drive_busy_seconds: float = 0.0
    drive_bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals of an engine since it was opened. Seconds, bytes and counts.

    Attributes:
        requests_running: being computed.
        requests_waiting: queued behind them.
        requests_finished: with a result.
        requests_failed: with an error.
        requests_cancelled: by their callers.
        prompt_tokens: of ended requests.
        cached_tokens: of these, that were taken from the prompt cache.
        prompt_cache_sequences: token sequences that it holds.
        prompt_cache_bytes: memory that they take.
        prompt_cache_evicted: sequences that have left it for want of room.
        tokens: generated.
        hits, misses: routed experts found resident, or waited for.
        joins: those of the misses whose read was already on its way.
        reads, read_errors, bytes_read: of the drive.
        stall_seconds, sync_seconds, host_seconds, syncs, waves: see ``GenerationStats``.
        streamed_layers: MoE layers whose experts come and go.
        resident_layers: MoE layers that are held whole.
        slots: slots of each streamed layer.
        planned_slots: the same without memory pressure.
        memory_pressure: "calm", "warning" or "critical" when last looked at.
        resizes: pools made smaller or larger for it.
        experts: experts of each streamed layer.
        slot_bytes: memory of all slot pools.
        trunk_bytes: memory of trunk and resident layers.
        memory_bytes: memory held by MLX at this moment.
        peak_memory_bytes: largest value seen; MLX's own peak counts the whole process.
        trace_events_dropped: events that did not fit the trace buffer.
        trace_error: why tracing stopped, if it did.
        wasted_bytes: read for guesses that were given up unused.
        prefetch: what reading ahead has done.
        batched: whether requests are computed together.
        most_running: how many at once; 1 when they run in turn.
        batch_limit: why these are fewer than ``max_running``; "" when they are not.
    """

    requests_running: int
    requests_waiting: int
    requests_finished: int
    requests_failed: int
    requests_cancelled: int
    prompt_tokens: int
    cached_tokens: int
    prompt_cache_sequences: int
    prompt_cache_bytes: int
    prompt_cache_evicted: int
    tokens: int
    hits: int
    misses: int
    joins: int
    reads: int
    read_errors: int
    bytes_read: int
    stall_seconds: float
    sync_seconds: float
    host_seconds: float
    syncs: int
    waves: int
    streamed_layers: int
    resident_layers: int
    slots: tuple[int, ...]
    planned_slots: tuple[int, ...]
    memory_pressure: str
    resizes: int
    experts: tuple[int, ...]
    slot_bytes: int
    trunk_bytes: int
    memory_bytes: int
    peak_memory_bytes: int
    trace_events_dropped: int
    trace_error: str | None
    wasted_bytes: int
    prefetch: PrefetchStatistics
    batched: bool
    most_running: int
    batch_limit: str

    @property
    def hit_rate(self) -> float:
        """Share of routed experts that were resident; 1.0 when none had to be looked up."""
        total = self.hits + self.misses
        return self.hits / total if total else 1.0
