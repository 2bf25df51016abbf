"""The order in which experts are read: demands first, then guesses by value and time left.

Pure bookkeeping: no I/O, no clock, no locks. The I/O loop thread owns the queue and is the only
one to call it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeAlias

__all__ = ["Entry", "Key", "QueueStatistics", "ReadQueue"]

Key: TypeAlias = tuple[int, int]
"""(group, expert)"""


@dataclass(slots=True)
class Entry:
    """One expert that waits to be read. While it is queued only the queue may change it.

    Attributes:
        key: (group, expert).
        demand: whether a router has chosen the expert, as opposed to a guess that one will.
        position: absolute index of the layer call that needs it: number of the forward pass
            times the number of MoE layers, plus the ordinal of the layer.
        probability: that the layer call will use it, in (0, 1]; 1.0 for a demand.
        owners: ids of the requests that want it.
        sequence: submission order; kept when a guess becomes a demand.
        sure: a guess that comes before all that are not.
    """

    key: Key
    demand: bool
    position: int
    probability: float
    owners: set[Hashable]
    sequence: int
    sure: bool = False


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Counts since the queue was made.

    Every submission is counted once, as queued, promoted or joined. Every entry queued is still
    there or was counted once as dropped_stale, removed_by_owner, removed, cleared or popped.
    """

    queued: int = 0
    promoted: int = 0
    joined: int = 0
    dropped_stale: int = 0
    removed_by_owner: int = 0
    removed: int = 0
    cleared: int = 0
    popped: int = 0
    peak_length: int = 0


_Item: TypeAlias = tuple[float, int, Entry]  # rank, sequence, entry


class _Lane:
    """A heap of entries by (rank, sequence) in which a rank can be improved.

    Deletion is lazy: an item counts only while `_current` maps its key to that very tuple.
    Invariants between calls: the top of the heap is current, and at most half of it is not.
    No two items compare equal in (rank, sequence), so entries themselves are never compared:
    sequences differ between entries, ranks between the items of one entry.
    """

    def __init__(self) -> None:
        self._heap: list[_Item] = []
        self._current: dict[Key, _Item] = {}

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: object) -> bool:
        return key in self._current

    def get(self, key: Key) -> Entry | None:
        item = self._current.get(key)
        return None if item is None else item[2]

    def put(self, rank: float, entry: Entry) -> None:
        """Add the entry, or move it to a better (smaller) rank."""
        item = (rank, entry.sequence, entry)
        self._current[entry.key] = item
        heappush(self._heap, item)
        self._sweep()

    def rank(self, key: Key) -> float:
        return self._current[key][0]

    def remove(self, key: Key) -> None:
        del self._current[key]
        self._sweep()

    def first(self) -> Entry | None:
        return self._heap[0][2] if self._heap else None

    def in_order(self) -> list[Entry]:
        return [item[2] for item in sorted(self._current.values())]

    def _is_current(self, item: _Item) -> bool:
        return self._current.get(item[2].key) is item

    def _sweep(self) -> None:
        # A rebuild costs O(current) and follows at least as many deletions: amortized O(1).
        if len(self._heap) > 2 * len(self._current):
            self._heap = list(self._current.values())
            heapify(self._heap)
        while self._heap and not self._is_current(self._heap[0]):
            heappop(self._heap)

    def check_integrity(self) -> None:
        live = [item for item in self._heap if self._is_current(item)]
        _require(len(live) == len(self._current), "a queued entry is missing from its heap")
        _require(len(self._heap) <= 2 * len(live), "more than half of a heap is dead")
        _require(not self._heap or self._is_current(self._heap[0]), "the top of a heap is dead")
        for key, (_, sequence, entry) in self._current.items():
            _require(entry.key == key, f"entry {entry} is filed under {key}")
            _require(entry.sequence == sequence, f"entry {entry} has changed its sequence")


class ReadQueue:
    """Priority queue of expert reads, with one entry per expert.

    Every demand comes before every guess. Demands are ordered by (position, sequence), guesses by
    `lookahead_price * position - log(probability)` and then sequence: a guess one layer further
    away has to be `exp(lookahead_price)` times as likely to be read first. Sure guesses come before
    the others, as they came. What compute has passed would be subtracted from all positions alike,
    so the order holds as it moves on and nothing is ever re-keyed.

    Operations take amortized O(log n), except where they say otherwise.

    Args:
        lookahead_price: cost of one layer of distance, in nats of log probability; finite, >= 0.

    Raises:
        ValueError: the price is out of range.
    """

    def __init__(self, lookahead_price: float = 0.5) -> None:
        if not (math.isfinite(lookahead_price) and lookahead_price >= 0):
            raise ValueError(f"lookahead_price must be finite and >= 0, not {lookahead_price}")
        self._price = lookahead_price
        self._demands = _Lane()
        self._guesses = _Lane()
        self._owned: dict[Hashable, set[Key]] = {}
        self._expiring: dict[int, set[Key]] = {}  # guesses by position
        self._sequence = 0
        self._promoted = 0
        self._joined = 0
        self._dropped_stale = 0
        self._removed_by_owner = 0
        self._removed = 0
        self._cleared = 0
        self._popped = 0
        self._peak_length = 0

    def __len__(self) -> int:
        return len(self._demands) + len(self._guesses)

    def __contains__(self, key: object) -> bool:
        return key in self._demands or key in self._guesses

    @property
    def demands(self) -> int:
        """Number of demands in the queue."""
        return len(self._demands)

    @property
    def guesses(self) -> int:
        """Number of speculative entries in the queue."""
        return len(self._guesses)

    @property
    def sure(self) -> bool:
        """Whether there are sure guesses in the queue."""
        first = self._guesses.first()
        return first is not None and first.sure

    def get(self, key: Key) -> Entry | None:
        """The queued entry of an expert, or None."""
        return self._demands.get(key) or self._guesses.get(key)

    def demand(self, key: Key, owner: Hashable, position: int) -> bool:
        """Ask for an expert that a router has chosen.

        A guess is promoted in place. An earlier demand is joined and keeps the nearer position.

        Returns:
            True if the expert was not queued before.
        """
        entry = self.get(key)
        if entry is None:
            self._add(Entry(key, True, position, 1.0, {owner}, self._sequence))
            return True
        self._add_owner(entry, owner)
        if not entry.demand:
            self._promote(entry, position)
        else:
            self._joined += 1
            self._bring_forward(entry, position)
        return False

    def speculate(
        self,
        key: Key,
        owner: Hashable,
        position: int,
        probability: float,
        *,
        sure: bool = False,
    ) -> bool:
        """Ask for an expert that is predicted to be needed.

        A demand is joined and stays as it is. A guess is joined and takes the position and
        probability of whichever of the two comes first in the order; a sure one stays as it is.

        Args:
            key: (group, expert).
            owner: id of the request.
            position: absolute index of the layer call.
            probability: calibrated chance that the layer call uses the expert, in (0, 1].
            sure: put it before all guesses that are not.

        Returns:
            True if the expert was not queued before.

        Raises:
            ValueError: the probability is out of range.
        """
        if not 0.0 < probability <= 1.0:
            raise ValueError(f"probability must be in (0, 1], not {probability}")
        entry = self.get(key)
        if entry is None:
            self._add(Entry(key, False, position, probability, {owner}, self._sequence, sure))
            return True
        self._add_owner(entry, owner)
        self._joined += 1
        if not entry.demand:
            self._improve(entry, position, probability, sure)
        return False

    def peek(self) -> Entry | None:
        """The entry that `pop` would return; O(1)."""
        return self._demands.first() or self._guesses.first()

    def pop(self) -> Entry | None:
        """Take out the entry to read next; None when the queue is empty."""
        entry = self.peek()
        if entry is not None:
            self._take_out(entry)
            self._popped += 1
        return entry

    def remove(self, key: Key) -> Entry | None:
        """Take out the entry of one expert; None if it is not queued."""
        entry = self.get(key)
        if entry is not None:
            self._take_out(entry)
            self._removed += 1
        return entry

    def drop_stale(self, position: int) -> list[Entry]:
        """Take out the guesses for layer calls before `position`; demands never go stale.

        O(dropped * log n + distinct positions of guesses).

        Returns:
            What was dropped, in submission order.
        """
        passed = [known for known in self._expiring if known < position]
        dropped = self._take_out_all({key for known in passed for key in self._expiring[known]})
        self._dropped_stale += len(dropped)
        return dropped

    def remove_owner(self, owner: Hashable) -> list[Entry]:
        """Forget a request. What others want as well stays, at its priority.

        O(entries of the owner * log n).

        Returns:
            The entries that nobody else wanted, now taken out, in submission order; they
            still name the owner.
        """
        unwanted: set[Key] = set()
        for key in self._owned.get(owner, set()).copy():
            entry = self._entry(key)
            if entry.owners == {owner}:
                unwanted.add(key)
            else:
                self._remove_owner(entry, owner)
        removed = self._take_out_all(unwanted)
        self._removed_by_owner += len(removed)
        return removed

    def clear(self) -> list[Entry]:
        """Take out everything, O(n log n).

        Returns:
            All entries in the order in which they would have been popped.
        """
        entries = self._demands.in_order() + self._guesses.in_order()
        self._demands = _Lane()
        self._guesses = _Lane()
        self._owned.clear()
        self._expiring.clear()
        self._cleared += len(entries)
        return entries

    def statistics(self) -> QueueStatistics:
        """Counts since the queue was made."""
        return QueueStatistics(
            queued=self._sequence,
            promoted=self._promoted,
            joined=self._joined,
            dropped_stale=self._dropped_stale,
            removed_by_owner=self._removed_by_owner,
            removed=self._removed,
            cleared=self._cleared,
            popped=self._popped,
            peak_length=self._peak_length,
        )

    def check_integrity(self) -> None:
        """Check that lanes, owners, positions and counts agree, O(n).

        Raises:
            AssertionError: they do not.
        """
        self._demands.check_integrity()
        self._guesses.check_integrity()
        self._check_lanes()
        self._check_indexes()
        self._check_counts()

    # Changes of one entry

    def _add(self, entry: Entry) -> None:
        self._sequence += 1
        for owner in entry.owners:
            self._owned.setdefault(owner, set()).add(entry.key)
        if entry.demand:
            self._demands.put(entry.position, entry)
        else:
            self._file_guess(entry)
        self._peak_length = max(self._peak_length, len(self))

    def _promote(self, entry: Entry, position: int) -> None:
        self._unfile_guess(entry)
        entry.demand, entry.position, entry.probability = True, position, 1.0
        entry.sure = False
        self._demands.put(position, entry)
        self._promoted += 1

    def _bring_forward(self, entry: Entry, position: int) -> None:
        if position < entry.position:
            entry.position = position
            self._demands.put(position, entry)

    def _improve(self, entry: Entry, position: int, probability: float, sure: bool) -> None:
        if self._guess_rank(position, probability, sure) < self._guesses.rank(entry.key):
            self._forget_position(entry)
            entry.position, entry.probability, entry.sure = position, probability, sure
            self._file_guess(entry)

    def _take_out(self, entry: Entry) -> None:
        """Remove the entry from everything that knows it; it keeps its owners."""
        if entry.demand:
            self._demands.remove(entry.key)
        else:
            self._unfile_guess(entry)
        for owner in entry.owners:
            self._forget_owned(owner, entry.key)

    def _take_out_all(self, keys: set[Key]) -> list[Entry]:
        entries = sorted(map(self._entry, keys), key=lambda entry: entry.sequence)
        for entry in entries:
            self._take_out(entry)
        return entries

    def _entry(self, key: Key) -> Entry:
        entry = self.get(key)
        if entry is None:
            raise AssertionError(f"read queue: {key} is indexed but not queued")
        return entry

    # The guesses and their positions

    def _guess_rank(self, position: int, probability: float, sure: bool) -> float:
        return -math.inf if sure else self._price * position - math.log(probability)

    def _file_guess(self, entry: Entry) -> None:
        rank = self._guess_rank(entry.position, entry.probability, entry.sure)
        self._guesses.put(rank, entry)
        self._expiring.setdefault(entry.position, set()).add(entry.key)

    def _unfile_guess(self, entry: Entry) -> None:
        self._guesses.remove(entry.key)
        self._forget_position(entry)

    def _forget_position(self, entry: Entry) -> None:
        keys = self._expiring[entry.position]
        keys.remove(entry.key)
        if not keys:
            del self._expiring[entry.position]

    # The owners

    def _add_owner(self, entry: Entry, owner: Hashable) -> None:
        entry.owners.add(owner)
        self._owned.setdefault(owner, set()).add(entry.key)

    def _remove_owner(self, entry: Entry, owner: Hashable) -> None:
        entry.owners.remove(owner)
        self._forget_owned(owner, entry.key)

    def _forget_owned(self, owner: Hashable, key: Key) -> None:
        keys = self._owned[owner]
        keys.remove(key)
        if not keys:
            del self._owned[owner]

    # Integrity

    def _check_lanes(self) -> None:
        for entry in self._demands.in_order():
            _require(entry.demand and entry.probability == 1.0, f"{entry} is no demand")
            _require(self._demands.rank(entry.key) == entry.position, f"{entry} is misplaced")
            _require(self._guesses.get(entry.key) is None, f"{entry} is queued twice")
        for entry in self._guesses.in_order():
            rank = self._guess_rank(entry.position, entry.probability, entry.sure)
            _require(not entry.demand, f"{entry} is no guess")
            _require(self._guesses.rank(entry.key) == rank, f"{entry} is misplaced")

    def _check_indexes(self) -> None:
        owned: dict[Hashable, set[Key]] = {}
        expiring: dict[int, set[Key]] = {}
        for entry in self._demands.in_order() + self._guesses.in_order():
            _require(bool(entry.owners), f"{entry} has no owner")
            for owner in entry.owners:
                owned.setdefault(owner, set()).add(entry.key)
            if not entry.demand:
                expiring.setdefault(entry.position, set()).add(entry.key)
        _require(owned == self._owned, "the index of owners differs from the entries")
        _require(expiring == self._expiring, "the index of positions differs from the entries")

    def _check_counts(self) -> None:
        gone = self._dropped_stale + self._removed_by_owner + self._removed
        gone += self._cleared + self._popped
        _require(self._sequence == gone + len(self), "entries are unaccounted for")
        _require(len(self) <= self._peak_length, "the peak is below the length")


def _require(condition: bool, problem: str) -> None:
    # Not an assert statement: it has to hold under `python -O` too.
    if not condition:
        raise AssertionError(f"read queue: {problem}")
