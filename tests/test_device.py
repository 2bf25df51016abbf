"""Reads for a GPU with memory of its own: the way through a lane's memory to the slot."""

from __future__ import annotations

import ctypes
import gc
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from moestream.io.errors import ChecksumMismatch, ReadFailed
from moestream.io.reader import RecordReader
from moestream.io.records import PAGE, Checksums, Record
from moestream.runtime.cuda import Copy
from moestream.runtime.device import DevicePassage, address_of, find_passage
from moestream.runtime.store import ExpertStore
from moestream.runtime.tracing import Tracer

from .fakes import FakeDrive, Tensor, aligned_rows, write_packed, write_stacked

PLAIN = (Tensor("up.weight", (5, 3)), Tensor("up.scales", (7,), "F16"), Tensor("down", (3,), "U8"))
MIXED = (Tensor("up.weight", (4, 4)), Tensor("up.scales", (6,), "BF16", "F32"), Tensor("b", (2,)))
PAGES = (Tensor("up", (PAGE // 4,)), Tensor("down", (2, PAGE // 4)))
LARGE = (Tensor("up", (3 << 18,)), Tensor("down", (1 << 18,)), Tensor("b", (5,)))


class FakeDevice:
    """Host memory in the place of a device's; copies when it is told to, and keeps count."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.preferred: list[tuple[int, int]] = []
        self.spare: list[memoryview] = []
        self.lent = 0

    def prefer(self, address: int, nbytes: int) -> None:
        self.preferred.append((address, nbytes))

    def borrow(self, nbytes: int) -> memoryview:
        self.lent += 1
        while self.spare:
            memory = self.spare.pop()
            if len(memory) >= nbytes:
                return memory
        memory = memoryview(bytearray(nbytes + PAGE))
        skip = -address_of(memory) % PAGE
        return memory[skip : skip + nbytes]

    def give_back(self, memory: memoryview) -> None:
        self.lent -= 1
        self.spare.append(memory)

    def copy(self, pairs: Sequence[Copy]) -> None:
        self.batches.append(len(pairs))
        for target, source, nbytes in pairs:
            ctypes.memmove(target, source, nbytes)


def fill(reader: RecordReader, record: Record, expert: int, passage: DevicePassage) -> list[bytes]:
    rows = aligned_rows(record)
    jobs = range(len(record.jobs))
    assert sum(reader.read_job(0, expert, j, rows, passage) for j in jobs) == record.stored_bytes
    return [bytes(row) for row in rows]


@pytest.mark.parametrize("write", [write_stacked, write_packed])
@pytest.mark.parametrize(
    "tensors", [PLAIN, MIXED, PAGES, LARGE], ids=["plain", "mixed", "pages", "large"]
)
@pytest.mark.parametrize("direct", [True, False])
def test_the_bytes_are_those_that_the_drive_would_write(
    tmp_path: Path, write: object, tensors: tuple[Tensor, ...], direct: bool
) -> None:
    layer = write(tmp_path / "experts", tensors, experts=3)  # type: ignore[operator]
    reader = RecordReader([layer.record], direct=direct)
    passage = DevicePassage(FakeDevice())
    for expert in (0, 1, 2, 0):
        assert fill(reader, layer.record, expert, passage) == layer.expected(expert)
    reader.close()


def test_a_job_is_copied_in_one_batch(tmp_path: Path) -> None:
    layer = write_stacked(tmp_path / "experts", PAGES, experts=2)
    reader, device = RecordReader([layer.record]), FakeDevice()
    fill(reader, layer.record, 1, DevicePassage(device))
    assert device.batches == [sum(len(p.straight) for p in job) for job in layer.record.jobs]
    reader.close()


def test_short_reads_reach_the_slot_whole(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "experts", PAGES, experts=2)
    drive = FakeDrive()
    drive.shorten(0, 700)
    drive.shorten(1, PAGE + 1)
    reader = RecordReader([layer.record], preadv=drive)
    assert fill(reader, layer.record, 1, DevicePassage(FakeDevice())) == layer.expected(1)
    reader.close()


def test_a_failed_read_leaves_nothing_to_be_copied_later(tmp_path: Path) -> None:
    layer = write_stacked(tmp_path / "experts", PAGES, experts=2)
    device = FakeDevice()
    passage = DevicePassage(device)
    reader = RecordReader([layer.record])
    rows = aligned_rows(layer.record)
    good = reader.preadv
    calls = 0

    def second_fails(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(5, "Input/output error")
        return good(descriptor, buffers, offset)

    reader.preadv = second_fails
    with pytest.raises(ReadFailed):
        reader.read_job(0, 0, 0, rows, passage)
    reader.preadv = good
    batches = len(device.batches)
    assert fill(reader, layer.record, 1, passage) == layer.expected(1)
    assert bytes(rows[1]) == bytes(len(rows[1]))  # of the failed read nothing came behind
    assert len(device.batches) == batches + len(layer.record.jobs)
    reader.close()


def test_checksums_are_of_what_was_read(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "experts", PAGES, experts=2)
    right = zlib.crc32(b"".join(layer.expected(0)))
    sums = Checksums(layer.record.stored_bytes, ((right,), (right,)))
    record = replace(layer.record, checksums=sums)
    reader, passage = RecordReader([record]), DevicePassage(FakeDevice())
    assert fill(reader, record, 0, passage) == layer.expected(0)
    with pytest.raises(ChecksumMismatch):
        fill(reader, record, 1, passage)
    reader.close()


def test_a_lane_gives_its_memory_back_when_it_ends() -> None:
    device = FakeDevice()
    passage = DevicePassage(device)

    def lane() -> None:
        room = passage.room(100)
        assert len(room) == 100
        assert address_of(room) % PAGE == 0
        assert address_of(passage.room(5000)) == address_of(room) + PAGE
        passage.flush()
        assert address_of(passage.room(100)) == address_of(room)
        assert device.lent == 1

    for _ in range(3):
        thread = threading.Thread(target=lane)
        thread.start()
        thread.join()
        gc.collect()
        assert device.lent == 0
    assert len(device.spare) == 1


def test_parts_that_fill_the_memory_of_a_lane_are_sent_before_the_next() -> None:
    device = FakeDevice()
    passage = DevicePassage(device)
    rows = [memoryview(bytearray(700_000)) for _ in range(4)]
    for number, row in enumerate(rows):
        room = passage.room(len(row))
        room[:] = bytes([number + 1]) * len(row)
        passage.send(room, [row])
    passage.flush()
    assert [row[0] for row in rows] == [1, 2, 3, 4]
    assert device.batches == [1, 1, 1, 1]
    huge = passage.room(5 << 20)
    assert len(huge) == 5 << 20


def test_pools_lie_on_the_device_and_staged_records_are_copied_there(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "experts", PAGES, experts=4)
    reader, device = RecordReader([layer.record]), FakeDevice()
    passage = DevicePassage(device)
    store = ExpertStore([layer.record], [2], reader, tracer=Tracer(None), passage=passage)
    pool = store.groups[0].pool
    assert len(device.preferred) == len(pool.arrays)
    for (address, nbytes), row in zip(device.preferred, pool.rows(1), strict=True):
        assert address <= address_of(row) < address + nbytes
    staged = [memoryview(bytearray(row)) for row in layer.expected(2)]
    passage.copy(staged, pool.rows(1))
    assert [bytes(row) for row in pool.rows(1)] == layer.expected(2)
    reader.close()


@pytest.mark.skipif(mx.cuda.is_available(), reason="there is such a device")
def test_memory_that_is_shared_is_written_in_place() -> None:
    assert find_passage() is None
