"""The decode step of a MoE layer on the compute thread: sync, residency, demand, wait, compute.

Per layer there is one synchronisation with the device, for the router's choice. The same
``mx.eval`` names the outputs of the layers before, so that their slots may be given up once it
returns: a slot is never reused before the evaluation that reads it has completed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..io.asks import Guess
from ..models.switch import StreamingSwitch
from .prefetch import OFF, PrefetchConfig
from .profile import DecodeLog
from .prompt_ahead import PromptAhead
from .readahead import ReadAhead
from .residency import IntegrityError
from .store import Demanded, ExpertStore
from .tracing import Tracer
from .waves import wave_size

Check = Callable[[], None]

PROMPT_TAIL = 64
"""Last tokens of a prompt whose routing the policy is told of (arbitrary: 16 gained half)."""

SMALL_CALL = 64
"""Routed pairs up to which plain lists are used: after a sync the caches are cold, and numpy's
indexing then takes 40 us where a list takes 2 (measured)."""


@dataclass(slots=True)
class StepCounters:
    """What one request has cost so far. Written by the compute thread only.

    Times are in seconds. ``host_seconds`` is Python between MLX's evaluations (graph building,
    residency, hand-off) without the stalls; ``sync_seconds`` is spent inside the evaluations.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    stall_seconds: float = 0.0
    sync_seconds: float = 0.0
    host_seconds: float = 0.0
    syncs: int = 0
    waves: int = 0

    def add(self, other: StepCounters) -> None:
        """Add what something else has cost."""
        for name in StepCounters.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def _no_check() -> None:
    return None


@dataclass(slots=True)
class Step:
    """Whom the compute thread is working for: a request, or several in one forward.

    Attributes:
        owner: request id; one that no request has for several, whose reads nobody may purge.
        check: raises when nobody wants the forward any more; called at each layer.
        counters: of the request, or of the forward.
        several: whether the forward has one token of each of several requests.
        passed: called with the index of each streamed layer that is reached.
    """

    owner: int = -1
    check: Check = _no_check
    counters: StepCounters = field(default_factory=StepCounters)
    several: bool = False
    passed: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class _Wave:
    """Experts of a call that are computed together."""

    experts: list[int]
    got: Demanded


class ExpertStream:
    """Runs the streaming switches of one engine. Lives on the compute thread.

    Args:
        store: residency and pools.
        widths: expert count of each streamed layer.
        tracer: gets an event per stall.
        ahead: reads ahead; None for not.
        prompts: reads ahead in prompts; None for not.
        prefetch: says whether hits are computed first.
    """

    def __init__(
        self,
        store: ExpertStore,
        widths: Sequence[int],
        *,
        tracer: Tracer,
        ahead: ReadAhead | None = None,
        prompts: PromptAhead | None = None,
        prefetch: PrefetchConfig = OFF,
    ) -> None:
        self._store = store
        self._ahead = ahead
        self._prompts = prompts
        self._sure: list[Guess] = []  # for the layer behind this one
        self._began = (0.0, 0.0)  # of the forward: time, and seconds that its request had waited
        self._hits_first = prefetch.hits_first
        self._deterministic = prefetch.deterministic
        self._ready: tuple[int, float] | None = None  # group that got its experts last, and when
        self._tracer = tracer
        self._tables: list[npt.NDArray[np.uint32]] = [np.zeros(n, np.uint32) for n in widths]
        # Slots that calls have pinned, and the outputs that read them and have not been seen to
        # be complete.
        self._pins: list[tuple[int, list[int]]] = []
        self._outputs: list[mx.array] = []
        self._forward = 0
        self._mark = 0.0  # host time has been accounted for up to here
        self._synced = 0.0  # when the present layer call's synchronisation began
        self.step = Step()
        self.log = DecodeLog(len(widths))
        self.at_rest: Callable[[], None] | None = None
        """Called before each forward, when nothing reads the pools; may replace them."""

    @property
    def layers(self) -> int:
        """How many layers are streamed."""
        return len(self._tables)

    # -- called by the generation loop --------------------------------------------------------

    def begin_forward(self, token: int | None = None) -> None:
        """A forward pass of the model is about to be built.

        Args:
            token: its only token, when that is known: its embedding predicts the first layers.
        """
        if self.at_rest is not None and not self._pins and not self._outputs:
            self.at_rest()
        # With nothing streamed the token is not known yet; a prompt is one forward or two then.
        self.log.forward(self.step.counters, single=token is not None or not self._tables)
        if self._prompts is not None:
            self._end_prompt(self._forward)  # one that was given up may have left something
            self._prompts.begin_forward()
            self._began = time.perf_counter(), self.step.counters.stall_seconds
        self._forward += 1
        self._mark = time.perf_counter()
        self._ready = None
        if self._ahead is not None:
            self._ahead.begin_forward(single=token is not None)
            if token is not None:
                self._predict(*self._ahead.build_from_embedding(token), 0)

    def _end_prompt(self, forward: int) -> None:
        """Nobody wants what was read ahead for prompts in the forwards up to this one."""
        self._store.give_up((forward + 1) * len(self._tables) - 1)

    def launch(self, *results: mx.array) -> None:
        """Start the evaluation of a forward that nothing waits for yet."""
        before = time.perf_counter()
        self.step.counters.host_seconds += before - self._mark
        mx.async_eval(*results)
        self._mark = time.perf_counter()
        self.step.counters.sync_seconds += self._mark - before

    def end_forward(self, *results: mx.array) -> None:
        """Evaluate the results of the forward, if it has not been given up, and let go of slots.

        Waits for whatever still reads a slot, so that the next request may overwrite it.
        """
        self._sync(*results)
        if self._ahead is not None:
            self._ahead.end_forward()

    def release(self) -> None:
        """The engine is being closed: let go of the model's taps and pools."""
        self._ahead = self._prompts = self.at_rest = None

    def end_request(self, owner: int) -> None:
        """A request has ended: nobody wants its guesses."""
        if self._ahead is not None:
            self._ahead.end_request()
            self._store.purge(owner)
            self._end_prompt(self._forward)
        self.log.end()
        self.step = Step()

    # -- called by the model (SwitchRunner) ---------------------------------------------------

    def at_input(self, group: int, x: mx.array) -> None:
        """The input of a MoE layer is known (distance 0): predict it during its attention.

        Needs a synchronisation of its own, since nothing of the layer has been computed.
        """
        if self._ahead is not None:
            targets, ranks = self._ahead.build_at_input(group, x)
            self._predict(targets, ranks, group)

    def _predict(
        self, targets: Sequence[tuple[int, int]], ranks: Sequence[mx.array], group: int
    ) -> None:
        """Evaluate ranks outside of a layer's sync and hand the guesses to the loop."""
        ahead = self._ahead
        if ahead is None or not ranks:
            return
        self._sync(*ranks)
        position = self._position(group)
        guesses = ahead.guesses(targets, ranks, position=position, first=group)
        if guesses and not self._deterministic:
            before = self._ready[0] if self._ready is not None else group
            self._store.guess(
                guesses, owner=self.step.owner, position=position - 1, grant=ahead.grant(before)
            )

    def run(self, switch: StreamingSwitch, x: mx.array, indices: mx.array) -> mx.array:
        """Run the routed experts of one layer call; see ``StreamingSwitch``."""
        self.step.check()
        if self.step.passed is not None:
            self.step.passed(switch.group)
        ahead = self._ahead
        large = indices.size > SMALL_CALL
        ranks: list[mx.array] = []
        if large and self._prompts is not None:
            ranks = self._prompts.build(switch.group)
        elif ahead is not None:
            ranks = ahead.build(switch.group)
        before = time.perf_counter()
        self._sync(indices, *ranks)
        self._synced = before
        self.step.counters.syncs += 1
        if large:
            return self._run_large(switch, x, indices, ranks)
        routed = flatten(indices.tolist())
        tail: list[list[int]] = []
        if len(routed) == indices.shape[-1]:
            experts = list(dict.fromkeys(routed))
            self.log.route(switch.group, experts)
        else:
            experts = hottest_last(routed)
            if not self.step.several:
                tail = rows_at_end(routed, indices.shape[-1])
                self._store.tell_prompt(switch.group, tail)
        if self._tracer.enabled:
            self._trace_route(switch.group, experts, len(routed) // indices.shape[-1], tail)
        got = self._demand(switch, experts, ranks)
        if got is None:
            return self._run_waves(switch, x, indices.shape, np.array(routed), experts)
        if got.futures:
            single = len(routed) == indices.shape[-1]
            if self._hits_first and single and len(got.futures) < len(experts) == len(routed):
                return self._run_hits_first(switch, x, indices.shape, got)
            self._wait(switch, got)
        slots = got.slots
        if experts == routed:  # one token
            ids = slots
        else:
            where = dict(zip(experts, slots, strict=True))
            ids = [where[expert] for expert in routed]
        return self._compute(switch, x, mx.array(nest(ids, indices.shape), mx.uint32))

    def _run_hits_first(
        self, switch: StreamingSwitch, x: mx.array, shape: tuple[int, ...], got: Demanded
    ) -> mx.array:
        """Compute the experts that are there while the missing ones are read; one token only."""
        order: list[int] = []
        outputs = []
        row = x.reshape(1, -1)
        there = [i for i, slot in enumerate(got.slots) if slot not in got.awaited]
        awaited = [i for i, slot in enumerate(got.slots) if slot in got.awaited]
        for part in (there, awaited):
            slots = [got.slots[i] for i in part]
            if part is awaited:
                self._wait(switch, got)
            outputs.append(self._compute(switch, row, mx.array([slots], mx.uint32)))
            order += part
        places = sorted(range(len(order)), key=order.__getitem__)
        joined = mx.concatenate(outputs, axis=1)[:, mx.array(places, mx.uint32)]
        return joined.reshape(*shape, -1)

    def _run_large(
        self,
        switch: StreamingSwitch,
        x: mx.array,
        indices: mx.array,
        votes: Sequence[mx.array],
    ) -> mx.array:
        """A prompt chunk: the same with arrays instead of lists."""
        if self._prompts is None:
            return self._compute_large(switch, x, indices)
        position = self._position(switch.group)
        self._sure = self._prompts.guesses(switch.group, votes, position)
        try:
            output = self._compute_large(switch, x, indices)
        finally:
            guesses, self._sure = self._sure, []
        self._store.give_up(position)
        began, waited = self._began
        stalled = self.step.counters.stall_seconds - waited
        self._prompts.spent(time.perf_counter() - began, stalled)
        if guesses:  # again: while the last wave was asked for, there may have been less room
            self._store.guess(guesses, owner=self.step.owner, position=position, grant=0.0)
        return output

    def _compute_large(self, switch: StreamingSwitch, x: mx.array, indices: mx.array) -> mx.array:
        routed = np.asarray(indices).ravel()
        heat = np.bincount(routed)
        present = np.flatnonzero(heat)
        experts: list[int] = present[np.argsort(heat[present], kind="stable")].tolist()
        top_k = indices.shape[-1]
        tail = rows_at_end(routed[-PROMPT_TAIL * top_k :].tolist(), top_k)
        self._store.tell_prompt(switch.group, tail)
        if self._tracer.enabled:
            self._trace_route(switch.group, experts, routed.size // top_k, tail)
        slots = self._fetch(switch, experts)
        if slots is None:
            first = () if self._prompts is None else self._prompts.guessed(switch.group)
            return self._run_waves(switch, x, indices.shape, routed, experts, first)
        ids = self._ids(switch, experts, slots, routed).reshape(indices.shape)
        return self._compute(switch, x, mx.array(ids))

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

    def _compute(self, switch: StreamingSwitch, x: mx.array, ids: mx.array) -> mx.array:
        counters = self.step.counters
        output: mx.array = switch.inner(x, ids)
        self._outputs.append(output)
        before = time.perf_counter()
        counters.host_seconds += before - self._mark
        # The device works on this layer while Python builds the next one up to its router.
        mx.async_eval(output)
        self._mark = after = time.perf_counter()
        counters.sync_seconds += after - before
        return output

    def _trace_route(
        self, group: int, experts: list[int], tokens: int, tail: list[list[int]]
    ) -> None:
        times = self._synced, self._mark
        self._tracer.route(group, self._forward, *times, experts, tokens, tail)

    def _position(self, group: int) -> int:
        return self._forward * len(self._tables) + group

    def _fetch(self, switch: StreamingSwitch, experts: list[int]) -> list[int] | None:
        """Slots of the experts, pinned, once all of them are there; None when they do not fit."""
        got = self._demand(switch, experts, [])
        if got is None:
            return None
        if got.futures:
            self._wait(switch, got)
        return got.slots

    def _demand(
        self,
        switch: StreamingSwitch,
        experts: list[int],
        ranks: Sequence[mx.array],
        *,
        part: bool = False,
    ) -> Demanded | None:
        """Ask for the experts of a call and, in the same message, for guesses at later ones."""
        group, ahead, owner = switch.group, self._ahead, self.step.owner
        position = self._position(group)
        if ahead is None:
            got = self._store.demand(group, experts, owner=owner, position=position, part=part)
            if got is None:
                return None
            self._pins.append((group, got.slots))
        else:
            if self._deterministic:
                ahead.wait()
            if self._ready is not None:
                ahead.governor.window(self._ready[0], self._mark - self._ready[1])
            predicted = ahead.note(group, experts)
            guesses = (
                ahead.guesses(
                    ahead.targets(group), ranks, position=position, first=group, routed=experts
                )
                if ranks
                else self._sure
            )
            got = self._store.demand(
                group,
                experts,
                owner=owner,
                position=position,
                part=part,
                predicted=predicted,
                guesses=() if self._deterministic else guesses,
                grant=ahead.grant(group) if ranks and guesses else 0.0,
            )
            if got is None:
                return None
            # From here on the next `_sync` unpins them, whatever happens in between.
            self._pins.append((group, got.slots))
            ahead.settle(group, got)
            if self._deterministic and guesses:
                ahead.ahead(guesses, owner=owner)
        self._ready = (group, self._mark)
        missing = len(got.futures)
        counters = self.step.counters
        counters.hits += len(experts) - missing
        counters.misses += missing
        counters.bytes_read += got.nbytes
        return got

    def _wait(self, switch: StreamingSwitch, got: Demanded) -> None:
        """Wait for the reads of a call."""
        counters = self.step.counters
        before = time.perf_counter()
        counters.host_seconds += before - self._mark
        try:
            _wait(got.futures)
        finally:
            self._mark = after = time.perf_counter()
            self._ready = (switch.group, after)
            counters.stall_seconds += after - before
            if self._ahead is not None:
                self._ahead.waited(after - before)
            self._tracer.stall(
                *(switch.group, before, after),
                *(got.late, got.evicted, got.unpredicted),
            )

    def _run_waves(
        self,
        switch: StreamingSwitch,
        x: mx.array,
        shape: tuple[int, ...],
        routed: npt.NDArray[np.integer],
        experts: list[int],
        first: Sequence[int] = (),
    ) -> mx.array:
        """A call that routes to more experts than fit: each wave computes the pairs of some.

        Each (token, expert) pair is computed once and each expert read at most once, the next wave
        while this one is computed. Rows are put back into their places, so only the shape of the
        kernel calls differs from the undivided one.
        """
        store, top_k = self._store, shape[-1]
        here, missing = store.split(switch.group, experts, first)
        waiting = here + missing
        record_bytes = store.groups[switch.group].stored_bytes
        size = wave_size(store.room(switch.group), record_bytes)
        tokens = x.reshape(-1, x.shape[-1])
        outputs: list[mx.array] = []
        order: list[npt.NDArray[np.intp]] = []
        wave = ahead = None
        try:
            while waiting or ahead is not None:
                self.step.check()
                wave, ahead = ahead or self._ask(switch, waiting, size), None
                # A guess may have taken a slot just before; it leaves room for a token's experts.
                wave = wave or self._ask(switch, waiting, size)
                if wave is None:
                    raise IntegrityError(f"layer {switch.layer} has no room for a wave")
                ahead = self._ask(switch, waiting, size)
                if wave.got.futures:
                    self._wait(switch, wave.got)
                pairs, output = self._compute_wave(switch, tokens, routed, top_k, wave)
                self._pins.append((switch.group, wave.got.slots))
                wave = None
                self._sync()  # room for the wave after the next
                self.step.counters.waves += 1
                outputs.append(output.squeeze(-2))
                order.append(pairs)
        finally:
            for asked in (wave, ahead):
                if asked is not None:  # an error: nothing is being read once it is told
                    self._pins.append((switch.group, asked.got.slots))
                    for future in asked.got.futures:
                        future.exception()
        inverse = np.argsort(np.concatenate(order)).astype(np.uint32)
        return mx.concatenate(outputs)[mx.array(inverse)].reshape(*shape, -1)

    def _ask(self, switch: StreamingSwitch, waiting: list[int], size: int) -> _Wave | None:
        """Ask for the next wave, taking it off ``waiting``; None when there is none, or no room.

        The caller books its pins.
        """
        experts = waiting[: min(size, self._store.room(switch.group))]
        got = self._demand(switch, experts, [], part=True) if experts else None
        if got is None:
            return None
        self._pins.pop()
        del waiting[: len(experts)]
        return _Wave(experts, got)

    def _compute_wave(
        self,
        switch: StreamingSwitch,
        tokens: mx.array,
        routed: npt.NDArray[np.integer],
        top_k: int,
        wave: _Wave,
    ) -> tuple[npt.NDArray[np.intp], mx.array]:
        """Which pairs belong to a wave, and their outputs ``[pairs, 1, hidden]``."""
        table = self._tables[switch.group]
        table[wave.experts] = wave.got.slots
        chosen = np.zeros(len(table), np.bool_)
        chosen[wave.experts] = True
        pairs = np.flatnonzero(chosen[routed])
        rows = tokens[mx.array((pairs // top_k).astype(np.uint32))]
        output: mx.array = switch.inner(rows, mx.array(table[routed[pairs]].reshape(-1, 1)))
        self._outputs.append(output)
        return pairs, output

    def _sync(self, *wanted: mx.array) -> None:
        """Evaluate these arrays and all outputs so far; unpin the slots that these have read."""
        outputs, counters = self._outputs, self.step.counters
        before = time.perf_counter()
        counters.host_seconds += before - self._mark
        try:
            mx.eval(*wanted, *outputs)
        except BaseException:
            mx.synchronize()  # a failed evaluation may have left others running
            raise
        finally:
            self._mark = after = time.perf_counter()
            counters.sync_seconds += after - before
            outputs.clear()
            for group, slots in self._pins:
                self._store.release(group, slots)
            self._pins.clear()


def flatten(nested: Any) -> list[int]:
    """The numbers of nested lists in order."""
    while nested and isinstance(nested[0], list):
        nested = [item for part in nested for item in part]
    flat: list[int] = nested
    return flat


def hottest_last(routed: Sequence[int]) -> list[int]:
    """The distinct experts by the number of their tokens, then by number."""
    heat = Counter(routed)
    return sorted(heat, key=lambda expert: (heat[expert], expert))


def rows_at_end(routed: list[int], top_k: int) -> list[list[int]]:
    """The experts of the last tokens, token by token."""
    start = max(len(routed) - PROMPT_TAIL * top_k, 0)
    return [routed[at : at + top_k] for at in range(start, len(routed), top_k)]


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
