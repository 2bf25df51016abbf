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
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..models.switch import StreamingSwitch
from .residency import IntegrityError
from .store import Demanded, ExpertStore
from .tracing import Tracer

Check = Callable[[], None]

SMALL_CALL = 64
"""Routed pairs up to which plain lists are used: after a sync the caches are cold, and numpy's
indexing then takes 40 us where a list takes 2 (measured)."""


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
        self._mark = 0.0  # host time has been accounted for up to here
        self.step = Step()

    # -- called by the generation loop --------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward pass of the model is about to be built."""
        self._forward += 1
        self._mark = time.perf_counter()

    def end_forward(self, *results: mx.array) -> None:
        """Evaluate the results of the forward, if it has not been given up, and let go of slots.

        Waits for whatever still reads a slot, so that the next request may overwrite it.
        """
        self._sync(*results)

    # -- called by the model (SwitchRunner) ---------------------------------------------------

    def run(self, switch: StreamingSwitch, x: mx.array, indices: mx.array) -> mx.array:
        """Run the routed experts of one layer call; see ``StreamingSwitch``."""
        self.step.check()
        self._sync(indices)
        self.step.counters.syncs += 1
        if indices.size > SMALL_CALL:
            return self._run_large(switch, x, indices)
        routed = flatten(indices.tolist())
        experts = list(dict.fromkeys(routed))
        slots = self._fetch(switch, experts)
        if slots is None:
            return self._run_waves(switch, x, indices.shape, np.array(routed), experts)
        if len(experts) == len(routed):  # one token, or tokens that share no expert
            ids = slots
        else:
            where = dict(zip(experts, slots, strict=True))
            ids = [where[expert] for expert in routed]
        return self._compute(switch, x, mx.array(nest(ids, indices.shape), mx.uint32), slots)

    def _run_large(self, switch: StreamingSwitch, x: mx.array, indices: mx.array) -> mx.array:
        """A prompt chunk: the same with arrays instead of lists."""
        routed = np.asarray(indices).ravel()
        experts: list[int] = np.unique(routed).tolist()
        slots = self._fetch(switch, experts)
        if slots is None:
            return self._run_waves(switch, x, indices.shape, routed, experts)
        ids = self._ids(switch, experts, slots, routed).reshape(indices.shape)
        return self._compute(switch, x, mx.array(ids), slots)

    def _ids(
        self,
        switch: StreamingSwitch,
        experts: list[int],
        slots: list[int],
        routed: npt.NDArray[np.integer],
    ) -> npt.NDArray[np.uint32]:
        table = self._tables[switch.group]
        table[experts] = slots
        ids: npt.NDArray[np.uint32] = table[routed]
        return ids

    def _compute(
        self, switch: StreamingSwitch, x: mx.array, ids: mx.array, slots: list[int]
    ) -> mx.array:
        output: mx.array = switch.inner(x, ids)
        # The device works on this layer while Python builds the next one up to its router.
        mx.async_eval(output)
        self._pending.append((switch.group, slots, output))
        return output

    def _fetch(self, switch: StreamingSwitch, experts: list[int]) -> list[int] | None:
        """Slots of the experts, pinned, once all of them are there; None when they do not fit."""
        step = self.step
        position = self._forward * len(self._tables) + switch.group
        got = self._store.demand(switch.group, experts, owner=step.owner, position=position)
        if got is None:
            return None
        counters = step.counters
        missing = len(got.futures)
        counters.hits += len(experts) - missing
        if missing:
            counters.misses += missing
            counters.bytes_read += got.nbytes
            self._wait(switch, got)
        return got.slots

    def _wait(self, switch: StreamingSwitch, got: Demanded) -> None:
        counters = self.step.counters
        before = time.perf_counter()
        counters.host_seconds += before - self._mark
        try:
            _wait(got.futures)
        except BaseException:
            self._store.release(switch.group, got.slots)
            raise
        finally:
            self._mark = after = time.perf_counter()
            counters.stall_seconds += after - before
            self._tracer.stall(switch.layer, before, after, len(got.futures))

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
            if slots is None:
                raise IntegrityError(f"layer {switch.layer} has no room for a wave")
            table[wave] = slots
            chosen = np.zeros(len(table), np.bool_)
            chosen[wave] = True
            pairs = np.flatnonzero(chosen[routed])
            rows = tokens[mx.array((pairs // top_k).astype(np.uint32))]
            ids = mx.array(table[routed[pairs]].reshape(-1, 1))
            output = switch.inner(rows, ids)
            self._pending.append((switch.group, slots, output))
            self._sync()
            self.step.counters.waves += 1
            outputs.append(output.squeeze(-2))
            order.append(pairs)
        inverse = np.argsort(np.concatenate(order)).astype(np.uint32)
        return mx.concatenate(outputs)[mx.array(inverse)].reshape(*shape, -1)

    def _sync(self, *wanted: mx.array) -> None:
        """Evaluate these arrays and all outputs so far; unpin the slots that these have read."""
        pending, counters = self._pending, self.step.counters
        before = time.perf_counter()
        counters.host_seconds += before - self._mark
        try:
            mx.eval(*wanted, *[output for _, _, output in pending])
        except BaseException:
            mx.synchronize()  # a failed evaluation may have left others running
            raise
        finally:
            self._mark = after = time.perf_counter()
            counters.sync_seconds += after - before
            for group, slots, _ in pending:
                self._store.release(group, slots)
            pending.clear()


def flatten(nested: Any) -> list[int]:
    """The numbers of nested lists in order."""
    while nested and isinstance(nested[0], list):
        nested = [item for part in nested for item in part]
    flat: list[int] = nested
    return flat


def nest(flat: list[int], shape: Sequence[int]) -> list[Any]:
    """Lists nested to ``shape``: what ``flatten`` undoes."""
    nested: list[Any] = flat
    for extent in reversed(shape[1:]):
        nested = [nested[i : i + extent] for i in range(0, len(nested), extent)]
    return nested


def _wait(futures: Sequence[Future[None]]) -> None:
    """Wait for all reads, the last one asked for first, so that the thread is mostly woken once.

    Every read has ended when this returns or raises: a slot with a pin is never being written.
    """
    failure: BaseException | None = None
    for future in reversed(futures):
        failure = future.exception() or failure
    if failure is not None:
        raise failure
