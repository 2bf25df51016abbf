"""Copies from host memory to a CUDA device, through the driver's own library (CUDA 12.0 or newer).

A call of a foreign function takes 0.2 us here when all its arguments are words that were integers
before; fixed-width types of ``ctypes`` take three times as long (measured).
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

logger = logging.getLogger("moestream")

Copy = tuple[int, int, int]
"""Address of the target, in managed memory; address of the source; bytes."""

SPARE_BYTES = 64 << 20
"""Pinned memory that is kept for lanes to come (arbitrary; a lane takes little more than 1 MiB)."""

_LIBRARY = "libcuda.so.1"
_PREFERRED = 3  # CU_MEM_ADVISE_SET_PREFERRED_LOCATION
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

_WORD = ctypes.c_void_p  # takes integers and what byref() makes
_ARGUMENTS = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_WORD, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_WORD, ctypes.c_int),
    "cuCtxSetCurrent": (_WORD,),
    "cuStreamCreate": (_WORD, ctypes.c_uint),
    "cuStreamDestroy_v2": (_WORD,),
    "cuStreamSynchronize": (_WORD,),
    "cuMemcpyHtoDAsync_v2": (_WORD, _WORD, _WORD, _WORD),
    "cuMemAdvise": (_WORD, _WORD, ctypes.c_int, ctypes.c_int),
    "cuMemPrefetchAsync": (_WORD, _WORD, ctypes.c_int, _WORD),
    "cuMemHostAlloc": (_WORD, _WORD, ctypes.c_uint),
    "cuMemFreeHost": (_WORD,),
    "cuGetErrorString": (ctypes.c_int, _WORD),
}


class _Driver:
    """The functions of the driver's library, and the context that MLX uses.

    Args:
        library: how it is loaded: ``ctypes.CDLL``, whose calls let other threads run, or
            ``ctypes.PyDLL``, or what stands in for them.
    """

    def __init__(self, library: Callable[[str], Any]) -> None:
        self.functions = library(_LIBRARY)
        for name, types in _ARGUMENTS.items():
            getattr(self.functions, name).argtypes = types
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        # Never released: pinned memory and streams of lanes that hang live in it.
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.value)
        self.context = context.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            OSError: it returned an error.
        """
        self.check((name, getattr(self.functions, name)(*arguments)))

    def check(self, *ends: tuple[str, int]) -> None:
        """Raise one error for those of these calls (name, status) that failed, if any."""
        failed = [(name, status) for name, status in ends if status]
        if not failed:
            return
        told = ", then ".join(f"{name} ({self._text(status)})" for name, status in failed)
        if any(status == _OUT_OF_MEMORY for _, status in failed):
            remedy = "close what else uses the memory of host and GPU, or lower memory="
        else:
            remedy = "see whether nvidia-smi shows the GPU as healthy, then start a new process"
        raise OSError(f"the CUDA driver refused {told}; {remedy}")

    def _text(self, status: int) -> str:
        text = ctypes.c_char_p()
        self.functions.cuGetErrorString(status, ctypes.byref(text))  # leaves NULL if unknown
        return f"error {status}: {text.value.decode()}" if text.value else f"error {status}"


class _Stream:
    """A stream for the thread that makes it, which gets the context, too.

    Lies in that thread's own storage, so that it is destroyed when the thread has ended. A lane
    that hangs keeps it.
    """

    def __init__(self, driver: _Driver) -> None:
        self.handle: int | None = None
        self._driver = driver
        made = ctypes.c_void_p()
        driver.call("cuCtxSetCurrent", driver.context)
        driver.call("cuStreamCreate", ctypes.byref(made), _NON_BLOCKING)
        self.handle = made.value

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the driver may be gone before us; the end of the process frees everything.
        if self.handle is None or at_exit():
            return
        functions = self._driver.functions
        functions.cuCtxSetCurrent(self._driver.context)
        functions.cuStreamDestroy_v2(self.handle)


@cache
def first_device() -> CudaDevice:
    """The one of this process: memory and streams outlive an engine.

    Raises:
        OSError: there is no such library, or no device; the next call looks again.
    """
    return CudaDevice()


class CudaDevice:
    """The first GPU, in the context that MLX uses. Implements ``device.Device``.

    Args:
        short: loads the library for calls of microseconds. They keep the interpreter's lock:
            getting it back costs more.
        long: loads it for calls during which other threads run.

    Raises:
        OSError: there is no such library, or no device.
    """

    def __init__(
        self,
        short: Callable[[str], Any] = ctypes.PyDLL,
        long: Callable[[str], Any] = ctypes.CDLL,
    ) -> None:
        self._driver = _Driver(long)
        self._start_long = self._driver.functions.cuMemcpyHtoDAsync_v2
        self._start = short(_LIBRARY).cuMemcpyHtoDAsync_v2
        self._start.argtypes = _ARGUMENTS["cuMemcpyHtoDAsync_v2"]
        self._synchronize = self._driver.functions.cuStreamSynchronize
        self._lane = threading.local()
        # By address. Without a lock, which the end of a lane could find held by its own thread:
        # each step on it is atomic.
        self._spare: dict[int, memoryview] = {}
        self._at_exit = sys.is_finalizing

    def _stream(self) -> int | None:
        """The calling thread's stream."""
        stream: _Stream | None = getattr(self._lane, "stream", None)
        if stream is None:
            stream = self._lane.stream = _Stream(self._driver)
        return stream.handle

    def prefer(self, address: int, nbytes: int) -> None:
        """See ``Device``. What the device has no room for stays where it is."""
        try:
            stream = self._stream()
            self._driver.call("cuMemAdvise", address, nbytes, _PREFERRED, 0)
            self._driver.call("cuMemPrefetchAsync", address, nbytes, 0, stream)
            self._driver.call("cuStreamSynchronize", stream)
        except OSError as error:
            logger.info("slots are not kept on the device: %s", error)

    def borrow(self, nbytes: int) -> memoryview:
        """See ``Device``."""
        for at, memory in list(self._spare.items()):
            # Another lane may have taken it meanwhile.
            if len(memory) >= nbytes and self._spare.pop(at, None) is not None:
                return memory
        self._stream()
        made = ctypes.c_void_p()
        self._driver.call("cuMemHostAlloc", ctypes.byref(made), nbytes, 0)
        assert made.value is not None
        return memoryview((ctypes.c_char * nbytes).from_address(made.value)).cast("B")

    def give_back(self, memory: memoryview) -> None:
        """See ``Device``. Kept for the next lane while there is little of it, else freed."""
        if self._at_exit():
            return
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if sum(map(len, list(self._spare.values()))) + len(memory) <= SPARE_BYTES:
            self._spare[at] = memory
        else:
            # Lanes call this as they end, when nobody could do anything about an error.
            self._driver.functions.cuCtxSetCurrent(self._driver.context)
            self._driver.functions.cuMemFreeHost(at)

    def copy(self, pairs: Sequence[Copy], *, pinned: bool = True) -> None:
        """See ``Device``."""
        # The driver itself copies what is not pinned, and only then returns.
        stream, start = self._stream(), self._start if pinned else self._start_long
        status = 0
        for target, source, nbytes in pairs:
            status = start(target, source, nbytes, stream)
            if status:
                break
        # After an error, too: those that were started read memory that will be used again. If that
        # fails as well, the context is lost, and nothing runs in it any more.
        ended = self._synchronize(stream)
        if status or ended:
            self._driver.check(("cuMemcpyHtoDAsync_v2", status), ("cuStreamSynchronize", ended))
