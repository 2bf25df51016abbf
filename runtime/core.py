"""What the compute thread works with: the streaming model, its store and its I/O loop."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..io.loop import IoLoop
from ..io.reader import RecordReader
from ..io.records import Record
from ..models.experts import SiteUse, expert_parameters, install_parameters
from ..models.lookahead import build_predictor
from ..models.switch import StreamingSwitch
from .arguments import check_trace_path
from .assembly import (
    Blueprint,
    Check,
    Progress,
    draw_blueprint,
    load_parameters,
    make_record,
    trunk_parameters,
)
from .batching import unbatchable
from .errors import TraceUnwritable
from .generation import LoadedModel
from .hub import resolve_model
from .machine import automatic_budget, process_bytes, return_memory
from .packed import load_residents
from .plan import CACHE_BYTES, Plan, fitting_chunk, make_plan, parse_size
from .prefetch import OFF, PrefetchConfig
from .readahead import ReadAhead
from .scheduling import (
    DEFAULT_PREFILL_CHUNK,
    DEFAULT_RUNNING,
    DEFAULT_WAITING,
    make_limits,
    planned_requests,
)
from .store import ExpertStore
from .streaming import ExpertStream
from .streams import leased_streams
from .tokenizing import end_tokens, load_tokenizer_of
from .tracing import Tracer

logger = logging.getLogger("moestream")

DEFAULT_CONTEXT = 4096
TRACE_GRACE = 5.0
"""Seconds that closing waits for the end of the trace to be written."""

DEFAULT_LANES = 8
"""Reads in flight at once (8 to 16 saturate the drives that were measured)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of ``Engine.open``, see there."""

    model: str | Path
    memory: int | str | None = None
    slots: int | None = None
    context: int | None = None
    dtype: str | None = None
    direct: bool = True
    lanes: int = DEFAULT_LANES
    trace: Path | None = None
    prefetch: PrefetchConfig = OFF
    calibration: Path | None = None
    checksum: bool = False
    max_running: int = DEFAULT_RUNNING
    max_waiting: int = DEFAULT_WAITING
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK


@dataclass(slots=True)
class Core:
    """A running engine's inside.

    Attributes:
        plan: how the memory is divided.
        loaded: model and tokenizer.
        store: residency and pools of the streamed layers.
        loop: performs the reads.
        tracer: records events.
        ahead: predicts and reads ahead, if that is wanted and possible.
        trunk_bytes: parameters held for good.
        stopping: set when the engine is being closed.
        memory_bytes, peak_memory_bytes: held by MLX when last looked at.
    """

    plan: Plan
    loaded: LoadedModel
    store: ExpertStore
    loop: IoLoop
    tracer: Tracer
    ahead: ReadAhead | None
    trunk_bytes: int
    stopping: threading.Event = field(default_factory=threading.Event)
    memory_bytes: int = 0
    peak_memory_bytes: int = 0

    def sample_memory(self) -> None:
        """Look at MLX's memory. Compute thread only."""
        self.memory_bytes = mx.get_active_memory() + mx.get_cache_memory()
        peak = max(mx.get_peak_memory(), self.memory_bytes)
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak)

    def release(self) -> None:
        """Let go of model and pools; books and counters stay for whoever asks. Compute thread."""
        self.loaded.model = self.loaded.tokenizer = None
        self.loaded.stream.release()
        for group in self.store.groups:
            group.pool.release()
        self.ahead = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before any tensor is read.

    Attributes:
        blueprint: the unevaluated model.
        tokenizer: mlx-lm's, or None when the checkpoint has none.
        plan: how the memory is divided.
        streamed: the layers that get fewer slots than experts, with their slots.
        records: where the experts of these layers lie.
    """

    blueprint: Blueprint
    tokenizer: Any
    plan: Plan
    streamed: tuple[tuple[SiteUse, int], ...]
    records: tuple[Record, ...]


def prepare(settings: Settings) -> Prepared:
    """Read the headers of a model and divide the memory.

    Raises:
        MoestreamError: the checkpoint is damaged or cannot be streamed, or the budget is too small.
    """
    widen = {None: None, "float32": True, "checkpoint": False}[settings.dtype]
    directory = resolve_model(settings.model)
    blueprint = draw_blueprint(directory, widen=widen, checksum=settings.checksum)
    # Before the plan, which counts what the process holds: it brings large libraries along.
    tokenizer = load_tokenizer_of(blueprint.checkpoint.directory, blueprint.lazy.config)
    plan = plan_model(blueprint, settings)
    uses = zip(blueprint.uses, plan.slots, strict=True)
    streamed = tuple((use, slots) for use, slots in uses if slots < use.site.experts)
    records = tuple(make_record(blueprint, use.site) for use, _ in streamed)
    return Prepared(blueprint, tokenizer, plan, streamed, records)


def plan_model(blueprint: Blueprint, settings: Settings) -> Plan:
    """The memory plan for a model of which only headers have been read.

    Its KV cache is what all running requests share: one at full context, or several where that
    takes little of the slots' memory.
    """
    longest = blueprint.size.longest_context
    context = settings.context or min(longest, DEFAULT_CONTEXT)
    slots, budget = settings.slots, None
    if settings.memory == "all":
        slots = max(layer.experts for layer in blueprint.size.layers)
    elif slots is None:
        budget = automatic_budget() if settings.memory is None else parse_size(settings.memory)
    size = blueprint.size
    make = partial(
        make_plan, budget=budget, process_bytes=process_bytes(), context=context, slots=slots
    )
    plan = make(size)
    requests = planned_requests(plan, settings.max_running)
    if requests == 1:
        return plan
    larger = replace(
        size,
        kv_fixed_bytes=requests * size.kv_fixed_bytes,
        kv_token_bytes=requests * size.kv_token_bytes,
    )
    together = replace(make(larger), minimum=plan.minimum)
    whole = [layer.experts for layer in size.layers]
    if list(plan.slots) == whole != list(together.slots):
        return plan  # every expert in memory is worth more
    return together


@contextmanager
def running_core(settings: Settings, *, check: Check, progress: Progress | None) -> Iterator[Core]:
    """Open a model on the calling thread, which stays its only MLX thread.

    Args:
        settings: what to open and how.
        check: called now and then while loading; raises to give up.
        progress: called with (bytes, bytes in all) while the trunk is loaded.
    """
    with ExitStack() as stack:
        stack.enter_context(leased_streams())
        stack.callback(return_memory)
        prepared = prepare(settings)
        check()
        blueprint, plan, tokenizer = prepared.blueprint, prepared.plan, prepared.tokenizer
        streamed, records = prepared.streamed, prepared.records
        stack.enter_context(_limits.hold(plan.budget))
        tracer = Tracer(_writable(settings.trace))
        # Direct reads would pass by what guesses have brought into the page cache.
        direct = settings.direct and settings.prefetch.destination != "pagecache"
        reader = RecordReader(records, direct=direct)
        stack.callback(reader.close)
        top_k = [use.top_k for use, _ in streamed]
        prefetch = settings.prefetch
        store = ExpertStore(
            records,
            [slots for _, slots in streamed],
            reader,
            tracer=tracer,
            top_k=top_k,
            prefetch=prefetch,
        )
        loop = IoLoop(store, lanes=settings.lanes, lookahead_price=prefetch.lookahead_price)
        stack.enter_context(loop)
        store.connect(loop)
        if tracer.enabled:
            tracer.about = _about(prepared, settings)
            stack.enter_context(_writing(tracer, loop))
        predictor = ahead = None
        if streamed and prefetch.predicts:
            model = blueprint.lazy.model
            uses = [use for use, _ in streamed]
            predictor = build_predictor(model, uses, make_prompt_cache(model))
            layers = [record.layer for record in records]
            ahead = ReadAhead(
                predictor, prefetch, store, loop, layers=layers, top_k=top_k, tracer=tracer
            )
        widths = [record.experts for record in records]
        stream = ExpertStream(store, widths, tracer=tracer, ahead=ahead, prefetch=prefetch)
        if predictor is not None:
            predictor.install(stream.at_input if 0 in prefetch.distances else None)
        for group, (use, _) in enumerate(streamed):
            install_parameters(use.site.module, store.groups[group].pool.arrays)
            use.site.put(StreamingSwitch(use.site.module, group, use.site.layer, stream))
        # Of the others the model tree holds the parameters: they are loaded with the trunk.
        model, config = blueprint.lazy.model, blueprint.lazy.config
        trunk_bytes = _load_trunk(prepared, settings, check=check, progress=progress)
        if predictor is not None and ahead is not None:
            predictor.verify()
            ahead.start()
            for warning in predictor.warnings:
                logger.warning("%s; they are read on demand", warning)
            stack.enter_context(_calibrated(ahead, settings.calibration))
        size = blueprint.size
        limits = make_limits(
            plan,
            max_running=settings.max_running,
            prefill_chunk=settings.prefill_chunk,
            streamed=[(slots, use.top_k) for use, slots in streamed],
            kv_fixed_bytes=size.kv_fixed_bytes,
            kv_token_bytes=size.kv_token_bytes,
            unbatchable=unbatchable(model, make_prompt_cache(model)),
        )
        loaded = LoadedModel(
            model=model,
            tokenizer=tokenizer,
            end_tokens=end_tokens(tokenizer, config),
            stream=stream,
            vocabulary=size.vocabulary,
            context=plan.context,
            chunk_tokens=partial(fitting_chunk, size, scratch_bytes=plan.scratch_bytes),
            resident=not streamed,
            limits=limits,
        )
        core = Core(plan, loaded, store, loop, tracer, ahead, trunk_bytes)
        core.sample_memory()
        del model, blueprint, streamed, prepared
        try:
            yield core
            store.check_integrity()
        finally:
            stack.callback(core.release)  # after the reads have ended


def _load_trunk(
    prepared: Prepared, settings: Settings, *, check: Check, progress: Progress | None
) -> int:
    """Read everything that stays in memory; returns its bytes."""
    blueprint, slots = prepared.blueprint, prepared.plan.slots
    sites = [use.site for use, _ in prepared.streamed]
    total = sum(array.nbytes for array in trunk_parameters(blueprint.lazy.model, sites))
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    residents = []
    if blueprint.manifest is not None:  # MLX cannot read records
        for use, count in zip(blueprint.uses, slots, strict=True):
            if count >= use.site.experts:
                residents.append((use.site, make_record(blueprint, use.site)))
        load_residents(
            residents, direct=settings.direct, lanes=settings.lanes, check=check, advance=advance
        )
    there = {
        id(array) for site, _ in residents for array in expert_parameters(site.module).values()
    }
    parameters = trunk_parameters(blueprint.lazy.model, sites)
    rest = [array for array in parameters if id(array) not in there]
    load_parameters(rest, check=check, advance=advance)
    return total


class _Limits:
    """MLX's limits, which are the process's: those of all open engines together.

    The buffer cache is kept small while any engine is open, and the memory limit above the largest
    budget; the last engine to close restores what was there before the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._budgets: list[int | None] = []
        self._before = (0, 0)

    @contextmanager
    def hold(self, budget: int | None) -> Iterator[None]:
        with self._lock:
            if not self._budgets:
                cache = mx.set_cache_limit(CACHE_BYTES)
                memory = mx.set_memory_limit(1 << 62)
                mx.set_memory_limit(memory)
                self._before = (cache, memory)
            self._budgets.append(budget)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._budgets.remove(budget)
                self._apply()

    def _apply(self) -> None:
        cache, memory = self._before
        if self._budgets:
            budgets = [budget for budget in self._budgets if budget is not None]
            # Without a budget an engine lives with the limit that was there.
            free = len(budgets) < len(self._budgets) or not budgets
            mx.set_memory_limit(max(memory, *budgets, 0) if free else sum(budgets))
        else:
            mx.set_cache_limit(cache)
            mx.set_memory_limit(memory)


_limits = _Limits()


def _writable(trace: Path | None) -> Path | None:
    """The trace file, made empty; refused here rather than after the first tokens."""
    if trace is not None:
        check_trace_path(trace)
        try:
            trace.write_bytes(b"")
        except OSError as error:
            raise TraceUnwritable(trace, error) from error
    return trace


def _about(prepared: Prepared, settings: Settings) -> dict[str, Any]:
    """What a reader of the trace has to know about the model."""
    layers = [
        {
            "group": group,
            "layer": record.layer,
            "experts": record.experts,
            "top_k": use.top_k,
            "slots": slots,
            "record_bytes": record.stored_bytes,
        }
        for group, ((use, slots), record) in enumerate(
            zip(prepared.streamed, prepared.records, strict=True)
        )
    ]
    return {
        "version": 1,
        "model": prepared.blueprint.checkpoint.directory.name,
        "layers": layers,
        "config": asdict(settings.prefetch),
    }


@contextmanager
def _calibrated(ahead: ReadAhead, path: Path | None) -> Iterator[None]:
    """Start from a saved calibration, if there is one, and save what was learnt at the end."""
    if path is None:
        yield
        return
    if path.exists():
        try:
            ahead.calibration.load_json(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("the calibration in %s cannot be used: %s", path, error)
    try:
        yield
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ahead.calibration.to_json()))


@contextmanager
def _writing(tracer: Tracer, loop: IoLoop) -> Iterator[None]:
    written = loop.start(tracer.write)
    try:
        yield
    finally:
        tracer.bandwidth = loop.bandwidth
        tracer.close()
        with suppress(TimeoutError):  # a target that hangs: the loop cancels the writer
            written.result(TRACE_GRACE)
