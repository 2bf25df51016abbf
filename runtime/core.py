"""What the compute thread works with: the streaming model, its store and its I/O loop."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..io.loop import READ_TIMEOUT, IoLoop
from ..io.reader import RecordReader
from ..io.records import Record
from ..models.errors import ExpertsNotStacked
from ..models.experts import SiteUse, expert_parameters, install_parameters
from ..models.lookahead import build_predictor
from ..models.switch import StreamingSwitch
from . import warmstart
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
from .device import find_passage
from .errors import TraceUnwritable
from .generation import LoadedModel
from .hub import resolve_model
from .identity import model_identity
from .limits import limits
from .machine import automatic_budget, process_bytes, return_memory
from .machine_pressure import find_source
from .packed import load_residents
from .plan import Plan, fitting_chunk, make_plan, parse_size, spare_bytes
from .policies import DEFAULT_POLICY, POLICIES, PolicyName
from .prefetch import OFF, PrefetchConfig
from .pressure import Pressure
from .profiling import profiled
from .prompt_ahead import PromptAhead, staging_for
from .prompt_cache import PromptCache
from .readahead import ReadAhead
from .resizing import Resizer, watching
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

PROMPT_STAGING = 16
"""The first waves of prompts take no more than this part of what a budget has above the smallest
one (arbitrary)."""


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
    pressure: bool = True
    policy: PolicyName = DEFAULT_POLICY
    read_timeout: float = READ_TIMEOUT
    max_running: int = DEFAULT_RUNNING
    max_waiting: int = DEFAULT_WAITING
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    prompt_cache: int | Literal[True] | None = None


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
        resizer: makes the pools smaller under memory pressure.
        trunk_bytes: parameters held for good.
        identity: digest of what the content of caches depends on.
        stopping: set when the engine is being closed.
        memory_bytes, peak_memory_bytes: held by MLX when last looked at.
    """

    plan: Plan
    loaded: LoadedModel
    store: ExpertStore
    loop: IoLoop
    tracer: Tracer
    ahead: ReadAhead | None
    resizer: Resizer
    trunk_bytes: int
    identity: Callable[[], str]
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
        if self.loaded.kept is not None:
            self.loaded.kept.clear()
        self.loaded.stream.release()
        self.resizer.release()
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
    takes little of the slots' memory. The prompt cache has memory of its own beside it.
    """
    longest = blueprint.size.longest_context
    context = settings.context or min(longest, DEFAULT_CONTEXT)
    slots, budget = settings.slots, None
    if settings.memory == "all":
        slots = max(layer.experts for layer in blueprint.size.layers)
    elif slots is None:
        budget = (
            automatic_budget(buffered=_reads_buffered(blueprint, settings))
            if settings.memory is None
            else parse_size(settings.memory)
        )
    size = blueprint.size
    make = partial(
        make_plan,
        size,
        budget=budget,
        process_bytes=process_bytes(),
        context=context,
        slots=slots,
        staging_bytes=settings.prefetch.staged_bytes,
    )
    plan = make()
    if not settings.prefetch.reads_prompts:
        return _with_caches(make, plan, settings)
    spare = None if budget is None else (budget - plan.minimum) // PROMPT_STAGING
    nbytes = staging_for(size.layers, plan.slots, spare)
    make = partial(make, staging_bytes=settings.prefetch.staged_bytes + nbytes)
    staged = make()
    made = _with_caches(make, staged, settings)
    # No budget is refused for it, and what else there is to share leaves it alone.
    return replace(made, minimum=made.minimum - (staged.minimum - plan.minimum))


def _with_caches(make: partial[Plan], plan: Plan, settings: Settings) -> Plan:
    """A plan with what is kept of prompts and for requests that run together."""
    if settings.prompt_cache is not None:
        make, plan = _with_prompt_cache(make, plan, settings.prompt_cache)
    requests = planned_requests(plan, settings.max_running)
    if requests == 1:
        return plan
    together = replace(make(sequences=requests), minimum=plan.minimum)
    whole = [layer.experts for layer in make.args[0].layers]
    if list(plan.slots) == whole != list(together.slots):
        return plan  # every expert in memory is worth more
    return together


def _with_prompt_cache(
    make: partial[Plan], plan: Plan, wanted: int | Literal[True]
) -> tuple[partial[Plan], Plan]:
    """A plan with a prompt cache; True asks for as much as one request takes, if it is to spare."""
    if wanted is not True:
        make = partial(make, prompt_cache_bytes=wanted)
        return make, make()
    nbytes = plan.kv_bytes // plan.sequences
    if plan.budget is not None:
        nbytes = min(nbytes, spare_bytes(plan))
    make = partial(make, prompt_cache_bytes=nbytes)
    return make, replace(make(), minimum=plan.minimum)


def _reads_buffered(blueprint: Blueprint, settings: Settings) -> bool:
    """Whether experts would come through the page cache: asked for, or their places want it."""
    if not reads_direct(settings):
        return True
    try:
        record = make_record(blueprint, blueprint.uses[0].site)
    except ExpertsNotStacked:  # only to be held whole
        return False
    return not any(run.direct for run in record.runs)


def reads_direct(settings: Settings) -> bool:
    """Whether reads are to pass by the page cache where alignment allows it."""
    # They would also pass by what guesses have brought there.
    return settings.direct and settings.prefetch.destination != "pagecache"


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
        stack.enter_context(limits.hold(plan.budget))
        tracer = Tracer(_writable(settings.trace))
        passage = find_passage()
        reader = RecordReader(records, direct=reads_direct(settings))
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
            staging_bytes=plan.staging_bytes,
            policy=POLICIES[settings.policy],
            passage=passage,
        )
        loop = IoLoop(
            store,
            lanes=settings.lanes,
            lookahead_price=prefetch.lookahead_price,
            read_timeout=settings.read_timeout,
        )
        stack.enter_context(loop)
        store.connect(loop)
        if tracer.enabled:
            tracer.about = _about(prepared, settings)
            stack.enter_context(_writing(tracer, loop))
        predictor = ahead = prompts = None
        if streamed and prefetch.predicts:
            model = blueprint.lazy.model
            uses = [use for use, _ in streamed]
            predictor = build_predictor(model, uses, make_prompt_cache(model))
            layers = [record.layer for record in records]
            ahead = ReadAhead(
                predictor, prefetch, store, loop, layers=layers, top_k=top_k, tracer=tracer
            )
            if prefetch.reads_prompts:
                allowed = prefetch.layers
                prompts = PromptAhead(predictor, store, layers=layers, top_k=top_k, allowed=allowed)
        widths = [record.experts for record in records]
        stream = ExpertStream(
            store, widths, tracer=tracer, ahead=ahead, prompts=prompts, prefetch=prefetch
        )
        if predictor is not None:
            predictor.install(stream.at_input if 0 in prefetch.distances else None)
        for group, (use, _) in enumerate(streamed):
            install_parameters(use.site.module, store.groups[group].pool.arrays)
            use.site.put(StreamingSwitch(use.site.module, group, use.site.layer, stream))
        guessed = prefetch.reads and bool(prefetch.distances)
        stack.enter_context(profiled(blueprint, plan, stream.log, guessed=guessed))
        resizer = Resizer(store, [use.site.module for use, _ in streamed], top_k, Pressure())
        stream.at_rest = resizer.apply
        kept = PromptCache(plan.prompt_cache_bytes) if settings.prompt_cache is not None else None
        if kept is not None:
            resizer.spare = kept.clear
        follows = settings.pressure and (streamed or kept is not None)
        source = find_source() if follows else None
        if source is not None:
            stack.enter_context(watching(loop, source, resizer))
        # Of the others the model tree holds the parameters: they are loaded with the trunk.
        model, config = blueprint.lazy.model, blueprint.lazy.config
        trunk_bytes = _load_trunk(prepared, settings, check=check, progress=progress)
        if predictor is not None and ahead is not None:
            predictor.verify()
            ahead.start()
            for warning in predictor.warnings:
                logger.warning("%s; they are read on demand", warning)
        stack.enter_context(_remembered(store, ahead, settings.calibration))
        size = blueprint.size
        bounds = make_limits(
            plan,
            max_running=settings.max_running,
            prefill_chunk=settings.prefill_chunk,
            streamed=[(slots, use.top_k) for use, slots in streamed],
            cache=size.cache,
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
            limits=bounds,
            kept=kept,
        )
        checkpoint = blueprint.checkpoint
        identity = partial(model_identity, checkpoint.directory, checkpoint.files, blueprint.widen)
        core = Core(plan, loaded, store, loop, tracer, ahead, resizer, trunk_bytes, identity)
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
        "policy": settings.policy,
        "config": asdict(settings.prefetch),
    }


@contextmanager
def _remembered(store: ExpertStore, ahead: ReadAhead | None, path: Path | None) -> Iterator[None]:
    """Start from what earlier runs have learnt, if that was saved, and save it at the end.

    The experts that they used most are read at once, while nobody waits for the drive.
    """
    if path is None:
        yield
        return
    records = [group.record for group in store.groups]
    heat = warmstart.from_json({}, records)
    if path.exists():
        try:
            saved = json.loads(path.read_text())
            heat = warmstart.from_json(saved.get("heat", {}), records)
            if ahead is not None:
                ahead.calibration.load_json(saved)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("the calibration in %s cannot be used: %s", path, error)
    for group, counts in zip(store.groups, heat, strict=True):
        group.residency.seed(counts)
    slots = [group.residency.slots for group in store.groups]
    store.preload(warmstart.in_file_order(warmstart.choose(heat, slots), records))
    try:
        yield
    finally:
        uses = [group.residency.uses for group in store.groups]
        merged = [warmstart.merge(old, new) for old, new in zip(heat, uses, strict=True)]
        table = {} if ahead is None else ahead.calibration.to_json()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**table, "heat": warmstart.to_json(merged, records)}))
        except OSError as error:  # it helps the next start, and nothing depends on it
            logger.warning("the calibration cannot be kept in %s: %s", path, error)


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
