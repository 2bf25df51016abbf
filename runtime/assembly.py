"""Puts a streaming model together: sizes from headers, extents of experts, the trunk loaded.

Everything here runs on the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..io.checkpoint import Checkpoint, open_checkpoint
from ..io.errors import StoreMismatch
from ..io.manifest import Manifest, read_manifest
from ..io.records import WIDENED, Component, Record
from ..models.errors import ExpertsNotStacked, NotMoEModel, UnsupportedModel
from ..models.experts import (
    ExpertSite,
    SiteUse,
    expert_parameters,
    find_sites,
    other_parameters,
    probe_sites,
)
from ..models.loading import LazyModel, load_lazily
from .calibration import PAIR_BYTES
from .errors import InvalidRequest
from .kvsize import measure_caches
from .packed import check_manifest, packed_record, stand_ins
from .sizes import LayerSize, ModelSize
from .slots import DTYPES

LOAD_BATCH_BYTES = 256 << 20
"""Trunk parameters evaluated at once: bounds what is in flight, and the work per command buffer."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model of which nothing has been read but headers.

    Attributes:
        checkpoint: files and tensors.
        lazy: the mlx-lm model, unevaluated.
        uses: its MoE layers in the order of the forward pass.
        size: what the memory plan needs to know.
        widen: whether 16-bit floats become float32.
        manifest: of a packed store; None for a checkpoint that is read in place.
        checksum: whether records are checked when they are read.
    """

    checkpoint: Checkpoint
    lazy: LazyModel
    uses: tuple[SiteUse, ...]
    size: ModelSize
    widen: bool
    manifest: Manifest | None = None
    checksum: bool = False


def draw_blueprint(
    directory: Path, *, widen: bool | None = None, checksum: bool = False
) -> Blueprint:
    """Open a checkpoint or packed store and work out sizes, order of layers and routing width.

    Args:
        directory: of the checkpoint.
        widen: compute in float32 where the checkpoint has 16-bit floats; None does so on the CPU
            backend, whose 16-bit kernels are many times slower.
        checksum: check records when they are read; only a packed store has checksums.

    Raises:
        MoestreamError: the checkpoint is damaged, no MoE model, or unknown to mlx-lm.
    """
    checkpoint = open_checkpoint(directory)
    manifest = read_manifest(checkpoint.directory)
    if checksum and manifest is None:
        raise InvalidRequest(
            f"checksum=True needs a packed store, and {checkpoint.directory} is none; make one "
            "with `moestream pack`"
        )
    lazy = _load(checkpoint.directory, manifest)
    sites = find_sites(lazy.model)
    if not sites:
        raise NotMoEModel(checkpoint.directory, str(lazy.config.get("model_type")))
    if manifest is not None:
        check_manifest(checkpoint.directory, manifest, sites)
    if widen is None:
        widen = mx.default_device() == mx.cpu
    stored = {site.path: _expert_bytes(site) for site in sites}
    if widen:
        lazy.model.set_dtype(mx.float32)
    cache = make_prompt_cache(lazy.model)
    try:
        uses, vocabulary = probe_sites(lazy.model, sites, cache)
    except Exception as error:
        raise UnsupportedModel(checkpoint.directory, f"its forward pass fails: {error}") from error
    if not uses:
        raise NotMoEModel(checkpoint.directory, str(lazy.config.get("model_type")))
    return Blueprint(
        checkpoint,
        lazy,
        tuple(uses),
        _measure(lazy, uses, cache, stored, vocabulary),
        widen,
        manifest,
        checksum,
    )


def _load(directory: Path, manifest: Manifest | None) -> LazyModel:
    try:
        return load_lazily(directory, stand_ins(manifest))
    except UnsupportedModel as error:
        if manifest is None or error.problem.startswith("Model type"):
            raise
        raise StoreMismatch(
            directory, f"mlx-lm makes no model of its config and manifest ({error.problem})"
        ) from error


def make_record(blueprint: Blueprint, site: ExpertSite) -> Record:
    """Where the experts of one layer lie in the checkpoint's files.

    Raises:
        ExpertsNotStacked: mlx-lm computes the stacked tensors while loading.
    """
    if blueprint.manifest is not None:
        for layer in blueprint.manifest.layers:
            if layer.path == site.path:
                return packed_record(
                    blueprint.checkpoint.directory,
                    layer,
                    widen=blueprint.widen,
                    checksum=blueprint.checksum,
                )
    components = []
    for name, array in expert_parameters(site.module).items():
        source = blueprint.lazy.sources.get(f"{site.path}.{name}")
        if source is None:
            raise ExpertsNotStacked(blueprint.checkpoint.directory, f"{site.path}.{name}")
        tensor = blueprint.checkpoint.tensors[source]
        if tensor.shape != tuple(array.shape) or tensor.dtype not in DTYPES:
            raise ExpertsNotStacked(blueprint.checkpoint.directory, source)
        widened = blueprint.widen and tensor.dtype in WIDENED
        components.append(
            Component(
                name=name,
                path=tensor.path,
                offset=tensor.offset,
                stride=tensor.nbytes // tensor.shape[0],
                shape=tensor.shape[1:],
                stored=tensor.dtype,
                pooled="F32" if widened else tensor.dtype,
            )
        )
    return Record(site.layer, site.experts, tuple(components))


def trunk_parameters(model: Any, streamed: Sequence[ExpertSite]) -> list[mx.array]:
    """All parameters but the streamed experts, whose modules have left the model's tree."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    for site in streamed:
        arrays += other_parameters(site.module)
    return arrays


def load_parameters(
    arrays: Sequence[mx.array], *, check: Check, advance: Callable[[int], None]
) -> None:
    """Evaluate parameters in batches.

    Args:
        arrays: unevaluated parameters.
        check: called between the batches; may raise to give up.
        advance: called with the bytes of each batch.
    """
    for batch in _batches(arrays):
        check()
        mx.eval(batch)
        advance(sum(array.nbytes for array in batch))


def _batches(arrays: Sequence[mx.array]) -> Iterator[list[mx.array]]:
    batch: list[mx.array] = []
    size = 0
    for array in arrays:
        batch.append(array)
        size += array.nbytes
        if size >= LOAD_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# -- sizes ------------------------------------------------------------------------------------


def _measure(
    lazy: LazyModel,
    uses: Sequence[SiteUse],
    cache: Sequence[Any],
    stored: Mapping[str, int],
    vocabulary: int,
) -> ModelSize:
    everything = sum(array.nbytes for _, array in tree_flatten(lazy.model.parameters()))
    layers = tuple(
        LayerSize(
            layer=use.site.layer,
            experts=use.site.experts,
            top_k=use.top_k,
            slot_bytes=_expert_bytes(use.site),
            record_bytes=stored[use.site.path],
        )
        for use in uses
    )
    experts = sum(layer.experts * layer.slot_bytes for layer in layers)
    settings = _text_config(lazy.config)
    hidden = int(settings.get("hidden_size") or settings.get("d_model") or 1024)
    heads = int(settings.get("num_attention_heads") or settings.get("n_heads") or 32)
    item = 4 if mx.default_device() == mx.cpu else 2
    widest = max(layer.top_k for layer in layers)
    inner = max(_inner_width(use.site) for use in uses)
    return ModelSize(
        layers=layers,
        # With the folded routers that predictions use, and the weights of pairs that they learn.
        trunk_bytes=everything
        - experts
        + sum(layer.experts for layer in layers) * hidden * item
        + sum(PAIR_BYTES * before.experts * layer.experts for before, layer in pairwise(layers)),
        cache=measure_caches(cache, lambda tokens: _built_cache(lazy, uses, tokens)),
        # About six hidden-sized arrays of a block at once, and per routed expert its sorted input,
        # two inner products, their product and the output, before and after unsorting.
        scratch_token_bytes=item * (6 * hidden + widest * (3 * hidden + 3 * inner)),
        scratch_pair_bytes=3 * heads * item if mx.default_device() == mx.cpu else item,
        vocabulary=vocabulary,
        longest_context=_longest_context(settings),
    )


def _built_cache(lazy: LazyModel, uses: Sequence[SiteUse], tokens: int) -> Sequence[Any]:
    """Caches behind a prompt that is built and never computed."""
    cache = make_prompt_cache(lazy.model)
    probe_sites(lazy.model, [use.site for use in uses], cache, tokens=tokens)
    return cache


def _expert_bytes(site: ExpertSite) -> int:
    parameters = expert_parameters(site.module)
    return sum(array.nbytes for array in parameters.values()) // site.experts


def _inner_width(site: ExpertSite) -> int:
    module = site.module
    first = module.up_proj if "up_proj" in module else module.fc1
    return int(first.output_dims)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a (possibly multimodal) config."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _longest_context(settings: dict[str, Any]) -> int:
    for name in ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions"):
        value = settings.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 20
