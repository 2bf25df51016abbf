"""The expert store: residency of all layers, their pools, and the futures of reads on their way.

Threads meet here. The compute thread asks (``demand``) and lets go (``release``); the loop thread
reports (``begin``, ``finish``, ``dropped``), and a lane does what it has read for a demand
(``finish``). One short lock guards the books; no I/O, no waiting and no MLX call happens under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from ..io.asks import Ask, Guess, Purge
from ..io.errors import LoopClosed, loop_died
from ..io.loop import IoLoop
from ..io.queue import Entry, Key
from ..io.reader import RecordReader
from ..io.records import Record
from .device import DevicePassage
from .policy import PolicyFactory, least_recently_used
from .prefetch import OFF, PrefetchConfig
from .residency import NONE, Acquired, Residency
from .slots import SlotPool
from .staging import Staging, copy_rows
from .tracing import Tracer

logger = logging.getLogger("moestream")

PRELOAD = 1 << 60
"""Position of reads that nobody asks for: behind every guess, and never stale."""

WINDOWS_KEPT = 1024
"""Times from asking to ready that are kept of each layer (arbitrary)."""

WARMING = 1 << 60
"""In place of the slot of a read that only warms the page cache."""

DEPTH_SECONDS = 0.002
"""Between two samples of queue and lanes in a trace (arbitrary; each costs the loop some time)."""


@dataclass(slots=True)
class Counters:
    """Totals since the engine was opened. Written under the store's lock.

    ``late``, ``evicted`` and ``unpredicted`` divide the experts that were waited for by cause.
    """

    hits: int = 0
    misses: int = 0
    joins: int = 0
    reads: int = 0
    read_errors: int = 0
    bytes_read: int = 0
    dropped: int = 0
    late: int = 0
    evicted: int = 0
    unpredicted: int = 0
    guesses: int = 0
    guesses_begun: int = 0
    guesses_refused: int = 0
    guesses_used: int = 0
    guesses_wasted: int = 0
    wasted_bytes: int = 0


@dataclass(slots=True)
class Demanded:
    """What ``ExpertStore.demand`` hands to the compute thread.

    Attributes:
        slots: one per expert asked for, pinned.
        futures: of the experts that are not there yet.
        misses: how many had to be asked from the drive (other ``futures`` were on their way).
        nbytes: bytes of the reads that this call started.
        late, evicted, unpredicted: the awaited experts by cause.
        paid: experts that a guess had brought.
        awaited: slots of the experts that are not there yet.
    """

    slots: list[int]
    futures: list[Future[None]]
    misses: int = 0
    nbytes: int = 0
    late: int = 0
    evicted: int = 0
    unpredicted: int = 0
    paid: Sequence[int] = ()
    awaited: frozenset[int] = frozenset()


@dataclass(slots=True)
class Group:
    """One streamed MoE layer."""

    record: Record
    pool: SlotPool
    residency: Residency
    job_bytes: tuple[int, ...] = field(init=False)
    stored_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.stored_bytes = self.record.stored_bytes
        self.job_bytes = tuple(sum(part.nbytes for part in job) for job in self.record.jobs)


@dataclass(slots=True)
class _Begun:
    """A guess that has begun, or waits in memory: for the profile of windows."""

    asked: float
    position: int  # of the layer call that it is for
    ready: float = 0.0


class ExpertStore:
    """Books and bytes of all streamed layers. Implements ``io.loop.ReadHost``.

    Args:
        records: one per streamed layer.
        slots: slots of each of these layers.
        reader: reads their records.
        top_k: routing width of these layers, which guesses leave room for.
        prefetch: where guesses go.
        staging_bytes: memory for guesses beside the slots; None for what ``prefetch`` asks for.
        policy: eviction order.
        passage: to the memory of a GPU that does not share the host's.
        tracer: gets an event per read, eviction and use of a guess.
    """

    def __init__(
        self,
        records: Sequence[Record],
        slots: Sequence[int],
        reader: RecordReader,
        *,
        tracer: Tracer,
        top_k: Sequence[int] | None = None,
        prefetch: PrefetchConfig = OFF,
        staging_bytes: int | None = None,
        policy: PolicyFactory = least_recently_used,
        passage: DevicePassage | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self.reader = reader
        self._tracer = tracer
        self._prefetch = prefetch
        self._flights: dict[Key, Future[None]] = {}
        self._lost: dict[Key, int] = {}  # guesses evicted unused -> the call that they were for
        self._begun: dict[Key, _Begun] = {}
        self._warming: set[Key] = set()
        self._copying: dict[Key, int] = {}
        self._asked: set[Key] = set()  # sure guesses in the queue
        self._over = -1  # calls up to this position want no sure guess any more
        self._hung: dict[int, tuple[int, int, int, float]] = {}  # the last timeout of each group
        self._wasted: list[int] = []  # groups of guesses read in vain, for the governor
        self._position = -1
        self._next_depth = 0.0
        self._loop: IoLoop
        self.windows: dict[int, deque[float]] = {}
        self.counters = Counters()
        self._passage = passage
        self._device = None if passage is None else passage.device
        beside = prefetch.staged_bytes if staging_bytes is None else staging_bytes
        self._staging = Staging(records, beside)
        widths = [1] * len(records) if top_k is None else top_k
        self.groups = [
            Group(
                record,
                SlotPool(record, count, self._device),
                Residency(record.experts, count, policy, reserve=min(width, record.experts)),
            )
            for record, count, width in zip(records, slots, widths, strict=True)
        ]
        for before, group in pairwise(self.groups):
            group.residency.behind(before.residency)

    def connect(self, loop: IoLoop) -> None:
        """Name the loop that performs the reads."""
        self._loop = loop

    # -- compute thread -----------------------------------------------------------------------

    def room(self, group: int) -> int:
        """How many distinct experts of the layer one call can hold now.

        Raises:
            ReadTimeout: for none, since reads that hang hold the slots.
        """
        with self._lock:
            residency = self.groups[group].residency
            room = residency.room()
            if room <= 0 and not residency.pinned and (lost := residency.quarantined):
                more = f", and such reads hold {lost} of the layer's {residency.slots} slots"
                raise self.reader.timeout(*self._hung[group], more=more)
            return room

    def tell_prompt(self, group: int, rows: Sequence[Sequence[int]]) -> None:
        """The experts of a prompt's last tokens at this layer, before the prompt is demanded."""
        with self._lock:
            self.groups[group].residency.tokens(rows)

    def split(
        self, group: int, experts: Sequence[int], first: Sequence[int] = ()
    ) -> tuple[list[int], list[int]]:
        """Divide a call that does not fit: the experts that are there, and the missing ones.

        They are demanded in this order, each time ``part`` of the call.

        Args:
            group: the layer.
            experts: of the call.
            first: sure guesses for it, in their order: as many as are kept beside the slots come
                first. Not those that have arrived: results to the last bit hang on the order.
        """
        with self._lock:
            here, missing = self.groups[group].residency.split(experts)
        early = {expert: rank for rank, expert in enumerate(first[: self._staging.places])}
        missing.sort(key=lambda expert: early.get(expert, len(early)))
        return here, missing

    def _staged(self, key: Key) -> bool:
        return key in self._staging or self._staging.filling(key)

    def demand(
        self,
        group: int,
        experts: Sequence[int],
        *,
        owner: Hashable,
        position: int,
        part: bool = False,
        predicted: Sequence[Container[int]] = (),
        guesses: Sequence[Guess] = (),
        grant: float = 0.0,
    ) -> Demanded | None:
        """Pin the experts of one layer call and start the reads of those that are missing.

        Returns None, and does nothing, when they do not fit at this moment.

        Args:
            group: the layer.
            experts: distinct experts.
            owner: the request.
            position: absolute index of this layer call.
            part: the experts are some of a call that was ``split``.
            predicted: what was predicted for this call, each time.
            guesses: what later layers may need; the experts that are there are left out.
            grant: bytes of them that may be begun.

        Raises:
            LoopClosed: the I/O loop is gone; nothing stays pinned.
        """
        books = self.groups[group]
        with self._lock:
            if not books.residency.fits(experts):
                return None
            self._position = position
            got = books.residency.acquire(experts, part=part)
            result = Demanded(got.slots, [])
            if got.paid:
                self._count_paid(group, got.paid, result)
            self.counters.hits += len(experts) - len(got.reads) - len(got.joins)
            if got.reads or got.joins:
                self._count_misses(group, got, predicted, result)
            if books.residency.evicted:
                self._count_evicted(group)
            wanted = self._wanted(guesses, grant) if guesses else ()
        if self._tracer.enabled:
            self._trace_asks(group, got.joins, wanted)
        if got.reads or got.joins or wanted:
            demands = tuple((group, expert) for expert in got.reads)
            joins = tuple((group, expert) for expert in got.joins)
            try:
                self._loop.submit(Ask(owner, position, demands, joins, tuple(wanted), grant))
            except BaseException as error:
                self.dropped(demands, error)
                self.release(group, got.slots)
                raise
        return result

    def _trace_asks(self, group: int, joins: Sequence[int], guesses: Sequence[Guess]) -> None:
        for expert in joins:
            self._tracer.queue("join", group, expert)
        for guess in guesses:
            self._tracer.queue("guess", *guess.key, guess.probability)

    def _trace_depth(self) -> None:
        self._next_depth = time.perf_counter() + DEPTH_SECONDS
        self._tracer.depth(*self._loop.depths())

    def _count_misses(
        self,
        group: int,
        got: Acquired,
        predicted: Sequence[Container[int]],
        result: Demanded,
    ) -> None:
        counters = self.counters
        result.misses = len(got.reads)
        result.nbytes = self.groups[group].stored_bytes * len(got.reads)
        counters.misses += len(got.reads)
        counters.joins += len(got.joins)
        result.futures = [self._flights[group, expert] for expert in got.joins]
        result.late = len(got.joins)
        slot = self.groups[group].residency.slot
        result.awaited = frozenset(slot(expert) for expert in (*got.reads, *got.joins))
        for expert in got.reads:
            flight: Future[None] = Future()
            self._flights[group, expert] = flight
            result.futures.append(flight)
            if self._lost and self._lost.pop((group, expert), -1) == self._position:
                result.evicted += 1
            elif self._staged((group, expert)) or any(expert in ranked for ranked in predicted):
                result.late += 1
            else:
                result.unpredicted += 1
        counters.late += result.late
        counters.evicted += result.evicted
        counters.unpredicted += result.unpredicted

    def _count_paid(self, group: int, paid: Sequence[int], result: Demanded) -> None:
        result.paid = paid
        self.counters.guesses_used += len(paid)
        now = time.perf_counter()
        for expert in paid:
            begun = self._begun.pop((group, expert), None)
            if begun is not None:
                self._tracer.use(group, expert, now - begun.asked)
                if self._prefetch.profile and begun.ready:
                    window = self.windows.setdefault(group, deque(maxlen=WINDOWS_KEPT))
                    window.append(begun.ready - begun.asked)

    def _count_evicted(self, group: int) -> None:
        evicted = self.groups[group].residency.evicted
        if self._tracer.enabled:
            self._tracer.evict(group, [~e.expert if e.unused else e.expert for e in evicted])
        for eviction in evicted:
            if eviction.unused:
                self._waste((group, eviction.expert))
        evicted.clear()

    def _waste(self, key: Key) -> None:
        begun = self._begun.pop(key, None)
        if begun is not None:
            self._lost[key] = begun.position
        self._wasted.append(key[0])
        self._count_wasted(key)

    def _count_wasted(self, key: Key) -> None:
        self.counters.guesses_wasted += 1
        self.counters.wasted_bytes += self.groups[key[0]].stored_bytes

    def _wanted(self, guesses: Sequence[Guess], grant: float) -> list[Guess]:
        """Of guesses in the order of their worth, those that there is a use and a grant for."""
        wanted: list[Guess] = []
        # Guesses of a call are all sure, or none of them is.
        places = self._staging.room - len(self._asked) if guesses[0].sure else 0
        for guess in guesses:
            if guess.sure:
                if places > 0 and self._is_new(guess):
                    wanted.append(guess)
                    self._asked.add(guess.key)
                    places -= 1
            elif self._is_absent(guess):
                wanted.append(guess)
                grant -= self.groups[guess.key[0]].stored_bytes
                if grant < 0:  # one more than the grant holds: demands may make others void
                    break
        self.counters.guesses += len(wanted)
        return wanted

    def _is_new(self, guess: Guess) -> bool:
        """Whether the expert of a sure guess is neither there nor on its way."""
        group, expert = guess.key
        there = self.groups[group].residency.slot(expert) != NONE
        return not (there or guess.key in self._asked or self._staged(guess.key))

    def _is_absent(self, guess: Guess) -> bool:
        group, expert = guess.key
        residency = self.groups[group].residency
        if residency.slot(expert) == NONE:
            if self._staged(guess.key) or guess.key in self._warming:
                return False
            return self._prefetch.destination != "slots" or residency.spare()
        if not self._prefetch.missing_only:
            residency.touch(expert)
        return False

    def guess(
        self, guesses: Sequence[Guess], *, owner: Hashable, position: int, grant: float
    ) -> None:
        """Hand guesses to the loop outside of a layer call; ``position`` is the last call's."""
        with self._lock:
            wanted = self._wanted(guesses, grant) if guesses else []
        if wanted:
            self._loop.submit(Ask(owner, position, guesses=tuple(wanted), grant=grant))

    def ahead(self, guesses: Sequence[Guess], *, owner: Hashable) -> list[Future[None]]:
        """Begin guesses at once, whatever the drive does: their slots are assigned here.

        For the deterministic mode; the caller waits for the futures before the next layer call.
        """
        futures: list[Future[None]] = []
        keys: list[Key] = []
        position = 0
        with self._lock:
            for guess in guesses:
                group, expert = guess.key
                residency = self.groups[group].residency
                if residency.slot(expert) != NONE or residency.guess(expert) == NONE:
                    continue
                self.counters.guesses += 1
                self.counters.guesses_begun += 1
                if residency.evicted:
                    self._count_evicted(group)
                flight: Future[None] = Future()
                self._flights[guess.key] = flight
                self._begun[guess.key] = _Begun(time.perf_counter(), guess.position)
                futures.append(flight)
                keys.append(guess.key)
                position = guess.position
        if keys:
            try:
                self._loop.submit(Ask(owner, position, tuple(keys)))
            except BaseException as error:
                self.dropped(keys, error)
                raise
        return futures

    def preload(self, keys: Sequence[Key]) -> None:
        """Read these experts, in this order, into free slots while the drive has nothing to do.

        The first demand ends that: what has not begun by then waits for the spare time of guesses.
        """
        if keys:
            guesses = tuple(Guess(key, PRELOAD, 1e-6) for key in keys)
            grant = float(sum(self.groups[group].stored_bytes for group, _ in keys))
            self._loop.submit(Ask(PRELOAD, -1, guesses=guesses, grant=grant))

    def give_up(self, position: int) -> None:
        """The layer calls up to this one are over: give up the sure guesses that they left."""
        with self._lock:
            self._over = max(self._over, position)
            for key in self._staging.kept:
                begun = self._begun[key]
                if begun.position <= position:
                    del self._begun[key]
                    self._staging.give_up(key)
                    self._count_wasted(key)

    def take_wasted(self) -> list[int]:
        """Groups of the guesses that have been given up unused since the last call."""
        if not self._wasted:
            return []
        with self._lock:
            wasted, self._wasted = self._wasted, []
        return wasted

    def purge(self, owner: Hashable) -> None:
        """Drop the queued guesses of a request that has ended."""
        with suppress(LoopClosed):
            self._loop.submit(Purge(owner))

    def release(self, group: int, slots: Sequence[int]) -> None:
        """Unpin; the evaluation that read these slots has completed."""
        with self._lock:
            self.groups[group].residency.release(slots)

    def resize(self, group: int, slots: int, swap: Callable[[SlotPool], None]) -> bool:
        """Rebuild a layer's pool with another number of slots; the hottest experts stay.

        Old and new pool are there together for a moment. Returns False, and does nothing, while a
        slot of the layer is pinned or being read into; True without a change for the number that
        there is.

        Args:
            group: the layer.
            slots: at least 1.
            swap: puts the new pool where the model looks for it.
        """
        books = self.groups[group]
        residency = books.residency
        with self._lock:
            if slots == residency.slots:  # a share that has changed back; nobody moves
                return True
            if not residency.hold():
                return False
            moves = residency.keepers(slots)
        try:
            # Nobody reads or writes rows of a layer whose slots are held.
            pool = SlotPool(books.record, slots, self._device)
            pool.take_rows(books.pool, moves)
        except BaseException:
            with self._lock:
                residency.resize(residency.slots, [])
            raise
        with self._lock:
            books.pool.release()
            books.pool = pool
            residency.resize(slots, moves)
            self._count_evicted(group)
        swap(pool)
        return True

    # -- loop thread and lanes (ReadHost) -----------------------------------------------------

    def begin(self, entry: Entry) -> int | None:
        """Where a read goes to; None when it is not wanted.

        Returns:
            A slot; the place beside the slots, inverted; or ``WARMING``. The jobs of the read go
            by this alone: one that a lane has just begun may run while the read is given up.
        """
        key = entry.key
        group, expert = key
        with self._lock:
            self._asked.discard(key)
            residency = self.groups[group].residency
            slot = residency.slot(expert)
            if slot != NONE:  # a demand has its slot; a guess for it is not needed any more
                if not entry.demand:
                    return None
                place = self._staging.take(key)
                if place is not None:
                    self._copying[key] = place
                    begun = self._begun.pop(key)  # as long as it is staged
                    self.counters.guesses_used += 1
                    self._tracer.use(group, expert, time.perf_counter() - begun.asked)
                return slot
            over = self._over if entry.sure else self._position
            if entry.demand or entry.position <= over:
                return None
            if self._staged(key):  # by a guess that has ended since this one was asked for
                return None
            if entry.position == PRELOAD:
                return self._begin_preload(key)
            place = self._begin_guess(key, sure=entry.sure)
            if place is None:
                self.counters.guesses_refused += 1
                self._tracer.queue("refuse", group, expert, entry.probability)
                return None
            self.counters.guesses_begun += 1
            self._begun[key] = _Begun(time.perf_counter(), entry.position)
            return place

    def _begin_preload(self, key: Key) -> int | None:
        slot = self.groups[key[0]].residency.preload(key[1])
        if slot == NONE:
            return None
        self._flights[key] = Future()
        return slot

    def _begin_guess(self, key: Key, *, sure: bool) -> int | None:
        group, expert = key
        destination = self._prefetch.destination
        if destination == "pagecache" and not sure:
            self._warming.add(key)
            return WARMING
        if destination == "staging" or sure:
            place, lost = self._staging.begin(key, keep=sure)
            if lost is not None:
                self._waste(lost)
            return None if place is None else ~place
        residency = self.groups[group].residency
        slot = residency.guess(expert)
        if residency.evicted:
            self._count_evicted(group)
        if slot == NONE:
            return None
        self._flights[key] = Future()
        return slot

    def jobs(self, key: Key) -> Sequence[int]:
        """Bytes of the jobs of a read; a copy from memory is one."""
        return (0,) if key in self._copying else self.groups[key[0]].job_bytes

    def read(self, key: Key, slot: int, job: int) -> int:
        """Do one job of a read; runs in a lane thread."""
        group, expert = key
        books = self.groups[group]
        place = self._copying.get(key)
        if place is not None:
            self._copy_staged(key, place, slot)
            return 0
        if slot == WARMING:
            return self.reader.warm_job(group, expert, job)
        speculative = key in self._begun
        staged = slot < 0
        rows = self._staging.rows(group, ~slot) if staged else books.pool.rows(slot)
        passage = None
        if self._passage is not None and not staged:
            passage = self._passage.into(books.pool.addresses(slot))
        started = time.perf_counter()
        nbytes = 0
        try:
            nbytes = self.reader.read_job(group, expert, job, rows, passage)
            return nbytes
        finally:
            ended = time.perf_counter()
            begun = self._begun.get(key)
            asked = started if begun is None else begun.asked
            self._tracer.read(group, expert, started, ended, nbytes, speculative, asked)

    def _copy_staged(self, key: Key, place: int, slot: int) -> None:
        group, expert = key
        pool = self.groups[group].pool
        if self._passage is None:
            copy_rows(self._staging.rows(group, place), pool.rows(slot))
            return
        source = self._staging.address(place)
        try:
            self._passage.copy(source, pool.addresses(slot), pool.widths)
        except OSError as error:
            raise self.reader.refused(group, expert, 0, error) from error

    def finish(self, key: Key, slot: int, nbytes: int, error: BaseException | None) -> None:
        """Publish the expert, or make it absent again; then wake whoever waits."""
        self._end(key, nbytes, error, hanging=False)

    def timeout(self, key: Key, job: int, seconds: float) -> BaseException:
        """The error of a read to which the drive does not answer."""
        group, expert = key
        self._hung[group] = (group, expert, job, seconds)
        return self.reader.timeout(group, expert, job, seconds)

    def abandoned(self, key: Key, slot: int, error: BaseException) -> Callable[[], None]:
        """Make the expert absent and tell whoever waits; its slot is free when the read returns."""
        logger.info("%s", error)
        self._tracer.queue("timeout", *key)
        return self._end(key, 0, error, hanging=True)

    def _end(
        self, key: Key, nbytes: int, error: BaseException | None, *, hanging: bool
    ) -> Callable[[], None]:
        """A read has ended, or was given up; returns what to call once that has returned."""
        group, expert = key
        flights: list[Future[None]] = []
        give_back: list[Callable[[], None]] = []
        try:
            with self._lock:
                self.counters.reads += 1
                self.counters.bytes_read += nbytes
                self.counters.read_errors += error is not None
                if (begun := self._begun.get(key)) is not None:
                    begun.ready = time.perf_counter()
                    if error is not None:
                        del self._begun[key]
                if (place := self._copying.pop(key, None)) is not None:
                    if hanging:
                        give_back.append(partial(self._free_place, place))
                    else:
                        self._staging.put_back(place)
                if key in self._warming:
                    self._warming.discard(key)
                elif self._staging.filling(key):  # a demand for it waits until this has ended
                    if hanging:
                        give_back.append(partial(self._free_place, self._staging.lose(key)))
                    else:
                        self._staging.end(key, ready=error is None)
                else:
                    flights.append(self._flights.pop(key))
                    residency = self.groups[group].residency
                    if error is None:
                        residency.published(expert)
                    elif hanging:
                        slot = residency.abandoned(expert)
                        give_back.append(partial(self._free_slot, group, slot))
                    else:
                        residency.failed(expert)
        except BaseException as bug:  # kills the loop; whoever waits must not wait for ever
            error = loop_died(bug)
            raise
        finally:
            _complete(flights, error)
        if self._tracer.enabled and time.perf_counter() >= self._next_depth:
            self._trace_depth()
        return partial(_call, give_back)

    def _free_place(self, place: int) -> None:
        with self._lock:
            self._staging.put_back(place)

    def _free_slot(self, group: int, slot: int) -> None:
        with self._lock:
            self.groups[group].residency.returned(slot)

    def void(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        """Guesses that never started: nobody waits for them, and they hold nothing."""
        with self._lock:
            self.counters.dropped += len(keys)
            self._asked.difference_update(keys)
        if self._tracer.enabled:
            for key in keys:
                self._tracer.queue("stale" if reason is None else "purge", *key)

    def promoted(self, key: Key) -> None:
        """A guess has been chosen by the router before its read began."""
        self._tracer.queue("promote", *key)

    def dropped(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        """Demands that never started: their waiters get the reason."""
        flights: list[Future[None]] = []
        try:
            with self._lock:
                self.counters.dropped += len(keys)
                self._asked.difference_update(keys)
                for key in keys:
                    if not self._staged(key):
                        self._begun.pop(key, None)
                flights += [self._flights.pop(key) for key in keys]
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
            self._staging.check_integrity(idle=idle)


def _call(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _complete(flights: Sequence[Future[None]], error: BaseException | None) -> None:
    for flight in flights:
        if error is None:
            flight.set_result(None)
        else:
            flight.set_exception(error)
