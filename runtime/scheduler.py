"""Runs requests together on the compute thread: who joins, who leaves, one forward for all.

A round is: those that were given up leave, chunks of prompts, one token of every running request.
While there are such, the chunks have ``prefill_chunk`` tokens together at most. So a stream never
waits longer for its next token than these and one forward take. Short prompts that wait together
are computed in one round: then their answers run in step, and equal ones share every expert.
"""

from __future__ import annotations

import time
import traceback
from bisect import insort
from collections.abc import Callable, Sequence

import mlx.core as mx

from ..io.errors import LoopClosed, MoestreamError, ReadsPurged
from .api import FinishReason
from .batching import Batch
from .core import Core
from .drawing import Drawn
from .errors import EngineClosed, EngineDead, GenerationFailed, RequestTimeout
from .generation import Row
from .request import Cancelled, Failed, Message, Request, State
from .scheduling import SHORT_PROMPT, Entrance
from .streaming import Step, StepCounters
from .totals import Totals, share

TOGETHER = -2
"""Owner of the reads of a forward for several requests: none of them may purge the others'."""


class Scheduler:
    """The work of an engine's compute thread.

    Args:
        entrance: counts the requests; is told when one has ended.

    Attributes:
        totals: sums over requests.
    """

    def __init__(self, entrance: Entrance) -> None:
        self.totals = Totals()
        self.entrance = entrance
        self._waiting: list[Row] = []  # in the order of their turns
        self._filling: Row | None = None  # whose prompt is being computed
        self._batch = Batch()  # whose prompts are done
        self._room = 0  # tokens of prompts that may still come before the next ones of streams
        self._failures = 0  # forwards of several requests that have failed in a row

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn. Any thread."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Take up a request."""
        insort(self._waiting, Row(request), key=lambda row: row.order)

    def refuse(self, request: Request, error: BaseException) -> None:
        """A request will not be taken up."""
        request.state = State.ENDED
        self.entrance.leave(request.number)
        request.post(Failed(error))

    def step(self, core: Core) -> bool:
        """One round; whether requests are left."""
        try:
            self._reap(core)
            limits, alone = core.loaded.limits, not self._batch.rows
            if alone:
                self._room = limits.prefill_chunk
            self._prefill(core)
            # Who came while the first prompt was computed is heard before its second token.
            if not (alone and self._batch.rows and limits.rows > 1):
                self._decode(core)
                self._room = limits.prefill_chunk
        except _Stopped:
            self.abort(EngineClosed)
        return bool(self._waiting or self._running)

    def abort(self, refusal: Callable[[], Exception]) -> None:
        """End everything: the engine is closed or dead."""
        rows = [*self._running, *self._waiting]
        self._waiting.clear()
        self._filling = None
        self._batch = Batch()
        for row in rows:
            row.forget()
            row.request.state = State.ENDED
            self.entrance.leave(row.number)
            self.totals.failed += 1
            row.request.post(Failed(refusal()))
        self.totals.running = ()

    # -- who runs -----------------------------------------------------------------------------

    @property
    def _running(self) -> list[Row]:
        filling = [] if self._filling is None else [self._filling]
        return [*self._batch.rows, *filling]

    def _reap(self, core: Core) -> None:
        """Let go of requests that their callers have given up, or whose time is over."""
        if core.stopping.is_set():
            raise _Stopped
        given_up = [row for row in self._waiting if row.request.given_up]
        if given_up:
            self._waiting = [row for row in self._waiting if row not in given_up]
        given_up += [row for row in self._running if row.request.given_up]
        self._end(core, [(row, "cancelled") for row in given_up])

    def _admit(self, core: Core) -> None:
        """Let the next request begin, if it may run beside the others."""
        limits, running = core.loaded.limits, self._running
        while self._waiting and len(running) < limits.rows:
            row = self._waiting[0]
            if not row.begun:
                try:
                    row.begin(core.loaded)
                except Exception as error:
                    self._waiting.pop(0)
                    self._fail(core, row, error)
                    continue
            if running and not limits.admits([other.length for other in running], row.length):
                return
            self._waiting.pop(0)
            row.request.state = State.RUNNING
            self._filling = row
            self._note_running()
            return

    def _make_room(self, core: Core) -> None:
        """Send requests back to the queue while the caches of all would not fit the budget."""
        limits = core.loaded.limits
        while not limits.fit([row.length + 1 for row in self._running]):
            last = max(self._running, key=lambda row: row.order)
            self._keep(core, last)
            self._put_back(core, last)

    def _put_back(self, core: Core, row: Row) -> None:
        """To be computed anew, from its tokens, when its turn comes again."""
        self._take_out([row])
        row.forget()
        core.loaded.stream.end_request(row.number)
        insort(self._waiting, row, key=lambda row: row.order)
        self._note_running()

    def _take_out(self, rows: Sequence[Row]) -> None:
        if self._filling in rows:
            self._filling = None
        self._batch.leave(rows)

    def _note_running(self) -> None:
        self.totals.running = tuple(self._running)

    # -- prompts ------------------------------------------------------------------------------

    def _prefill(self, core: Core) -> None:
        """Compute chunks of prompts: as much as running requests can wait for."""
        if self._joinable(core) and any(row.pending is not None for row in self._batch.rows):
            self._decode(core)  # a token whose forward has begun comes before company
        while self._room > 0:
            if self._filling is None:
                self._admit(core)
            row = self._filling
            if row is None:
                return
            if not self._batch.rows:  # nobody waits: one chunk as large as it likes
                self._fill(core, row, row.left)
                if not self._batch.rows:  # jobs first, and whoever they bring
                    return
            else:
                left = row.left
                self._fill(core, row, self._room)
                self._room -= max(left - row.left, SHORT_PROMPT)
            self._reap(core)

    def _joinable(self, core: Core) -> bool:
        """Whether somebody may want to join those who run."""
        return core.loaded.limits.rows > 1 and (bool(self._waiting) or self._filling is not None)

    def _fill(self, core: Core, row: Row, most: int) -> None:
        loaded = core.loaded
        begun = time.perf_counter()
        loaded.stream.step = Step(row.number, self._check(core, [row]), row.counters)
        drawn: Drawn | None = None
        try:
            try:
                loaded.stream.step.check()
                logits = row.prefill(loaded, core.tracer, most)
                if logits is not None:
                    drawn = row.draw(logits)
            finally:
                loaded.stream.end_forward(*(drawn.arrays() if drawn is not None else ()))
        except Exception as error:
            self._failed(core, [row], error)
            return
        if drawn is None:
            return
        if loaded.kept is not None:
            row.keep(loaded.kept, row.cache, logits)
        self._filling = None
        self._batch.join([row])
        self._take(core, [row], [drawn], begun)

    # -- tokens -------------------------------------------------------------------------------

    def _decode(self, core: Core) -> None:
        """One token of every running request."""
        self._make_room(core)
        loaded = core.loaded
        rows: list[Row] = list(self._batch.rows)
        if not rows:
            return
        begun = time.perf_counter()
        several = len(rows) > 1
        counters = StepCounters() if several else rows[0].counters
        owner = TOGETHER if several else rows[0].number
        loaded.stream.step = Step(owner, self._check(core, rows), counters, several)
        drawn: list[Drawn] = []
        try:
            try:
                drawn = self._forward(core, rows)
            finally:
                loaded.stream.end_forward(*[array for one in drawn for array in one.arrays()])
        except Exception as error:
            self._failed(core, rows, error)
            return
        finally:
            if several:
                share(counters, [row.counters for row in rows])
        if several:
            self._failures = 0
        self._take(core, rows, drawn, begun)

    def _forward(self, core: Core, rows: Sequence[Row]) -> list[Drawn]:
        """Draw the next token of each row; evaluates nothing of a single row."""
        loaded, stream = core.loaded, core.loaded.stream
        if len(rows) == 1:
            row = rows[0]
            drawn = row.pending
            row.pending = None
            if drawn is None:
                token = mx.array([[row.last]], mx.uint32)
                drawn = row.draw(self._logits(core, token, row.last))
            if loaded.resident and row.two_left and not self._joinable(core):
                # No layer needs the host: the device goes on while this token is handed out.
                row.pending = row.draw(self._logits(core, drawn.token[None]))
                stream.launch(*row.pending.arrays())
            return [drawn]
        logits = self._logits(core, mx.array([[row.last] for row in rows], mx.uint32))
        return [row.draw(logits[index : index + 1]) for index, row in enumerate(rows)]

    def _logits(self, core: Core, tokens: mx.array, token: int | None = None) -> mx.array:
        """Logits ``[rows, vocabulary]`` behind tokens ``[rows, 1]``, unevaluated."""
        stream = core.loaded.stream
        stream.step.check()
        stream.begin_forward(token)
        logits: mx.array = core.loaded.model(tokens, cache=self._batch.caches)
        return logits[:, -1, :]

    def _take(self, core: Core, rows: Sequence[Row], drawn: Sequence[Drawn], begun: float) -> None:
        """Hand tokens out; a request ends with its last one."""
        ended: list[tuple[Row, FinishReason]] = []
        for row, one in zip(rows, drawn, strict=True):
            chosen = one.resolve()
            core.tracer.token(row.number, chosen.token, begun, time.perf_counter())
            try:
                finish = row.take(chosen, core.loaded.end_tokens)
            except Exception as error:  # of the tokenizer
                self._fail(core, row, error)
                continue
            if finish is not None:
                ended.append((row, finish))
        self._end(core, ended)

    # -- ends ---------------------------------------------------------------------------------

    def _check(self, core: Core, rows: Sequence[Row]) -> Callable[[], None]:
        """Raises inside a forward that nobody wants any more."""
        requests = [row.request for row in rows]

        def check() -> None:
            if all(request.given_up for request in requests):
                raise Cancelled
            if core.stopping.is_set():
                raise EngineClosed

        return check

    def _failed(self, core: Core, rows: Sequence[Row], error: Exception) -> None:
        """A forward has not been completed: its caches are of no use any more."""
        if core.stopping.is_set():
            _drop_frames(error)
            raise _Stopped
        if core.loop.failure is not None:
            raise core.loop.failure
        self._failures += len(rows) > 1
        if isinstance(error, Cancelled | ReadsPurged):
            self._end(core, [(row, "cancelled") for row in rows], sound=False)
        elif len(rows) == 1 or self._failures > 1:
            for row in rows:
                self._fail(core, row, error)
        else:
            # One of them is at fault, or none. All are computed anew from their tokens, each by
            # itself: then it fails by itself as well.
            _drop_frames(error)
            for row in rows:
                self._put_back(core, row)

    def _end(
        self, core: Core, ended: Sequence[tuple[Row, FinishReason]], *, sound: bool = True
    ) -> None:
        """Requests have ended in a result; their caches are not ``sound`` in a broken forward."""
        for row, _ in ended:
            self._keep(core, row, sound=sound)
        self._leave(core, [row for row, _ in ended])
        for row, finish in ended:
            result = row.result(finish)
            outcome: Message = result
            timeout = row.request.timeout
            if finish == "cancelled" and row.request.expired and timeout is not None:
                outcome = Failed(RequestTimeout(timeout, result if row.begun else None))
            self._send(core, row, outcome)

    def _keep(self, core: Core, row: Row, *, sound: bool = True) -> None:
        """Offer what a request has computed to the prompt cache."""
        if core.loaded.kept is not None and (sound or len(self._batch.rows) < 2):
            row.keep(core.loaded.kept, self._batch.cache_of(row), sound=sound)

    def _fail(self, core: Core, row: Row, error: Exception) -> None:
        """A request has ended in an error."""
        _drop_frames(error)
        self._leave(core, [row])
        self._send(core, row, Failed(_outcome(error)))

    def _leave(self, core: Core, rows: Sequence[Row]) -> None:
        if not rows:
            return
        self._take_out(rows)
        for row in rows:
            row.forget()
            if row.request.state is State.RUNNING:
                core.loaded.stream.end_request(row.number)
            row.request.state = State.ENDED
            self.entrance.leave(row.number)
        self._note_running()

    def _send(self, core: Core, row: Row, outcome: Message) -> None:
        self.totals.end(row.counters, outcome)
        core.sample_memory()
        row.request.post(outcome)


class _Stopped(Exception):
    """The engine is being closed. Never escapes."""


class GenerationJob:
    """Hands one request to the scheduler."""

    def __init__(self, request: Request, scheduler: Scheduler) -> None:
        self._request = request
        self._scheduler = scheduler

    def run(self, core: Core) -> None:
        """Take it up; steps do the rest."""
        self._scheduler.add(self._request)

    def abort(self, error: BaseException) -> None:
        """The thread has ended first."""
        self._scheduler.refuse(self._request, error)


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
