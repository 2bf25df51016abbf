"""Stands in for the library of the CUDA driver: keeps books, and copies when told to wait."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from moestream.runtime.cuda import CudaDevice


class FakeLibrary:
    """A driver in host memory. Calls that are to fail are named with their number, from 0.

    Attributes:
        calls: names, in order.
        faults: (name, number of the call of that name) -> status; nothing else happens then.
        retained: of contexts.
        streams: handle -> thread that made it, of those that have not been destroyed.
        pending: of each stream the copies that were started and not waited for.
        memory: address -> bytes, of pinned memory that has not been freed.
        lost: calls that need a context, from threads that have none.
        on_call: called first with each name.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.faults: dict[tuple[str, int], int] = {}
        self.retained = 0
        self.streams: dict[int, int] = {}
        self.pending: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.memory: dict[int, mmap.mmap] = {}
        self.lost: list[str] = []
        self.on_call: Callable[[str], None] | None = None
        self._handles = itertools.count(1001)
        self._current = threading.local()
        self._functions: dict[str, _Function] = {}

    def load(self, name: str) -> FakeLibrary:
        assert name == "libcuda.so.1"
        return self

    def device(self) -> CudaDevice:
        """A device on this library."""
        return CudaDevice(self.load, self.load)

    def fail(self, name: str, nth: int, status: int) -> None:
        """Let a call fail, counted from the next one of that name on."""
        self.faults[name, self.calls.count(name) + nth] = status

    def __getattr__(self, name: str) -> _Function:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return self._functions.setdefault(name, _Function(self, name))

    def handle(self, name: str, arguments: tuple[Any, ...]) -> int:
        if self.on_call is not None:
            self.on_call(name)
        nth = self.calls.count(name)
        self.calls.append(name)
        if status := self.faults.get((name, nth)):
            return status
        if name.startswith(("cuMem", "cuStream")) and not getattr(self._current, "context", 0):
            self.lost.append(name)
        done: int | None = getattr(self, "_" + name)(*arguments)
        return done or 0

    def _cuInit(self, flags: int) -> None:
        pass

    def _cuDeviceGet(self, device: Any, number: int) -> None:
        device._obj.value = number

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        self.retained += 1
        context._obj.value = 77

    def _cuCtxSetCurrent(self, context: int) -> None:
        self._current.context = context

    def _cuStreamCreate(self, stream: Any, flags: int) -> None:
        handle = next(self._handles)  # in one step: lanes make theirs at the same time
        stream._obj.value = handle
        self.streams[handle] = threading.get_ident()

    def _cuStreamDestroy_v2(self, stream: int) -> None:
        del self.streams[stream]

    def _cuStreamSynchronize(self, stream: int) -> None:
        assert stream in self.streams
        for target, source, nbytes in self.pending.pop(stream, []):
            ctypes.memmove(target, source, nbytes)

    def _cuMemcpyHtoDAsync_v2(self, target: int, source: int, nbytes: int, stream: int) -> None:
        assert stream in self.streams
        self.pending[stream].append((target, source, nbytes))

    def _cuMemAdvise(self, address: int, nbytes: int, advice: int, device: int) -> None:
        pass

    def _cuMemPrefetchAsync(self, address: int, nbytes: int, device: int, stream: int) -> None:
        pass

    def _cuMemHostAlloc(self, address: Any, nbytes: int, flags: int) -> None:
        memory = mmap.mmap(-1, nbytes)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.memory[at] = memory
        address._obj.value = at

    def _cuMemFreeHost(self, address: int) -> None:
        del self.memory[address]

    def _cuGetErrorString(self, status: int, text: Any) -> int:
        known = {2: b"out of memory", 700: b"an illegal memory access was encountered"}
        if status not in known:
            return 1
        text._obj.value = known[status]
        return 0


class _Function:
    def __init__(self, library: FakeLibrary, name: str) -> None:
        self._library = library
        self._name = name
        self.argtypes: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes), f"{self._name} got {arguments}"
        return self._library.handle(self._name, arguments)
