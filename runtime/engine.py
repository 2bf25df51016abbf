"""The engine: what callers hold. Lives on the caller's event loop and never blocks it."""

from __future__ import annotations

import asyncio
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

from ..io.errors import MoestreamError
from ..io.loop import READ_TIMEOUT
from .api import Chunk, Generation, Statistics
from .arguments import cache_path_argument, path_argument, real, show, whole
from .assembly import Progress
from .compute import ComputeThread
from .core import DEFAULT_LANES, Core, Settings, running_core
from .errors import EngineClosed, InvalidRequest, OpenFailed
from .plan import Plan, parse_size
from .policies import DEFAULT_POLICY, POLICIES, PolicyName
from .prefetch import OFF, PrefetchConfig
from .prompt_cache import PromptCache
from .prompt_files import FileJob, load, save
from .request import PromptProgress, Request, State
from .resizing import wake_with
from .sampling import Prompt, Sampling, early_check, freeze_prompt, make_sampling
from .scheduler import GenerationJob, Scheduler
from .scheduling import DEFAULT_PREFILL_CHUNK, DEFAULT_RUNNING, DEFAULT_WAITING, Entrance


class SamplingArguments(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``stream``; see ``Sampling`` for their meaning."""

    max_tokens: int
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[int, float] | None
    stop: str | Iterable[str] | None
    ignore_eos: bool
    logprobs: int | None


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_opening: dict[ComputeThread[Core], threading.Event] = {}


class Engine:
    """A Mixture-of-Experts model whose experts are streamed from the drive.

    Made by ``Engine.open``; an async context manager. All methods may be called from any asyncio
    loop, many calls at once; requests are computed together where the model allows it, and begin in
    the order of their arrival.
    """

    def __init__(self, thread: ComputeThread[Core], core: Core, scheduler: Scheduler) -> None:
        self._thread = thread
        self._core = core
        self._scheduler = scheduler
        scheduler.entrance.running = core.loaded.limits.rows
        self._closed = False
        wake_with(thread, core.resizer)
        _open_engines.add(self)

    @classmethod
    async def open(
        cls,
        model: str | Path,
        *,
        memory: int | str | None = None,
        slots: int | None = None,
        context: int | None = None,
        dtype: Literal["float32", "checkpoint"] | None = None,
        direct: bool = True,
        lanes: int = DEFAULT_LANES,
        prefetch: PrefetchConfig | Literal["off"] | None = None,
        calibration: str | Path | None = None,
        policy: PolicyName = DEFAULT_POLICY,
        trace: str | Path | None = None,
        progress: Progress | None = None,
        checksum: bool = False,
        pressure: Literal["auto", "off"] = "auto",
        read_timeout: float = READ_TIMEOUT,
        max_running: int = DEFAULT_RUNNING,
        max_waiting: int = DEFAULT_WAITING,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        prompt_cache: int | str | bool | None = None,
    ) -> Engine:
        """Open a model.

        Args:
            model: directory of an mlx-lm checkpoint or packed store, or a Hub id that is downloaded
                first.
            memory: total for this process: bytes, a text like "8GB", "all" (every expert resident),
                or None for a share of what the machine has free.
            slots: slots per MoE layer, instead of what ``memory`` gives.
            context: most tokens of prompt and answer together; None for at most 4096.
            dtype: "float32" computes in float32, "checkpoint" in the checkpoint's own type; None
                takes float32 on the CPU backend, where 16-bit kernels are many times slower.
            direct: read past the page cache where the alignment of the file allows it.
            lanes: reads in flight at once.
            prefetch: how experts are read ahead, see ``PrefetchConfig``; "off" and None read them
                when they are routed to.
            calibration: file that keeps what was learnt for the next start: which experts were used
                most, which are then read before the first request, and with ``prefetch`` how well
                predictions come true.
            policy: which expert gives up its slot first: "neighbours" goes by how often experts are
                used and by what came after tokens with such a routing, "successors" by how often
                and by which come after which, "lfu-decay" by how often alone, "lru" by how long
                ago.
            trace: file for a trace; ``moestream trace report`` makes a page of it, and a file that
                opens in Perfetto.
            progress: called on the compute thread with (bytes, bytes in all) while loading.
            checksum: check every record that is read against the checksums of a packed store; one
                that does not match fails the request with ``ChecksumMismatch``.
            pressure: "auto" gives slots up while the machine, or a control group that the process
                is in, runs short of memory, and takes them back slowly; "off" keeps them.
            read_timeout: seconds after which a read to which the drive does not answer fails its
                request with ``ReadTimeout``; the engine goes on without the slot until it does.
            max_running: requests computed together at most; fewer where slots or the memory of the
                plan's KV cache do not suffice, and one at a time where mlx-lm cannot batch the
                model's caches (``statistics`` says so).
            max_waiting: requests that wait behind them at most; more raise ``EngineBusy``.
            prefill_chunk: prompt tokens computed between two tokens of running requests at most. A
                stream pauses no longer than that chunk and one forward take; smaller chunks make
                prompts slower, since each of them reads nearly all experts.
            prompt_cache: memory for the caches of prompts and answers, so that a prompt that begins
                like one before computes only the rest: bytes, a text like "512MB", True for as much
                as one request at full context takes, if that can be spared, or None for none. It
                has its place in the plan. The rest of a prompt is then computed in other chunks
                than the whole would be, and sums of another order round otherwise: logits may
                differ in their last bits. The same prompt again has the same bits while its end is
                remembered. Decoding is as usual.

        Raises:
            MoestreamError: one of its subclasses says what is wrong and what would do.
        """
        settings = _settings(
            model,
            memory,
            slots,
            context,
            dtype,
            direct,
            lanes,
            prefetch,
            trace,
            calibration,
            checksum,
            pressure,
            policy,
            read_timeout,
            max_running,
            max_waiting,
            prefill_chunk,
            prompt_cache,
        )
        given_up = threading.Event()

        def check() -> None:
            if given_up.is_set():
                raise EngineClosed()

        make_core = partial(running_core, settings, check=check, progress=progress)
        scheduler = Scheduler(Entrance(settings.max_waiting))
        thread: ComputeThread[Core] = ComputeThread(make_core, scheduler)
        _opening[thread] = given_up
        thread.start()
        try:
            core = await asyncio.wrap_future(thread.ready)
        except BaseException as error:
            given_up.set()
            thread.stop()
            await _finish(thread)
            if isinstance(error, OSError | RuntimeError) and not isinstance(error, MoestreamError):
                raise OpenFailed(error) from error
            raise
        finally:
            del _opening[thread]
        return cls(thread, core, scheduler)

    # -- generation ---------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109  # the compute thread keeps it
        progress: PromptProgress | None = None,
        **sampling: Unpack[SamplingArguments],
    ) -> Generation:
        """Generate text; see ``Sampling`` for the arguments. Temperature 0 (greedy) is the default.

        Cancelling the awaiting task stops the request: within one layer while it is computed by
        itself, before the next token while it is computed with others, who do not notice.

        Args:
            prompt: a text, token ids, or chat messages (dicts with ``role`` and ``content``).
            priority: of those that wait, the request with the largest goes first, then the one that
                came first. What runs is not interrupted.
            timeout: seconds from now in which the request has to end, waiting included.
            progress: called on this loop, while a prompt is computed, with the number of its tokens
                that are done and of all.
            **sampling: ``max_tokens``, ``temperature``, ``top_p``, ``min_p``, ``top_k``, ``seed``,
                ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``,
                ``stop``, ``ignore_eos``, ``logprobs``.

        Raises:
            InvalidRequest: an argument makes no sense; says which.
            ReadFailed: an expert could not be read; the next request may work.
            EngineBusy: too many requests run and wait.
            RequestTimeout: its time is over; has what was generated by then.
            EngineClosed, EngineDead: the engine takes no requests.
        """
        checked, arguments = self._read(prompt, sampling, "generate")
        request = self._submit(checked, arguments, False, *_turn(priority, timeout), progress)
        try:
            result = await request.receive()
        except BaseException:
            self._cancel(request)
            raise
        assert isinstance(result, Generation)
        return result

    def stream(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        timeout: float | None = None,
        progress: PromptProgress | None = None,
        **sampling: Unpack[SamplingArguments],
    ) -> AsyncGenerator[Chunk, None]:
        """Generate text token by token; arguments and errors as for ``generate``.

        The arguments are checked at the call; the request is queued when the iteration begins.

        Each chunk is handed out before the next token is computed. Closing the iterator (also by
        leaving the loop inside ``contextlib.aclosing``) stops the request as cancelling does.
        """
        checked, arguments = self._read(prompt, sampling, "stream")
        return self._stream(checked, arguments, _turn(priority, timeout), progress)

    async def _stream(
        self,
        prompt: Prompt,
        sampling: Sampling,
        turn: tuple[int, float | None],
        progress: PromptProgress | None,
    ) -> AsyncGenerator[Chunk, None]:
        request = self._submit(prompt, sampling, True, *turn, progress)
        try:
            while isinstance(message := await request.receive(), Chunk):
                yield message
        finally:
            self._cancel(request)

    def _read(
        self, prompt: Prompt, arguments: SamplingArguments, function: str
    ) -> tuple[Prompt, Sampling]:
        """Check and copy the arguments; what a caller changes later is not seen."""
        sampling = make_sampling(arguments, function=function)
        loaded = self._core.loaded
        prompt = freeze_prompt(prompt, context=loaded.context)
        early_check(sampling, prompt, vocabulary=loaded.vocabulary, context=loaded.context)
        return prompt, sampling

    def _submit(
        self,
        prompt: Prompt,
        sampling: Sampling,
        chunks: bool,
        priority: int,
        timeout: float | None,
        progress: PromptProgress | None,
    ) -> Request:
        if progress is not None and not callable(progress):
            raise InvalidRequest(f"progress={show(progress)} cannot be called")
        request = Request(
            prompt,
            sampling,
            chunks=chunks,
            priority=priority,
            timeout=timeout,
            progress=progress,
        )
        entrance = self._scheduler.entrance
        entrance.enter(request.number)
        try:
            self._thread.submit(GenerationJob(request, self._scheduler))
        except BaseException:
            entrance.leave(request.number)
            raise
        return request

    def _cancel(self, request: Request) -> None:
        request.cancel()
        if request.state is State.RUNNING:
            self._core.store.purge(request.number)
        elif request.state is State.WAITING:
            self._scheduler.entrance.leave(request.number)

    # -- prompt cache -------------------------------------------------------------------------

    async def save_prompt_cache(self, path: str | Path) -> int:
        """Save the prompt cache to a file that ``load_prompt_cache`` reads, also of a later engine.

        An old file is replaced once the new one is complete. With an empty cache nothing is
        written. Requests wait meanwhile.

        Args:
            path: must end in ``.safetensors``; the format is mlx-lm's.

        Returns:
            How many token sequences were saved.

        Raises:
            InvalidRequest: it is no such path, or the engine was opened without prompt cache.
            PromptCacheFileError: it cannot be written, or mlx-lm cannot save this model's caches.
            EngineClosed, EngineDead: the engine takes no requests.
        """
        return await self._with_file(path, save)

    async def load_prompt_cache(self, path: str | Path) -> int:
        """Add what ``save_prompt_cache`` has saved to the prompt cache, as far as there is room.

        Args:
            path: of the file.

        Returns:
            How many token sequences there was room for; the newest come first.

        Raises:
            InvalidRequest: it is no such path, or the engine was opened without prompt cache.
            PromptCacheFileError: there is no such file, it is damaged, or of another model.
            EngineClosed, EngineDead: the engine takes no requests.
        """
        return await self._with_file(path, load)

    async def _with_file(
        self, path: str | Path, work: Callable[[Path, PromptCache, str], int]
    ) -> int:
        job = FileJob(cache_path_argument("path", path), work)
        self._thread.submit(job)
        return await asyncio.wrap_future(job.done)

    # -- state --------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """How the memory was divided."""
        return self._core.plan

    @property
    def tokenizer(self) -> Any:
        """mlx-lm's tokenizer, to read from on any thread; None when the checkpoint has none.

        Also None once the engine is closed.
        """
        return self._core.loaded.tokenizer

    @property
    def alive(self) -> bool:
        """Whether requests are taken: neither closed nor dead."""
        ended = self._closed or self._thread.finished.done()
        return not ended and self._core.loop.failure is None

    def statistics(self) -> Statistics:
        """Totals since the engine was opened. Cheap; from any thread."""
        waiting = self._thread.waiting + self._scheduler.waiting
        return self._scheduler.totals.record(self._core, waiting=waiting)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise IntegrityError unless the books of all slot pools balance.

        Args:
            idle: also demand that nothing is pinned or being read.
        """
        self._core.store.check_integrity(idle=idle)

    # -- end ----------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Stop running requests (they get ``EngineClosed``), end both threads, free the memory.

        Idempotent and bounded in time.
        """
        self._begin_close()
        await _finish(self._thread)

    def _begin_close(self) -> None:
        self._closed = True
        _open_engines.discard(self)
        self._core.stopping.set()
        self._thread.stop()
        # The compute thread may be waiting for a drive that never answers.
        self._core.loop.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)
            self._begin_close()


def _settings(
    model: str | Path,
    memory: int | str | None,
    slots: int | None,
    context: int | None,
    dtype: str | None,
    direct: bool,
    lanes: int,
    prefetch: PrefetchConfig | str | None,
    trace: str | Path | None,
    calibration: str | Path | None,
    checksum: bool,
    pressure: str,
    policy: PolicyName,
    read_timeout: float,
    max_running: int,
    max_waiting: int,
    prefill_chunk: int,
    prompt_cache: int | str | bool | None,
) -> Settings:
    slots = None if slots is None else whole("slots", slots, least=1)
    context = None if context is None else whole("context", context, least=1)
    lanes = whole("lanes", lanes, least=1)
    if dtype not in (None, "float32", "checkpoint"):
        raise InvalidRequest(f"dtype={dtype!r} must be 'float32', 'checkpoint' or None")
    if pressure not in ("auto", "off"):
        raise InvalidRequest(f"pressure={pressure!r} must be 'auto' or 'off'")
    if prefetch is None or prefetch == "off":
        prefetch = OFF
    elif not isinstance(prefetch, PrefetchConfig):
        raise InvalidRequest(f"prefetch={prefetch!r} must be a PrefetchConfig, 'off' or None")
    if not isinstance(policy, str) or policy not in POLICIES:
        raise InvalidRequest(f"policy={show(policy)} must be one of {', '.join(POLICIES)}")
    return Settings(
        model=model,
        memory=memory,
        slots=slots,
        context=context,
        dtype=dtype,
        direct=direct,
        lanes=lanes,
        trace=path_argument("trace", trace),
        prefetch=prefetch,
        calibration=path_argument("calibration", calibration),
        checksum=bool(checksum),
        pressure=pressure == "auto",
        policy=policy,
        read_timeout=real("read_timeout", read_timeout, 0.001, 1e6),
        max_running=whole("max_running", max_running, least=1),
        max_waiting=whole("max_waiting", max_waiting, least=0),
        prefill_chunk=whole("prefill_chunk", prefill_chunk, least=1),
        prompt_cache=_cache_size(prompt_cache),
    )


def _cache_size(value: int | str | bool | None) -> int | Literal[True] | None:
    if value is None or value is False:
        return None
    return True if value is True else parse_size(value, "prompt_cache")


def _turn(priority: int, timeout: float | None) -> tuple[int, float | None]:
    """The checked arguments about a request's turn."""
    priority = whole("priority", priority, least=-(2**31), most=2**31)
    return priority, None if timeout is None else real("timeout", timeout, 0.0, 1e9)


async def _finish(thread: ComputeThread[Core]) -> None:
    """Wait for the thread's end, also when the waiting task is cancelled meanwhile."""
    finished = asyncio.wrap_future(thread.finished)
    cancelled: asyncio.CancelledError | None = None
    while not finished.done():
        try:
            await asyncio.shield(finished)
        except asyncio.CancelledError as error:
            cancelled = error
    thread.join()
    if cancelled is not None:
        raise cancelled


def _close_left_engines() -> None:
    for engine in list(_open_engines):
        engine._begin_close()
    for thread, given_up in list(_opening.items()):
        given_up.set()
        thread.stop()


# The interpreter joins threads before it runs atexit functions, so a forgotten engine would keep
# the process alive for ever. This hook runs before the join; it is what concurrent.futures uses.
threading._register_atexit(_close_left_engines)  # type: ignore[attr-defined]
