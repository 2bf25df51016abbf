"""How a memory budget is read, divided and refused; what the machine says it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scripts.make_checkpoint import Shape, make_checkpoint

from moestream.io.errors import MoestreamError
from moestream.runtime import core, machine
from moestream.runtime.errors import BudgetTooSmall, InvalidRequest
from moestream.runtime.plan import (
    CHUNK_TOKENS,
    LEAST_CHUNK_TOKENS,
    SLACK,
    WHOLE_FROM,
    Plan,
    _scratch,
    fitting_chunk,
    make_plan,
    parse_size,
    share_slots,
)
from moestream.runtime.sizes import CacheSize, LayerSize, ModelSize, Window

MIB = 1 << 20
GIB = 1 << 30


# -- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1),
        (8 * GIB, 8 * GIB),
        ("123", 123),
        ("123B", 123),
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("8G", 8 * 10**9),
        (" 512 MiB ", 512 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        ("0.1TB", 10**11),
        ("2KiB", 2048),
        ("2k", 2000),
        ("1TiB", 1 << 40),
        ("1000000000000000001", 10**18 + 1),  # more digits than a float holds
        ("0.3KB", 300),
    ],
)
def test_good_sizes(text: int | str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "GB", "8 XB", "8GB8", "-1", "-1GB", "+1GB", "1,5GB", "1.GB", ".5GB", "1e9", "8 G B"),
        *("0", "0.0GB", "0.1B", "nan", "inf", "8GBs", "\u0663GB"),
        *(0, -1, True, False, 1.5, None, b"8GB", [8]),
        *("9" * 30, "9" * 400, "9" * 5000, "1" + "0" * 30 + "TB", 10**400, (1 << 60) + 1),
    ],
    ids=repr,
)
def test_bad_sizes(text: int | str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_size(text)
    assert isinstance(caught.value, MoestreamError)
    assert isinstance(caught.value, ValueError)


@given(st.integers(1, 1 << 60))
@settings(deadline=None)
def test_plain_bytes_are_exact_as_a_number_and_as_a_text(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == size


@given(st.text(max_size=12))
@settings(deadline=None)
def test_any_text_is_a_size_or_a_bad_one(text: str) -> None:
    try:
        assert parse_size(text) > 0
    except InvalidRequest as error:
        assert repr(text) in str(error)


# -- plans ------------------------------------------------------------------------------------


def layer_of(experts: int = 16, top_k: int = 2, slot_bytes: int = MIB, layer: int = 0) -> LayerSize:
    return LayerSize(layer, experts, top_k, slot_bytes, slot_bytes)


def model_of(*layers: LayerSize) -> ModelSize:
    return ModelSize(
        layers=layers or tuple(layer_of(layer=number) for number in range(4)),
        trunk_bytes=100 * MIB,
        cache=CacheSize(token=1000),
        scratch_token_bytes=4000,
        scratch_pair_bytes=8,
        vocabulary=1000,
        longest_context=8192,
    )


def plan(
    model: ModelSize,
    budget: int | None,
    *,
    slots: int | None = None,
    context: int = 1024,
    process_bytes: int = 50 * MIB,
) -> Plan:
    return make_plan(
        model, budget=budget, process_bytes=process_bytes, context=context, slots=slots
    )


def minimum_of(model: ModelSize, context: int = 1024, process_bytes: int = 50 * MIB) -> int:
    with pytest.raises(BudgetTooSmall) as caught:
        plan(model, 1, context=context, process_bytes=process_bytes)
    return caught.value.minimum


layers = st.builds(
    layer_of,
    experts=st.integers(1, 64),
    top_k=st.integers(1, 8),
    slot_bytes=st.one_of(st.integers(1, 5000), st.integers(1, 64 * MIB)),
)
caches = st.builds(
    CacheSize,
    fixed=st.integers(0, 16 * MIB),
    token=st.integers(0, 1 << 18),
    step=st.integers(1, 256),
    largest=st.integers(0, 1 << 12),
    windows=st.lists(
        st.builds(Window, rows=st.integers(1, 8192), row_bytes=st.integers(1, 1 << 14)), max_size=2
    ).map(tuple),
)
models = st.builds(
    ModelSize,
    layers=st.lists(layers, max_size=6).map(tuple),
    trunk_bytes=st.integers(0, 8 * GIB),
    cache=caches,
    scratch_token_bytes=st.integers(0, 1 << 20),
    scratch_pair_bytes=st.integers(0, 256),
    vocabulary=st.integers(1, 300_000),
    longest_context=st.integers(1, 1 << 18),
)
contexts = st.integers(1, 20_000)
processes = st.integers(0, GIB)
many = settings(max_examples=150, deadline=None)


@given(models, contexts, processes, st.data())
@many
def test_a_plan_keeps_its_budget(
    model: ModelSize, context: int, process_bytes: int, data: st.DataObject
) -> None:
    minimum = minimum_of(model, context, process_bytes)
    everything = sum(layer.experts * layer.slot_bytes for layer in model.layers)
    budget = data.draw(st.integers(minimum, minimum + 2 * everything + GIB))
    made = plan(model, budget, context=context, process_bytes=process_bytes)
    assert made.total_bytes <= budget
    assert made.minimum == minimum
    for slots, layer in zip(made.slots, model.layers, strict=True):
        assert min(layer.top_k, layer.experts) <= slots <= layer.experts
    sizes = [layer.slot_bytes for layer in model.layers]
    assert made.slot_bytes == sum(n * size for n, size in zip(made.slots, sizes, strict=True))
    assert min(context, LEAST_CHUNK_TOKENS) <= made.chunk_tokens <= min(context, CHUNK_TOKENS)


@given(models, contexts, processes)
@many
def test_the_minimum_is_the_boundary(model: ModelSize, context: int, process_bytes: int) -> None:
    minimum = minimum_of(model, context, process_bytes)
    made = plan(model, minimum, context=context, process_bytes=process_bytes)
    assert made.total_bytes <= minimum
    with pytest.raises(BudgetTooSmall) as caught:
        plan(model, minimum - 1, context=context, process_bytes=process_bytes)
    assert (caught.value.given, caught.value.minimum) == (minimum - 1, minimum)
    written = re.search(r"needs at least (\S+) ", str(caught.value))
    assert written is not None
    plan(model, parse_size(written[1]), context=context, process_bytes=process_bytes)


@given(models, contexts, st.data())
@many
def test_more_budget_never_gives_any_layer_fewer_slots(
    model: ModelSize, context: int, data: st.DataObject
) -> None:
    minimum = minimum_of(model, context)
    everything = sum(layer.experts * layer.slot_bytes for layer in model.layers)
    budgets = st.integers(minimum, minimum + 2 * everything + GIB)
    less, more = sorted([data.draw(budgets), data.draw(budgets)])
    fewer = plan(model, less, context=context)
    larger = plan(model, more, context=context)
    assert all(a <= b for a, b in zip(fewer.slots, larger.slots, strict=True))
    assert fewer.chunk_tokens <= larger.chunk_tokens


def test_more_budget_never_gives_fewer_slots_where_the_chunk_grows() -> None:
    layers = [layer_of(slot_bytes=8 * MIB) for _ in range(4)]
    model = replace(model_of(*layers), scratch_token_bytes=32 << 10)
    minimum = minimum_of(model, context=8192)
    plans = [plan(model, minimum + 4 * step * MIB, context=8192) for step in range(150)]
    assert len({made.chunk_tokens for made in plans}) > 10
    assert [sum(made.slots) for made in plans] == sorted(sum(made.slots) for made in plans)


@given(models, contexts)
@many
def test_enough_budget_makes_every_layer_resident(model: ModelSize, context: int) -> None:
    everything = sum(layer.experts * layer.slot_bytes for layer in model.layers)
    made = plan(model, 2 * (minimum_of(model, context) + everything) + 64 * GIB, context=context)
    assert made.slots == tuple(layer.experts for layer in model.layers)


@given(st.lists(layers, min_size=1, max_size=6), st.integers(0, 1 << 33))
@example([layer_of(slot_bytes=10), layer_of(slot_bytes=3)], 64 + 2)
@many
def test_slots_are_shared_alike(sizes: list[LayerSize], spare: int) -> None:
    least = sum(min(layer.top_k, layer.experts) * layer.slot_bytes for layer in sizes)
    assume(spare >= least)
    chosen = share_slots(sizes, spare)
    used = sum(n * layer.slot_bytes for n, layer in zip(chosen, sizes, strict=True))
    assert used <= spare
    pairs = list(zip(chosen, sizes, strict=True))
    shares = [(n / layer.experts, (n + 1) / layer.experts) for n, layer in pairs]
    grown = [
        share if share <= WHOLE_FROM else 1.0
        for (share, _), (n, layer) in zip(shares, pairs, strict=True)
        if n > layer.top_k
    ]
    could_grow = [after if after <= WHOLE_FROM else 1.0 for share, after in shares if share < 1.0]
    # No layer has got a slot before another one whose turn it was, and less than one is left over.
    assert max(grown, default=0.0) <= min(could_grow, default=1.0)
    if could_grow:
        assert spare - used < max(layer.slot_bytes for layer in sizes)


def test_from_a_share_on_layer_after_layer_becomes_whole() -> None:
    sizes = [layer_of(100, 2, 1000), layer_of(10, 2, 8000), layer_of(100, 2, 1000)]
    assert WHOLE_FROM == 0.7
    even = 70_000 + 56_000 + 70_000
    assert share_slots(sizes, even) == [70, 7, 70]
    assert share_slots(sizes, even + 15_000) == [85, 7, 70]
    assert share_slots(sizes, even + 30_000 + 24_000) == [100, 10, 70]
    assert share_slots(sizes, 10**9) == [100, 10, 100]


def test_slots_for_what_all_sequences_route_to_at_once() -> None:
    sizes = [layer_of(64, 6, 1000), layer_of(16, 6, 1000)]
    assert share_slots(sizes, 0, routed_tokens=3) == [18, 16]
    alone = plan(model_of(*sizes), GIB)
    together = make_plan(
        model_of(*sizes),
        budget=GIB,
        process_bytes=50 * MIB,
        context=1024,
        sequences=3,
        routed_tokens=3,
    )
    assert together.kv_bytes == 3 * alone.kv_bytes
    assert together.minimum - alone.minimum == pytest.approx(
        (2 * alone.kv_bytes + 22_000) / (1 - SLACK), abs=2
    )


def test_staging_is_part_of_the_budget() -> None:
    model = model_of()
    plain = plan(model, 300 * MIB)
    staged = make_plan(
        model, budget=300 * MIB, process_bytes=50 * MIB, context=1024, staging_bytes=8 * MIB
    )
    assert staged.staging_bytes == 8 * MIB
    assert staged.total_bytes <= 300 * MIB
    assert sum(plain.slots) - sum(staged.slots) == pytest.approx(8, abs=3)


def test_memory_beyond_what_a_model_needs_is_left_alone() -> None:
    model = model_of()
    made = plan(model, 64 * GIB)
    assert made.slots == (16, 16, 16, 16)
    assert made.total_bytes < GIB


def test_layers_of_different_record_sizes_get_equal_shares() -> None:
    sizes = [layer_of(32, 2, 1000), layer_of(32, 2, 9000), layer_of(128, 2, 500)]
    everything = sum(layer.experts * layer.slot_bytes for layer in sizes)
    chosen = share_slots(sizes, everything // 2)
    assert chosen == [16, 16, 64]


def test_a_layer_whose_share_is_below_top_k_takes_it_from_the_others() -> None:
    sizes = [layer_of(64, 2, 1000), layer_of(64, 16, 1000)]
    assert share_slots(sizes, 24_000) == [8, 16]
    assert share_slots(sizes, 18_000) == [2, 16]


@pytest.mark.parametrize("slots", [1, 2, 5, 1000])
def test_slots_given_by_hand_are_kept(slots: int) -> None:
    model = model_of(layer_of(experts=4), layer_of(experts=16))
    made = plan(model, None, slots=slots)
    assert made.slots == (min(slots, 4), min(slots, 16))
    assert made.budget is None
    assert made.slot_bytes == sum(made.slots) * MIB


@pytest.mark.parametrize("slots", [0, -3])
def test_slots_below_one_are_refused(slots: int) -> None:
    with pytest.raises(InvalidRequest, match="at least 1"):
        plan(model_of(), None, slots=slots)


def test_a_small_budget_is_refused_with_what_would_do_and_why() -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        plan(model_of(), 10 * MIB)
    text = str(caught.value)
    assert "memory=11MB is too small" in text
    assert "process 53MB" in text
    assert "trunk 105MB" in text
    told = caught.value.to_json()
    assert told["minimum"] == caught.value.minimum == sum(told["parts"].values())
    assert told["parts"]["slots"] == 4 * 2 * MIB
    assert json.loads(json.dumps(told)) == told


@given(models, contexts, st.data())
@many
def test_a_shorter_prompt_keeps_the_scratch_in_chunks_no_shorter(
    model: ModelSize, context: int, data: st.DataObject
) -> None:
    made = plan(model, minimum_of(model, context) + data.draw(st.integers(0, GIB)), context=context)
    assert _scratch(model, made.chunk_tokens, context) <= made.scratch_bytes
    length = data.draw(st.integers(1, context))
    chunk = fitting_chunk(model, length, made.scratch_bytes)
    assert min(made.chunk_tokens, length) <= chunk <= min(length, CHUNK_TOKENS)
    assert _scratch(model, chunk, length) <= made.scratch_bytes


def test_the_plan_is_the_sum_of_its_parts() -> None:
    made = plan(model_of(), GIB)
    fixed = made.process_bytes + made.trunk_bytes + made.kv_bytes + made.cache_bytes
    assert made.total_bytes == fixed + made.scratch_bytes + made.slot_bytes
    assert made.kv_bytes == 1024 * 1000
    assert made.staging_bytes == 0
    assert made.chunk_tokens == 1024


# -- the machine ------------------------------------------------------------------------------


def test_the_machine_has_memory() -> None:
    assert 0 < machine.available_bytes() <= psutil.virtual_memory().total
    assert machine.resident_bytes() > MIB
    assert machine.automatic_budget() > machine.resident_bytes()


def test_reads_through_the_page_cache_leave_it_room(
    tmp_path: Path, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "automatic_budget", lambda *, buffered: GIB + buffered)
    aligned = make_checkpoint(tmp_path / "aligned", Shape(layers=1), aligned=True, quiet=True)
    buffered = core.prepare(core.Settings(demo)), core.prepare(core.Settings(aligned, direct=False))
    assert [prepared.plan.budget for prepared in buffered] == [GIB + 1, GIB + 1]
    assert core.prepare(core.Settings(aligned)).plan.budget == GIB
    monkeypatch.undo()
    assert machine.automatic_budget() > machine.automatic_budget(buffered=True)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty tree of control groups; the process is in ``/outer/inner`` of it."""
    root = tmp_path / "cgroup"
    (root / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "self").write_text("0::/outer/inner\n")
    monkeypatch.setattr(machine, "PROCESS_GROUPS", tmp_path / "self")
    monkeypatch.setattr(machine, "GROUPS", root)
    yield root


def limit(folder: Path, most: int | str, used: int, cached: int = 0) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon {used - cached}\nfile {cached}\ninactive_file {cached - 1000}\nactive_file 1000\n"
        if cached
        else ""
    )


def test_a_control_group_limits_the_process(groups: Path) -> None:
    limit(groups / "outer" / "inner", 50 * MIB, 20 * MIB)
    assert machine.available_bytes() == 30 * MIB


def test_the_tightest_group_above_counts(groups: Path) -> None:
    limit(groups / "outer" / "inner", 50 * MIB, 20 * MIB)
    limit(groups / "outer", 60 * MIB, 55 * MIB)
    limit(groups, 90 * MIB, 60 * MIB)
    assert machine.available_bytes() == 5 * MIB


def test_a_group_without_a_limit_does_not_count(groups: Path) -> None:
    limit(groups / "outer" / "inner", "max", 20 * MIB)
    assert machine.available_bytes() > 100 * MIB


def test_a_group_that_is_over_its_limit_has_nothing_left(groups: Path) -> None:
    limit(groups / "outer", 50 * MIB, 51 * MIB)
    assert machine.available_bytes() == 0


def test_the_page_cache_of_a_group_is_available(groups: Path) -> None:
    """Reading a checkpoint fills a container up to its limit with page cache."""
    limit(groups / "outer", 50 * MIB, 50 * MIB, cached=35 * MIB)
    assert machine.available_bytes() == 35 * MIB


def test_groups_that_cannot_be_seen_do_not_count(groups: Path) -> None:
    machine.PROCESS_GROUPS.write_text("0::/../elsewhere\n4:cpu:/outer\n")
    assert machine.available_bytes() > 100 * MIB
    machine.PROCESS_GROUPS.unlink()
    assert machine.available_bytes() > 100 * MIB


def test_groups_of_the_first_version(groups: Path) -> None:
    machine.PROCESS_GROUPS.write_text("7:cpu,cpuacct:/x\n5:memory:/outer\n1:name=systemd:/y\n")
    folder = groups / "memory" / "outer"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{50 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{40 * MIB}\n")
    (folder / "memory.stat").write_text(
        f"inactive_file 0\nactive_file 0\ntotal_inactive_file {2 * MIB}\ntotal_active_file {MIB}\n"
    )
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    assert machine.available_bytes() == 13 * MIB
