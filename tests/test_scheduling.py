"""Limits and decisions about who runs together: no engine, no threads but the callers'."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from moestream.runtime.errors import EngineBusy
from moestream.runtime.plan import Plan
from moestream.runtime.scheduling import (
    KV_STEP,
    Entrance,
    Limits,
    make_limits,
    planned_requests,
)
from moestream.runtime.sizes import CacheSize
from moestream.runtime.streaming import StepCounters
from moestream.runtime.totals import share

PLAN = Plan(
    budget=10**9,
    process_bytes=0,
    trunk_bytes=0,
    kv_bytes=20_000,
    scratch_bytes=0,
    cache_bytes=0,
    staging_bytes=0,
    slot_bytes=0,
    context=2048,
    chunk_tokens=512,
    slots=(16,),
    minimum=0,
)


def limits(max_running: int = 8, slots: int = 64, unbatchable: str = "") -> Limits:
    return make_limits(
        PLAN,
        max_running=max_running,
        prefill_chunk=512,
        streamed=[(64, 4), (slots, 6)],
        cache=CacheSize(100, 2),
        unbatchable=unbatchable,
    )


def test_rows_are_what_was_asked_for_where_all_suffices() -> None:
    assert (limits().rows, limits().reason) == (8, "")
    assert limits(max_running=2).rows == 2


def test_few_slots_limit_the_rows_and_say_so() -> None:
    few = limits(slots=7)
    assert few.rows == 3  # 3 waves of 7 slots for the 6 experts of each
    assert "slots" in few.reason
    assert limits(slots=6).rows == 3
    assert limits(slots=1).rows == 1


def test_caches_that_cannot_be_batched_mean_one_row() -> None:
    assert (limits(unbatchable="because").rows, limits(unbatchable="because").reason) == (
        1,
        "because",
    )
    assert limits(max_running=1, unbatchable="because").reason == ""


def test_a_batch_is_padded_to_its_longest_request() -> None:
    assert limits().cache_bytes([]) == 0
    assert limits().cache_bytes([1]) == 100 + 2 * KV_STEP
    assert limits().cache_bytes([KV_STEP + 1, 3]) == 2 * (100 + 2 * 2 * KV_STEP)


def test_caches_of_all_stay_within_the_budget_but_one_may_always_run() -> None:
    one = 100 + 2 * KV_STEP  # of 20_000
    assert limits().fit([1] * 8)
    assert not replace(limits(), kv_budget=8 * one - 1).fit([1] * 8)
    assert replace(limits(), kv_budget=1).fit([5000])
    assert replace(limits(), kv_budget=None).fit([5000] * 8)
    assert not limits().fit([1] * 9)


def test_a_newcomer_needs_room_for_the_next_tokens_of_all() -> None:
    two = 2 * (100 + 2 * 2 * KV_STEP)
    assert replace(limits(), kv_budget=two).admits([5], 5)
    assert not replace(limits(), kv_budget=two - 1).admits([5], 5)
    assert replace(limits(), kv_budget=0).admits([], 5)


def test_without_a_budget_nothing_bounds_the_caches() -> None:
    free = make_limits(
        replace(PLAN, budget=None),
        max_running=3,
        prefill_chunk=1,
        streamed=[],
        cache=CacheSize(1, 1),
        unbatchable="",
    )
    assert free.kv_budget is None
    assert free.rows == 3


def test_entrance_refuses_what_is_too_much_and_takes_again() -> None:
    entrance = Entrance(2)
    entrance.running = 1
    for number in (1, 2, 3):
        entrance.enter(number)
    with pytest.raises(EngineBusy, match="1 requests are running and 2 waiting") as caught:
        entrance.enter(4)
    assert (caught.value.running, caught.value.waiting) == (1, 2)
    entrance.leave(2)
    entrance.leave(2)
    entrance.enter(4)
    with pytest.raises(EngineBusy):
        entrance.enter(5)


def test_shares_add_up_to_the_whole() -> None:
    total = StepCounters(
        hits=10, misses=2, bytes_read=101, stall_seconds=1.5, sync_seconds=3.0, syncs=1
    )
    parts = [StepCounters(hits=1) for _ in range(3)]
    share(total, parts)
    summed = StepCounters()
    for part in parts:
        summed.add(part)
    for entry in fields(StepCounters):
        expected = getattr(total, entry.name) + (3 if entry.name == "hits" else 0)
        assert getattr(summed, entry.name) == pytest.approx(expected)
    assert [part.bytes_read for part in parts] == [33, 34, 34]
    assert isinstance(parts[0].hits, int)


def test_memory_is_set_aside_for_as_many_requests_as_cost_little() -> None:
    def full(slot_bytes: int, *, minimum: int = 10**8, left: int = 0) -> Plan:
        """A plan that leaves so many bytes to nobody."""
        process = 980_000_000 - slot_bytes - PLAN.kv_bytes - left
        return replace(PLAN, slot_bytes=slot_bytes, minimum=minimum, process_bytes=process)

    assert planned_requests(full(8 * 70_000), 8) == 4  # an eighth holds 3.5 caches more
    assert planned_requests(full(8 * 70_000), 2) == 2
    assert planned_requests(full(8), 8) == 1
    assert planned_requests(full(8 * 70_000, minimum=10**9 - 45_000), 8) == 2  # half of the spare
    assert planned_requests(full(8, left=100_000), 8) == 6
    assert planned_requests(replace(full(8 * 70_000), budget=None), 8) == 1
