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

from moestream.io.asks import Guess
from moestream.io.errors import ChecksumMismatch, ReadFailed
from moestream.io.queue import Entry
from moestream.io.reader import RecordReader
from moestream.io.records import PAGE, Checksums, Piece, Record
from moestream.runtime.cuda import Copy, first_device
from moestream.runtime.device import DevicePassage, SlotPassage, address_of, find_passage
from moestream.runtime.slots import SlotPool
from moestream.runtime.store import ExpertStore
from moestream.runtime.tracing import Tracer

from .fakes import FakeDrive, FakeLoop, Tensor, aligned_rows, write_packed, write_stacked

PLAIN = (Tensor("up.weight", (5, 3)), Tensor("up.scales", (7,), "F16"), Tensor("down", (3,), "U8"))
MIXED = (Tensor("up.weight", (4, 4)), Tensor("up.scales", (6,), "BF16", "F32"), Tensor("b", (2,)))
PAGES = (Tensor("up", (PAGE // 4,)), Tensor("down", (2, PAGE // 4)))
LARGE = (Tensor("up", (3 << 18,)), Tensor("down", (1 << 18,)), Tensor("b", (5,)))


class FakeDevice:
    """Host memory in the place of a device's; copies when it is told to, and keeps count.

    Attributes:
        batches: number of copies of each call.
        preferred: what was asked to be kept there.
        spare: memory that was given back.
        lent: how much is borrowed.
        refuse: what the next call of ``borrow`` or ``copy`` fails with.
        pageable: calls of ``copy`` that said so.
    """

    def __init__(self) -> None:
        self.refuse: str | None = None
        self.pageable = 0
        self.batches: list[int] = []
        self.preferred: list[tuple[int, int]] = []
        self.spare: list[memoryview] = []
        self.lent = 0

    def prefer(self, address: int, nbytes: int) -> None:
        self.preferred.append((address, nbytes))

    def _may_refuse(self) -> None:
        refuse, self.refuse = self.refuse, None
        if refuse:
            raise OSError(refuse)

    def borrow(self, nbytes: int) -> memoryview:
        self._may_refuse()
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

    def copy(self, pairs: Sequence[Copy], *, pinned: bool = True) -> None:
        self._may_refuse()
        self.batches.append(len(pairs))
        self.pageable += not pinned
        for target, source, nbytes in pairs:
            ctypes.memmove(target, source, nbytes)


def into(passage: DevicePassage, rows: Sequence[memoryview]) -> SlotPassage:
    return passage.into([address_of(row) for row in rows])


def fill(reader: RecordReader, record: Record, expert: int, passage: DevicePassage) -> list[bytes]:
    rows = aligned_rows(record)
    jobs = range(len(record.jobs))
    way = into(passage, rows)
    assert sum(reader.read_job(0, expert, j, rows, way) for j in jobs) == record.stored_bytes
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


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    return Broken(tmp_path)


class Broken:
    """An expert of two reads in one job, that can go wrong in several ways."""

    def __init__(self, folder: Path) -> None:
        self.layer = write_stacked(folder / "experts", PAGES, experts=2, layer=7)
        self.drive, self.device = FakeDrive(), FakeDevice()
        self.passage = DevicePassage(self.device)
        self.reader = RecordReader([self.layer.record], preadv=self.drive)
        self.rows = aligned_rows(self.layer.record)

    def read(self) -> ReadFailed:
        """The error of reading expert 1."""
        with pytest.raises(ReadFailed) as caught:
            self.reader.read_job(0, 1, 0, self.rows, into(self.passage, self.rows))
        assert (caught.value.layer, caught.value.expert) == (7, 1)
        assert caught.value.path == self.layer.record.components[0].path
        return caught.value

    def check_next(self) -> None:
        """The next job of the same lane is as ever, and nothing comes behind."""
        before = [bytes(row) for row in self.rows]
        batches = len(self.device.batches)
        assert fill(self.reader, self.layer.record, 0, self.passage) == self.layer.expected(0)
        assert [bytes(row) for row in self.rows] == before
        assert self.device.batches[batches:] == [2]
        assert self.device.lent == 1
        self.reader.close()


def test_a_failed_read_leaves_nothing_to_be_copied_later(broken: Broken) -> None:
    broken.drive.fail(1)
    assert broken.read().component == "down"
    assert broken.device.batches == []  # nor what was read before
    broken.check_next()


def test_an_error_of_the_device_does_not_hide_that_of_the_drive(broken: Broken) -> None:
    broken.drive.fail(1)
    broken.passage.enlarge(1)  # so that `borrow` is not what is refused
    broken.device.refuse = "no"
    error = broken.read()
    assert error.problem == "Input/output error"
    assert error.offset == broken.layer.record.components[1].offset + 2 * PAGE
    broken.device.refuse = None
    broken.check_next()


def test_a_refused_copy_is_told_with_its_place(broken: Broken) -> None:
    first = broken.layer.record.components[0]
    into(broken.passage, broken.rows).flush()  # nothing to copy: nothing can be refused
    broken.passage.enlarge(1)
    broken.device.refuse = "the driver refused; buy another GPU"
    error = broken.read()
    assert (error.component, error.offset) == ("up", first.offset + first.stride)
    assert str(error).endswith("the driver refused; buy another GPU")
    assert isinstance(error.__cause__, OSError)
    broken.check_next()


def test_refused_memory_is_told_with_its_place(broken: Broken) -> None:
    first = broken.layer.record.components[0]
    broken.device.refuse = "there is no memory; buy some"
    error = broken.read()
    assert (error.component, error.offset) == ("up", first.offset + first.stride)
    assert error.problem == "there is no memory; buy some"
    assert broken.device.lent == 0
    assert broken.drive.calls == []
    broken.check_next()


def test_a_copy_refused_for_want_of_room_is_told_with_its_place(tmp_path: Path) -> None:
    layer = write_stacked(tmp_path / "experts", PAGES, experts=2)
    reader, device = RecordReader([layer.record]), FakeDevice()
    passage, rows = DevicePassage(device), aligned_rows(layer.record)
    way = into(passage, rows)
    room = way.room(1 << 20)
    room[:PAGE] = bytes([9]) * PAGE
    way.send([Piece(0, 0, PAGE)])
    device.refuse = "no"
    with pytest.raises(ReadFailed, match=r": no$"):
        reader.read_job(0, 0, 0, rows, way)
    assert fill(reader, layer.record, 1, passage) == layer.expected(1)
    assert bytes(rows[0]) == bytes(PAGE)
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
        way = passage.into([])
        room = way.room(100)
        assert len(room) == 100
        assert address_of(room) % PAGE == 0
        assert address_of(way.room(5000)) == address_of(room) + PAGE
        way.flush()
        assert address_of(passage.into([]).room(100)) == address_of(room)
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
    way = into(passage, rows)
    for number, row in enumerate(rows):
        room = way.room(len(row))
        room[:] = bytes([number + 1]) * len(row)
        way.send([Piece(number, 0, len(row))])
    way.flush()
    assert [row[0] for row in rows] == [1, 2, 3, 4]
    assert device.batches == [1, 1, 1, 1]
    huge = way.room(5 << 20)
    assert len(huge) == 5 << 20
    del way
    assert device.lent == 1  # the smaller one has been given back


def test_pools_lie_on_the_device(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "experts", PAGES, experts=4)
    device = FakeDevice()
    pool = SlotPool(layer.record, 3, device)
    assert len(device.preferred) == len(pool.arrays)
    for slot in range(3):
        rows = pool.rows(slot)
        assert pool.addresses(slot) == [address_of(row) for row in rows]
        assert pool.widths == [len(row) for row in rows]
        for (address, nbytes), row in zip(device.preferred, rows, strict=True):
            assert address <= address_of(row) <= address + nbytes - len(row)


class Stage:
    """A store that has read expert 2 beside the slots, and is asked for it."""

    def __init__(self, folder: Path) -> None:
        self.layer = write_packed(folder / "experts", PAGES, experts=4, layer=7)
        self.reader, self.device = RecordReader([self.layer.record]), FakeDevice()
        self.store = ExpertStore(
            [self.layer.record],
            [2],
            self.reader,
            tracer=Tracer(None),
            staging_bytes=1 << 20,
            passage=DevicePassage(self.device),
        )
        self.loop = FakeLoop(self.store)
        self.store.connect(self.loop.as_loop())
        for expert in (1, 2):  # so that its place is not the first
            self.store.guess([Guess((0, expert), 1, 1.0, True)], owner=1, position=0, grant=0.0)
            place = self.store.begin(Entry((0, expert), False, 1, 1.0, {1}, 0, sure=True))
            assert place is not None
            self.loop.end((0, expert), place)
        assert self.device.batches == []

    def demand(self) -> tuple[int, BaseException | None]:
        """Its slot, and the error."""
        got = self.store.demand(0, [2], owner=1, position=1)
        assert got is not None
        while self.loop.queue:
            self.loop.step()
        (future,) = got.futures
        self.store.release(0, got.slots)
        return got.slots[0], future.exception()


def test_a_staged_record_is_copied_to_the_device(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    slot, error = stage.demand()
    assert error is None
    rows = stage.store.groups[0].pool.rows(slot)
    assert [bytes(row) for row in rows] == stage.layer.expected(2)
    assert (stage.device.batches, stage.device.pageable) == ([2], 1)
    stage.reader.close()


def test_a_refused_copy_of_a_staged_record_is_told_with_its_place(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.device.refuse = "the driver refused; buy another GPU"
    _, error = stage.demand()
    assert isinstance(error, ReadFailed)
    component = stage.layer.record.components[0]
    assert (error.layer, error.expert, error.component) == (7, 2, "up")
    assert (error.path, error.offset) == (component.path, component.offset + 2 * component.stride)
    assert error.problem == "the driver refused; buy another GPU"
    slot, error = stage.demand()  # it is read anew
    assert error is None
    rows = stage.store.groups[0].pool.rows(slot)
    assert [bytes(row) for row in rows] == stage.layer.expected(2)
    assert stage.device.pageable == 0
    stage.reader.close()


@pytest.mark.skipif(not mx.cuda.is_available(), reason="there is no such device")
def test_the_real_driver_copies_what_threads_read(tmp_path: Path) -> None:
    layer = write_packed(tmp_path / "experts", LARGE, experts=4)
    reader, passage = RecordReader([layer.record]), DevicePassage(first_device())
    pool = SlotPool(layer.record, 4, passage.device)

    def lane(expert: int) -> None:
        way = passage.into(pool.addresses(expert))
        for job in range(len(layer.record.jobs)):
            reader.read_job(0, expert, job, pool.rows(expert), way)

    for expert in range(3):
        thread = threading.Thread(target=lane, args=(expert,))
        thread.start()
        thread.join()
    staged = bytearray(b"".join(layer.expected(3)))
    passage.copy(address_of(memoryview(staged)), pool.addresses(3), pool.widths)
    for expert in range(4):
        assert [bytes(row) for row in pool.rows(expert)] == layer.expected(expert)
    reader.close()


@pytest.mark.skipif(mx.cuda.is_available(), reason="there is such a device")
def test_memory_that_is_shared_is_written_in_place() -> None:
    assert find_passage() is None
