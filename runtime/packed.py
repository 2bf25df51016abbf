"""The experts of a packed store in an engine: stand-ins, records, and layers held whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..io.errors import StoreMismatch
from ..io.manifest import Manifest, StoredLayer
from ..io.reader import RecordReader
from ..io.records import WIDENED, Component, Record
from ..models.experts import ExpertSite, install_parameters, projections
from ..models.quantizing import Scheme, scheme_of
from .slots import DTYPES, SlotPool


def stand_ins(manifest: Manifest | None) -> dict[str, mx.array]:
    """An unevaluated array, without memory, for each tensor of the experts."""
    if manifest is None:
        return {}
    return {
        f"{layer.path}.{component.name}": mx.zeros(
            (layer.experts, *component.shape), DTYPES[component.dtype]
        )
        for layer in manifest.layers
        for component in layer.layout.components
    }


def check_manifest(directory: Path, manifest: Manifest, sites: Sequence[ExpertSite]) -> None:
    """Compare the manifest with the model that mlx-lm has built from the config and the trunk.

    Names and shapes fit, or mlx-lm would not have taken the stand-ins.

    Raises:
        StoreMismatch: they are of different models.
    """
    found = {site.path: site for site in sites}
    for layer in manifest.layers:
        site = found.get(layer.path)
        if site is None:
            raise StoreMismatch(directory, f"{layer.path} is no expert module of its model")
        for name, linear in projections(site.module).items():
            packed, expected = layer.quantization.get(name), _entry(scheme_of(linear))
            if packed != expected:
                raise StoreMismatch(
                    directory,
                    f"{layer.path}.{name} was packed as {packed} and its config says {expected}",
                )


def _entry(scheme: Scheme | None) -> Mapping[str, Any] | None:
    return None if scheme is None else scheme.to_config()


def packed_record(directory: Path, layer: StoredLayer, *, widen: bool, checksum: bool) -> Record:
    """Where the experts of a packed layer lie.

    Args:
        directory: of the store.
        layer: its entry in the manifest.
        widen: whether 16-bit floats become float32.
        checksum: whether reads are checked.
    """
    components = tuple(
        Component(
            name=component.name,
            path=directory / layer.file,
            offset=component.offset,
            stride=layer.layout.stride,
            shape=component.shape,
            stored=component.dtype,
            pooled="F32" if widen and component.dtype in WIDENED else component.dtype,
        )
        for component in layer.layout.components
    )
    checksums = layer.checksums if checksum else None
    return Record(layer.layer, layer.experts, components, layer.place, checksums)


def load_residents(
    layers: Sequence[tuple[ExpertSite, Record]],
    *,
    direct: bool = True,
    lanes: int = 4,
    check: Callable[[], None] = lambda: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Fill mlx-lm's own switch modules with all their experts. Compute thread.

    Args:
        layers: the modules and where their experts lie.
        direct: see ``RecordReader``.
        lanes: reads in flight at once.
        check: called between the layers; may raise to give up.
        advance: called with the bytes of each layer in memory when it is there.

    Raises:
        ReadFailed: an expert cannot be read.
    """
    reader = RecordReader([record for _, record in layers], direct=direct)
    executor = ThreadPoolExecutor(lanes, thread_name_prefix="moestream-load")
    try:
        for group, (site, record) in enumerate(layers):
            check()
            pool = SlotPool(record, record.experts)
            reads = [
                executor.submit(reader.read, group, expert, pool.rows(expert))
                for expert in range(record.experts)
            ]
            for read in reads:
                read.result()
            install_parameters(site.module, pool.arrays)
            advance(pool.nbytes)
    finally:
        executor.shutdown(cancel_futures=True)
        reader.close()
