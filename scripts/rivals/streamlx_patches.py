"""What is changed in streamlx at run time, so that it runs and can be measured outside of macOS.

Its checkout stays as it is and its algorithm, too: which experts are read, when, in which spans and
by which threads, what is evicted and what is computed. ``CHANGES`` lists every change.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from scripts.rivals.errors import CheckoutMissing

PAGE = 4096
CHANGES = {
    "direct": "files opened with O_DIRECT, spans read into aligned memory and rounded to pages "
    "(F_NOCACHE, which it asks for, exists on macOS only)",
    "random": "POSIX_FADV_RANDOM on its files (F_RDAHEAD off, which it asks for, exists on macOS "
    "only)",
    "float32": "trunk, scales and biases widened to float32 (16-bit types are many times slower on "
    "MLX's CPU backend)",
    "single": "a checkpoint in one file is shown to it under a shard's name",
    "counted": "time that its computing thread waits for reads is counted",
    "gates": "its lookahead asks a wrapped gate; routing does not",
    "scores": "scores of its lookahead widened to float32 (numpy refuses bfloat16)",
}


def import_streamlx(checkout: Path) -> ModuleType:
    """Its module ``integrate``, from a checkout.

    Raises:
        CheckoutMissing: it is none.
    """
    if not (checkout / "streamlx" / "integrate.py").is_file():
        raise CheckoutMissing("--checkout", checkout, "streamlx/integrate.py")
    sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module("streamlx.integrate")
    finally:
        sys.path.remove(str(checkout))


class LinuxFiles:
    """Stands for ``os`` in its reader: the hints of macOS in the words of Linux.

    Args:
        direct: read past the page cache.
    """

    def __init__(self, direct: bool) -> None:
        self._direct = direct

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int) -> int:
        """Open a file with the hints."""
        if self._direct:
            return os.open(path, flags | os.O_DIRECT)
        descriptor = os.open(path, flags)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    def pread(self, descriptor: int, size: int, offset: int) -> bytes | memoryview:
        """``size`` bytes at ``offset``; fewer at the end of the file."""
        if not self._direct:
            return os.pread(descriptor, size, offset)
        lead = offset % PAGE
        total = lead + size + -(lead + size) % PAGE
        # From the heap as a bytes object would be: an anonymous map would fault in every page anew.
        memory = np.empty(total + PAGE, np.uint8)
        start = -memory.ctypes.data % PAGE
        aligned = memoryview(memory.data)[start : start + total]
        done = 0
        while done < lead + size:
            more = os.preadv(descriptor, [aligned[done:]], offset - lead + done)
            if not more:
                break
            done += more
            if done % PAGE:  # only the end of a file is not a whole page
                break
        return aligned[lead : min(done, lead + size)]


def use_linux_files(direct: bool) -> list[str]:
    """Hints for the reads of Linux; elsewhere nothing is changed. Names of changes made."""
    if sys.platform != "linux":
        return []
    reader: Any = importlib.import_module("streamlx.reader")
    reader.os = LinuxFiles(direct)
    return ["direct" if direct else "random"]


class WaitClock:
    """Counts the time that one thread waits for reads.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()

    def timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; its time is counted when this thread calls it."""

        def run(*arguments: Any) -> Any:
            if threading.get_ident() != self._thread:
                return wait(*arguments)
            begun = time.perf_counter()
            try:
                return wait(*arguments)
            finally:
                self.seconds += time.perf_counter() - begun

        return run


class _TimedExecutor:
    """An executor whose futures are waited for on the clock."""

    def __init__(self, executor: Any, clock: WaitClock) -> None:
        self._executor = executor
        self._clock = clock

    def submit(self, *job: Any) -> Future[Any]:
        future: Future[Any] = self._executor.submit(*job)
        future.result = self._clock.timed(future.result)  # type: ignore[method-assign]
        return future


def count_waits(integrate: Any, reader: Any, clock: WaitClock) -> list[str]:
    """Count what blocks: reads of missing experts, and of predicted ones that are still under way.

    Waits of prompts are counted by streamlx itself (``sweep_fetch_s``).
    """
    reader.read_ranges = clock.timed(reader.read_ranges)
    executor = integrate._pf_ex
    integrate._pf_ex = lambda: _TimedExecutor(executor(), clock)
    return ["counted"]


@contextmanager
def loading_widened(widen: bool) -> Iterator[list[str]]:
    """While it loads a model, give it one whose trunk is float32, and widen what it reads."""
    if not widen:
        yield []
        return
    mlx_lm: Any = importlib.import_module("mlx_lm")
    reader: Any = importlib.import_module("streamlx.reader").ExpertReader
    load, to_mx = mlx_lm.load, reader._to_mx

    def load_widened(*arguments: Any, **options: Any) -> Any:
        model, tokenizer = load(*arguments, **options)
        model.set_dtype(mx.float32)
        return model, tokenizer

    def to_widened(self: Any, raw: memoryview, loc: Any) -> mx.array:
        array: mx.array = to_mx(self, raw, loc)
        return widened(array)

    mlx_lm.load = load_widened
    reader._to_mx = to_widened
    try:
        yield ["float32"]
    finally:
        mlx_lm.load = load  # the reader goes on widening


def widened(array: mx.array) -> mx.array:
    """float32 in place of 16-bit floats."""
    return array.astype(mx.float32) if array.dtype in (mx.bfloat16, mx.float16) else array


def widen_pools(pools: dict[int, Any]) -> None:
    """Make its empty pools float32, as what is read will be."""
    for pool in pools.values():
        for parts in pool.pool.values():
            for name, array in parts.items():
                parts[name] = widened(array)
        mx.eval([array for parts in pool.pool.values() for array in parts.values()])


def wrap_gates(model: Any, wrap: Callable[[int, Any], Any]) -> list[str]:
    """Put a wrapper around each gate that its lookahead asks, and around nothing else.

    Args:
        model: with streamlx installed.
        wrap: (number of the predicted layer, gate) -> what the lookahead calls instead.
    """
    for layer in model.layers:
        switch: Any = getattr(getattr(layer, "mlp", None), "switch_mlp", None)
        link = getattr(switch, "_pf_next", None)
        if link is not None:
            pool, gate, *norms = link
            switch._pf_next = (pool, wrap(pool.layer, gate), *norms)
    return ["gates"]


def widen_scores(model: Any) -> list[str]:
    """Have its lookahead hand scores to numpy in a type that numpy has."""

    def widened(layer: int, gate: Any) -> Any:
        def scores(x: mx.array) -> Any:
            out: Any = gate(x)
            if isinstance(out, tuple):
                return out[0], out[1].astype(mx.float32)
            return out.astype(mx.float32)

        return scores

    wrap_gates(model, widened)
    return ["scores"]


def as_shards(model: Path, folder: Path) -> tuple[Path, list[str]]:
    """The checkpoint as streamlx looks for it: safetensors files called ``model-*``.

    Args:
        model: directory of the checkpoint.
        folder: where links may be put.
    """
    if any(model.glob("model-*.safetensors")):
        return model, []
    for file in sorted(model.iterdir()):
        name = "model-00001-of-00001.safetensors" if file.name == "model.safetensors" else file.name
        (folder / name).symlink_to(file.resolve())
    return folder, ["single"]
