"""MLX streams for compute threads.

MLX starts an operating-system thread for each stream and never ends it, so a new stream for each
engine would leak one. Engines therefore lease streams from a pool that grows to the largest number
of engines that were ever open at once. A leased stream is used by one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

_lock = threading.Lock()
_free: list[list[mx.Stream]] = []
_leased = 0


def _new_streams() -> list[mx.Stream]:
    streams = [mx.new_thread_unsafe_stream(mx.cpu)]
    if mx.default_device() != mx.cpu:
        streams.append(mx.new_thread_unsafe_stream(mx.default_device()))
    return streams


@contextmanager
def leased_streams() -> Iterator[None]:
    """Make leased streams the calling thread's defaults; clear its MLX state at the end."""
    global _leased
    with _lock:
        streams = _free.pop() if _free else None
    if streams is None:
        streams = _new_streams()
    with _lock:
        _leased += 1
    try:
        for stream in streams:
            mx.set_default_stream(stream)
        yield
    finally:
        try:  # streams that fail here are not leased again
            for stream in streams:
                mx.synchronize(stream)
        finally:
            with _lock:
                _leased -= 1
                alone = not _leased
        if alone:
            # Holds the interpreter lock until all streams are idle, hence only when nobody works.
            mx.clear_cache()
        mx.clear_streams()
        with _lock:
            _free.append(streams)
