"""Reading records: layouts, scatter, short reads, errors, widening, direct I/O, descriptors."""

from __future__ import annotations

import errno
import os
import random
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestream.io import reader as reader_module
from moestream.io.errors import ChecksumMismatch, MoestreamError, ReadFailed
from moestream.io.reader import RecordReader, open_direct, remaining, widen_into
from moestream.io.records import PAGE, Checksums, Component, Record, divide_runs, merge_runs

from .fakes import (
    TIMEOUT,
    FakeDrive,
    Layer,
    ReadCall,
    Tensor,
    aligned_rows,
    widened,
    write_packed,
    write_stacked,
)

PLAIN = (Tensor("up.weight", (5, 3)), Tensor("up.scales", (7,), "F16"), Tensor("down", (3,), "U8"))
MIXED = (Tensor("up.weight", (4, 4)), Tensor("up.scales", (6,), "BF16", "F32"), Tensor("b", (2,)))
PAGES = (Tensor("up", (PAGE // 4,)), Tensor("down", (2, PAGE // 4)))
EXPERTS = 5

Write = Callable[..., Layer]


def read(layer: Layer, reader: RecordReader, expert: int, group: int = 0) -> list[bytes]:
    rows = aligned_rows(layer.record)
    assert reader.read(group, expert, rows) == layer.record.stored_bytes
    return [bytes(row) for row in rows]


def open_descriptors() -> int:
    folder = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    return len(os.listdir(folder))


# -- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("skip", [0, 24, PAGE])
@pytest.mark.parametrize("tensors", [PLAIN, MIXED, PAGES], ids=["plain", "mixed", "pages"])
@pytest.mark.parametrize("write", [write_stacked, write_packed])
def test_every_expert_reads_its_own_bytes(
    tmp_path: Path, write: Write, tensors: tuple[Tensor, ...], skip: int, direct: bool
) -> None:
    layer = write(tmp_path / "experts", tensors, experts=EXPERTS, skip=skip)
    reader = RecordReader([layer.record], direct=direct)
    for expert in (*range(EXPERTS), 0):
        assert read(layer, reader, expert) == layer.expected(expert)
    reader.close()


def test_groups_are_read_from_their_own_files(tmp_path: Path) -> None:
    layers = [
        write_stacked(tmp_path / "a", PLAIN, experts=2, layer=3),
        write_packed(tmp_path / "b", MIXED, experts=4, layer=7),
    ]
    reader = RecordReader([layer.record for layer in layers])
    for group, layer in enumerate(layers):
        assert read(layer, reader, 1, group) == layer.expected(1)
    reader.close()


def test_a_packed_record_is_one_scattered_read(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "packed", MIXED, experts=3, skip=100)
    drive = FakeDrive()
    reader = RecordReader([layer.record], preadv=drive)
    assert read(layer, reader, 2) == layer.expected(2)
    (call,) = drive.calls
    assert call.lengths == (64, 20)  # what follows a widened component is staged with it
    assert call.offset == 100 + 2 * PAGE
    reader.close()


def test_a_stacked_record_is_one_read_per_tensor(tmp_path: Path) -> None:
    layer = write_stacked(tmp_path / "stacked", PLAIN, experts=3)
    drive = FakeDrive()
    reader = RecordReader([layer.record], preadv=drive)
    assert read(layer, reader, 1) == layer.expected(1)
    assert [call.lengths for call in drive.calls] == [(60,), (14,), (3,)]
    assert [call.offset for call in drive.calls] == [60, 180 + 14, 180 + 42 + 3]
    reader.close()


def component(name: str, offset: int, nbytes: int, stride: int, path: str = "f") -> Component:
    return Component(name, Path(path), offset, stride, (nbytes,), "U8", "U8")


def members(*components: Component) -> list[tuple[int, ...]]:
    return [run.members for run in merge_runs(components)]


def test_runs_join_neighbours_in_file_order() -> None:
    assert members(component("b", 10, 6, 16), component("a", 0, 10, 16)) == [(1, 0)]


@pytest.mark.parametrize(
    "second",
    [
        component("gap", 11, 5, 16),
        component("other stride", 10, 6, 32),
        component("other file", 10, 6, 16, path="g"),
        component("overlap", 9, 6, 16),
    ],
    ids=lambda second: second.name,
)
def test_runs_keep_apart(second: Component) -> None:
    assert members(component("a", 0, 10, 16), second) == [(0,), (1,)]


def test_a_run_never_reaches_into_the_next_expert() -> None:
    # Stacked tensors of a single expert are neighbours, but not those of two experts.
    assert members(component("a", 0, 8, 8), component("b", 8, 8, 8)) == [(0,), (1,)]
    assert members(component("a", 0, 8, 16), component("b", 8, 8, 16)) == [(0, 1)]


def test_an_odd_rest_behind_whole_pages_is_staged() -> None:
    pages = component("a", 0, PAGE, 3 * PAGE), component("b", PAGE, PAGE, 3 * PAGE)
    (run,) = merge_runs(pages)
    assert (run.direct, run.straight) == (True, 2)
    rest = component("c", 2 * PAGE, 100, 3 * PAGE), component("d", 2 * PAGE + 100, 50, 3 * PAGE)
    (run,) = merge_runs((*pages, *rest))
    assert (run.direct, run.straight, run.nbytes) == (True, 2, 2 * PAGE + 150)
    (part,) = divide_runs([run], (*pages, *rest))[0]
    assert [piece.member for piece in part.staged] == [2, 3]
    assert part.scratch_bytes == PAGE


def test_a_run_without_room_for_padding_is_not_direct() -> None:
    # Its padding would reach into the next expert.
    components = component("a", 0, PAGE, 2 * PAGE), component("b", PAGE, 2 * PAGE, 2 * PAGE)
    assert [run.direct for run in merge_runs(components)] == [True, True]
    assert not merge_runs([component("a", 0, 2 * PAGE + 1, 2 * PAGE)])[0].direct


@pytest.mark.parametrize("block", [PAGE, 2 * PAGE, 5 * PAGE])
def test_parts_of_a_record_are_its_blocks(tmp_path: Path, block: int) -> None:
    tensors = (Tensor("a", (2 * PAGE // 4,)), Tensor("b", (PAGE // 4 + 3,)), *MIXED, *PLAIN[1:])
    layer = write_packed(tmp_path / "packed", tensors, experts=3)
    (run,) = layer.record.runs
    jobs = divide_runs([run], layer.record.components, block=block)
    parts = [part for job in jobs for part in job]
    assert [part.begin for part in parts] == list(range(0, run.nbytes, block))
    for part in parts:
        assert sum(piece.nbytes for piece in (*part.straight, *part.staged)) == part.nbytes
        straight = sum(piece.nbytes for piece in part.straight)
        assert straight + part.scratch_bytes == -(-part.nbytes // PAGE) * PAGE
        assert all(piece.begin % PAGE == piece.end % PAGE == 0 for piece in part.straight)


@pytest.mark.parametrize("job_bytes", [PAGE, 3 * PAGE])
@pytest.mark.parametrize("direct", [True, False])
def test_a_record_with_an_odd_tail_is_read_in_parts(
    tmp_path: Path, drive: FakeDrive, job_bytes: int, direct: bool
) -> None:
    wide = Tensor("scales", (3 * PAGE,), "BF16", "F32")
    tensors = (Tensor("a", (2 * PAGE // 4,)), Tensor("b", (PAGE // 4 + 3,)), wide, *PLAIN[1:])
    layer = write_packed(tmp_path / "packed", tensors, experts=3)
    record = layer.record
    jobs = divide_runs(record.runs, record.components, job_bytes)
    object.__setattr__(record, "jobs", jobs)
    reader = RecordReader([record], direct=direct, preadv=drive)
    for expert in (2, 0):
        assert read(layer, reader, expert) == layer.expected(expert)
    assert len(drive.calls) == 2 * len(jobs) > 6
    assert {call.direct for call in drive.calls} == {direct}
    assert all(n % PAGE == 0 for call in drive.calls for n in call.lengths)
    reader.close()


def test_records_are_found_at_their_places(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "packed", PAGES, experts=4)
    moved = Record(0, 4, layer.record.components, place=(2, 0, 3, 1))
    reader = RecordReader([moved])
    rows = aligned_rows(moved)
    for expert, place in enumerate(moved.place or ()):
        reader.read(0, expert, rows)
        assert [bytes(row) for row in rows] == layer.expected(place)
    reader.close()


def checked(layer: Layer, block: int) -> Record:
    """The record with checksums of what the file holds."""
    (run,) = layer.record.runs
    values = []
    for expert in range(layer.record.experts):
        start = run.offset + expert * run.stride
        data = layer.content[start : start + run.nbytes]
        values.append(tuple(zlib.crc32(data[i : i + block]) for i in range(0, len(data), block)))
    checksums = Checksums(block, tuple(values))
    return Record(layer.record.layer, len(values), layer.record.components, checksums=checksums)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("tensors", [PLAIN, MIXED, PAGES, (*PAGES, *MIXED)])
def test_checksums_find_every_flipped_bit(
    tmp_path: Path, tensors: tuple[Tensor, ...], direct: bool
) -> None:
    path = tmp_path / "packed"
    layer = write_packed(path, tensors, experts=2, layer=5)
    record = checked(layer, PAGE)
    reader = RecordReader([record], direct=direct)
    assert read(layer, reader, 1) == layer.expected(1)
    (run,) = record.runs
    source = random.Random(run.nbytes)
    for _ in range(20):
        at = source.randrange(run.nbytes)
        content = bytearray(layer.content)
        content[run.stride + at] ^= 1 << source.randrange(8)
        path.write_bytes(content)
        with pytest.raises(ChecksumMismatch) as caught:
            reader.read(0, 1, aligned_rows(record))
        error = caught.value
        assert (error.layer, error.expert, error.path) == (5, 1, path)
        assert error.offset == run.stride + at // PAGE * PAGE
        reader.read(0, 0, aligned_rows(record))
    path.write_bytes(layer.content)
    assert read(layer, reader, 1) == layer.expected(1)
    reader.close()


# -- short reads and errors -------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 63, 64, 65, 75, 76, 83])
def test_a_short_read_is_completed(tmp_path: Path, first: int) -> None:
    layer = write_packed(tmp_path / "packed", MIXED, experts=2, skip=24)
    drive = FakeDrive()
    drive.shorten(0, first)
    drive.shorten(1, 1)
    reader = RecordReader([layer.record], preadv=drive)
    assert read(layer, reader, 1) == layer.expected(1)
    asked = [(call.offset - PAGE - 24, sum(call.lengths)) for call in drive.calls]
    assert asked[:2] == [(0, 84), (first, 84 - first)]
    assert len(asked) == (3 if first < 83 else 2)
    reader.close()


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 20))
@settings(deadline=None)
def test_remaining_is_what_lies_behind(lengths: list[int], done: int) -> None:
    whole = bytes(range(sum(lengths)))
    edges = np.cumsum([0, *lengths])
    buffers = [memoryview(whole)[a:b] for a, b in pairwise(edges)]
    assert b"".join(remaining(buffers, done)) == whole[done:]


def failure(layer: Layer, drive: FakeDrive, expert: int) -> ReadFailed:
    reader = RecordReader([layer.record], preadv=drive)
    with pytest.raises(ReadFailed) as caught:
        reader.read(0, expert, aligned_rows(layer.record))
    reader.close()
    return caught.value


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    layer = write_stacked(path, PLAIN, experts=3, layer=12)
    os.truncate(path, 60 + 20)
    error = failure(layer, FakeDrive(), 1)
    assert (error.layer, error.expert, error.component) == (12, 1, "up.weight")
    assert (error.path, error.offset) == (path, 60)
    assert error.problem == "the file ends 40 bytes early"
    assert isinstance(error.__cause__, EOFError)
    assert str(error) == (
        f"cannot read expert 1 of layer 12 (up.weight) from {path} at offset 60: "
        "the file ends 40 bytes early"
    )


def test_an_error_of_the_drive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    layer = write_stacked(path, PLAIN, experts=3, layer=4)
    drive = FakeDrive()
    drive.fail(1, errno.EIO)
    error = failure(layer, drive, 2)
    assert isinstance(error, MoestreamError)
    assert (error.layer, error.expert, error.component) == (4, 2, "up.scales")
    assert (error.path, error.offset, error.problem) == (path, 180 + 28, os.strerror(errno.EIO))
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.EIO
    assert os.strerror(errno.EIO) in str(error)


def test_an_error_while_completing_a_short_read_is_named(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "packed", PLAIN, experts=2)
    drive = FakeDrive()
    drive.shorten(0, 10)
    drive.fail(1, errno.ENXIO)
    assert failure(layer, drive, 0).problem == os.strerror(errno.ENXIO)


def test_the_reader_works_on_after_an_error(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "packed", MIXED, experts=2)
    drive = FakeDrive()
    drive.fail(0)
    reader = RecordReader([layer.record], preadv=drive)
    with pytest.raises(ReadFailed):
        reader.read(0, 1, aligned_rows(layer.record))
    assert read(layer, reader, 1) == layer.expected(1)
    reader.close()


# -- widening ---------------------------------------------------------------------------------

EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)


def test_bf16_is_widened_exactly_nan_payloads_too() -> None:
    row = bytearray(4 << 16)
    widen_into(memoryview(EVERY_PATTERN.tobytes()), "BF16", memoryview(row))
    got = np.frombuffer(row, np.uint32)
    np.testing.assert_array_equal(got, EVERY_PATTERN.astype(np.uint32) * 65536)


def test_f16_is_widened_exactly() -> None:
    row = bytearray(4 << 16)
    widen_into(memoryview(EVERY_PATTERN.tobytes()), "F16", memoryview(row))
    got = np.frombuffer(row, np.float32)
    np.testing.assert_array_equal(got, EVERY_PATTERN.view(np.float16).astype(np.float32))
    # Zeros have their signs; what is no NaN goes back to the bits it came from.
    numbers = ~np.isnan(got)
    np.testing.assert_array_equal(
        got.astype(np.float16).view(np.uint16)[numbers], EVERY_PATTERN[numbers]
    )


@pytest.mark.parametrize("code", ["BF16", "F16"])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_widening_takes_any_address(code: str, shift: int) -> None:
    source, row = bytearray(200 + shift), bytearray(400 + shift)
    source[shift:] = np.random.default_rng(0).bytes(200)
    widen_into(memoryview(source)[shift:], code, memoryview(row)[shift:])
    assert bytes(row[shift:]) == widened(bytes(source[shift:]), code)


def test_lanes_do_not_share_their_scratch(tmp_path: Path) -> None:
    tensors = [Tensor("scales", (4096,), "BF16", "F32")]
    layer = write_stacked(tmp_path / "experts", tensors, experts=8)
    drive = FakeDrive()
    together = threading.Barrier(8)

    def meet(_: ReadCall) -> None:
        together.wait(TIMEOUT)

    drive.before = meet
    reader = RecordReader([layer.record], preadv=drive)
    with ThreadPoolExecutor(8) as lanes:
        got = list(lanes.map(lambda expert: read(layer, reader, expert), range(8)))
    assert got == [layer.expected(expert) for expert in range(8)]
    reader.close()


@pytest.mark.parametrize("pooled", ["F16", "F32"])
def test_reading_allocates_nothing_but_small_objects(tmp_path: Path, pooled: str) -> None:
    megabyte = [Tensor("weight", (1 << 18,)), Tensor("scales", (1 << 15,), "F16", pooled)]
    layer = write_packed(tmp_path / "packed", megabyte, experts=2)
    reader = RecordReader([layer.record])
    rows = aligned_rows(layer.record)
    reader.read(0, 0, rows)  # makes the scratch of this lane
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(200):
            reader.read(0, number % 2, rows)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10
    reader.close()


# -- direct I/O -------------------------------------------------------------------------------


def test_direct_reads_of_a_real_file_system(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "packed", PAGES, experts=3)
    probe = open_direct(tmp_path / "packed")
    if probe is None:
        pytest.skip("no direct I/O here")
    os.close(probe)
    reader = RecordReader([layer.record])
    assert reader.direct_files == {tmp_path / "packed"}
    for expert in range(3):
        assert read(layer, reader, expert) == layer.expected(expert)
    reader.close()


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> FakeDrive:
    """A drive whose files can all be opened for direct reads."""
    fake = FakeDrive()
    monkeypatch.setattr(reader_module, "open_direct", fake.open_direct)
    return fake


@pytest.mark.parametrize("write", [write_stacked, write_packed])
@pytest.mark.parametrize(
    ("tensors", "skip", "expected"),
    [
        (PAGES, 0, True),
        (PAGES, 24, False),
        ((Tensor("scales", (PAGE // 2,), "BF16", "F32"),), 0, True),
    ],
    ids=["aligned", "unaligned offset", "widened"],
)
def test_direct_reads_are_used_where_alignment_allows(
    tmp_path: Path,
    drive: FakeDrive,
    write: Write,
    tensors: tuple[Tensor, ...],
    skip: int,
    expected: bool,
) -> None:
    layer = write(tmp_path / "experts", tensors, experts=3, skip=skip)
    reader = RecordReader([layer.record], preadv=drive)
    assert bool(reader.direct_files) == expected
    assert read(layer, reader, 2) == layer.expected(2)
    assert {call.direct for call in drive.calls} == {expected}
    reader.close()


@pytest.mark.parametrize(("write", "expected"), [(write_stacked, False), (write_packed, True)])
def test_odd_lengths_are_read_directly_where_they_are_padded(
    tmp_path: Path, drive: FakeDrive, write: Write, expected: bool
) -> None:
    layer = write(tmp_path / "experts", MIXED, experts=3)
    reader = RecordReader([layer.record], preadv=drive)
    assert bool(reader.direct_files) == expected
    assert read(layer, reader, 2) == layer.expected(2)
    assert {call.direct for call in drive.calls} == {expected}
    if expected:
        assert [call.lengths for call in drive.calls] == [(PAGE,)]
    reader.close()


def test_padding_may_lie_behind_the_end_of_the_file(tmp_path: Path, drive: FakeDrive) -> None:
    layer = write_packed(tmp_path / "packed", MIXED, experts=2)
    os.truncate(tmp_path / "packed", PAGE + 84)
    reader = RecordReader([layer.record], preadv=drive)
    assert read(layer, reader, 1) == layer.expected(1)
    assert len(drive.calls) == 1
    reader.close()


def test_direct_and_buffered_runs_of_one_file(tmp_path: Path, drive: FakeDrive) -> None:
    layer = write_stacked(tmp_path / "experts", [*PAGES, *PLAIN], experts=3)
    reader = RecordReader([layer.record], preadv=drive)
    assert read(layer, reader, 2) == layer.expected(2)
    assert [call.direct for call in drive.calls] == [True, True, False, False, False]
    reader.close()


def test_direct_reads_can_be_switched_off(tmp_path: Path, drive: FakeDrive) -> None:
    layer = write_packed(tmp_path / "packed", PAGES, experts=2)
    reader = RecordReader([layer.record], direct=False, preadv=drive)
    assert reader.direct_files == frozenset()
    assert read(layer, reader, 1) == layer.expected(1)
    reader.close()


def test_a_file_system_without_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = write_packed(tmp_path / "packed", PAGES, experts=2)
    monkeypatch.setattr(reader_module, "open_direct", lambda path: None)
    reader = RecordReader([layer.record])
    assert reader.direct_files == frozenset()
    assert read(layer, reader, 1) == layer.expected(1)
    reader.close()


def test_a_short_direct_read_is_completed_through_the_page_cache(
    tmp_path: Path, drive: FakeDrive
) -> None:
    layer = write_packed(tmp_path / "packed", PAGES, experts=2)
    drive.shorten(0, PAGE + 512)
    reader = RecordReader([layer.record], preadv=drive)
    assert read(layer, reader, 1) == layer.expected(1)
    assert [call.direct for call in drive.calls] == [True, False]
    assert drive.calls[1].lengths == (2 * PAGE - 512,)
    assert reader.direct_files  # one short read says nothing about the drive
    reader.close()


def test_a_drive_that_refuses_direct_reads_is_read_buffered(
    tmp_path: Path, drive: FakeDrive
) -> None:
    layer = write_packed(tmp_path / "packed", PAGES, experts=3)
    drive.refuse_direct = True
    reader = RecordReader([layer.record], preadv=drive)
    assert read(layer, reader, 1) == layer.expected(1)
    assert reader.direct_files == frozenset()
    assert read(layer, reader, 2) == layer.expected(2)
    assert [call.direct for call in drive.calls] == [True, False, False]
    reader.close()


def test_other_errors_of_direct_reads_are_errors(tmp_path: Path, drive: FakeDrive) -> None:
    layer = write_packed(tmp_path / "packed", PAGES, experts=3)
    drive.fail(0, errno.EIO)
    error = failure(layer, drive, 1)
    assert error.problem == os.strerror(errno.EIO)
    assert len(drive.calls) == 1


LANES = 8


def test_falling_back_leaves_the_descriptor_to_the_other_lanes(
    tmp_path: Path, drive: FakeDrive
) -> None:
    """One lane gets EINVAL and reads on buffered while seven are about to read the descriptor."""
    layer = write_packed(tmp_path / "packed", PAGES, experts=LANES)
    together = threading.Barrier(LANES)
    fallen_back = threading.Event()
    first = threading.local()

    def race(call: ReadCall) -> None:
        if not call.direct:
            return
        if together.wait(TIMEOUT) == 0:
            first.here = True
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        assert fallen_back.wait(TIMEOUT)

    drive.before = race
    reader = RecordReader([layer.record], preadv=drive)

    def lane(expert: int) -> list[bytes]:
        got = read(layer, reader, expert)
        if getattr(first, "here", False):
            fallen_back.set()
        return got

    with ThreadPoolExecutor(LANES) as lanes:
        got = list(lanes.map(lane, range(LANES)))
    assert got == [layer.expected(expert) for expert in range(LANES)]
    reader.close()


def test_falling_back_in_all_lanes_closes_no_foreign_descriptor(
    tmp_path: Path, drive: FakeDrive
) -> None:
    """Every lane gets EINVAL, one after another; new files are opened meanwhile."""
    layer = write_packed(tmp_path / "packed", PAGES, experts=LANES)
    together = threading.Barrier(LANES)
    turn = threading.Lock()
    foreign: list[int] = []

    def race(call: ReadCall) -> None:
        if call.direct:
            together.wait(TIMEOUT)
            with turn:  # a number that has been closed too early is given out again here
                foreign.append(os.open(tmp_path / "packed", os.O_RDONLY))

    drive.before = race
    drive.refuse_direct = True
    reader = RecordReader([layer.record], preadv=drive)
    with ThreadPoolExecutor(LANES) as lanes:
        got = list(lanes.map(lambda expert: read(layer, reader, expert), range(LANES)))
    assert got == [layer.expected(expert) for expert in range(LANES)]
    reader.close()
    assert len(set(foreign)) == LANES
    for descriptor in foreign:
        os.close(descriptor)  # fails if the reader has done it


# -- descriptors ------------------------------------------------------------------------------


def test_closing_gives_all_descriptors_back(tmp_path: Path, drive: FakeDrive) -> None:
    layers = [
        write_packed(tmp_path / "a", PAGES, experts=2),
        write_stacked(tmp_path / "b", PLAIN, experts=2),
        write_packed(tmp_path / "c", PAGES, experts=2),
    ]
    before = open_descriptors()
    reader = RecordReader([layer.record for layer in layers], preadv=drive)
    assert open_descriptors() == before + 5
    drive.refuse_direct = True
    assert read(layers[0], reader, 1) == layers[0].expected(1)
    reader.close()
    assert open_descriptors() == before
    reader.close()
    assert open_descriptors() == before


def test_a_missing_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    there = write_packed(tmp_path / "there", PAGES, experts=2)
    gone = write_packed(tmp_path / "gone", PAGES, experts=2)
    (tmp_path / "gone").unlink()
    before = open_descriptors()
    with pytest.raises(FileNotFoundError, match="gone"):
        RecordReader([there.record, gone.record])
    assert open_descriptors() == before


def test_a_model_without_streamed_layers_needs_no_file() -> None:
    before = open_descriptors()
    reader = RecordReader([])
    assert open_descriptors() == before
    reader.close()


# -- sizes ------------------------------------------------------------------------------------


def test_sizes_of_a_record(tmp_path: Path) -> None:
    record: Record = write_packed(tmp_path / "packed", MIXED, experts=2).record
    assert record.stored_bytes == 64 + 12 + 8
    assert record.pooled_bytes == 64 + 24 + 8
    assert [c.items for c in record.components] == [16, 6, 2]
    assert [c.widened for c in record.components] == [False, True, False]
