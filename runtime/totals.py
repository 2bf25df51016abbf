"""The sums over all requests of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from statistics import median

from .api import Generation, PrefetchStatistics, Statistics
from .core import Core
from .generation import Row
from .request import Failed, Message
from .streaming import StepCounters


class Totals:
    """Sums over requests. Written on the compute thread only."""

    def __init__(self) -> None:
        self.finished = self.failed = self.cancelled = 0
        self.prompt_tokens = self.cached_tokens = self.tokens = 0
        self.running: tuple[Row, ...] = ()
        self.ended = StepCounters()

    def end(self, counters: StepCounters, outcome: Message) -> None:
        """A request that had cost so much has ended."""
        if isinstance(outcome, Failed):
            self.failed += 1
        elif isinstance(outcome, Generation):
            self.cancelled += outcome.finish_reason == "cancelled"
            self.finished += outcome.finish_reason != "cancelled"
            self.prompt_tokens += outcome.prompt_tokens
            self.cached_tokens += outcome.cached_tokens
            self.tokens += len(outcome.tokens)
        self.ended.add(counters)

    def record(self, core: Core, *, waiting: int) -> Statistics:
        """The statistics of the engine at this moment. Any thread."""
        running, current = self.running, StepCounters()
        for row in running:
            current.add(row.counters)
        limits, kept = core.loaded.limits, core.loaded.kept
        counters, groups = core.store.counters, core.store.groups
        layers = len(core.plan.slots)
        return Statistics(
            requests_running=len(running),
            requests_waiting=waiting,
            requests_finished=self.finished,
            requests_failed=self.failed,
            requests_cancelled=self.cancelled,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            prompt_cache_sequences=0 if kept is None else len(kept.index),
            prompt_cache_bytes=0 if kept is None else kept.nbytes,
            prompt_cache_evicted=0 if kept is None else kept.index.evicted,
            tokens=self.tokens,
            hits=counters.hits,
            misses=counters.misses + counters.joins,
            joins=counters.joins,
            reads=counters.reads,
            read_errors=counters.read_errors,
            bytes_read=counters.bytes_read,
            stall_seconds=self.ended.stall_seconds + current.stall_seconds,
            sync_seconds=self.ended.sync_seconds + current.sync_seconds,
            host_seconds=self.ended.host_seconds + current.host_seconds,
            syncs=self.ended.syncs + current.syncs,
            waves=self.ended.waves + current.waves,
            streamed_layers=len(groups),
            resident_layers=layers - len(groups),
            slots=tuple(group.residency.slots for group in groups),
            planned_slots=core.resizer.planned,
            memory_pressure=core.resizer.pressure.level.name.lower(),
            resizes=core.resizer.resizes,
            experts=tuple(group.residency.experts for group in groups),
            slot_bytes=sum(group.pool.nbytes for group in groups),
            trunk_bytes=core.trunk_bytes,
            memory_bytes=core.memory_bytes,
            peak_memory_bytes=core.peak_memory_bytes,
            trace_events_dropped=core.tracer.dropped,
            trace_error=core.tracer.error,
            wasted_bytes=counters.wasted_bytes,
            prefetch=_prefetch_statistics(core),
            batched=limits.rows > 1,
            most_running=limits.rows,
            batch_limit=limits.reason,
        )


def _prefetch_statistics(core: Core) -> PrefetchStatistics:
    counters, drive, ahead = core.store.counters, core.loop.statistics(), core.ahead
    layers = [group.record.layer for group in core.store.groups]
    return PrefetchStatistics(
        predictions=0 if ahead is None else ahead.totals.predictions,
        recall={} if ahead is None else ahead.totals.shares(),
        guesses=counters.guesses,
        begun=counters.guesses_begun,
        refused=counters.guesses_refused,
        used=counters.guesses_used,
        wasted=counters.guesses_wasted,
        late=counters.late,
        evicted=counters.evicted,
        unpredicted=counters.unpredicted,
        share=0.0 if ahead is None else ahead.governor.share,
        pays=ahead is not None and ahead.trial.verdict,
        seconds_with=0.0 if ahead is None else ahead.trial.seconds[0],
        seconds_without=0.0 if ahead is None else ahead.trial.seconds[1],
        layers_off=()
        if ahead is None
        else tuple(layers[group] for group in ahead.governor.switched_off),
        windows={
            layers[group]: median(list(times)) for group, times in list(core.store.windows.items())
        },
        drive_busy_seconds=drive.busy_seconds,
        drive_bandwidth=drive.bandwidth,
    )


def share(total: StepCounters, parts: Sequence[StepCounters]) -> None:
    """Divide what a forward has cost equally between its requests; counts add up exactly."""
    count = len(parts)
    for entry in fields(StepCounters):
        value = getattr(total, entry.name)
        for index, part in enumerate(parts):
            if isinstance(value, int):
                own = value * (index + 1) // count - value * index // count
            else:
                own = value / count
            setattr(part, entry.name, getattr(part, entry.name) + own)
