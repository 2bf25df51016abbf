"""The read queue: order, joins, promotions, owners, and agreement with a naive model."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import FrozenInstanceError, dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moestream.io.queue import Entry, Key, QueueStatistics, ReadQueue


def drain(queue: ReadQueue) -> list[Key]:
    keys = []
    while (entry := queue.pop()) is not None:
        keys.append(entry.key)
        queue.check_integrity()
    return keys


def keys_of(entries: Iterable[Entry]) -> list[Key]:
    return [entry.key for entry in entries]


def entry_of(queue: ReadQueue, key: Key) -> Entry:
    entry = queue.get(key)
    assert entry is not None
    return entry


def test_an_empty_queue() -> None:
    queue = ReadQueue()
    assert queue.pop() is None
    assert queue.peek() is None
    assert queue.get((0, 0)) is None
    assert queue.remove((0, 0)) is None
    assert queue.remove_owner("nobody") == []
    assert queue.drop_stale(10) == []
    assert queue.clear() == []
    assert len(queue) == queue.demands == queue.guesses == 0
    assert queue.statistics() == QueueStatistics()
    queue.check_integrity()


def test_every_demand_comes_before_every_guess() -> None:
    queue = ReadQueue()
    queue.speculate((0, 0), "a", 0, 1.0)
    queue.demand((9, 0), "a", 9)
    queue.demand((5, 0), "a", 5)
    assert drain(queue) == [(5, 0), (9, 0), (0, 0)]


def test_demands_of_one_position_keep_their_order_of_submission() -> None:
    queue = ReadQueue()
    for expert in (3, 1, 2):
        queue.demand((0, expert), "a", 0)
    assert drain(queue) == [(0, 3), (0, 1), (0, 2)]


def test_guesses_go_by_probability_then_by_order_of_submission() -> None:
    queue = ReadQueue()
    for expert, probability in enumerate((0.2, 0.9, 0.2, 0.5)):
        queue.speculate((0, expert), "a", 0, probability)
    assert drain(queue) == [(0, 1), (0, 3), (0, 0), (0, 2)]


@pytest.mark.parametrize(("further", "first"), [(0.61, (0, 0)), (0.82, (1, 0)), (0.83, (1, 0))])
def test_a_layer_of_distance_costs_the_lookahead_price(further: float, first: Key) -> None:
    queue = ReadQueue(lookahead_price=0.5)
    queue.speculate((0, 0), "a", 0, 0.49)
    queue.speculate((1, 0), "a", 1, further)
    assert (further / 0.49 > math.exp(0.5)) == (first == (1, 0))
    assert drain(queue)[0] == first


def test_a_price_of_zero_ignores_distance() -> None:
    queue = ReadQueue(lookahead_price=0)
    queue.speculate((0, 0), "a", 0, 0.5)
    queue.speculate((50, 0), "a", 50, 0.6)
    assert drain(queue) == [(50, 0), (0, 0)]


def test_order_between_guesses_does_not_depend_on_how_far_compute_is() -> None:
    orders = []
    for start in (0, 1_000_000):
        queue = ReadQueue()
        for layer in range(8):
            queue.speculate((layer, 0), "a", start + layer, 1 / (1 + (layer * 5) % 8))
        orders.append(drain(queue))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_a_probability_out_of_range(probability: float) -> None:
    queue = ReadQueue()
    with pytest.raises(ValueError, match="probability"):
        queue.speculate((0, 0), "a", 0, probability)
    assert len(queue) == 0
    queue.check_integrity()


def test_the_smallest_probability_is_in_range() -> None:
    queue = ReadQueue()
    assert queue.speculate((0, 0), "a", 0, math.ulp(0.0))
    queue.check_integrity()


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_a_price_out_of_range(price: float) -> None:
    with pytest.raises(ValueError, match="lookahead_price"):
        ReadQueue(price)


def test_a_demand_promotes_a_guess_in_place() -> None:
    queue = ReadQueue()
    assert queue.speculate((3, 1), "a", 3, 0.2)
    entry = entry_of(queue, (3, 1))
    assert not queue.demand((3, 1), "b", 3)
    assert queue.peek() is entry
    assert entry == Entry((3, 1), True, 3, 1.0, {"a", "b"}, 0)
    assert (queue.demands, queue.guesses) == (1, 0)
    assert queue.drop_stale(100) == []
    assert drain(queue) == [(3, 1)]
    assert queue.statistics().promoted == 1


def test_a_guess_never_demotes_a_demand() -> None:
    queue = ReadQueue()
    queue.demand((3, 1), "a", 3)
    assert not queue.speculate((3, 1), "b", 1, 0.1)
    assert entry_of(queue, (3, 1)) == Entry((3, 1), True, 3, 1.0, {"a", "b"}, 0)


def test_a_second_demand_keeps_the_nearer_position() -> None:
    queue = ReadQueue()
    queue.demand((0, 0), "a", 8)
    queue.demand((1, 0), "a", 5)
    queue.demand((0, 0), "b", 9)
    assert entry_of(queue, (0, 0)).position == 8
    queue.demand((0, 0), "b", 2)
    queue.check_integrity()
    assert drain(queue) == [(0, 0), (1, 0)]


def test_a_second_guess_keeps_the_better_priority() -> None:
    queue = ReadQueue()
    queue.speculate((0, 0), "a", 4, 0.5)
    queue.speculate((0, 0), "b", 4, 0.3)
    assert entry_of(queue, (0, 0)).probability == 0.5
    queue.speculate((0, 0), "b", 4, 0.8)
    assert entry_of(queue, (0, 0)) == Entry((0, 0), False, 4, 0.8, {"a", "b"}, 0)
    queue.speculate((0, 0), "b", 1, 0.7)
    assert entry_of(queue, (0, 0)).position == 1
    assert queue.drop_stale(1) == []
    assert keys_of(queue.drop_stale(2)) == [(0, 0)]


def test_a_second_guess_of_equal_priority_changes_nothing() -> None:
    queue = ReadQueue(lookahead_price=0)
    queue.speculate((0, 0), "a", 4, 0.5)
    queue.speculate((0, 0), "b", 2, 0.5)
    assert entry_of(queue, (0, 0)).position == 4


def test_stale_guesses_are_dropped_and_demands_are_not() -> None:
    queue = ReadQueue()
    queue.speculate((2, 0), "a", 2, 0.1)
    queue.speculate((1, 0), "a", 1, 0.9)
    queue.speculate((3, 0), "a", 3, 0.9)
    queue.demand((0, 0), "a", 0)
    assert keys_of(queue.drop_stale(3)) == [(2, 0), (1, 0)]
    queue.check_integrity()
    assert drain(queue) == [(0, 0), (3, 0)]
    assert queue.statistics().dropped_stale == 2


def test_removing_an_owner_takes_only_what_nobody_else_wants() -> None:
    queue = ReadQueue()
    queue.demand((0, 0), "a", 0)
    queue.demand((0, 1), "a", 0)
    queue.speculate((1, 0), "b", 1, 0.5)
    queue.speculate((1, 0), "a", 1, 0.5)
    queue.speculate((1, 1), "a", 1, 0.5)
    queue.demand((0, 1), "b", 0)
    assert keys_of(queue.remove_owner("a")) == [(0, 0), (1, 1)]
    queue.check_integrity()
    assert entry_of(queue, (0, 1)).owners == {"b"}
    assert entry_of(queue, (1, 0)).owners == {"b"}
    assert queue.remove_owner("a") == []
    assert queue.statistics().removed_by_owner == 2


def test_entries_taken_out_still_name_their_owners() -> None:
    queue = ReadQueue()
    queue.demand((0, 0), "a", 0)
    queue.demand((0, 1), "a", 0)
    queue.demand((0, 1), "b", 0)
    assert [entry.owners for entry in queue.remove_owner("a")] == [{"a"}]
    assert [entry.owners for entry in queue.clear()] == [{"b"}]


def test_a_key_can_come_back_after_it_was_taken_out() -> None:
    queue = ReadQueue()
    queue.demand((0, 0), "a", 0)
    first = queue.remove((0, 0))
    assert first is not None
    assert (0, 0) not in queue
    assert queue.speculate((0, 0), "a", 0, 0.5)
    assert (0, 0) in queue
    second = queue.pop()
    assert second is not None
    assert (first.sequence, second.sequence) == (0, 1)
    assert queue.statistics().removed == 1


def test_clear_returns_everything_in_order() -> None:
    queue = ReadQueue()
    queue.speculate((2, 0), "a", 2, 0.1)
    queue.speculate((2, 1), "a", 2, 0.9)
    queue.demand((1, 0), "b", 1)
    assert keys_of(queue.clear()) == [(1, 0), (2, 1), (2, 0)]
    queue.check_integrity()
    assert queue.demand((1, 0), "b", 1)
    assert queue.statistics() == QueueStatistics(queued=4, cleared=3, peak_length=3)


def test_statistics_are_a_frozen_record_with_a_peak() -> None:
    queue = ReadQueue()
    queue.demand((0, 0), "a", 0)
    queue.demand((0, 1), "a", 0)
    queue.demand((0, 1), "b", 0)
    queue.pop()
    queue.demand((0, 2), "a", 0)
    statistics = queue.statistics()
    assert statistics == QueueStatistics(queued=3, joined=1, popped=1, peak_length=2)
    with pytest.raises(FrozenInstanceError):
        statistics.queued = 0  # type: ignore[misc]


def test_dead_heap_items_stay_bounded() -> None:
    queue = ReadQueue()
    queue.demand((0, 0), "a", 0)
    queue.speculate((0, 1), "a", 1000, 0.5)
    for step in range(1, 1000):
        queue.speculate((0, 1), "a", 1000 - step, 0.5)
        queue.demand((step, 0), "b", step)
        queue.remove_owner("b")
    assert len(queue._demands._heap) + len(queue._guesses._heap) <= 4
    queue.check_integrity()


def break_rank(queue: ReadQueue) -> None:
    entry_of(queue, (1, 0)).position = 7


def break_owners(queue: ReadQueue) -> None:
    entry_of(queue, (0, 0)).owners.clear()


def break_owner_index(queue: ReadQueue) -> None:
    queue._owned["ghost"] = {(0, 0)}


def break_lane(queue: ReadQueue) -> None:
    entry_of(queue, (0, 0)).demand = False


def break_heap(queue: ReadQueue) -> None:
    queue._demands._heap.clear()


def break_count(queue: ReadQueue) -> None:
    queue._popped += 1


@pytest.mark.parametrize(
    "damage",
    [break_rank, break_owners, break_owner_index, break_lane, break_heap, break_count],
)
def test_integrity_check_notices_damage(damage: Callable[[ReadQueue], None]) -> None:
    queue = ReadQueue()
    queue.demand((0, 0), "a", 0)
    queue.speculate((1, 0), "a", 1, 0.5)
    queue.check_integrity()
    damage(queue)
    with pytest.raises(AssertionError, match="read queue"):
        queue.check_integrity()


def test_sure_guesses_come_before_others_as_they_came() -> None:
    queue = ReadQueue()
    queue.speculate((1, 0), "a", 1, 1.0)
    queue.speculate((2, 0), "a", 8, 0.1, sure=True)
    queue.speculate((2, 1), "a", 7, 1.0, sure=True)
    assert queue.sure
    queue.demand((3, 0), "a", 9)
    queue.demand((2, 0), "a", 9)  # is sure no more
    assert keys_of([entry for entry in iter(queue.pop, None)]) == [(2, 0), (3, 0), (2, 1), (1, 0)]
    assert not queue.sure


# The same operations on a list that is searched and sorted every time

PRICE = 0.5


@dataclass
class Wanted:
    key: Key
    sequence: int
    position: int
    probability: float | None  # None for a demand
    owners: set[Hashable] = field(default_factory=set)
    sure: bool = False

    def order(self) -> tuple[int, float, int]:
        if self.probability is None:
            return (0, self.position, self.sequence)
        if self.sure:
            return (1, -math.inf, self.sequence)
        return (1, guess_cost(self.position, self.probability), self.sequence)


def guess_cost(position: int, probability: float) -> float:
    return PRICE * position - math.log(probability)


class NaiveQueue:
    def __init__(self) -> None:
        self.wanted: list[Wanted] = []
        self.submitted = 0

    def find(self, key: Key) -> Wanted | None:
        return next((w for w in self.wanted if w.key == key), None)

    def want(
        self,
        key: Key,
        owner: Hashable,
        position: int,
        probability: float | None,
        sure: bool = False,
    ) -> bool:
        found = self.find(key)
        if found is None:
            self.wanted.append(Wanted(key, self.submitted, position, probability, {owner}, sure))
            self.submitted += 1
            return True
        found.owners.add(owner)
        offer = Wanted(key, found.sequence, position, probability, sure=sure)
        if offer.order() < found.order():
            found.position, found.probability, found.sure = position, probability, sure
        return False

    def in_order(self) -> list[Key]:
        return [w.key for w in sorted(self.wanted, key=Wanted.order)]

    def take(self, gone: list[Wanted]) -> list[Key]:
        self.wanted = [w for w in self.wanted if w not in gone]
        return [w.key for w in gone]

    def pop(self) -> Key | None:
        first = min(self.wanted, key=Wanted.order, default=None)
        return self.take([first])[0] if first is not None else None

    def drop_stale(self, position: int) -> list[Key]:
        return self.take(
            [w for w in self.wanted if w.probability is not None and w.position < position]
        )

    def remove_owner(self, owner: Hashable) -> list[Key]:
        gone = [w for w in self.wanted if w.owners == {owner}]
        for wanted in self.wanted:
            if wanted not in gone:
                wanted.owners.discard(owner)
        return self.take(gone)


KEYS = st.tuples(st.integers(0, 3), st.integers(0, 4))
OWNERS = st.sampled_from(["a", "b", "c"])
POSITIONS = st.integers(0, 8)
PROBABILITIES = st.sampled_from([0.01, 0.25, 0.5, 1.0]) | st.floats(0, 1, exclude_min=True)


class QueueMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.queue = ReadQueue(PRICE)
        self.model = NaiveQueue()
        self.calls = 0
        self.taken = 0
        self.peak = 0

    def _submitted(self, newly: bool, expected: bool) -> None:
        assert newly == expected
        self.calls += 1
        self.peak = max(self.peak, len(self.model.wanted))

    def _took(self, entries: list[Entry], expected: list[Key]) -> None:
        assert keys_of(entries) == expected
        self.taken += len(entries)

    @rule(key=KEYS, owner=OWNERS, position=POSITIONS)
    def demand(self, key: Key, owner: str, position: int) -> None:
        newly = self.queue.demand(key, owner, position)
        self._submitted(newly, self.model.want(key, owner, position, None))

    @rule(key=KEYS, owner=OWNERS, position=POSITIONS, probability=PROBABILITIES, sure=st.booleans())
    def speculate(
        self, key: Key, owner: str, position: int, probability: float, sure: bool
    ) -> None:
        newly = self.queue.speculate(key, owner, position, probability, sure=sure)
        self._submitted(newly, self.model.want(key, owner, position, probability, sure))

    @precondition(lambda self: self.model.wanted)
    @rule()
    def pop(self) -> None:
        peeked = self.queue.peek()
        entry = self.queue.pop()
        assert entry is not None and entry is peeked
        assert entry.key == self.model.pop()
        self.taken += 1

    @rule(key=KEYS)
    def remove(self, key: Key) -> None:
        entry = self.queue.remove(key)
        found = self.model.find(key)
        self._took([entry] if entry else [], self.model.take([found] if found else []))

    @rule(position=POSITIONS)
    def drop_stale(self, position: int) -> None:
        self._took(self.queue.drop_stale(position), self.model.drop_stale(position))

    @rule(owner=OWNERS)
    def remove_owner(self, owner: str) -> None:
        self._took(self.queue.remove_owner(owner), self.model.remove_owner(owner))

    @rule()
    def clear(self) -> None:
        expected = self.model.in_order()
        self.model.wanted.clear()
        self._took(self.queue.clear(), expected)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.model.wanted)
        assert self.queue.demands == sum(w.probability is None for w in self.model.wanted)
        assert self.queue.guesses == sum(w.probability is not None for w in self.model.wanted)
        assert self.queue.sure == any(w.sure for w in self.model.wanted)
        for wanted in self.model.wanted:
            assert entry_of(self.queue, wanted.key) == Entry(
                wanted.key,
                wanted.probability is None,
                wanted.position,
                1.0 if wanted.probability is None else wanted.probability,
                wanted.owners,
                wanted.sequence,
                wanted.sure,
            )

    @invariant()
    def counts_conserve(self) -> None:
        counts = self.queue.statistics()
        assert counts.queued + counts.promoted + counts.joined == self.calls
        assert counts.queued == self.taken + len(self.queue)
        gone = counts.dropped_stale + counts.removed_by_owner + counts.removed
        assert gone + counts.cleared + counts.popped == self.taken
        assert counts.peak_length == self.peak

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            assert drain(self.queue) == self.model.in_order()


TestQueueAgainstModel = QueueMachine.TestCase
TestQueueAgainstModel.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
