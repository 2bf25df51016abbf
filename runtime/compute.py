"""The compute thread: the only one that touches MLX, for the engine's whole life.

Contract: a submitted job is either refused at once with ``EngineClosed`` or ``EngineDead``, or
exactly one of its ``run`` and ``abort`` is called, also when the thread dies. What ``run`` began is
gone on with step by step; its ``abort`` is called when no step follows.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from .errors import EngineClosed, EngineDead

logger = logging.getLogger("moestream")

Core = TypeVar("Core")
CoreIn = TypeVar("CoreIn", contravariant=True)


class Job(Protocol[CoreIn]):
    """Something for the compute thread to do."""

    def run(self, core: CoreIn) -> None:
        """Do it, and deliver the outcome. An exception from here kills the engine."""

    def abort(self, error: BaseException) -> None:
        """It will not be done."""


class Work(Protocol[CoreIn]):
    """What jobs have begun and the thread goes on with, step by step, between them."""

    def step(self, core: CoreIn) -> bool:
        """Do some of it; whether anything is left. An exception from here kills the engine."""

    def abort(self, refusal: Callable[[], Exception]) -> None:
        """No step will follow: end what is left, each part with an error of its own."""


class NoWork:
    """Jobs that are over when they have run."""

    def step(self, core: object) -> bool:
        """Nothing is left."""
        return False

    def abort(self, refusal: Callable[[], Exception]) -> None:
        """Nobody to tell."""


class ComputeThread(Generic[Core]):
    """Runs jobs in the order of their arrival, and between them the steps of what they began.

    Args:
        make_core: opens what the jobs work on; entered and left on the thread.
        work: what jobs begin and steps go on with.
        name: of the thread.
    """

    def __init__(
        self,
        make_core: Callable[[], AbstractContextManager[Core]],
        work: Work[Core] | None = None,
        *,
        name: str = "moestream-compute",
    ) -> None:
        self._make_core = make_core
        self._work: Work[Core] = NoWork() if work is None else work
        self._thread = threading.Thread(target=self._main, name=name)
        self._wake = threading.Condition()  # guards the fields below
        self._jobs: deque[Job[Core]] = deque()
        self._stopping = False  # also once the thread is over
        self._death: BaseException | None = None
        self.ready: Future[Core] = Future()
        self.finished: Future[None] = Future()

    def start(self) -> None:
        """Start the thread; ``ready`` tells how the start went, ``finished`` that it is over."""
        for future in (self.ready, self.finished):  # so that nobody who waits can cancel them
            future.set_running_or_notify_cancel()
        self._thread.start()

    def submit(self, job: Job[Core]) -> None:
        """Queue a job.

        Raises:
            EngineClosed: the thread is stopping or has stopped.
            EngineDead: the thread has died.
        """
        with self._wake:
            if self._stopping:
                raise self._refusal()
            self._jobs.append(job)
            self._wake.notify()

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._jobs)

    def stop(self) -> None:
        """Refuse new jobs and end the thread behind the running job or step. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self) -> None:
        """Wait for the thread itself, after ``finished``: a matter of microseconds."""
        if self._thread.ident is not None:
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            with self._make_core() as core:
                try:
                    self.ready.set_result(core)
                    self._serve(core)
                except BaseException as error:
                    self._death = error
                    raise
                finally:
                    # Waiters hear of it before the clean-up, which may take a while.
                    self._refuse_all()
        except BaseException as error:
            failure = error
            # The frames hold models and descriptors, and the caller may keep the error.
            traceback.clear_frames(error.__traceback__)
        self._refuse_all()
        if failure is not None and not self.ready.done():
            self.ready.set_exception(failure)
        elif failure is not None and failure is not self._death:
            logger.error("the engine did not close cleanly", exc_info=failure)
        self.finished.set_result(None)

    def _serve(self, core: Core) -> None:
        busy = False
        while True:
            # All jobs first: what they begin may be done together.
            while (job := self._next(wait=not busy)) is not None:
                job.run(core)
                busy = True
            if self._stopping:
                return
            busy = self._work.step(core)

    def _next(self, *, wait: bool) -> Job[Core] | None:
        """The next job; None when there is none, or no job is to be run any more."""
        with self._wake:
            while wait and not self._jobs and not self._stopping:
                self._wake.wait()
            return None if self._stopping or not self._jobs else self._jobs.popleft()

    def _refuse_all(self) -> None:
        with self._wake:
            self._stopping = True
            left = list(self._jobs)
            self._jobs.clear()
        for job in left:
            try:
                job.abort(self._refusal())
            except Exception:  # the other jobs have to hear of it all the same
                logger.exception("a job could not be aborted")
        try:
            self._work.abort(self._refusal)
        except Exception:
            logger.exception("what was left of the jobs could not be aborted")

    def _refusal(self) -> EngineClosed | EngineDead:
        # A new one for each caller: raising one object in several threads mixes their tracebacks.
        if self._death is None:
            return EngineClosed()
        error = EngineDead(self._death)
        error.__cause__ = self._death
        return error
