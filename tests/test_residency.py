"""Residency of one layer: by example, and in any legal order against a naive model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moestream.runtime.policy import LeastRecentlyUsed
from moestream.runtime.residency import NONE, IntegrityError, Residency


def filled(experts: int, slots: int, resident: list[int]) -> Residency:
    """Residency with these experts resident and unpinned, the first one coldest."""
    residency = Residency(experts, slots)
    for expert in resident:
        slots_of = residency.acquire([expert]).slots
        residency.published(expert)
        residency.release(slots_of)
    residency.check_integrity(idle=True)
    return residency


# -- by example -------------------------------------------------------------------------------


def test_an_empty_layer() -> None:
    residency = Residency(4, 2)
    assert residency.room() == 2
    assert [residency.slot(expert) for expert in range(4)] == [NONE] * 4
    assert not any(residency.resident(expert) for expert in range(4))
    residency.check_integrity(idle=True)


def test_an_absent_expert_is_read_then_resident() -> None:
    residency = Residency(4, 2)
    got = residency.acquire([3])
    assert (got.reads, got.joins) == ([3], [])
    assert residency.slot(3) == got.slots[0]
    assert not residency.resident(3)
    residency.published(3)
    assert residency.resident(3)
    again = residency.acquire([3])
    assert (again.slots, again.reads, again.joins) == (got.slots, [], [])
    residency.release(got.slots + again.slots)
    residency.check_integrity(idle=True)


def test_an_expert_that_is_being_read_is_joined() -> None:
    residency = Residency(4, 2)
    first = residency.acquire([1])
    second = residency.acquire([1])
    assert (second.slots, second.reads, second.joins) == (first.slots, [], [1])
    residency.check_integrity()


def test_slots_come_in_the_order_asked() -> None:
    residency = filled(6, 4, [2, 4])
    kept = {2: residency.slot(2), 4: residency.slot(4)}
    got = residency.acquire([5, 4, 0, 2])
    assert got.reads == [5, 0]
    assert got.slots[1] == kept[4]
    assert got.slots[3] == kept[2]
    assert sorted(got.slots) == [0, 1, 2, 3]


def test_the_least_recently_used_goes_first() -> None:
    residency = filled(6, 3, [0, 1, 2])
    residency.release(residency.acquire([0]).slots)
    freed = residency.slot(1)
    assert residency.acquire([3]).slots == [freed]
    assert residency.slot(1) == NONE
    assert residency.evictions == 1


def test_nothing_of_the_same_call_is_evicted() -> None:
    residency = filled(6, 3, [0, 1, 2])
    got = residency.acquire([5, 0])  # 0 is coldest, but asked for behind the absent 5
    assert got.reads == [5]
    assert residency.resident(0)
    assert residency.slot(1) == NONE


def test_nothing_pinned_is_evicted() -> None:
    residency = filled(6, 3, [0, 1, 2])
    pinned = residency.acquire([0, 1]).slots
    assert residency.room() == 1
    residency.acquire([4])
    assert residency.slot(2) == NONE
    assert [residency.slot(0), residency.slot(1)] == pinned


def test_nothing_that_is_being_read_is_evicted() -> None:
    residency = Residency(6, 2)
    residency.release(residency.acquire([0]).slots)  # the caller went away, the read did not
    assert residency.room() == 1
    residency.check_integrity()
    residency.acquire([1])
    assert residency.room() == 0
    with pytest.raises(IntegrityError, match="larger than the room"):
        residency.acquire([2])


def test_a_read_without_pins_is_joined_even_without_room() -> None:
    residency = Residency(6, 2)
    residency.release(residency.acquire([0, 1]).slots)
    assert residency.room() == 0
    assert residency.acquire([0, 1]).joins == [0, 1]
    residency.check_integrity()


def test_a_failed_read_leaves_the_expert_absent_and_its_slot_free_after_the_last_pin() -> None:
    residency = Residency(6, 1)
    got = residency.acquire([2])
    residency.failed(2)
    residency.check_integrity()
    assert residency.slot(2) == NONE
    assert residency.room() == 0  # whoever asked still holds the slot
    residency.release(got.slots)
    assert residency.room() == 1
    assert residency.acquire([2]).reads == [2]
    residency.check_integrity()


def test_a_failed_read_that_nobody_holds_frees_its_slot_at_once() -> None:
    residency = Residency(6, 1)
    residency.release(residency.acquire([2]).slots)
    residency.failed(2)
    assert residency.room() == 1
    residency.check_integrity(idle=True)


def test_after_a_failure_the_expert_is_read_into_another_slot_while_the_old_one_is_held() -> None:
    residency = Residency(6, 2)
    old = residency.acquire([2]).slots
    residency.failed(2)
    new = residency.acquire([2])
    assert new.reads == [2]
    assert new.slots != old
    residency.published(2)
    residency.release(old)
    residency.release(new.slots)
    residency.check_integrity(idle=True)


def test_idle_means_no_pins_and_no_reads() -> None:
    residency = Residency(4, 2)
    got = residency.acquire([0])
    with pytest.raises(IntegrityError, match="pinned while idle"):
        residency.check_integrity(idle=True)
    residency.release(got.slots)
    with pytest.raises(IntegrityError, match="being read while idle"):
        residency.check_integrity(idle=True)
    residency.published(0)
    residency.check_integrity(idle=True)


def test_integrity_notices_a_slot_released_twice() -> None:
    residency = filled(4, 2, [0])
    residency.release([residency.slot(0)])
    with pytest.raises(IntegrityError):
        residency.check_integrity()


class Forgetful(LeastRecentlyUsed):
    """A policy that loses what it is told."""

    def added(self, expert: int) -> None:
        if expert != 1:
            super().added(expert)


def test_integrity_notices_a_policy_that_drifts() -> None:
    residency = Residency(4, 2, lambda experts, width: Forgetful())
    residency.acquire([0])
    residency.check_integrity()
    residency.acquire([1])
    with pytest.raises(IntegrityError, match="policy"):
        residency.check_integrity()


# -- another number of slots ------------------------------------------------------------------


def test_fewer_slots_keep_the_hottest() -> None:
    residency = filled(8, 5, [3, 1, 4, 0, 6])
    residency.acquire([1])
    residency.release([residency.slot(1)])
    assert residency.hold()
    moves = residency.keepers(3)
    old = {residency.slot(expert): expert for expert in (0, 6, 1)}
    assert {slot for slot, _ in moves} == set(old)
    residency.resize(3, moves)
    assert [(old[slot], new) for slot, new in moves] == [
        (expert, residency.slot(expert)) for expert in (old[slot] for slot, _ in moves)
    ]
    assert [expert for expert in range(8) if residency.resident(expert)] == [0, 1, 6]
    assert [eviction.expert for eviction in residency.evicted] == [3, 4]
    assert residency.room() == 3
    residency.check_integrity(idle=True)


def test_more_slots_lose_nothing() -> None:
    residency = filled(8, 2, [3, 1])
    assert residency.hold()
    moves = residency.keepers(5)
    residency.resize(5, moves)
    assert residency.evictions == 0
    got = residency.acquire([3, 1, 5, 6, 7])
    assert got.reads == [5, 6, 7]
    assert len(set(got.slots)) == 5


def test_nothing_is_given_away_while_slots_are_held() -> None:
    residency = filled(8, 4, [])
    assert residency.hold()
    assert residency.room() == 0
    assert residency.guess(2) == NONE
    residency.resize(4, [])
    assert residency.room() == 4
    assert residency.guess(2) != NONE
    residency.check_integrity()


def test_slots_in_use_are_not_held() -> None:
    residency = Residency(8, 4)
    slots = residency.acquire([1]).slots
    assert not residency.hold()
    residency.release(slots)
    assert not residency.hold(), "it is still being read into"
    residency.published(1)
    assert residency.hold()


# -- against a naive model --------------------------------------------------------------------


class Comparison(RuleBasedStateMachine):
    """Everything by definition: states in a dict, age in a list, pins counted from open calls."""

    @initialize(experts=st.integers(1, 8), slots=st.integers(1, 6))
    def open(self, experts: int, slots: int) -> None:
        self.experts, self.slots = experts, slots
        self.residency = Residency(experts, slots)
        self.slot_of: dict[int, int] = {}
        self.reading: set[int] = set()
        self.age: list[int] = []  # the one used longest ago first
        self.calls: list[list[int]] = []  # slots of each call that has not been released
        self.evictions = 0

    # The model's view

    @property
    def pins(self) -> Counter[int]:
        return Counter(slot for call in self.calls for slot in call)

    @property
    def loose(self) -> list[int]:
        """Experts being read that nobody holds."""
        return [expert for expert in sorted(self.reading) if not self.pins[self.slot_of[expert]]]

    @property
    def held(self) -> list[int]:
        return [expert for expert, slot in sorted(self.slot_of.items()) if self.pins[slot]]

    @property
    def room(self) -> int:
        return self.slots - len(self.pins) - len(self.loose)

    @property
    def free(self) -> int:
        return self.slots - len(set(self.pins) | set(self.slot_of.values()))

    # Steps

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        """As many experts as there is room for, and any that hold a slot already."""
        everyone = data.draw(st.permutations(range(self.experts)))
        count = data.draw(st.integers(0, max(self.room, 0)))
        extra = data.draw(st.sets(st.sampled_from(range(self.experts))))
        chosen = set(everyone[:count]) | (extra & {*self.loose, *self.held})
        self._acquire([expert for expert in everyone if expert in chosen])

    @rule(data=st.data())
    def acquire_all_that_fits(self, data: st.DataObject) -> None:
        everyone = data.draw(st.permutations(range(self.experts)))
        self._acquire(list(everyone[: self.room]))

    def _acquire(self, experts: list[int]) -> None:
        hits = [expert for expert in experts if expert in self.slot_of]
        reads = [expert for expert in experts if expert not in self.slot_of]
        joins = [expert for expert in hits if expert in self.reading]
        pins = self.pins
        cold = [
            expert
            for expert in self.age
            if expert not in self.reading
            and expert not in experts
            and not pins[self.slot_of[expert]]
        ]
        victims = cold[: max(len(reads) - self.free, 0)]
        untouchable = set(pins) | {self.slot_of[e] for e in [*self.reading, *hits]}

        got = self.residency.acquire(experts)

        assert (got.reads, got.joins) == (reads, joins)
        assert len(set(got.slots)) == len(experts)
        for expert, slot in zip(experts, got.slots, strict=True):
            assert 0 <= slot < self.slots
            if expert in hits:
                assert slot == self.slot_of[expert]
            else:
                assert slot not in untouchable, "a slot in use was given away"
        for victim in victims:
            del self.slot_of[victim]
        self.evictions += len(victims)
        self.slot_of.update(zip(experts, got.slots, strict=True))
        self.reading |= set(reads)
        gone = {*victims, *hits}
        self.age = [expert for expert in self.age if expert not in gone] + hits + reads
        self.calls.append(got.slots)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def published(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.reading)))
        self.residency.published(expert)
        self.reading.remove(expert)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.reading)))
        self.residency.failed(expert)
        self.reading.remove(expert)
        self.age.remove(expert)
        del self.slot_of[expert]

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        self.residency.release(call)

    @precondition(lambda self: not self.calls and not self.reading)
    @rule(slots=st.integers(1, 6))
    def resize(self, slots: int) -> None:
        assert self.residency.hold()
        moves = self.residency.keepers(slots)
        self.residency.resize(slots, moves)
        if slots < len(self.age):
            gone = self.age[:-slots]
            self.age = self.age[-slots:]
            self.evictions += len(gone)
            for expert in gone:
                del self.slot_of[expert]
        if slots != self.slots:
            to = dict(moves)
            self.slot_of = {expert: to[slot] for expert, slot in self.slot_of.items()}
        self.slots = slots

    # After each step

    @invariant()
    def agrees(self) -> None:
        self.residency.check_integrity()
        assert self.residency.room() == self.room
        assert self.residency.evictions == self.evictions
        slots = [self.residency.slot(expert) for expert in range(self.experts)]
        assert slots == [self.slot_of.get(expert, NONE) for expert in range(self.experts)]
        resident = {expert for expert in range(self.experts) if self.residency.resident(expert)}
        assert resident == set(self.slot_of) - self.reading
        assert list(self.residency._policy.coldest()) == self.age

    def teardown(self) -> None:
        if not hasattr(self, "residency"):
            return
        for expert in sorted(self.reading):
            self.residency.published(expert)
        for call in self.calls:
            self.residency.release(call)
        self.residency.check_integrity(idle=True)
        assert self.residency.room() == self.slots


TestComparison = Comparison.TestCase
TestComparison.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
