"""The drive measurement of `moestream doctor`: its table, its choice, and what it leaves behind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from moestream.io import drive
from moestream.io.drive import (
    ALIGNMENT,
    KIB,
    MIB,
    Cell,
    DriveError,
    DriveReport,
    Mode,
    measure,
)
from moestream.io.errors import MoestreamError

SIZES = (64 * KIB, 256 * KIB)
DEPTHS = (1, 3)
FILE_BYTES = 4 * MIB


def quick(
    path: Path,
    *,
    preadv: drive.Preadv = os.preadv,
    progress: drive.Progress | None = None,
    sizes: Sequence[int] = SIZES,
) -> DriveReport:
    return measure(
        path,
        sizes=sizes,
        depths=DEPTHS,
        seconds_per_cell=0.0,
        file_bytes=FILE_BYTES,
        progress=progress,
        preadv=preadv,
    )


def refuse(code: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("moestream-drive")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


# -- measuring


def test_every_cell_is_measured(tmp_path: Path) -> None:
    report = quick(tmp_path)

    modes: tuple[Mode, ...] = ("buffered",) if report.direct_refused else ("direct", "buffered")
    table = [(cell.mode, cell.size, cell.depth) for cell in report.cells]
    assert table == [(mode, size, depth) for mode in modes for size in SIZES for depth in DEPTHS]
    for cell in report.cells:
        assert cell.bytes_read >= cell.size * cell.depth
        assert report.bandwidth(cell.mode, cell.size, cell.depth) == cell.bandwidth > 0
    assert report.file_bytes == FILE_BYTES
    with pytest.raises(KeyError):
        report.bandwidth("buffered", 3, 3)


def test_temporary_file_is_gone(tmp_path: Path) -> None:
    quick(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_existing_file_is_only_read(file: Path) -> None:
    before = file.read_bytes(), file.stat().st_mtime_ns
    report = quick(file)
    assert report.path == file
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert list(file.parent.iterdir()) == [file]


def test_offsets_are_aligned_and_never_repeat_within_a_pass(file: Path) -> None:
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()

    def watching(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        with lock:
            seen.append((len(buffers[0]), offset))
        return os.preadv(descriptor, buffers, offset)

    report = measure(
        file,
        sizes=SIZES,
        depths=(2,),
        seconds_per_cell=60.0,  # a buffered cell ends when it has read all: no time limit needed
        file_bytes=FILE_BYTES,
        preadv=without_direct(watching),
    )
    assert report.direct_refused == os.strerror(errno.EINVAL)
    blocks = [(size, index * size) for size in SIZES for index in range(FILE_BYTES // size)]
    assert Counter(seen) == Counter(blocks)


def without_direct(preadv: drive.Preadv) -> drive.Preadv:
    """A file system that takes the flag for direct I/O and refuses the first read."""
    asked = iter([True])

    def lying(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(asked, False):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(descriptor, buffers, offset)

    return lying


def test_passes_cover_a_part_of_a_large_file() -> None:
    offsets = drive._Offsets(blocks=1_000_000, size=ALIGNMENT, per_pass=8, once=False)
    first, second = ({offsets.take() for _ in range(8)} for _ in range(2))
    assert len(first) == len(second) == 8
    assert first != second


def test_a_single_pass_ends() -> None:
    offsets = drive._Offsets(blocks=3, size=ALIGNMENT, per_pass=100, once=True)
    assert {offsets.take() for _ in range(3)} == {0, ALIGNMENT, 2 * ALIGNMENT}
    assert offsets.take() is None


def test_buffers_are_page_aligned(file: Path) -> None:
    def checking(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert np.frombuffer(buffers[0], np.uint8).ctypes.data % ALIGNMENT == 0
        return os.preadv(descriptor, buffers, offset)

    quick(file, preadv=checking)


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = quick(tmp_path, progress=lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == list(range(1, len(steps) + 1))
    assert steps[-1] == (len(report.cells) + 1, len(report.cells) + 1)  # 1: writing the file


def test_sizes_too_large_for_the_file_are_named(file: Path) -> None:
    report = quick(file, sizes=(64 * KIB, 2 * MIB))
    assert report.skipped_sizes == (2 * MIB,)
    assert {cell.size for cell in report.cells} == {64 * KIB}


@pytest.mark.parametrize(
    ("sizes", "depths", "file_bytes"),
    [
        ((), (1,), MIB),
        ((1000,), (1,), MIB),
        ((0,), (1,), MIB),
        ((ALIGNMENT,), (), MIB),
        ((ALIGNMENT,), (0,), MIB),
        ((MIB,), (4,), MIB),
    ],
)
def test_senseless_arguments(
    tmp_path: Path, sizes: tuple[int, ...], depths: tuple[int, ...], file_bytes: int
) -> None:
    with pytest.raises(ValueError, match="must"):
        measure(tmp_path, sizes=sizes, depths=depths, file_bytes=file_bytes)


# -- what goes wrong


def test_direct_refused_at_open(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "_open_direct", refuse(errno.EINVAL))
    report = quick(file)
    assert report.direct_refused == os.strerror(errno.EINVAL)
    assert {cell.mode for cell in report.cells} == {"buffered"}
    assert report.choice.mode == "buffered"
    assert os.strerror(errno.EINVAL) in report.choice.why


def test_cache_that_stays_is_noticed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.read_bytes()  # now in the page cache
    monkeypatch.setattr(drive, "_drop_cache", lambda _descriptor: None)
    assert not quick(file).cache_dropped


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MoestreamError, match=r"cannot open .*missing: No such file"):
        quick(tmp_path / "missing")


def test_file_too_small(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_bytes(b"tiny")
    with pytest.raises(DriveError, match="has 4 bytes; measuring takes a file of 192 KiB or more"):
        quick(tmp_path / "tiny")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DriveError, match="has 0 bytes"):
        quick(tmp_path / "empty")


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(DriveError, match="has 100 MiB free; measuring takes 260 MiB"):
        quick(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.ENOSPC, "is full"), (errno.EDQUOT, "is full"), (errno.EIO, "cannot write to")],
)
def test_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(code))
    with pytest.raises(DriveError, match=message):
        quick(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", refuse(errno.EACCES))
    with pytest.raises(DriveError, match=r"cannot write to .*: Permission denied"):
        quick(tmp_path)


def test_read_error_ends_the_measurement(tmp_path: Path) -> None:
    reads = iter(range(100))

    def breaking(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(reads) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, buffers, offset)

    with pytest.raises(
        DriveError, match=f"cannot read {re.escape(str(tmp_path))}: Input/output error"
    ):
        quick(tmp_path, preadv=breaking)
    assert list(tmp_path.iterdir()) == []


def test_file_that_shrinks(file: Path) -> None:
    reads = iter([0])

    def shrinking(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return next(reads, None) or 0

    with pytest.raises(DriveError, match="became shorter"):
        quick(file, preadv=shrinking)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_interrupt_leaves_nothing(tmp_path: Path, step: int) -> None:
    def interrupt(done: int, _total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    descriptors = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        quick(tmp_path, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == descriptors


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/dev/fd"))


# -- choosing


def report_of(
    *figures: tuple[Mode, int, float],
    size: int = 2 * MIB,
    refused: str | None = None,
    dropped: bool = True,
) -> DriveReport:
    """A report from (mode, depth, GB/s)."""
    cells = tuple(Cell(mode, size, depth, int(rate * 1e9), 1.0) for mode, depth, rate in figures)
    return DriveReport(Path("/ssd"), 1 << 30, cells, refused, dropped)


def test_fewest_lanes_within_five_percent() -> None:
    choice = report_of(
        ("direct", 1, 3.0), ("direct", 4, 6.7), ("direct", 8, 7.0), ("buffered", 8, 4.0)
    ).choice
    assert (choice.mode, choice.lanes, choice.bandwidth) == ("direct", 4, 6.7e9)
    assert choice.why == (
        "direct reads of 2 MiB reach 6.70 GB/s with 4 lanes, and no other number of lanes gains "
        "more than 5 %; buffered reads, which cost memory, reach 4.00 GB/s"
    )


def test_direct_wins_a_near_draw() -> None:
    assert report_of(("direct", 2, 3.85), ("buffered", 2, 4.0)).choice.mode == "direct"


def test_buffered_when_clearly_faster() -> None:
    choice = report_of(("direct", 2, 3.0), ("buffered", 1, 4.0)).choice
    assert (choice.mode, choice.lanes) == ("buffered", 1)
    assert choice.why.endswith("direct reads reach only 3.00 GB/s")


def test_speed_of_memory_is_no_argument() -> None:
    choice = report_of(("direct", 2, 3.0), ("buffered", 1, 40.0), dropped=False).choice
    assert choice.mode == "direct"


def test_only_memory_was_measured() -> None:
    choice = report_of(("buffered", 1, 40.0), refused="Invalid argument", dropped=False).choice
    assert choice.mode == "buffered"
    assert "Invalid argument" in choice.why
    assert "speed of memory" in choice.why


@pytest.mark.parametrize("size", [64 * KIB, 8 * MIB])
def test_without_the_typical_size(size: int) -> None:
    assert report_of(("direct", 2, 3.0), size=size).choice.lanes == 2


def test_json(tmp_path: Path) -> None:
    report = quick(tmp_path)
    read_back = json.loads(json.dumps(report.to_json()))
    assert read_back["cells"][0]["bandwidth"] == report.cells[0].bandwidth
    assert read_back["choice"]["lanes"] == report.choice.lanes
    assert read_back["path"] == str(tmp_path)
