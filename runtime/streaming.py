"""The decode step of a MoE layer on the compute thread: sync, residency, demand, wait, compute.

Per layer there is one synchronisation with the device, for the router's choice. The same
``mx.eval`` names the outputs of the layers before, so that their slots may be given up once it
returns: a slot is never reused before the evaluation that reads it has completed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..models.switch import StreamingSwitch
from .store import ExpertStore
from .tracing import Tracer

Check = Callable[[], None]


@dataclass(slots=True)
class StepCounters:
    """What one request has cost so far. Written by the compute thread only.

    Times are in seconds. ``host_seconds`` is Python between the layer syncs (graph building,
    residency, hand-off) without the stalls; ``sync_seconds`` is spent inside the syncs.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    stall_seconds: float = 0.0
    sync_seconds: float = 0.0
    host_seconds: float = 0.0
    syncs: int = 0
    waves: int = 0


def _no_check() -> None:
    return None


@dataclass(slots=True)
class Step:
    """The request that the compute thread is working for.

    Attributes:
        owner: request id.
        check: raises when the request has been cancelled; called at each layer.
        counters: of the request.
    """

    owner: int = -1
    check: Check = _no_check
    counters: StepCounters = field(default_factory=StepCounters)


class ExpertStream:
    """Runs the streaming switches of one engine. Lives on the compute thread.

    Args:
        store: residency and pools.
        widths: expert count of each streamed layer.
        tracer: gets an event per stall.
    """

    def __init__(self, store: ExpertStore, widths: Sequence[int], *, tracer: Tracer) -> None:
        self._store = store
        self._tracer = tracer
        self._tables: list[npt.NDArray[np.uint32]] = [np.zeros(n, np.uint32) for n in widths]
        # Outputs whose evaluation has not been seen to complete, and the slots that they read.
        self._pending: list[tuple[int, list[int], mx.array]] = []
        self._forward = 0
        self._resumed = 0.0
        self.step = Step()

    # -- called by the generation loop --------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward pass of the model is about to be built."""
        self._forward += 1
        self._resumed = time.perf_counter()

    def end_forward(self) -> None:
        """The forward's result has been evaluated, or the pass has been given up: let go of slots.

        Waits for whatever still reads a slot, so that the next request may overwrite it.
        """
        if self._pending:
            mx.eval(*[output for _, _, output in self._pending])
            self._release()

    # -- called by the model (SwitchRunner) ---------------------------------------------------

    def run(self, switch: StreamingSwitch, x: mx.array, indices: mx.array) -> mx.array:
        """Run the routed experts of one layer call; see ``StreamingSwitch``."""
        step = self.step
        step.check()
        before = time.perf_counter()
        step.counters.host_seconds += before - self._resumed
        mx.eval(indices, *[output for _, _, output in self._pending])
        self._resumed = time.perf_counter()
        step.counters.sync_seconds += self._resumed - before
        step.counters.syncs += 1
        self._release()
        routed = np.asarray(indices).ravel()
        experts = _distinct(routed)
        if len(experts) > self._store.room(switch.group):
            return self._run_waves(switch, x, indices.shape, routed, experts)
        slots = self._fetch(switch, experts)
        table = self._tables[switch.group]
        table[experts] = slots
        output: mx.array = switch.inner(x, mx.array(table[routed].reshape(indices.shape)))
        self._pending.append((switch.group, slots, output))
        return output

    def _fetch(self, switch: StreamingSwitch, experts: list[int]) -> list[int]:
        """Slots of the experts, pinned, once all of them are there."""
        step = self.step
        position = self._forward * len(self._tables) + switch.group
        got = self._store.demand(switch.group, experts, owner=step.owner, position=position)
        counters = step.counters
        counters.hits += len(experts) - len(got.futures)
        if not got.futures:
            return got.slots
        counters.misses += len(got.futures)
        counters.bytes_read += got.nbytes
        before = time.perf_counter()
        try:
            _wait(got.futures)
        except BaseException:
            self._store.release(switch.group, got.slots)
            raise
        finally:
            after = time.perf_counter()
            counters.stall_seconds += after - before
            counters.host_seconds -= after - before
            self._tracer.stall(switch.layer, before, after, len(got.futures))
        return got.slots

    def _run_waves(
        self,
        switch: StreamingSwitch,
        x: mx.array,
        shape: tuple[int, ...],
        routed: npt.NDArray[np.integer],
        experts: list[int],
    ) -> mx.array:
        """A call that routes to more experts than fit: each wave computes the pairs of some.

        Each (token, expert) pair is computed once and each expert read at most once. Rows are
        put back into their places, so only the shape of the kernel calls differs from the
        undivided one.
        """
        store, table, top_k = self._store, self._tables[switch.group], shape[-1]
        tokens = x.reshape(-1, x.shape[-1])
        here, missing = store.split(switch.group, experts)
        waiting = here + missing
        outputs: list[mx.array] = []
        order: list[npt.NDArray[np.intp]] = []
        while waiting:
            self.step.check()
            room = store.room(switch.group)
            wave, waiting = waiting[:room], waiting[room:]
            slots = self._fetch(switch, wave)
            table[wave] = slots
            chosen = np.zeros(len(table), np.bool_)
            chosen[wave] = True
            pairs = np.flatnonzero(chosen[routed])
            rows = tokens[mx.array((pairs // top_k).astype(np.uint32))]
            ids = mx.array(table[routed[pairs]].reshape(-1, 1))
            output = switch.inner(rows, ids)
            self._pending.append((switch.group, slots, output))
            before = time.perf_counter()
            self.end_forward()
            waited = time.perf_counter() - before
            self.step.counters.sync_seconds += waited
            self.step.counters.host_seconds -= waited
            self.step.counters.waves += 1
            outputs.append(output.squeeze(-2))
            order.append(pairs)
        inverse = np.argsort(np.concatenate(order)).astype(np.uint32)
        return mx.concatenate(outputs)[mx.array(inverse)].reshape(*shape, -1)

    def _release(self) -> None:
        for group, slots, _ in self._pending:
            self._store.release(group, slots)
        self._pending.clear()


def _distinct(routed: npt.NDArray[np.integer]) -> list[int]:
    if routed.size <= 64:
        return list(dict.fromkeys(routed.tolist()))
    distinct: list[int] = np.unique(routed).tolist()
    return distinct


def _wait(futures: Sequence[Future[None]]) -> None:
    """Wait for all reads, the last one asked for first, so that the thread is mostly woken once.

    Every read has ended when this returns or raises: a slot with a pin is never being written.
    """
    failure: BaseException | None = None
    for future in reversed(futures):
        failure = future.exception() or failure
    if failure is not None:
        raise failure
