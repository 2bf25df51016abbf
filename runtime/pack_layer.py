"""Writes the records of one layer of a packed store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..io.disk import Disk, FileWriter
from ..io.layout import StoredComponent
from ..io.manifest import StoredLayer, block_checksums
from ..io.records import Checksums
from ..models.experts import projections
from ..models.quantizing import converted, parameters
from .pack_plan import LayerPlan
from .trunk import WRITE_BYTES, array_bytes


def pack_layer(
    disk: Disk, directory: Path, plan: LayerPlan, advance: Callable[[int], None]
) -> StoredLayer:
    """Write the records of one layer; its parameters are given up on the way.

    In memory are the whole file and one projection of the source at a time.

    Args:
        disk: does the writing.
        directory: of the store.
        plan: of the layer.
        advance: called with each number of bytes written.
    """
    layout, experts = plan.layout, plan.site.experts
    image = np.zeros((experts, layout.stride), np.uint8)
    place = np.array(plan.place or range(experts))
    components = {component.name: component for component in layout.components}
    for projection, linear in projections(plan.site.module).items():
        for begin, arrays in converted(linear, plan.schemes[projection]):
            for name, array in arrays.items():
                rows = place[begin : begin + array.shape[0]]
                _put(image, rows, components[f"{projection}.{name}"], array)
        for name, array in parameters(linear).items():
            setattr(linear, name, mx.zeros(array.shape, array.dtype))  # never computed
        del arrays, array
        mx.clear_cache()
    with FileWriter(disk, directory / plan.file) as file:
        flat = image.reshape(-1).data
        for at in range(0, len(flat), WRITE_BYTES):
            file.add(flat[at : at + WRITE_BYTES])
            advance(len(flat[at : at + WRITE_BYTES]))
    values = tuple(
        block_checksums(memoryview(image[row])[: layout.nbytes], layout.block) for row in place
    )
    return StoredLayer(
        path=plan.site.path,
        layer=plan.site.layer,
        experts=experts,
        file=plan.file,
        layout=layout,
        quantization=plan.quantization,
        place=plan.place,
        checksums=Checksums(layout.block, values),
    )


def _put(image: np.ndarray, rows: np.ndarray, component: StoredComponent, array: mx.array) -> None:
    """Copy a component of some experts to where it belongs in their records."""
    data = np.frombuffer(array_bytes(array), np.uint8).reshape(len(rows), component.nbytes)
    image[rows, component.offset : component.offset + component.nbytes] = data
