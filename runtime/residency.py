"""Which expert sits in which slot: a pure state machine for one MoE layer.

No I/O, no locks, no MLX.

States of an expert: absent, reading (it has a slot, the bytes are on their way), resident.
A slot is taken from the free ones or from the coldest resident expert that nobody has pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from .policy import Policy, PolicyFactory, least_recently_used

NONE = -1


class IntegrityError(AssertionError):
    """The books of a pool do not balance: a bug, never the user's fault."""


@dataclass(slots=True)
class Acquired:
    """What a layer call got.

    Attributes:
        slots: one per requested expert, in the order asked; all are pinned once.
        reads: experts that have just been given a slot and must be read.
        joins: experts whose read was already on its way.
        paid: experts that a guess had brought, or begun to bring, used for the first time.
    """

    slots: list[int]
    reads: list[int]
    joins: list[int]
    paid: list[int]


@dataclass(frozen=True, slots=True)
class Eviction:
    """An expert that has lost its slot; ``unused`` when a guess had brought it in vain."""

    expert: int
    slot: int
    unused: bool


class Residency:
    """The slots of one layer.

    Args:
        experts: number of experts of the layer.
        slots: number of slots, at least 1.
        policy: makes the order of eviction.
        reserve: slots that guesses leave to the calls of the layer; the width of its routing.
    """

    def __init__(
        self,
        experts: int,
        slots: int,
        policy: PolicyFactory = least_recently_used,
        *,
        reserve: int = 1,
    ) -> None:
        self.experts = experts
        self.slots = slots
        self._policy: Policy = policy(experts, reserve)
        self.uses = [0] * experts
        """Layer calls that wanted each expert, hits and misses alike."""
        self._slot_of = [NONE] * experts
        self._expert_of = [NONE] * slots
        self._reading = bytearray(slots)
        self._pins = [0] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._pinned = 0
        self._unpinnable = 0  # slots being read into that nobody has pinned
        self._guessed = bytearray(slots)  # filled or being filled by a guess, not used yet
        self._calls = 0
        self._used_at = [0] * slots  # call that last used the slot, or brought its expert
        self._reserve = reserve
        self._protected = _protected(slots, reserve)
        self._held = 0  # slots that nobody gets while the pool is rebuilt: all or none
        self.evictions = 0
        self.evicted: list[Eviction] = []  # for whoever owns the books; emptied by them

    # -- questions ----------------------------------------------------------------------------

    def slot(self, expert: int) -> int:
        """Slot of an expert that is resident or reading, else -1."""
        return self._slot_of[expert]

    def resident(self, expert: int) -> bool:
        """Whether the expert's bytes are there."""
        slot = self._slot_of[expert]
        return slot != NONE and not self._reading[slot]

    def room(self) -> int:
        """How many absent experts a call can still take in at this moment."""
        return self.slots - self._pinned - self._unpinnable - self._held

    def fits(self, experts: Sequence[int]) -> bool:
        """Whether one call can hold all of these distinct experts at this moment."""
        if len(experts) <= self.slots - self._pinned - self._unpinnable:
            return True
        # Those that are pinned or being read hold a slot that ``room`` does not count.
        held = 0
        for expert in experts:
            slot = self._slot_of[expert]
            held += slot != NONE and (self._pins[slot] > 0 or self._reading[slot] > 0)
        return len(experts) - held <= self.room()

    # -- steps --------------------------------------------------------------------------------

    def behind(self, before: Residency) -> None:
        """The layer that is called before this one in each forward; told first of all."""
        self._policy.behind(before._policy)

    def seed(self, heat: Sequence[float]) -> None:
        """How much each expert was used by earlier runs; before any call."""
        self._policy.seed(heat)

    def preload(self, expert: int) -> int:
        """Give an absent expert a free slot for a read before anybody asks; -1 if there is none."""
        if not self._free or self.room() <= self._reserve or self._slot_of[expert] != NONE:
            return NONE
        slot = self._free.pop()
        self._put(expert, slot)
        self._unpinnable += 1
        return slot

    def tokens(self, rows: Sequence[Sequence[int]]) -> None:
        """A prompt is about to be acquired: the experts of its last tokens, in order."""
        self._policy.tokens(rows)

    def split(self, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Divide a call that does not fit, to be acquired in parts.

        Returns:
            The experts that are there, and the missing ones, those to keep longest last.
        """
        self._policy.routed(experts)
        here = [expert for expert in experts if self.resident(expert)]
        missing = [expert for expert in experts if not self.resident(expert)]
        return here, self._policy.order(missing)

    def acquire(self, experts: Sequence[int], *, part: bool = False) -> Acquired:
        """Pin a slot for each of these distinct experts, assigning slots to the absent ones.

        The caller has made sure that they fit (``room``); experts that are already being read count
        as fitting. Nothing that is pinned or asked for here is evicted.

        Args:
            experts: of a layer call, or those of them that fit.
            part: they are some of a call that was ``split``.
        """
        slot_of, pins, reading = self._slot_of, self._pins, self._reading
        slots: list[int] = []
        absent: list[int] = []
        joins: list[int] = []
        paid: list[int] = []
        guessed, used_at = self._guessed, self._used_at
        self._calls = now = self._calls + 1
        if not part:
            self._policy.routed(experts)
        uses = self.uses
        for position, expert in enumerate(experts):
            slot = slot_of[expert]
            slots.append(slot)
            uses[expert] += 1
            if slot == NONE:
                absent.append(position)
                continue
            if not pins[slot]:
                self._pinned += 1
                self._unpinnable -= reading[slot]
            pins[slot] += 1
            used_at[slot] = now
            if guessed[slot]:
                guessed[slot] = 0
                paid.append(expert)
            if reading[slot]:
                joins.append(expert)
        reads = [experts[position] for position in absent]
        for position, expert in zip(absent, reads, strict=True):
            slot = self._take(expert)
            pins[slot] = 1
            self._pinned += 1
            slots[position] = slot
        return Acquired(slots, reads, joins, paid)

    def spare(self) -> bool:
        """Whether a guess may take a slot now.

        Not when it would take one that is worth more: the layer's calls need room, and what was
        used lately stays.
        """
        if self.room() <= self._reserve:
            return False
        return bool(self._free) or self._spare_victim() is not None

    def guess(self, expert: int) -> int:
        """Give an absent expert a slot for a read that nobody waits for; -1 if none is spare."""
        if self.room() <= self._reserve:
            return NONE
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._spare_victim()
            if victim is None:
                return NONE
            slot = self._evict(victim)
        self._put(expert, slot)
        self._guessed[slot] = 1
        self._unpinnable += 1
        return slot

    def touch(self, expert: int) -> None:
        """Keep a resident expert that is predicted to be used soon."""
        slot = self._slot_of[expert]
        if slot != NONE:
            self._policy.keep(expert)
            self._used_at[slot] = self._calls

    def _victim(self) -> int:
        for expert in self._policy.coldest():
            slot = self._slot_of[expert]
            if not self._pins[slot] and not self._reading[slot]:
                return expert
        raise IntegrityError("no slot can be given up: the call was larger than the room")

    def _spare_victim(self) -> int | None:
        """What a guess may take the slot of: of the colder half, what was not used lately.

        The policy may well find an expert that was used once, just now, the coldest of all.
        """
        oldest = self._calls - self._protected
        for expert in islice(self._policy.coldest(), (self.slots + 1) // 2):
            slot = self._slot_of[expert]
            if not self._pins[slot] and not self._reading[slot] and self._used_at[slot] < oldest:
                return expert
        return None

    def _take(self, expert: int) -> int:
        slot = self._free.pop() if self._free else self._evict(self._victim())
        self._put(expert, slot)
        return slot

    def _put(self, expert: int, slot: int) -> None:
        self._used_at[slot] = self._calls
        self._guessed[slot] = 0
        self._slot_of[expert] = slot
        self._expert_of[slot] = expert
        self._reading[slot] = 1
        self._policy.added(expert)

    def _evict(self, victim: int) -> int:
        slot = self._slot_of[victim]
        self._forget(victim)
        self.evictions += 1
        self.evicted.append(Eviction(victim, slot, bool(self._guessed[slot])))
        return slot

    def _forget(self, expert: int) -> None:
        slot = self._slot_of[expert]
        self._slot_of[expert] = NONE
        self._expert_of[slot] = NONE
        self._policy.removed(expert)

    def published(self, expert: int) -> None:
        """The expert's bytes have arrived in its slot."""
        slot = self._slot_of[expert]
        self._reading[slot] = 0
        self._unpinnable -= not self._pins[slot]

    def failed(self, expert: int) -> None:
        """The read has ended in an error: the expert is absent again, the slot never published."""
        slot = self._slot_of[expert]
        self._forget(expert)
        self._reading[slot] = 0
        if not self._pins[slot]:
            self._unpinnable -= 1
            self._free.append(slot)

    def abandoned(self, expert: int) -> int:
        """The read was given up but may still write: the expert is absent, its slot out of use.

        Returns the slot, for ``returned``. Until then it counts as being read into.
        """
        slot = self._slot_of[expert]
        self._forget(expert)
        return slot

    def returned(self, slot: int) -> None:
        """Nothing writes into this slot any more whose read was given up."""
        self._reading[slot] = 0
        if not self._pins[slot]:
            self._unpinnable -= 1
            self._free.append(slot)

    @property
    def pinned(self) -> int:
        """Slots that somebody has pinned."""
        return self._pinned

    @property
    def quarantined(self) -> int:
        """Slots out of use since the reads into them were given up and have not returned."""
        return sum(map(self._is_quarantined, range(self.slots)))

    def _is_quarantined(self, slot: int) -> bool:
        return self._reading[slot] > 0 and self._expert_of[slot] == NONE

    def release(self, slots: Sequence[int]) -> None:
        """Take one pin off each slot. The evaluation that read them must have completed."""
        pins = self._pins
        for slot in slots:
            pins[slot] -= 1
            if not pins[slot]:
                self._pinned -= 1
                if self._reading[slot]:
                    self._unpinnable += 1
                elif self._expert_of[slot] == NONE:
                    self._free.append(slot)

    # -- another number of slots --------------------------------------------------------------

    def hold(self) -> bool:
        """Give no slots away until ``resize``; refused (False) while one is pinned or read into."""
        if self._pinned or any(self._reading):
            return False
        self._held = self.slots
        return True

    def keepers(self, slots: int) -> list[tuple[int, int]]:
        """(old slot, new slot) of the experts that stay when there are ``slots`` of them.

        The hottest stay, in the order of their old slots.
        """
        order = [self._slot_of[expert] for expert in self._policy.coldest()]
        kept = sorted(order[-slots:])
        return [(old, new) for new, old in enumerate(kept)]

    def resize(self, slots: int, moves: Sequence[tuple[int, int]]) -> None:
        """Go over to another pool; ends ``hold``.

        Args:
            slots: of the new pool; with the number there is, nothing changes.
            moves: what ``keepers`` said; the experts of other slots are given up.
        """
        self._held = 0
        if slots == self.slots:
            return
        staying = {old for old, _ in moves}
        for slot, expert in enumerate(self._expert_of):
            if expert != NONE and slot not in staying:
                self._forget(expert)
                self.evictions += 1
                self.evicted.append(Eviction(expert, slot, bool(self._guessed[slot])))
        expert_of, guessed, used_at = self._expert_of, self._guessed, self._used_at
        self.slots = slots
        self._expert_of = [NONE] * slots
        self._reading = bytearray(slots)
        self._pins = [0] * slots
        self._guessed = bytearray(slots)
        self._used_at = [0] * slots
        for old, new in moves:
            self._slot_of[expert_of[old]] = new
            self._expert_of[new] = expert_of[old]
            self._guessed[new] = guessed[old]
            self._used_at[new] = used_at[old]
        self._free = list(range(slots - 1, len(moves) - 1, -1))
        self._protected = _protected(slots, self._reserve)

    # -- integrity ----------------------------------------------------------------------------

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise IntegrityError unless the books balance.

        Args:
            idle: also demand that nothing is pinned or being read, but for reads given up.
        """
        held = [slot for slot in range(self.slots) if self._expert_of[slot] != NONE]
        for slot in held:
            check(self._slot_of[self._expert_of[slot]] == slot, f"slot {slot} has two owners")
        mapped = sum(slot != NONE for slot in self._slot_of)
        check(mapped == len(held), f"{mapped} experts are mapped to {len(held)} slots")
        check(len(set(self._free)) == len(self._free), "a slot is free twice")
        check(not set(self._free) & set(held), "a free slot holds an expert")
        empty_pinned = sum(
            self._expert_of[slot] == NONE and (pin > 0 or self._is_quarantined(slot))
            for slot, pin in enumerate(self._pins)
        )
        check(not any(self._reading[slot] for slot in self._free), "a slot is free and read into")
        total = len(self._free) + len(held) + empty_pinned
        check(total == self.slots, f"{total} slots are accounted for, {self.slots} exist")
        check(set(self._policy.coldest()) == {self._expert_of[s] for s in held}, "policy drifted")
        check(min(self._pins) >= 0, "a slot has been released more often than pinned")
        check(self._pinned == sum(pin > 0 for pin in self._pins), "pin count drifted")
        loose = sum(r and not pin for r, pin in zip(self._reading, self._pins, strict=True))
        check(self._unpinnable == loose, "count of unpinned reads drifted")
        if idle:
            check(self._pinned == 0, f"{self._pinned} slots are pinned while idle")
            reading = sum(map(bool, self._reading)) - self.quarantined
            check(reading == 0, "a slot is being read while idle")


def _protected(slots: int, reserve: int) -> int:
    """A guess evicts nothing that was used within so many calls: about half of what a full turn of
    the cache takes when every call misses everything."""
    return max(slots // (2 * reserve), 1)


def check(holds: bool, problem: str) -> None:
    """Raise IntegrityError with this problem unless something holds."""
    if not holds:
        raise IntegrityError(problem)
