"""The expert store: residency of all layers, their pools, and the futures of reads on their way.

Two threads meet here. The compute thread asks (``demand``) and lets go (``release``); the loop
thread reports (``begin``, ``finish``, ``dropped``). One short lock guards the books; no I/O, no
waiting and no MLX call happens under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..io.errors import LoopClosed
from ..io.loop import Ask, IoLoop, Key
from ..io.reader import RecordReader
from ..io.records import Record
from .policy import LeastRecentlyUsed, PolicyFactory
from .residency import NONE, Residency
from .slots import SlotPool
from .tracing import Tracer


@dataclass(slots=True)
class Counters:
    """Totals since the engine was opened. Written under the store's lock or by one thread only."""

    hits: int = 0
    misses: int = 0
    joins: int = 0
    reads: int = 0
    read_errors: int = 0
    bytes_read: int = 0
    dropped: int = 0


@dataclass(slots=True)
class Demanded:
    """What ``ExpertStore.demand`` hands to the compute thread.

    Attributes:
        slots: one per expert asked for, pinned.
        futures: of the experts that are not there yet.
        misses: how many had to be asked from the drive (other ``futures`` were on their way).
        nbytes: bytes of the reads that this call started.
    """

    slots: list[int]
    futures: list[Future[None]]
    misses: int
    nbytes: int


@dataclass(slots=True)
class Group:
    """One streamed MoE layer."""

    record: Record
    pool: SlotPool
    residency: Residency
    stored_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.stored_bytes = self.record.stored_bytes


class ExpertStore:
    """Books and bytes of all streamed layers. Implements ``io.loop.ReadHost``.

    Args:
        records: one per streamed layer.
        slots: slots of each of these layers.
        reader: reads their records.
        policy: eviction order.
        tracer: gets an event per read.
    """

    def __init__(
        self,
        records: Sequence[Record],
        slots: Sequence[int],
        reader: RecordReader,
        *,
        tracer: Tracer,
        policy: PolicyFactory = LeastRecentlyUsed,
    ) -> None:
        self._lock = threading.Lock()
        self._reader = reader
        self._tracer = tracer
        self._flights: dict[Key, Future[None]] = {}
        self._loop: IoLoop
        self.counters = Counters()
        self.groups = [
            Group(record, SlotPool(record, count), Residency(record.experts, count, policy))
            for record, count in zip(records, slots, strict=True)
        ]

    def connect(self, loop: IoLoop) -> None:
        """Name the loop that performs the reads."""
        self._loop = loop

    # -- compute thread -----------------------------------------------------------------------

    def room(self, group: int) -> int:
        """How many distinct experts of the layer one call can hold now."""
        with self._lock:
            return self.groups[group].residency.room()

    def split(self, group: int, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """The experts in the order to compute them: those that are there, then the missing ones."""
        with self._lock:
            resident = self.groups[group].residency.resident
            here = [expert for expert in experts if resident(expert)]
            missing = [expert for expert in experts if not resident(expert)]
        return here, missing

    def demand(
        self, group: int, experts: Sequence[int], *, owner: Hashable, position: int
    ) -> Demanded | None:
        """Pin the experts of one layer call and start the reads of those that are missing.

        Returns None, and does nothing, when they are more than ``room(group)``.

        Args:
            group: the layer.
            experts: distinct experts.
            owner: the request.
            position: absolute index of this layer call.

        Raises:
            LoopClosed: the I/O loop is gone; nothing stays pinned.
        """
        books = self.groups[group]
        counters = self.counters
        with self._lock:
            if not books.residency.fits(experts):
                return None
            got = books.residency.acquire(experts)
            counters.hits += len(experts) - len(got.reads) - len(got.joins)
            if not got.reads and not got.joins:
                return Demanded(got.slots, [], 0, 0)
            counters.misses += len(got.reads)
            counters.joins += len(got.joins)
            futures = [self._flights[group, expert] for expert in got.joins]
            for expert in got.reads:
                flight: Future[None] = Future()
                self._flights[group, expert] = flight
                futures.append(flight)
        if got.reads:
            keys = tuple((group, expert) for expert in got.reads)
            try:
                self._loop.submit(Ask(owner, position, keys))
            except BaseException as error:
                self.dropped(keys, error)
                self.release(group, got.slots)
                raise
        nbytes = books.stored_bytes * len(got.reads)
        return Demanded(got.slots, futures, len(got.reads), nbytes)

    def release(self, group: int, slots: Sequence[int]) -> None:
        """Unpin; the evaluation that read these slots has completed."""
        with self._lock:
            self.groups[group].residency.release(slots)

    # -- loop thread and lanes (ReadHost) -----------------------------------------------------

    def begin(self, key: Key) -> int | None:
        """The slot that was assigned when the demand was made."""
        with self._lock:
            slot = self.groups[key[0]].residency.slot(key[1])
        return None if slot == NONE else slot

    def read(self, key: Key, slot: int) -> int:
        """Read one record into its slot; runs in a lane thread."""
        group, expert = key
        started = time.perf_counter()
        nbytes = 0
        try:
            nbytes = self._reader.read(group, expert, self.groups[group].pool.rows(slot))
            return nbytes
        finally:
            layer = self.groups[group].record.layer
            self._tracer.read(layer, expert, started, time.perf_counter(), nbytes)

    def finish(self, key: Key, slot: int, nbytes: int, error: BaseException | None) -> None:
        """Publish the expert, or make it absent again; then wake whoever waits."""
        group, expert = key
        flights: list[Future[None]] = []
        try:
            with self._lock:
                flights.append(self._flights.pop(key))
                self.counters.reads += 1
                self.counters.bytes_read += nbytes
                residency = self.groups[group].residency
                if error is None:
                    residency.published(expert)
                else:
                    self.counters.read_errors += 1
                    residency.failed(expert)
        except BaseException as bug:  # kills the loop; whoever waits must not wait for ever
            error = bug
            raise
        finally:
            _complete(flights, error)

    def dropped(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        """Reads that never started: their waiters get the reason."""
        flights: list[Future[None]] = []
        try:
            with self._lock:
                flights += [self._flights.pop(key) for key in keys]
                self.counters.dropped += len(keys)
                for group, expert in keys:
                    self.groups[group].residency.failed(expert)
        finally:
            _complete(flights, reason or LoopClosed("the read was given up before it started"))

    # -- any thread ---------------------------------------------------------------------------

    def check_integrity(self, *, idle: bool = False) -> None:
        """Check the books of every layer; with ``idle`` also that nothing is pinned or reading."""
        with self._lock:
            for books in self.groups:
                books.residency.check_integrity(idle=idle)


def _complete(flights: Sequence[Future[None]], error: BaseException | None) -> None:
    for flight in flights:
        if error is None:
            flight.set_result(None)
        else:
            flight.set_exception(error)
