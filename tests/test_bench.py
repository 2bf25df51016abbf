"""`moestream bench`: rows, turns, the ledger, rivals, suites, pictures, Ctrl-C."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from moestream.runtime.bench import bound, cells, drives, figures, plots, seats, suite_file, summary
from moestream.runtime.bench.arms import EngineArm, Sample
from moestream.runtime.bench.cells import Budget, Cell
from moestream.runtime.bench.errors import (
    BenchError,
    HeaderChanged,
    MatplotlibMissing,
    RivalFailed,
    SuiteInvalid,
)
from moestream.runtime.bench.job import Bench, Listener
from moestream.runtime.bench.machine import cpu_name
from moestream.runtime.bench.padding import Throttle, padded_records
from moestream.runtime.bench.resident import ResidentArm
from moestream.runtime.bench.rivals import parse_output, parse_rival, run_rival
from moestream.runtime.bench.rows import COLUMNS, Ledger, Row, read_rows
from moestream.runtime.bench.runner import run_bench
from moestream.runtime.bench.texts import prompt_of, prompt_text, recorded_routing
from moestream.runtime.cli import app

from .conftest import DEMO

RECORD_MB = 0.1
ALL_ARMS = ("resident", "off", "fifo", "ours")
COMMAND = [sys.executable, "-m", "moestream"]


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    """Here it is not about the size of the figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drives, "SECONDS", 0.05)
        patch.setattr(seats, "WARM_UP", 4)
        yield


def call(*arguments: str, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of `moestream bench ...` in this process."""
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result.stdout, result.stderr


def cell(**changes: Any) -> Cell:
    plain = Cell("decode", Budget(slots=16), "cold", ("off",), context=8, tokens=4, repeats=2)
    return replace(plain, **changes)


def run(*measured: Cell, **options: Any) -> list[Row]:
    rows: list[Row] = []
    asyncio.run(run_bench(Bench(DEMO, measured, **options), Listener(rows.append)))
    return rows


# -- arithmetic


def test_spread_of_five_values() -> None:
    spread = bound.spread([4.0, 1.0, 3.0, 2.0, 10.0])
    assert (spread.q1, spread.median, spread.q3) == (2.0, 3.0, 4.0)
    assert (spread.low, spread.high, spread.count) == (1.0, 10.0, 5)


def test_spread_of_one_value_and_of_none() -> None:
    assert bound.spread([2.5]) == bound.Spread(2.5, 2.5, 2.5, 2.5, 2.5, 1)
    with pytest.raises(ValueError, match="no values"):
        bound.spread([])


def test_bound_by_the_drive_and_by_the_processor() -> None:
    # 48 layers of top 8 with 2.65 MB each, three quarters of them there: 254.4 MB a token.
    nbytes = bound.missed_bytes(384, 2.65e6, 0.75)
    assert nbytes == pytest.approx(254.4e6)
    assert bound.token_bound(0.026, nbytes, 1.6e9) == pytest.approx(0.159)
    assert bound.token_bound(0.2, nbytes, 1.6e9) == 0.2


def test_speedups_are_ratios_of_the_same_repetitions() -> None:
    ratio = bound.speedups([2.0, 4.0, 9.0], [1.0, 4.0, 3.0])
    assert (ratio.low, ratio.median, ratio.high) == (1.0, 2.0, 3.0)


def sample(seconds: float, **changes: Any) -> Sample:
    plain = Sample(
        seconds, 10, first=0.5, gap=0.2, stall=0.4, sync=0.3, host=0.1, syncs=120, nbytes=2000
    )
    return replace(plain, **changes)


def test_row_of_three_repetitions() -> None:
    off = [sample(1.0, hits=30, misses=10), sample(2.0, hits=20, misses=20), sample(1.2)]
    ours = [sample(0.5, nbytes=4000, wasted=1000), sample(2.0), sample(1.0)]
    reference = summary.Reference(bandwidth=2000.0, off=off)

    row = summary.fill(Row(arm="off"), off, reference)
    assert (row.n, row.ms_per_token, row.ms_low, row.ms_high) == (3, 120.0, 100.0, 200.0)
    assert row.samples_ms == "100 200 120"
    assert (row.hit_rate, row.routed_per_token) == (50 / 80, 80 / 30)
    assert (row.stall_ms, row.host_ms, row.host_us_per_layer) == pytest.approx((40, 10, 833.3333))
    assert row.compute_ms == pytest.approx(80.0)  # of the third repetition, 1.2 - 0.4 s
    assert (row.bytes_per_token, row.waste) == (200.0, 0.0)
    # 200 bytes take 0.1 s, computing takes 0.08.
    assert row.bound_ms == row.own_bound_ms == pytest.approx(100.0)
    assert row.bound_over_measured == pytest.approx(100 / 120)
    assert row.drive_share == pytest.approx(200 / 0.12 / 2000)
    assert row.speedup == 1.0

    other = summary.fill(Row(arm="ours"), ours, reference)
    assert other.bound_ms == pytest.approx(100.0)  # that of the arm on demand
    assert other.bytes_per_token == pytest.approx(8000 / 30)
    assert other.own_bound_ms == pytest.approx(1e3 * 8000 / 30 / 2000)
    assert other.waste == pytest.approx(1000 / 8000)
    assert (other.speedup_low, other.speedup, other.speedup_high) == (1.0, 1.2, 2.0)


def test_row_of_an_arm_that_counts_nothing() -> None:
    plain = Sample(1.0, 10)
    row = summary.fill(Row(), [plain], summary.Reference(2000.0, None))
    assert (row.ms_per_token, row.tokens_per_s) == (100.0, 10.0)
    for name in ("stall_ms", "compute_ms", "bytes_per_token", "bound_ms", "speedup", "hit_rate"):
        assert getattr(row, name) is None, name


# -- cells


def test_arms_rotate() -> None:
    assert [cells.turn_order(("a", "b", "c"), turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_groups_share_budget_and_cache() -> None:
    budgets = [Budget(share=0.25), Budget(share=0.5)]
    made = cells.expand(
        budgets, ["cold", "warm"], ["off"], contexts=[8, 16], prefills=[32], callers=[4], tokens=5
    )
    groups = cells.in_groups(made)
    assert [len(group) for group in groups] == [4, 4, 4, 4]
    assert [(str(group[0].budget), group[0].cache) for group in groups] == [
        ("25 %", "cold"),
        ("25 %", "warm"),
        ("50 %", "cold"),
        ("50 %", "warm"),
    ]
    first = groups[0]
    assert [(c.kind, c.context, c.callers, c.tokens) for c in first] == [
        ("decode", 8, 1, 5),
        ("decode", 16, 1, 5),
        ("prefill", 32, 1, 1),
        ("callers", 16, 4, 5),
    ]


def test_counts_may_be_replaced() -> None:
    assert cell().with_counts(9, None) == cell(tokens=9)
    assert cell(kind="prefill", tokens=1).with_counts(9, 7) == cell(
        kind="prefill", tokens=1, repeats=7
    )


def test_arms_that_do_not_fit_are_opened_in_turn() -> None:
    needs = {"off": 4, "ours": 4, "fifo": 4, "resident": 20}
    assert seats.batches(needs, 100) == [["off", "ours", "fifo", "resident"]]
    assert seats.batches(needs, 12) == [["off", "ours", "fifo"], ["resident"]]
    assert seats.batches(needs, 8) == [["off", "ours"], ["fifo"], ["resident"]]
    assert seats.batches({}, 8) == []


@pytest.mark.parametrize("name", suite_file.suite_names())
def test_suites_of_the_package(name: str) -> None:
    suite = suite_file.load_suite(name)
    assert suite.title
    assert {cell.kind for cell in suite.cells} == set(cells.KINDS)
    assert (suite.model == "demo") == (name != "gpu")


def test_gpu_suite_is_about_slots() -> None:
    made = [cell for cell in suite_file.load_suite("gpu").cells if cell.kind == "decode"]
    assert sorted({cell.budget.slots or 0 for cell in made}) == [16, 32, 64, 96, 128]
    assert {cell.context for cell in made} == {128, 2048}


CELLS = '[[cells]]\nkind = "decode"\ncontext = 8\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("title = ", "Invalid value"),
        ('title = "x"', "cells is missing"),
        ("cells = 3", "must be tables"),
        ("cells = []", "there are no cells"),
        (CELLS, "cells 1: give slots, share or memory"),
        (CELLS + "slots = 0", "slots = 0: must be a whole number above 0"),
        (CELLS + "slots = true", "slots = True: must be a whole number above 0"),
        (CELLS + "share = 1.5", "share = 1.5: must be at most 1"),
        (CELLS + 'memory = "much"', "memory = 'much'"),
        (CELLS + 'slots = 4\narms = ["theirs"]', "must be of resident, off, fifo, ours"),
        (CELLS + "slots = 4\nspeed = 3", "there is no speed"),
        ('[[cells]]\nkind = "sideways"\nslots = 4', "must be of decode, prefill, callers"),
        ('[[cells]]\nkind = "callers"\nslots = 4', "callers is missing"),
        ("record_mb = -1\n" + CELLS + "slots = 4", "record_mb = -1: must be above 0"),
    ],
)
def test_suites_that_make_no_sense(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(SuiteInvalid) as caught:
        suite_file.load_suite(str(path))
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


def test_suite_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(CELLS + 'slots = [4, 8]\narms = "off"\nrepeats = 2\ntokens = 3')
    suite = suite_file.load_suite(str(path))
    assert (suite.name, suite.model, suite.record_mb) == ("own", None, None)
    assert suite.cells == tuple(
        Cell("decode", Budget(slots=n), "cold", ("off",), 8, 1, 3, 2) for n in (4, 8)
    )


def test_unknown_suite_names_those_that_there_are() -> None:
    with pytest.raises(SuiteInvalid, match="there are cpu, gpu, quick"):
        suite_file.load_suite("nonsense")


# -- prompts


class Words:
    """A tokenizer of words."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


@pytest.mark.parametrize("count", [1, 7, 500, 3000])
def test_prompts_have_exactly_so_many_tokens(count: int) -> None:
    ids = prompt_of(Words(), count, 3, vocabulary=100)
    assert len(ids) == count
    assert ids == prompt_of(Words(), count, 3, vocabulary=100)


def test_prompts_differ_by_seed_and_do_without_a_tokenizer() -> None:
    assert prompt_text(1, 5) != prompt_text(2, 5)
    ids = prompt_of(None, 50, 1, vocabulary=7)
    assert len(ids) == 50 and set(ids) <= set(range(7))


def test_prompts_of_recorded_routing_are_steps_in_a_row(tmp_path: Path) -> None:
    assert recorded_routing(tmp_path, {}) is None
    assert recorded_routing(tmp_path, {"moestream_routing": {"steps": 3}}) is None
    about = {"first_token": 10, "steps": 5, "description": "of the demo model"}
    (tmp_path / "routing.json").write_text(json.dumps(about))
    routing = recorded_routing(tmp_path, {})
    assert routing == recorded_routing(Path(), {"moestream_routing": about}) is not None
    assert routing is not None and routing.description == "of the demo model"
    ids = routing.prompt(12, 4)
    assert ids == routing.prompt(12, 4) and set(ids) == set(range(10, 15))
    assert all(b == a + 1 or (a, b) == (14, 10) for a, b in pairwise(ids))


async def test_predictions_of_recorded_routing_are_made_noisy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def noisy_lookahead(engine: Any) -> Future[None]:
        asked.append(engine)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    fake = types.ModuleType("moestream.runtime.bench.routing")
    fake.noisy_lookahead = noisy_lookahead  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    for name, routed in (("ours", False), ("off", True), ("ours", True)):
        arm = await EngineArm.open(DEMO, name, routed=routed, throttle=None, slots=16, context=64)
        engine = arm.engine
        await arm.aclose()
    assert asked == [engine]  # the only one that predicts recorded routing


# -- the ledger


def test_rows_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    first = Row(time="now", arm="off", note="a, b\nc", layers=3, ms_per_token=1.25, slots=16.0)
    Ledger(path).append(first)
    before = path.read_text()
    Ledger(path).append(Row(arm="ours", status="failed"))
    assert path.read_text().startswith(before)
    assert read_rows(path) == [first, Row(arm="ours", status="failed")]
    with path.open(newline="") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS


def test_other_columns_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join([*COLUMNS[1:], "mood"]) + "\n")
    for use in (Ledger, read_rows):
        with pytest.raises(HeaderChanged) as caught:
            use(path)
        assert f"it lacks {COLUMNS[0]} and has besides mood" in str(caught.value)
    assert path.read_text().count("\n") == 1
    path.write_text(",".join(reversed(COLUMNS)) + "\n")
    with pytest.raises(HeaderChanged, match="in another order"):
        Ledger(path)


def test_damaged_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    Ledger(path)
    whole = path.read_text()
    path.write_text(whole + "now,ok\n")
    with pytest.raises(BenchError, match="line 2: 2 cells"):
        read_rows(path)
    damaged = ["many" if name == "layers" else "" for name in COLUMNS]
    path.write_text(whole + ",".join(damaged) + "\n")
    with pytest.raises(BenchError, match="line 2: invalid literal"):
        read_rows(path)
    with pytest.raises(BenchError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_ledger_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot be written to"):
        Ledger(tmp_path / "file" / "rows.csv")


# -- drives


def test_touched_files_are_cached_and_dropped_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(os.urandom(4 << 20))
        file.flush()
        os.fsync(file.fileno())
    share = drives.cached_share([path]) if drives.drop([path]) else None
    if share in (None, 1.0):
        pytest.skip("this file system does not drop pages, or does not tell")
    assert share is not None and share < 0.5
    drives.touch([path])
    assert drives.cached_share([path]) == 1.0


def test_throttle_passes_bytes_on(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    buffer = bytearray(3)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert Throttle(1e9)(descriptor, [memoryview(buffer)], 2) == 3
    finally:
        os.close(descriptor)
    assert bytes(buffer) == b"cde"


# -- rows of engines


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """All arms and kinds of cells, with padded records."""
    return run(
        cell(arms=ALL_ARMS),
        cell(arms=("resident", "off"), kind="prefill", context=20, tokens=1),
        cell(arms=("resident", "off"), kind="callers", context=4, callers=2, tokens=2),
        suite="tests",
        record_mb=RECORD_MB,
        scratch=tmp_path_factory.mktemp("padding"),
    )


def test_every_arm_of_every_cell_has_a_row(measured: list[Row]) -> None:
    assert [(row.kind, row.arm) for row in measured] == [
        *(("decode", arm) for arm in ALL_ARMS),
        *((kind, arm) for kind in ("prefill", "callers") for arm in ("resident", "off")),
    ]
    skipped = [(row.kind, row.arm) for row in measured if row.status == "skipped"]
    assert skipped == [("callers", "resident")]
    assert [row.note for row in measured if row.status == "failed"] == []


def test_rows_say_where_and_with_what(measured: list[Row]) -> None:
    for row in measured:
        assert (row.model, row.model_type) == (DEMO.name, "qwen3_next")
        assert (row.layers, row.experts, row.top_k, row.bits) == (12, 64, 6, 4.0)
        # Whole pages of padding: a little less than was asked for.
        assert row.record_bytes is not None and 0 <= 100_000 - row.record_bytes < 4096
        assert (row.suite, row.cache, row.turns) == ("tests", "cold", "together")
        assert row.conditions == "records padded to 0.1 MB"
        for name in ("time", "cpu", "cores", "memory_bytes", "os", "device", "python", "moestream"):
            assert getattr(row, name), name
        assert row.mlx and row.mlx_lm


def test_figures_agree_with_each_other(measured: list[Row]) -> None:
    for row in measured:
        if row.status != "ok":
            continue
        assert row.n == 2 and len(row.samples_ms.split()) == 2
        assert row.ms_per_token is not None and row.tokens_per_s is not None
        assert row.tokens_per_s == pytest.approx(1e3 / row.ms_per_token)
        assert row.ms_low is not None and row.ms_q1 is not None and row.ms_high is not None
        assert row.ms_low <= row.ms_q1 <= row.ms_per_token <= row.ms_high
        assert row.speedup is not None
        if row.arm == "resident":
            assert row.slots is row.bytes_per_token is row.bound_ms is row.stall_ms is None
            continue
        assert row.slots == 16 and row.bound_over_measured is not None
        assert row.bound_ms is not None and row.compute_ms is not None
        assert row.bound_over_measured == pytest.approx(row.bound_ms / row.ms_per_token)
        assert row.expert_bytes == 12 * 16 * (row.record_bytes or 0)
        assert row.direct_share is not None and 0.5 < row.direct_share < 1.0


def test_bytes_of_prompts_are_those_of_the_misses(measured: list[Row]) -> None:
    row = next(r for r in measured if (r.kind, r.arm) == ("prefill", "off"))
    assert row.routed_per_token is not None and row.hit_rate is not None
    assert row.bytes_per_token == pytest.approx(
        bound.missed_bytes(row.routed_per_token, row.record_bytes or 0, row.hit_rate)
    )


async def test_samples_count_what_the_drive_has_read(tmp_path: Path) -> None:
    counted, lock = 0, threading.Lock()

    def reading(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal counted
        done = os.preadv(descriptor, buffers, offset)
        with lock:
            counted += done
        return done

    with padded_records(tmp_path, int(RECORD_MB * 1e6)):
        arm = await EngineArm.open(DEMO, "off", routed=False, throttle=None, slots=12, context=64)
        try:
            arm.engine._core.store.reader.preadv = reading
            taken = await arm.prefill(list(range(100, 120)))
            assert (taken.tokens, taken.nbytes, taken.wasted) == (20, counted, 0)
            record = arm.engine._core.store.groups[0].record.stored_bytes
            assert taken.nbytes == taken.misses * record
            counted = 0
            together = await arm.together([[101, 102], [103, 104]], 3)
            assert (together.tokens, together.nbytes) == (6, counted)
        finally:
            await arm.aclose()


async def test_callers_that_are_not_computed_together_are_told_of() -> None:
    common: dict[str, Any] = {"routed": False, "throttle": None, "slots": 16, "context": 64}
    arm = await EngineArm.open(DEMO, "off", max_running=2, **common)
    try:
        assert [arm.remark(1), arm.remark(2)] == ["", ""]
        assert arm.remark(3) == "computes 2 at once"
    finally:
        await arm.aclose()


async def test_arms_give_the_same_tokens_to_time() -> None:
    engine = await EngineArm.open(DEMO, "ours", routed=False, throttle=None, slots=16, context=64)
    resident = await ResidentArm.open(DEMO, widen=True)
    try:
        for arm in (engine, resident):
            taken = await arm.decode([101, 102, 103], 5)
            assert taken.tokens == 5 and taken.seconds > 0 and taken.first > 0
            assert taken.gap <= taken.seconds
    finally:
        await engine.aclose()
        await resident.aclose()


def test_arms_take_turns_and_the_first_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int, int]] = []
    decode = EngineArm.decode

    async def noted(self: EngineArm, prompt: Sequence[int], tokens: int) -> Sample:
        order.append((names[id(self)], len(prompt), tokens))
        return await decode(self, prompt, tokens)

    names: dict[int, str] = {}
    opened = EngineArm.open.__func__  # type: ignore[attr-defined]

    async def named(cls: Any, /, model: Path, arm: str, **arguments: Any) -> EngineArm:
        made: EngineArm = await opened(cls, model, arm, **arguments)
        names[id(made)] = arm
        return made

    monkeypatch.setattr(EngineArm, "open", classmethod(named))
    monkeypatch.setattr(EngineArm, "decode", noted)
    rows = run(cell(arms=("fifo", "ours", "off"), tokens=3, repeats=3))
    assert [arm for arm, _, _ in order[:3]] == ["off", "ours", "fifo"]  # opened and warmed up
    assert [arm for arm, _, _ in order[3:6]] == ["fifo", "ours", "off"]
    assert [arm for arm, _, _ in order[6:]] == [
        *("fifo", "ours", "off"),
        *("ours", "off", "fifo"),
        *("off", "fifo", "ours"),
    ]
    assert {(context, tokens) for _, context, tokens in order[6:]} == {(8, 3)}
    assert [row.n for row in rows] == [3, 3, 3]


def test_pages_that_stay_in_the_cache_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "cached_share", lambda paths: 0.25)
    rows = run(cell(repeats=1, tokens=1))
    assert rows[0].note == "25 % of what is not read directly stayed in the page cache"
    monkeypatch.setattr(drives, "drop", lambda paths: False)
    rows = run(cell(repeats=1, tokens=1))
    assert rows[0].note == "unaligned experts may come from the page cache"


def test_files_that_do_not_stay_in_the_cache_are_not_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "cached_share", lambda paths: 0.9)
    rows = run(cell(cache="warm", arms=("off", "resident"), repeats=1, tokens=1))
    assert [(row.arm, row.status) for row in rows] == [("off", "skipped"), ("resident", "ok")]
    assert rows[0].note == "only 90 % of the experts stay in the page cache"


def test_warm_reads_pass_through_the_page_cache() -> None:
    (row,) = run(cell(cache="warm"))
    if row.status == "skipped":  # a machine without room for it
        assert "page cache" in row.note
        return
    assert (row.status, row.cache, row.direct_share) == ("ok", "warm", 0.0)


# -- what goes wrong


def test_an_arm_that_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    decode = ResidentArm._decode

    def failing(self: ResidentArm, prompt: Sequence[int], tokens: int) -> Sample:
        nonlocal calls
        calls += 1
        if calls == 3:  # warmed up twice
            raise RuntimeError("the\nanvil fell")
        return decode(self, prompt, tokens)

    monkeypatch.setattr(ResidentArm, "_decode", failing)
    steps: list[int] = []
    rows: list[Row] = []
    bench = Bench(DEMO, (cell(arms=("resident", "off")), cell(arms=("off",), context=12)))
    asyncio.run(run_bench(bench, Listener(rows.append, step=steps.append)))
    assert [(row.arm, row.status) for row in rows] == [
        ("resident", "failed"),
        ("off", "ok"),
        ("off", "ok"),
    ]
    assert rows[0].note == "RuntimeError: the anvil fell"
    assert sum(steps) == bench.steps == 6


def test_a_budget_that_is_too_small_fails_its_cells_only() -> None:
    steps: list[int] = []
    rows: list[Row] = []
    bench = Bench(DEMO, (cell(budget=Budget(memory="1MB")), cell()))
    asyncio.run(run_bench(bench, Listener(rows.append, step=steps.append)))
    assert [row.status for row in rows] == ["failed", "ok"]
    assert "the smallest budget" in rows[0].note or "at least" in rows[0].note
    assert sum(steps) == bench.steps


def test_mlx_lm_is_skipped_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from moestream.runtime.bench import runner

    monkeypatch.setattr(runner, "memory_left", lambda: 1000)
    rows = run(cell(arms=("resident", "off")))
    assert [(row.arm, row.status, row.turns) for row in rows] == [
        ("off", "ok", "in turn"),
        ("resident", "skipped", "in turn"),
    ]
    assert "does not fit" in rows[1].note
    assert rows[0].bound_ms is not None


def test_mlx_lm_is_skipped_for_a_packed_store(packed: Path) -> None:
    rows: list[Row] = []
    bench = Bench(packed, (cell(arms=("resident", "off")),))
    asyncio.run(run_bench(bench, Listener(rows.append)))
    assert [row.status for row in rows] == ["skipped", "ok"]
    assert rows[1].direct_share == 1.0


# -- rivals

FAKE = """
import json, sys
names = ("--model", "--budget-bytes", "--prompt-file", "--tokens", "--repeats")
given = {name: sys.argv[sys.argv.index(name) + 1] for name in names}
prompts = json.load(open(given["--prompt-file"]))
assert "--cold" in sys.argv and len(prompts) == int(given["--repeats"]) == 2
print("loading ...")
print(json.dumps({"kind": "prefill", "tokens": 8, "seconds": 1, "note": ""}))
print(json.dumps({"arm": "fake", "kind": "decode", "tokens": int(given["--tokens"]),
                  "seconds": [0.4, 0.8], "bytes_read": [400, 1200], "stall_seconds": None,
                  "hits": [3, 0], "misses": [1, 4],
                  "note": f"{len(prompts[0])} tokens, {given['--budget-bytes']} bytes"}))
"""


def fake(tmp_path: Path, text: str = FAKE) -> str:
    path = tmp_path / "rival.py"
    path.write_text(text)
    return f"fake={shlex.join([sys.executable, str(path)])}"


def test_a_rival_is_one_more_arm(tmp_path: Path) -> None:
    rival = parse_rival(fake(tmp_path))
    rows = run(cell(), cell(kind="callers", callers=2), rivals=(rival,))
    off, row = (r for r in rows if r.kind == "decode")
    assert (row.arm, row.status, row.turns, row.n) == ("fake", "ok", "own process", 2)
    assert row.samples_ms == "100 200"
    assert (row.bytes_per_token, row.hit_rate) == (200.0, 3 / 8)
    assert row.bound_ms == off.bound_ms and row.bound_ms is not None
    assert row.speedup is not None and row.stall_ms is None
    assert row.note == f"8 tokens, {12 * 16 * 27648} bytes"
    assert [r.status for r in rows if r.kind == "callers"] == ["ok", "skipped"]


def test_a_rival_cannot_read_padded_records(tmp_path: Path) -> None:
    rows = run(cell(), rivals=(parse_rival(fake(tmp_path)),), record_mb=0.05, scratch=tmp_path)
    assert rows[1].status == "skipped" and "records padded to 0.05 MB" in rows[1].note


def test_a_failing_rival_is_reported(tmp_path: Path) -> None:
    csv_file = tmp_path / "rows.csv"
    text = "import sys; sys.exit('no such\\nmodel')"
    arguments = ["--slots", "16", "--context", "8", "--tokens", "2", "--repeats", "1"]
    output, _ = call(
        *(*arguments, "--arms", "off", "--rival", fake(tmp_path, text), "--csv", str(csv_file)),
        code=1,
    )
    assert "ended with status 1: no such model" in output
    assert [row.status for row in read_rows(csv_file)] == ["ok", "failed"]


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("", 'no line with "kind": "decode"'),
        ('{"kind": "prefill"}\n[1]\n{', 'no line with "kind": "decode"'),
        ('{"kind": "decode", "tokens": 4}', "seconds are not 2 numbers: null"),
        ('{"kind": "decode", "tokens": 4, "seconds": 1}', "seconds are not 2 numbers: 1"),
        ('{"kind": "decode", "tokens": 4, "seconds": [1]}', "seconds are not 2 numbers"),
        ('{"kind": "decode", "tokens": 4, "seconds": [1, "2"]}', "seconds are not 2 numbers"),
        ('{"kind": "decode", "tokens": 4, "seconds": [1, -2]}', "seconds are not 2 numbers"),
        ('{"kind": "decode", "tokens": 0, "seconds": [1, 2]}', "must be above 0"),
        (
            '{"kind": "decode", "tokens": 4, "seconds": [1, 2], "bytes_read": [1]}',
            "bytes_read are not 2 numbers",
        ),
    ],
)
def test_what_a_rival_must_print(output: str, problem: str) -> None:
    with pytest.raises(RivalFailed) as caught:
        parse_output(output, "decode", 2)
    assert problem in str(caught.value)


async def ask(command: str, seconds: float) -> None:
    await run_rival(
        parse_rival(command),
        model=DEMO,
        budget=1,
        prompt_file=DEMO,
        kind="decode",
        tokens=1,
        repeats=1,
        warm=False,
        seconds=seconds,
    )


@pytest.mark.one_loop
async def test_a_rival_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    # The child holds the pipe: the reader of it would wait for ever if it were not killed too.
    text = "import subprocess; subprocess.run(['sleep', '100'])"
    with pytest.raises(RivalFailed, match="did not end within"):
        await ask(fake(tmp_path, text), 0.5)


@pytest.mark.one_loop
async def test_a_rival_that_is_not_there() -> None:
    with pytest.raises(RivalFailed, match="cannot be run: No such file"):
        await ask("x=./no-such-program", 5)


@pytest.mark.parametrize("text", ["name", "=x", "name=", "name='", "ours=x"])
def test_rivals_have_a_name_and_a_command(text: str) -> None:
    with pytest.raises(BenchError):
        parse_rival(text)


# -- the command


def test_json_and_traces(tmp_path: Path) -> None:
    csv_file, traces = tmp_path / "rows.csv", tmp_path / "traces"
    output, _ = call(
        *("--share", "0.25", "--context", "8", "--arms", "off,ours", "--tokens", "2"),
        *("--repeats", "1", "--csv", str(csv_file), "--trace-dir", str(traces), "--json"),
    )
    document = json.loads(output)
    assert document["csv"] == str(csv_file)
    assert [(row["arm"], row["share"], row["tokens"]) for row in document["rows"]] == [
        ("off", 0.25, 2),
        ("ours", 0.25, 2),
    ]
    assert sorted(path.name for path in traces.iterdir()) == [
        "cell001-decode-cold-off.trace",
        "cell001-decode-cold-ours.trace",
    ]
    assert all(path.stat().st_size > 1000 for path in traces.iterdir())


def test_suite_on_the_command_line(tmp_path: Path) -> None:
    suite = tmp_path / "own.toml"
    suite.write_text('model = "demo"\n' + CELLS + 'slots = 16\narms = "off"\ntokens = 9')
    csv_file = tmp_path / "rows.csv"
    arguments = ["--suite", str(suite), "--csv", str(csv_file)]
    output, errors = call(*arguments, "--tokens", "2", "--repeats", "1", "--throttle", "1GB/s")
    (row,) = read_rows(csv_file)
    assert (row.suite, row.tokens, row.n) == ("own", 2, 1)
    assert row.conditions == "drive throttled to 1000 MB/s"
    assert row.drive_bytes_per_s is not None and row.drive_bytes_per_s <= 1.1e9
    lines = output.splitlines()
    assert lines[0].startswith("16 slots, cold, 2 tokens behind 8, off: ")
    assert any(line.startswith("cold, 8") for line in lines)
    assert f"1 rows in {csv_file}" in errors


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--suite", "gpu"], "needs a model"),
        (["--suite", "quick", "--slots", "4"], "leave --slots out"),
        (["--suite", "quick", "--arms", "off"], "leave --arms out"),
        (["--slots", "none"], "'none'"),
        (["--share", "2"], "'2'"),
        (["--memory", "much"], "'much'"),
        (["--cache", "tepid"], "cold or warm"),
        (["--arms", "theirs"], "resident, off, fifo, ours"),
        (["--throttle", "fast"], "'fast' is not a rate"),
        (["--tokens", "0"], "--tokens"),
        (["--suite", "quick", "--only", "1-99"], "there are cells 1 to 5"),
        (["--suite", "quick", "--only", "none"], "give numbers such as 1-3,5"),
    ],
    ids=" ".join,
)
def test_usage_errors(arguments: list[str], problem: str) -> None:
    _, errors = call(*arguments, code=2)
    assert problem in " ".join(errors.replace("│", " ").split())


def test_errors_before_anything_is_opened(tmp_path: Path) -> None:
    _, errors = call("--suite", "nonsense", code=1)
    assert "there are cpu, gpu, quick" in errors
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n")
    _, errors = call("--csv", str(path), code=1)
    assert "has other columns" in " ".join(errors.split())


def test_cells_are_listed_and_chosen_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    output, _ = call("--suite", "quick", "--list", "--only", "3-4,1", "--repeats", "7")
    lines = output.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "3", "4"]
    assert lines[0] == ("  1  25 %, cold, 24 tokens behind 32: resident, off, fifo, ours; 7 times")
    listed = json.loads(call("--suite", "quick", "--list", "--json")[0])["cells"]
    assert [cell["number"] for cell in listed] == [1, 2, 3, 4, 5]

    benches: list[Bench] = []

    async def remember(bench: Bench, listener: Listener) -> None:
        benches.append(bench)

    monkeypatch.setattr("moestream.runtime.bench.runner.run_bench", remember)
    monkeypatch.setattr("moestream.runtime.bench_cli._default_csv", lambda: Path(os.devnull))
    call("--suite", "quick", "--only", "2")
    assert [cell.cache for cell in benches[0].cells] == ["warm"]
    assert benches[0].record_mb == 0.5


def test_rows_go_to_the_repository_or_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moestream.runtime.bench_cli import _default_csv

    monkeypatch.chdir(tmp_path)
    assert _default_csv() == Path("moestream-bench.csv")
    (tmp_path / "pyproject.toml").write_text('name = "moestream"\n')
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    assert _default_csv() == tmp_path / "docs" / "bench" / "results.csv"


def test_ctrl_c_keeps_the_rows_that_there_are(tmp_path: Path) -> None:
    csv_file = tmp_path / "rows.csv"
    arguments = ["--slots", "16,17", "--context", "8", "--arms", "off", "--tokens", "20"]
    command = [*COMMAND, "bench", *arguments, "--repeats", "2", "--csv", str(csv_file)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.readline()  # the row of 16 slots; those of 17 are under way
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert first.startswith("16 slots")
    assert [row.slots for row in read_rows(csv_file)] == [16]
    assert "Traceback" not in errors and "cold, 8" in output


def test_help_of_both_commands() -> None:
    assert "--suite" in call("--help")[0]
    assert "--out" in call("plot", "--help")[0]


def test_processor_has_a_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: A Fine One\n")
    if sys.platform == "linux":
        assert cpu_name(info) == "A Fine One"
    assert cpu_name()


# -- pictures


def plain_rows() -> Iterator[Row]:
    base = Row(
        cpu="A Fine One",
        cores=2,
        memory_bytes=8 << 30,
        device="cpu",
        commit="abc123",
        mlx="1",
        mlx_lm="2",
        model="small",
        layers=12,
        experts=64,
        top_k=6,
        record_bytes=500_000,
        conditions="padded",
        bytes_per_token=2e6,
        drive_bytes_per_s=2e9,
        tokens_per_s=50.0,
        callers=1,
    )

    def timed(row: Row, ms: float, **changes: Any) -> Row:
        return replace(
            row, ms_per_token=ms, ms_q1=0.9 * ms, ms_q3=1.2 * ms, host_ms=ms / 4, **changes
        )

    arms = ("resident", "off", "fifo", "ours", "other & <system>")
    for arm in arms:
        for cache in ("cold", "warm"):
            for slots in (8, 16):
                held = None if arm == "resident" else slots
                streamed: dict[str, Any] = (
                    {} if held is None else {"bound_ms": 9.0, "bound_over_measured": 0.6}
                )
                own = replace(
                    base, arm=arm, cache=cache, slots=held, context=32, note=arm, **streamed
                )
                yield timed(own, 20.0 - slots, kind="decode")
                yield timed(own, 2.0, kind="prefill")
                yield timed(own, 10.0, kind="callers")
    for what, count in (("layers", 48), ("layers", 96), ("experts", 128), ("callers", 4)):
        counted: dict[str, Any] = {what: count, "kind": f"scale-{what}"}
        yield timed(replace(base, arm="ours"), count / 2, **counted)


def texts(path: Path) -> str:
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    return "\n".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))


def test_pictures_show_each_arm_and_say_where_they_come_from(tmp_path: Path) -> None:
    paths = {path.name.split("-")[0]: path for path in plots.draw(list(plain_rows()), tmp_path)}
    assert sorted(paths) == ["bound", "callers", "prefill", "scaling", "tokens"]
    assert paths["tokens"].name == "tokens-cpu-small-0.5mb.svg"
    assert paths["scaling"].name == "scaling-cpu-synthetic.svg"
    shown = {name: texts(path) for name, path in paths.items()}
    for arm in ("off (on demand)", "fifo", "ours", "other & <system>"):
        for name in ("tokens", "bound", "prefill", "callers"):
            assert arm in shown[name], (name, arm)
    assert "resident (mlx-lm)" in shown["tokens"]
    assert "ms per token" in shown["tokens"] and "experts held per layer" in shown["tokens"]
    assert "12.5 %" in shown["tokens"] and "max(compute, bytes / bandwidth)" in shown["tokens"]
    assert "bound / measured" in shown["bound"]
    assert "GB read per second" in shown["prefill"] and "50 tok/s" in shown["prefill"]
    assert "callers at once" in shown["callers"]
    assert "1.15 times" in shown["scaling"] and "per routed expert" in shown["scaling"]
    for text in shown.values():
        assert "A Fine One, 2 cores, 8 GiB" in text and "commit abc123" in text
    assert "small: 12 layers, 64 experts, top 6, 0.5 MB each; padded" in shown["tokens"]


def test_pictures_are_the_same_each_time(tmp_path: Path) -> None:
    rows = [row for row in plain_rows() if row.kind in ("decode", "scale-layers")]
    first, second = (plots.draw(rows, tmp_path / name) for name in ("a", "b"))
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert b"<dc:date>" not in one.read_bytes()


def test_the_newest_row_counts_and_models_are_kept_apart() -> None:
    row = Row(device="cpu", model="a", kind="decode", arm="off", slots=8, ms_per_token=9.0)
    newer = replace(row, ms_per_token=7.0)
    other = replace(row, model="b")
    failed = replace(row, status="failed", ms_per_token=None)
    made = figures.settings([row, other, newer, failed])
    assert [setting.slug for setting in made] == ["cpu-a", "cpu-b"]
    assert [setting.rows for setting in made] == [(newer,), (other,)]
    twice = figures.settings([row, replace(row, cpu="another")])
    assert [setting.slug for setting in twice] == ["cpu-a", "cpu-a-2"]


def test_cost_by_layer_against_the_smallest() -> None:
    def row(layers: int, ms: float) -> Row:
        return Row(layers=layers, top_k=2, ms_per_token=ms, ms_q1=ms, ms_q3=1.5 * ms, host_ms=1.0)

    rows = [row(96, 52.8), row(48, 24.0)]
    assert figures.relative(rows, "layers") == [
        (48, 1.0, 1.0, 1.5),
        (96, pytest.approx(1.1), pytest.approx(1.1), pytest.approx(1.65)),
    ]
    assert [cost for _, cost, _, _ in figures.relative(rows, "layers", host=True)] == [1.0, 0.5]
    assert figures.relative([], "layers") == []


def test_scaling_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import bench_scaling

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.csv"
    sizes = ["--layers", "2", "3", "--experts", "4", "8", "--callers", "1", "2"]
    small = ["--hidden", "64", "--inner", "64", "--tokens", "2", "--repeats", "1"]
    bench_scaling.main([*sizes, *small, "--arms", "off", "--csv", str(path)])
    rows = read_rows(path)
    assert [(row.kind, row.layers, row.experts, row.callers) for row in rows] == [
        ("scale-layers", 2, 4, 1),
        ("scale-layers", 3, 4, 1),
        ("scale-experts", 2, 4, 1),
        ("scale-experts", 2, 8, 1),
        ("scale-callers", 2, 4, 1),
        ("scale-callers", 2, 4, 2),
    ]
    assert all(row.host_ms and row.hit_rate is not None and row.n == 1 for row in rows)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


def test_plot_without_rows_and_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.csv"
    Ledger(path)
    output, errors = call("plot", str(path), "--out", str(tmp_path))
    assert output == "" and "has no rows to draw" in " ".join(errors.split())
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(MatplotlibMissing, match=r"moestream\[analysis\]"):
        plots.draw([], tmp_path)


def test_plot_command(tmp_path: Path) -> None:
    assert find_spec("matplotlib") is not None, "an extra of the development environment"
    path = tmp_path / "rows.csv"
    ledger = Ledger(path)
    for row in plain_rows():
        ledger.append(row)
    output, _ = call("plot", str(path), "--out", str(tmp_path / "out"), "--json")
    names = json.loads(output)["files"]
    assert len(names) == 5 and all(Path(name).exists() for name in names)
