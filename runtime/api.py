"""What callers get back: plain frozen records without any MLX in them."""

from __future__ import annotations

from dataclasses import dataclass
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

    Attributes:
        queued_seconds: from the call to its turn on the compute thread.
        time_to_first_token: from its turn to the first token.
        decode_tokens_per_second: of the tokens behind the first one; 0.0 when there is only one.
        hits: routed experts (per layer call, distinct) that were resident.
        misses: those that had to be waited for.
        bytes_read: read from the drive for this request's misses.
        stall_seconds: time that the compute thread waited for reads.
        sync_seconds: time in the layer syncs, that is mostly compute.
        host_seconds: Python between the layer syncs.
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
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: GenerationStats
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals of an engine since it was opened. Seconds, bytes and counts.

    Attributes:
        requests_running: 0 or 1.
        requests_waiting: queued behind it.
        requests_finished: with a result.
        requests_failed: with an error.
        requests_cancelled: by their callers.
        prompt_tokens: computed.
        tokens: generated.
        hits, misses: routed experts found resident, or waited for.
        joins: those of the misses whose read was already on its way.
        reads, read_errors, bytes_read: of the drive.
        stall_seconds, sync_seconds, host_seconds, syncs, waves: see ``GenerationStats``.
        streamed_layers: MoE layers whose experts come and go.
        resident_layers: MoE layers that are held whole.
        slots: slots of each streamed layer.
        experts: experts of each streamed layer.
        slot_bytes: memory of all slot pools.
        trunk_bytes: memory of trunk and resident layers.
        memory_bytes: memory held by MLX at this moment.
        peak_memory_bytes: largest value of it.
        trace_events_dropped: events that did not fit the trace buffer.
        trace_error: why tracing stopped, if it did.
    """

    requests_running: int
    requests_waiting: int
    requests_finished: int
    requests_failed: int
    requests_cancelled: int
    prompt_tokens: int
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
    experts: tuple[int, ...]
    slot_bytes: int
    trunk_bytes: int
    memory_bytes: int
    peak_memory_bytes: int
    trace_events_dropped: int
    trace_error: str | None

    @property
    def hit_rate(self) -> float:
        """Share of routed experts that were resident; 1.0 when none had to be looked up."""
        total = self.hits + self.misses
        return self.hits / total if total else 1.0
