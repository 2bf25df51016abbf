"""Experts as large as a big model's, and drives as slow as one likes, for a small model.

The records of a small model are padded on disk: a component of noise that is read past the page
cache into the slot and never used. Routing, and all that is computed, stay the model's own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...io.records import PAGE, Component, Record
from .. import core

BLOCK = 1 << 20
_NAME = "padding"


class Throttle:
    """A drive of a given bandwidth: each read ends no sooner than its turn is over.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = os.preadv(descriptor, buffers, offset)
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + done / self._rate
            wait = self._free - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        return done


@contextmanager
def padded_records(folder: Path, record_bytes: int) -> Iterator[None]:
    """Engines that are opened inside read records padded to ``record_bytes``.

    The padding takes whole pages, so a record may stay a little smaller; one that is as large
    already is left as it is.

    Args:
        folder: gets one file, as large as all padded experts.
        record_bytes: of an expert on disk.
    """
    patched: Any = core
    make, install = patched.make_record, patched.install_parameters
    pad = _Padding(folder / "padding.bin", record_bytes)

    def padded(blueprint: Any, site: Any) -> Record:
        return pad(make(blueprint, site))

    def install_own(module: Any, arrays: dict[str, Any]) -> None:
        install(module, {name: array for name, array in arrays.items() if name != _NAME})

    patched.make_record, patched.install_parameters = padded, install_own
    try:
        yield
    finally:
        patched.make_record, patched.install_parameters = make, install


class _Padding:
    """One file in which the layers' padding lies one behind the other."""

    def __init__(self, path: Path, record_bytes: int) -> None:
        self._path = path
        self._record_bytes = record_bytes
        self._places: dict[tuple[int, int, int], int] = {}
        self._end = 0

    def __call__(self, record: Record) -> Record:
        extra = max(self._record_bytes - record.stored_bytes, 0) // PAGE * PAGE
        if not extra:
            return record
        place = (record.layer, record.experts, extra)
        if place not in self._places:
            self._places[place] = self._end
            self._write(extra * record.experts)
        offset = self._places[place]
        padding = Component(_NAME, self._path, offset, extra, (extra,), "U8", "U8")
        return Record(record.layer, record.experts, (*record.components, padding))

    def _write(self, count: int) -> None:
        self._end += count
        with self._path.open("ab") as file:
            while count:
                count -= file.write(os.urandom(min(count, BLOCK)))
            file.flush()
            os.fsync(file.fileno())  # else the first reads would wait for the writing
