"""Stand-ins with the real interfaces: a drive that fails on request, an owner of slots, a loop."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from moestream.io.asks import Ask, Purge, ReadHost
from moestream.io.errors import LoopClosed
from moestream.io.loop import IoLoop
from moestream.io.queue import Entry, Key
from moestream.io.records import ITEM_BYTES, PAGE, Component, Record

TIMEOUT = 20.0
"""Seconds after which a test that waits for another thread fails; nothing ever waits that long."""


class Gate:
    """A place where threads stop until the test lets them go on."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self) -> None:
        """Stop here."""
        self._entered.set()
        if not self._opened.wait(TIMEOUT):
            raise TimeoutError("nobody opened the gate")

    def wait_entered(self) -> None:
        """Wait for the first thread to arrive."""
        assert self._entered.wait(TIMEOUT), "nobody came to the gate"

    def open(self) -> None:
        """Let everybody through from now on."""
        self._opened.set()


@contextmanager
def no_threads_left() -> Iterator[None]:
    """Fail if the block leaves Python threads behind that were not there before."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not left, f"threads left behind: {left}"


def join_lanes() -> None:
    """Wait for lane threads that a test has made a loop abandon, once their reads have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("moestream-lane"):
            thread.join(TIMEOUT)
            assert not thread.is_alive()


# -- the drive --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadCall:
    """One call of ``preadv``."""

    descriptor: int
    lengths: tuple[int, ...]
    offset: int
    direct: bool


class FakeDrive:
    """Stands in for ``os.preadv`` and ``open_direct``: reads the real file unless told otherwise.

    Faults are set for the n-th call, counted from 0.

    Attributes:
        calls: what was asked for, in order.
        refuse_direct: direct reads fail with EINVAL, as on a drive with larger sectors.
        before: called with each call before anything else happens.
    """

    def __init__(self) -> None:
        self.calls: list[ReadCall] = []
        self.refuse_direct = False
        self.before: Callable[[ReadCall], None] | None = None
        self._faults: dict[int, Callable[[], None]] = {}
        self._limits: dict[int, int] = {}
        self._direct: set[int] = set()
        self._lock = threading.Lock()

    def fail(self, nth: int, code: int = errno.EIO) -> None:
        """Let the n-th call fail."""

        def fault() -> None:
            raise OSError(code, os.strerror(code))

        self._faults[nth] = fault

    def shorten(self, nth: int, nbytes: int) -> None:
        """Let the n-th call return after this many bytes; 0 looks like the end of the file."""
        self._limits[nth] = nbytes

    def hang(self, nth: int) -> Gate:
        """Let the n-th call wait at a gate."""
        gate = Gate()
        self._faults[nth] = gate
        return gate

    def open_direct(self, path: Path) -> int:
        """A descriptor that counts as direct, also where the file system knows no direct I/O."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct.add(descriptor)
        return descriptor

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        lengths = tuple(map(len, buffers))
        call = ReadCall(descriptor, lengths, offset, descriptor in self._direct)
        with self._lock:
            nth = len(self.calls)
            self.calls.append(call)
        if self.before is not None:
            self.before(call)
        if nth in self._faults:
            self._faults[nth]()
        if call.direct and self.refuse_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(descriptor, _cut(buffers, self._limits.get(nth)), offset)


def _cut(buffers: Sequence[memoryview], limit: int | None) -> list[memoryview]:
    if limit is None:
        return list(buffers)
    cut = []
    for buffer in buffers:
        cut.append(buffer[:limit])
        limit -= len(cut[-1])
    return cut


# -- files ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """What a component of the test file is to look like."""

    name: str
    shape: tuple[int, ...]
    stored: str = "U32"
    pooled: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's tensor on disk."""
        return int(np.prod(self.shape)) * ITEM_BYTES[self.stored]


@dataclass
class Layer:
    """A layer of experts in a file of random bytes."""

    record: Record
    content: bytes = field(repr=False)

    def stored(self, expert: int, index: int) -> bytes:
        """The bytes of one tensor of one expert, as they lie on disk."""
        component = self.record.components[index]
        start = component.offset + expert * component.stride
        return self.content[start : start + component.stored_bytes]

    def expected(self, expert: int) -> list[bytes]:
        """What a slot has to hold after the expert has been read."""
        return [
            widened(self.stored(expert, index), component.stored)
            if component.widened
            else self.stored(expert, index)
            for index, component in enumerate(self.record.components)
        ]


def widened(stored: bytes, code: str) -> bytes:
    """The float32 bytes of 16-bit floats, by another road than the reader's."""
    if code == "F16":
        return np.frombuffer(stored, np.float16).astype(np.float32).tobytes()
    halves = np.frombuffer(stored, np.uint16)
    return np.stack([np.zeros_like(halves), halves], axis=1).tobytes()


def write_stacked(
    path: Path, tensors: Sequence[Tensor], *, experts: int, layer: int = 0, skip: int = 0
) -> Layer:
    """A file like a checkpoint's: for each tensor the rows of all experts, from ``skip`` on."""
    components = []
    for tensor in tensors:
        components.append(_component(path, tensor, skip, tensor.nbytes))
        skip += experts * tensor.nbytes
    return _write(path, components, experts, layer, skip)


def write_packed(
    path: Path,
    tensors: Sequence[Tensor],
    *,
    experts: int,
    layer: int = 0,
    skip: int = 0,
    alignment: int = PAGE,
) -> Layer:
    """A file like a packed store's: one record for each expert, padded to the alignment."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    stride = -(-nbytes // alignment) * alignment
    components = []
    for tensor in tensors:
        components.append(_component(path, tensor, skip, stride))
        skip += tensor.nbytes
    return _write(path, components, experts, layer, skip - nbytes + experts * stride)


def _component(path: Path, tensor: Tensor, offset: int, stride: int) -> Component:
    return Component(
        name=tensor.name,
        path=path,
        offset=offset,
        stride=stride,
        shape=tensor.shape,
        stored=tensor.stored,
        pooled=tensor.pooled or tensor.stored,
    )


def _write(
    path: Path, components: Sequence[Component], experts: int, layer: int, size: int
) -> Layer:
    content = np.random.default_rng(size).bytes(size)
    path.write_bytes(content)
    return Layer(Record(layer=layer, experts=experts, components=tuple(components)), content)


def aligned_rows(record: Record) -> list[memoryview]:
    """Page-aligned memory for one expert, one view per component."""
    return [
        memoryview(mmap.mmap(-1, component.pooled_bytes))[: component.pooled_bytes]
        for component in record.components
    ]


# -- the owner of slots, for IoLoop -----------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How the loop has ended the read of one key."""

    kind: str
    slot: int | None
    nbytes: int
    error: BaseException | None


class FakeHost(ReadHost):
    """Owner of imaginary slots that writes down what the loop does.

    Attributes:
        unwanted: keys for which ``begin`` returns None.
        on_begin, on_read, on_finish, on_dropped: called first; may wait or raise.
        begun: keys in the order of ``begin``.
        outcomes: key -> what it ended in (exactly one each, if the loop keeps its contract).
        returned: keys and slots of abandoned reads that have ended.
        threads: name of the method -> threads that it ran in.
        peak: most reads at once.
    """

    def __init__(self) -> None:
        self.unwanted: set[Key] = set()
        self.on_begin: Callable[[Key], None] | None = None
        self.on_read: Callable[[Key], None] | None = None
        self.on_finish: Callable[[Key], None] | None = None
        self.on_dropped: Callable[[Sequence[Key]], None] | None = None
        self.begun: list[Key] = []
        self.outcomes: dict[Key, list[Outcome]] = defaultdict(list)
        self.promotions: list[Key] = []
        self.returned: list[tuple[Key, int]] = []
        self.threads: dict[str, set[int]] = defaultdict(set)
        self.peak = 0
        self._reading = 0
        self._changed = threading.Condition()

    def jobs(self, key: Key) -> list[int]:
        return [10]

    def begin(self, entry: Entry) -> int | None:
        key = entry.key
        self.threads["begin"].add(threading.get_ident())
        if self.on_begin is not None:
            self.on_begin(key)
        self.begun.append(key)
        return None if key in self.unwanted else key[1]

    def read(self, key: Key, slot: int, job: int) -> int:
        with self._changed:
            self.threads["read"].add(threading.get_ident())
            self._reading += 1
            self.peak = max(self.peak, self._reading)
        try:
            if self.on_read is not None:
                self.on_read(key)
            return 10
        finally:
            with self._changed:
                self._reading -= 1

    def finish(self, key: Key, slot: int, nbytes: int, error: BaseException | None) -> None:
        self.threads["finish"].add(threading.get_ident())
        self._end(key, Outcome("finish", slot, nbytes, error))
        if self.on_finish is not None:
            self.on_finish(key)

    def timeout(self, key: Key, job: int, seconds: float) -> BaseException:
        return TimeoutError(key, job)

    def abandoned(self, key: Key, slot: int, error: BaseException) -> Callable[[], None]:
        self._end(key, Outcome("abandoned", slot, 0, error))
        return partial(self._give_back, key, slot)

    def _give_back(self, key: Key, slot: int) -> None:
        with self._changed:
            self.returned.append((key, slot))
            self._changed.notify_all()

    def dropped(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        self.threads["dropped"].add(threading.get_ident())
        for key in keys:
            self._end(key, Outcome("dropped", None, 0, reason))
        if self.on_dropped is not None:
            self.on_dropped(keys)

    def void(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        for key in keys:
            self._end(key, Outcome("void", None, 0, None))

    def promoted(self, key: Key) -> None:
        self.promotions.append(key)

    def _end(self, key: Key, outcome: Outcome) -> None:
        with self._changed:
            self.outcomes[key].append(outcome)
            self._changed.notify_all()

    def wait_ended(self, count: int) -> None:
        """Wait until this many keys have ended in something."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) >= count, TIMEOUT)

    def wait_outcomes(self, key: Key, count: int) -> None:
        """Wait until a key has ended this often."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes[key]) >= count, TIMEOUT)

    def wait_returned(self, count: int) -> None:
        """Wait until this many reads that had been given up have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.returned) >= count, TIMEOUT)

    def outcome(self, key: Key) -> Outcome:
        """What the key has ended in; fails unless it has done so exactly once."""
        (only,) = self.outcomes[key]
        return only


# -- the loop, for owners of slots ------------------------------------------------------------


class FakeLoop:
    """Stands in for ``IoLoop``: reads happen one by one, on the calling thread, when asked for.

    Attributes:
        asks: messages so far.
        queue: keys not begun yet, in the order of arrival.
        closed: refuse further messages.
    """

    def __init__(self, host: ReadHost) -> None:
        self.host = host
        self.asks: list[Ask] = []
        self.queue: deque[Key] = deque()
        self.closed = False

    def as_loop(self) -> IoLoop:
        """Itself, for type checkers."""
        return cast(IoLoop, self)

    def submit(self, ask: Ask | Purge) -> None:
        if self.closed:
            raise LoopClosed("the I/O loop takes no more reads")
        if isinstance(ask, Purge):
            return
        self.asks.append(ask)
        self.queue.extend(ask.demands)

    def begin(self) -> tuple[Key, int]:
        """Take the next key up; returns it with its slot."""
        key = self.queue.popleft()
        slot = self.host.begin(Entry(key, True, 0, 1.0, set(), 0))
        assert slot is not None
        return key, slot

    def end(self, key: Key, slot: int) -> None:
        """Read what was begun, and report."""
        nbytes, failure = 0, None
        try:
            nbytes = sum(self.host.read(key, slot, job) for job in range(len(self.host.jobs(key))))
        except Exception as error:
            failure = error
        self.host.finish(key, slot, nbytes, failure)

    def step(self) -> Key:
        """One whole read."""
        key, slot = self.begin()
        self.end(key, slot)
        return key

    def drop(self, reason: BaseException | None = None) -> None:
        """Give up everything that has not begun."""
        keys = list(self.queue)
        self.queue.clear()
        self.host.dropped(keys, reason)
