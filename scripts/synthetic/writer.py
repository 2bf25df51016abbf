"""Writes a checkpoint piece by piece; what is not complete does not have its name."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from moestream.io.errors import MoestreamError

from .tensors import Noise, Tensor

PAGE = 4096
SPARE = 256 << 20
"""Bytes that are left free on the drive."""


class DirectoryTaken(MoestreamError):
    """There is something under this name already."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory} is there already; remove it, or give another name")


class DriveFull(MoestreamError):
    """The checkpoint does not fit on the drive."""

    def __init__(self, directory: Path, needed: int, free: int) -> None:
        super().__init__(
            f"{directory} takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
            "make room, or give fewer --layers"
        )


def write_checkpoint(
    directory: Path,
    shards: list[list[Tensor]],
    finish: Callable[[Path], None],
    *,
    seed: int,
    aligned: bool,
    quiet: bool,
) -> None:
    """Write the shards and an index into a directory that gets its name when all is there.

    Args:
        directory: to make; it may be there when it is empty.
        shards: tensors file by file.
        finish: writes the other files into the directory it is given.
        seed: of the random numbers.
        aligned: whether tensors of whole pages begin at pages.
        quiet: without a progress bar; otherwise there is one on a terminal.

    Raises:
        DirectoryTaken: the directory is there and not empty.
        DriveFull: there is too little room; nothing has been written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DirectoryTaken(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.parent / f".{directory.name}.partial"
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    free = shutil.disk_usage(directory.parent).free
    if total + SPARE > free:
        raise DriveFull(directory, total, free)
    partial.mkdir()
    try:
        with _bar(total, quiet) as advance:
            index = _write_shards(partial, shards, seed, aligned, advance)
        metadata = {"metadata": {"total_size": total}, "weight_map": index}
        (partial / "model.safetensors.index.json").write_text(json.dumps(metadata))
        finish(partial)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _bar(total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    hidden = quiet or not sys.stderr.isatty()
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.update(task, advance=count)


def _write_shards(
    directory: Path,
    shards: list[list[Tensor]],
    seed: int,
    aligned: bool,
    advance: Callable[[int], None],
) -> dict[str, str]:
    """Returns the file of each tensor."""
    noise = Noise(seed)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if aligned:
            shard = sorted(shard, key=lambda tensor: tensor.nbytes % PAGE != 0)
        _write_shard(directory / name, shard, noise, PAGE if aligned else 8, advance)
        index |= {tensor.name: name for tensor in shard}
    return index


def _write_shard(
    path: Path, tensors: list[Tensor], noise: Noise, unit: int, advance: Callable[[int], None]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % unit)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for block in tensor.blocks(noise):
                view = block.reshape(-1).view(np.uint8).data
                while view:  # a write may end early
                    done = file.write(view)
                    view = view[done:]
                    advance(done)
