"""Writes the trunk of a packed store: ordinary safetensors files that mlx-lm loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..io.disk import Disk, FileWriter
from ..io.manifest import FILE_BLOCK, StoredFile
from ..models.experts import expert_parameters
from .assembly import Blueprint

SHARD_BYTES = 2 << 30
"""Largest trunk file, unless a single tensor is larger (arbitrary): what a resumed pack repeats."""

WRITE_BYTES = 8 << 20
"""Written by one call at most (arbitrary)."""

_CODES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.float64: "F64",
    mx.complex64: "C64",
}

Shard = dict[str, mx.array]


def code_of(dtype: mx.Dtype) -> str:
    """The safetensors code of an MLX dtype."""
    return _CODES[dtype]


def trunk_arrays(blueprint: Blueprint) -> Shard:
    """Every parameter of the model but the packed experts, by its path, unevaluated."""
    packed = {
        f"{use.site.path}.{name}"
        for use in blueprint.uses
        for name in expert_parameters(use.site.module)
    }
    return {
        path: array
        for path, array in tree_flatten(blueprint.lazy.model.parameters())
        if path not in packed
    }


def divide_trunk(arrays: Mapping[str, mx.array]) -> dict[str, Shard]:
    """File name -> the tensors it gets."""
    shards: list[Shard] = [{}]
    filled = 0
    for name, array in arrays.items():
        if shards[-1] and filled + array.nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = array
        filled += array.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": s for i, s in enumerate(shards, 1)}


def shard_header(shard: Mapping[str, mx.array]) -> bytes:
    """The beginning of a safetensors file up to its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, array in shard.items():
        header[name] = {
            "dtype": code_of(array.dtype),
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    disk: Disk, path: Path, shard: Shard, *, advance: Callable[[int], None]
) -> StoredFile:
    """Write a file tensor by tensor; each leaves ``shard``, so that its memory can go.

    Args:
        disk: does the writing.
        path: of the file.
        shard: its tensors.
        advance: called with each number of bytes written.
    """
    with FileWriter(disk, path, block=FILE_BLOCK) as file:
        file.add(shard_header(shard))
        while shard:
            name = next(iter(shard))
            data = array_bytes(shard.pop(name))
            for at in range(0, len(data), WRITE_BYTES):
                file.add(data[at : at + WRITE_BYTES])
                advance(len(data[at : at + WRITE_BYTES]))
    return StoredFile(path.name, file.nbytes, tuple(file.checksums))


def array_bytes(array: mx.array) -> memoryview:
    """The bytes of an array, which is computed; zero-copy where it lies in one piece."""
    if array.size == 0:
        return memoryview(b"")
    flat = mx.view(mx.contiguous(array).reshape(-1), mx.uint8)
    mx.eval(flat)
    view: Any = flat
    return memoryview(view)


def index_bytes(shards: Mapping[str, Mapping[str, mx.array]]) -> bytes:
    """The content of model.safetensors.index.json."""
    total = sum(array.nbytes for shard in shards.values() for array in shard.values())
    names = {name: file for file, shard in shards.items() for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    return json.dumps(index, indent=1).encode()
