"""Requests as jobs of the compute thread, and the sums over them."""

from __future__ import annotations

import traceback
from statistics import median

from ..io.errors import LoopClosed, MoestreamError
from .api import Generation, PrefetchStatistics, Statistics
from .core import Core
from .errors import EngineClosed, EngineDead, GenerationFailed
from .generation import TokenLoop
from .request import Cancelled, Failed, Message, Request, State
from .streaming import StepCounters


class Totals:
    """Sums over requests. Written on the compute thread only."""

    def __init__(self) -> None:
        self.finished = self.failed = self.cancelled = 0
        self.prompt_tokens = self.tokens = 0
        self.running: TokenLoop | None = None
        self.ended = StepCounters()

    def end(self, loop: TokenLoop, outcome: Message) -> None:
        self.running = None
        if isinstance(outcome, Failed):
            self.failed += 1
        elif isinstance(outcome, Generation):
            self.cancelled += outcome.finish_reason == "cancelled"
            self.finished += outcome.finish_reason != "cancelled"
            self.prompt_tokens += outcome.prompt_tokens
            self.tokens += len(outcome.tokens)
        for name in StepCounters.__slots__:
            setattr(self.ended, name, getattr(self.ended, name) + getattr(loop.counters, name))

    def record(self, core: Core, *, waiting: int) -> Statistics:
        running = self.running
        current = running.counters if running is not None else StepCounters()
        counters, groups = core.store.counters, core.store.groups
        layers = len(core.plan.slots)
        return Statistics(
            requests_running=int(running is not None),
            requests_waiting=waiting,
            requests_finished=self.finished,
            requests_failed=self.failed,
            requests_cancelled=self.cancelled,
            prompt_tokens=self.prompt_tokens,
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


class GenerationJob:
    """Runs one request on the compute thread and sends its outcome to the caller."""

    def __init__(self, request: Request, totals: Totals) -> None:
        self._request = request
        self._totals = totals

    def run(self, core: Core) -> None:
        request, totals = self._request, self._totals
        if request.cancelled:
            totals.cancelled += 1
            request.state = State.ENDED
            return
        request.state = State.RUNNING

        def check() -> None:
            if request.cancelled:
                raise Cancelled
            if core.stopping.is_set():
                raise EngineClosed

        loop = TokenLoop(core.loaded, request, tracer=core.tracer, check=check)
        totals.running = loop
        outcome: Message
        try:
            outcome = loop.run()
        except Exception as error:
            _drop_frames(error)
            outcome = Failed(EngineClosed() if core.stopping.is_set() else _outcome(error))
        except BaseException as error:
            request.post(Failed(EngineDead(error)))
            raise
        finally:
            request.state = State.ENDED
        totals.end(loop, outcome)
        core.sample_memory()
        request.post(outcome)
        if core.loop.failure is not None and not core.stopping.is_set():
            raise core.loop.failure

    def abort(self, error: BaseException) -> None:
        self._request.state = State.ENDED
        self._request.post(Failed(error))


def _drop_frames(error: BaseException | None) -> None:
    """Forget the locals of the frames that an error has passed: caches, models, slot rows."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _outcome(error: Exception) -> Exception:
    """The error that the caller of a request gets to see."""
    if isinstance(error, LoopClosed):
        outcome: Exception = EngineDead(error.__cause__ or error)
    elif isinstance(error, MoestreamError):
        return error
    else:
        outcome = GenerationFailed(f"the request failed: {type(error).__name__}: {error}")
    outcome.__cause__ = error
    return outcome
