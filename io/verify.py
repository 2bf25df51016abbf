"""Reads a packed store from end to end and compares it with its checksums."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointNotFound
from .manifest import (
    FILE_BLOCK,
    MANIFEST,
    Manifest,
    StoredFile,
    StoredLayer,
    parse_manifest,
    size_problem,
)

CHANGED = "the bytes are not those that were packed"


@dataclass(frozen=True, slots=True)
class Damage:
    """A place where a store is not what was packed.

    Attributes:
        file: relative to the store.
        offset: where the damaged block begins; None for the file as a whole.
        problem: in one clause.
        layer, expert: whose bytes they are; None outside of the experts.
    """

    file: str
    offset: int | None
    problem: str
    layer: int | None = None
    expert: int | None = None

    def __str__(self) -> str:
        where = self.file if self.offset is None else f"{self.file} at offset {self.offset}"
        if self.layer is None:
            return f"{where}: {self.problem}"
        whose = f"layer {self.layer}"
        if self.expert is not None:
            whose += f", expert {self.expert}"
        return f"{whose}: {where}: {self.problem}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Verified:
    """What has been read, and what was wrong."""

    records: int
    nbytes: int
    damages: tuple[Damage, ...]


Progress = Callable[[int, int], None]


def verify_store(directory: Path, progress: Progress | None = None) -> Verified:
    """Read everything that the manifest names.

    Args:
        directory: of the store.
        progress: called with (bytes, bytes in all).

    Raises:
        CheckpointNotFound: there is no packed store.
        CheckpointError: its manifest cannot be used.
    """
    manifest = parse_manifest(directory)
    if manifest is None:
        raise CheckpointNotFound(
            f"{directory}: there is no {MANIFEST}; give a store that `moestream pack` has made"
        )
    count = _Count(_total(manifest), progress)
    damages: list[Damage] = []
    for layer in manifest.layers:
        damages += verify_layer(directory, layer, count.add)
    for file in (*manifest.trunk, *manifest.files):
        damages += verify_file(directory, file, count.add)
    records = sum(layer.experts for layer in manifest.layers)
    return Verified(records, count.done, tuple(damages))


def verify_layer(
    directory: Path, layer: StoredLayer, add: Callable[[int], None] | None = None
) -> list[Damage]:
    """The damaged blocks of a layer's records, in file order."""
    path = directory / layer.file
    problem = size_problem(path, layer.file_bytes)
    if problem:
        return [Damage(layer.file, None, problem, layer.layer)]
    layout, damages = layer.layout, []
    experts = range(layer.experts)
    order = experts if layer.place is None else sorted(experts, key=layer.place.__getitem__)
    with _reading(path) as descriptor:
        for position, expert in enumerate(order):
            start = position * layout.stride
            record = os.pread(descriptor, layout.stride, start)
            data = memoryview(record)[: layout.nbytes]
            for number, expected in enumerate(layer.checksums.values[expert]):
                at = number * layout.block
                if zlib.crc32(data[at : at + layout.block]) != expected:
                    damages.append(Damage(layer.file, start + at, CHANGED, layer.layer, expert))
            if len(record) != layout.stride or any(record[layout.nbytes :]):
                at = start + layout.nbytes
                padding = "the padding is not empty"
                damages.append(Damage(layer.file, at, padding, layer.layer, expert))
            if add is not None:
                add(layout.stride)
    return damages


def verify_file(
    directory: Path, file: StoredFile, add: Callable[[int], None] | None = None
) -> list[Damage]:
    """The damaged blocks of an ordinary file."""
    path = directory / file.name
    problem = size_problem(path, file.nbytes)
    if problem:
        return [Damage(file.name, None, problem)]
    damages = []
    with _reading(path) as descriptor:
        for number, expected in enumerate(file.checksums):
            block = os.pread(descriptor, FILE_BLOCK, number * FILE_BLOCK)
            if zlib.crc32(block) != expected:
                damages.append(Damage(file.name, number * FILE_BLOCK, CHANGED))
            if add is not None:
                add(len(block))
    return damages


class _Count:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done = 0
        self._total = total
        self._progress = progress

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self._progress is not None:
            self._progress(self.done, self._total)


def _total(manifest: Manifest) -> int:
    files = sum(file.nbytes for file in (*manifest.trunk, *manifest.files))
    return files + sum(layer.file_bytes for layer in manifest.layers)


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):  # the drive is to be checked, not the page cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        yield descriptor
    finally:
        os.close(descriptor)
