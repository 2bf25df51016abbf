"""`moestream plan` and `moestream doctor`: what a model would need, and what the machine has."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import interrupts_held, progress_bar, run_until_signal

if TYPE_CHECKING:
    from ..io.drive import DriveReport
    from .chaos import ChaosReport
    from .forecast import Forecast
    from .plan import Plan
    from .sizes import LayerSize, ModelSize

MEASURED_PROMPT = "Once upon a time, in a small town by the sea, there lived"
MEASURED_TOKENS = 128
"""Decoded by ``--measure`` (arbitrary: a few seconds, and enough for a hit-rate curve)."""


CHAOS_CONTEXT = 64
"""Tokens of the context of an engine that is tried with faults."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """MoE layers with the same numbers."""

    layers: tuple[int, ...]
    experts: int
    top_k: int
    record_bytes: int
    slot_bytes: int
    slots: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A memory plan and what to compare it with.

    Attributes:
        model: directory of the checkpoint.
        model_type: mlx-lm's name of the architecture.
        automatic: whether the budget was chosen from what is free.
        plan: how the budget is divided.
        groups: the MoE layers.
        expert_bytes: all experts on disk.
        resident_share: of the experts' memory, what the slots hold.
        everything_resident: the smallest budget that holds every expert.
        resident_chunk: tokens of a prompt chunk under that budget.
        longest_context: tokens that the model was made for.
        forecast: how fast it would be.
    """

    model: str
    model_type: str
    automatic: bool
    plan: Plan
    groups: tuple[LayerGroup, ...]
    expert_bytes: int
    resident_share: float
    everything_resident: int
    resident_chunk: int
    longest_context: int
    forecast: Forecast

    @property
    def parts(self) -> dict[str, int]:
        """What the memory goes to; sums to the budget, if there is one."""
        plan = self.plan
        parts = {
            "process": plan.process_bytes,
            "trunk": plan.trunk_bytes,
            "kv": plan.kv_bytes,
            "prompt_cache": plan.prompt_cache_bytes,
            "scratch": plan.scratch_bytes,
            "cache": plan.cache_bytes,
            "staging": plan.staging_bytes,
            "slots": plan.slot_bytes,
        }
        if plan.budget is not None:
            parts["reserve"] = plan.budget - sum(parts.values())
        return parts

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return {
            "model": self.model,
            "model_type": self.model_type,
            "budget": self.plan.budget,
            "automatic": self.automatic,
            "minimum": self.plan.minimum,
            "everything_resident": self.everything_resident,
            "context": self.plan.context,
            "chunk_tokens": self.plan.chunk_tokens,
            "parts": self.parts,
            "total": self.total,
            "expert_bytes": self.expert_bytes,
            "resident_share": self.resident_share,
            "layers": [asdict(group) for group in self.groups],
            "forecast": self.forecast.to_json(),
        }


def inspect_plan(
    model: str,
    *,
    memory: str | None,
    slots: int | None,
    context: int | None,
    bandwidth: int | None = None,
    prompt_cache: int | None = None,
) -> PlanReport:
    """Plan a model from its headers, on the calling thread.

    Args:
        model, memory, slots, context, prompt_cache: as for ``Engine.open``.
        bandwidth: of the drive in bytes per second, instead of what was measured.

    Raises:
        BudgetTooSmall: says the smallest budget that would do.
        MoestreamError: the model cannot be streamed.
    """
    with interrupts_held():
        from .core import Settings, prepare
        from .expectations import expect
        from .streams import leased_streams

    settings = Settings(
        model=model, memory=memory, slots=slots, context=context, prompt_cache=prompt_cache
    )
    with leased_streams():
        prepared = prepare(settings)
        blueprint, plan = prepared.blueprint, prepared.plan
        layers = blueprint.size.layers
        everything = sum(layer.experts * layer.slot_bytes for layer in layers)
        whole = smallest_resident_plan(
            blueprint.size,
            process_bytes=plan.process_bytes,
            context=plan.context,
            prompt_cache_bytes=plan.prompt_cache_bytes,
        )
        return PlanReport(
            model=str(blueprint.checkpoint.directory),
            model_type=str(blueprint.lazy.config.get("model_type")),
            automatic=memory is None and slots is None,
            plan=plan,
            groups=_groups(layers, plan.slots),
            expert_bytes=sum(layer.experts * layer.record_bytes for layer in layers),
            resident_share=plan.slot_bytes / everything,
            everything_resident=whole.budget or 0,
            resident_chunk=whole.chunk_tokens,
            longest_context=blueprint.size.longest_context,
            forecast=expect(prepared, bandwidth=bandwidth, lanes=settings.lanes),
        )


def measure_model(
    model: str, *, memory: str | None, slots: int | None, context: int | None
) -> None:
    """Run a model a little, so that its plans know what a token costs on this machine.

    Raises:
        BudgetTooSmall: says the smallest budget that would do.
        MoestreamError: the model cannot be streamed.
    """
    from .session import EngineOptions, open_engine

    async def run() -> None:
        async with await open_engine(EngineOptions(model, memory, slots, context)) as engine:
            prompt = [1, 2, 3] if engine.tokenizer is None else MEASURED_PROMPT
            await engine.generate(prompt, max_tokens=MEASURED_TOKENS, ignore_eos=True)

    asyncio.run(run())


def smallest_resident_plan(
    model: ModelSize, *, process_bytes: int, context: int, prompt_cache_bytes: int = 0
) -> Plan:
    """The plan of the smallest budget under which every expert is resident."""
    from .plan import make_plan

    plan_with = partial(
        make_plan,
        model,
        process_bytes=process_bytes,
        context=context,
        prompt_cache_bytes=prompt_cache_bytes,
    )
    experts = [layer.experts for layer in model.layers]
    by_hand = plan_with(budget=None, slots=max(experts))
    # A larger budget never gives fewer slots, so bisecting finds the smallest.
    below = by_hand.minimum - 1
    plan = plan_with(budget=max(by_hand.total_bytes, by_hand.minimum))
    while list(plan.slots) != experts:
        assert plan.budget is not None
        below = plan.budget
        plan = plan_with(budget=plan.budget + plan.budget // 8)
    while plan.budget is not None and plan.budget - below > 1:
        middle = plan_with(budget=(below + plan.budget) // 2)
        if list(middle.slots) == experts:
            plan = middle
        else:
            below = middle.budget or 0
    return plan


def _groups(layers: Sequence[LayerSize], slots: Sequence[int]) -> tuple[LayerGroup, ...]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for layer, count in zip(layers, slots, strict=True):
        key = (layer.experts, layer.top_k, layer.record_bytes, layer.slot_bytes, count)
        groups.setdefault(key, []).append(layer.layer)
    return tuple(LayerGroup(tuple(numbers), *key) for key, numbers in groups.items())


# -- doctor -------------------------------------------------------------------------------------


def machine_facts() -> dict[str, Any]:
    """What matters for speed and memory; never fails for a missing MLX, but says so."""
    import psutil

    from .machine import automatic_budget, available_bytes

    return {
        "moestream": metadata.version("moestream"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "device": _device(),
        "cores": psutil.cpu_count() or 1,
        "memory_bytes": int(psutil.virtual_memory().total),
        "available_bytes": available_bytes(),
        "automatic_budget_bytes": automatic_budget(),
        "uvloop": _version("uvloop") if util.find_spec("uvloop") else "no, asyncio's own loop",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    try:
        with interrupts_held():
            import mlx.core as mx

        device = mx.default_device()
        name = mx.device_info(device).get("device_name")
    except (ImportError, RuntimeError) as error:
        return f"MLX does not start: {error}"
    kind = "gpu" if device == mx.gpu else "cpu"
    return f"{kind} ({name})" if name else kind


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """How a drive is to be measured; see ``measure``."""

    file_bytes: int = 1 << 30
    sizes: tuple[int, ...] = (64 << 10, 512 << 10, 2 << 20, 8 << 20)
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    seconds_per_cell: float = 0.4

    @property
    def least_bytes(self) -> int:
        """A smaller file cannot be measured: not every lane would have a block to read."""
        return min(self.sizes) * max(self.depths)


def measured_path(path: Path, options: DriveOptions) -> Path:
    """The largest weight file of a model's directory, if it is large enough; else the path itself.

    Raises:
        DriveError: there is nothing.
    """
    from ..io.drive import DriveError

    if not path.exists():
        raise DriveError(f"{path} does not exist; give a directory or a file")
    if not path.is_dir() or not (path / "config.json").is_file():
        return path
    weights = [*path.glob("*.safetensors"), *path.glob("experts/*.bin")]
    sizes = {file: file.stat().st_size for file in weights if file.is_file()}
    largest = max(sizes, key=lambda file: sizes[file], default=None)
    return path if largest is None or sizes[largest] < options.least_bytes else largest


def measure_drive(path: Path, options: DriveOptions) -> DriveReport:
    """Measure the drive under a progress bar; plans of models on it go by that from now on."""
    from ..io.drive import measure
    from .expectations import remember_drive

    with progress_bar("measuring the drive") as progress:
        report = measure(path, progress=progress, **asdict(options))
    remember_drive(path, report.to_json())
    return report


# -- doctor --chaos -------------------------------------------------------------------------------


def run_chaos(model: Path) -> ChaosReport:
    """Run a model on a drive with faults, under a progress bar.

    Raises:
        DriveError: there is nothing.
        MoestreamError: the model cannot be streamed.
    """
    from ..io.drive import DriveError

    if not model.is_dir():
        raise DriveError(f"{model} is no directory; --chaos needs a model to run")
    report = inspect_plan(str(model), memory=None, slots=None, context=CHAOS_CONTEXT)
    # A quarter of the experts: enough for a layer call, and too few to hold what is asked for.
    slots = min(
        min(max(group.top_k, group.experts // 4), max(group.slots, 1)) for group in report.groups
    )
    with interrupts_held():
        from .chaos import try_faults

    with progress_bar("trying faults") as progress:
        return run_until_signal(try_faults(str(model), slots=slots, advance=progress))
