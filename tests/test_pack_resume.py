"""Packing that is killed, meets a full drive, or is done twice: nothing half ever opens."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moestream import CheckpointError
from moestream.io.checkpoint import open_checkpoint
from moestream.io.disk import Disk
from moestream.io.journal import Journal
from moestream.io.manifest import parse_manifest
from moestream.io.verify import verify_store
from moestream.runtime import pack_layer, pack_target, packing, trunk
from moestream.runtime.errors import NotEnoughSpace, PackError, TargetExists
from moestream.runtime.pack_options import PackOptions
from moestream.runtime.packing import Packed, pack_model

from . import zoo
from .fakes import TIMEOUT

POINTS = 20


class Killed(BaseException):
    """The process is gone: nothing of ours catches this."""


class FaultyDisk(Disk):
    """A drive that counts its operations and lets a fault happen at one of them.

    A write is half done when the fault comes; anything else has not happened.
    """

    def __init__(self, fault: Callable[[], None] | None = None, at: int = -1) -> None:
        self.count = 0
        self._fault = fault
        self._at = at

    def _turn(self) -> bool:
        self.count += 1
        return self.count - 1 == self._at and self._fault is not None

    def _maybe(self) -> None:
        if self._turn():
            assert self._fault is not None
            self._fault()

    def create(self, path: Path) -> int:
        self._maybe()
        return super().create(path)

    def append(self, path: Path) -> int:
        self._maybe()
        return super().append(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        if self._turn():
            super().write(descriptor, data[: len(data) // 2])
            assert self._fault is not None
            self._fault()
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._maybe()
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._maybe()
        super().remove(path)


def kill() -> None:
    raise Killed


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("source") / "m")


@dataclass(frozen=True)
class Whole:
    """An uninterrupted pack."""

    content: dict[str, bytes]
    operations: int
    packed: Packed


def content_of(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


OPTIONS = PackOptions(bits="gate=4,up=4", group_size=32)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Several trunk files, and several writes for each file."""
    patch.setattr(trunk, "SHARD_BYTES", 150_000)
    for module in (trunk, pack_layer):
        patch.setattr(module, "WRITE_BYTES", 50_000)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    disk = FaultyDisk()
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        store = tmp_path_factory.mktemp("whole") / "store"
        packed = pack_model(source, store, OPTIONS, disk=disk)
    assert not list(store.parent.glob("store.*"))
    assert sum(name.endswith(".safetensors") for name in content_of(store)) > 2
    return Whole(content_of(store), disk.count, packed)


def nothing_opens(store: Path) -> None:
    """Neither the place of the store nor the unfinished directory is a model."""
    assert not store.exists()
    partial = store.with_name(store.name + ".partial")
    if (partial / "config.json").exists() and not (partial / pack_target.JOURNAL).exists():
        return  # all is written, only the name is not the right one yet
    with pytest.raises(CheckpointError):
        open_checkpoint(partial)


def points(count: int, seed: int = 0) -> list[int]:
    return sorted(random.Random(seed).sample(range(count), POINTS))


@pytest.mark.parametrize("nth", range(POINTS))
def test_a_killed_pack_goes_on(nth: int, source: Path, whole: Whole, tmp_path: Path) -> None:
    at = points(whole.operations)[nth]
    store = tmp_path / "store"
    with pytest.raises(Killed):
        pack_model(source, store, OPTIONS, disk=FaultyDisk(kill, at))
    nothing_opens(store)
    second = FaultyDisk()
    packed = pack_model(source, store, OPTIONS, disk=second)
    assert content_of(store) == whole.content
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    # What was finished is not written again.
    assert second.count < whole.operations + 3
    if at > whole.operations // 2:
        assert packed.resumed > 0 or second.count < whole.operations // 2


def test_killed_again_and_again(source: Path, whole: Whole, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = []
    for _ in range(100):
        try:
            done.append(pack_model(source, store, OPTIONS, disk=FaultyDisk(kill, 31)).resumed)
            break
        except Killed:
            nothing_opens(store)
    assert done
    assert content_of(store) == whole.content


def test_a_process_that_is_killed(source: Path, whole: Whole, tmp_path: Path) -> None:
    store = tmp_path / "store"
    code = f"""
import os, signal
from pathlib import Path
from moestream.runtime import pack_layer, packing, trunk
from moestream.runtime.pack_options import PackOptions
from tests.test_pack_resume import FaultyDisk, OPTIONS
trunk.SHARD_BYTES, trunk.WRITE_BYTES, pack_layer.WRITE_BYTES = 150_000, 50_000, 50_000
disk = FaultyDisk(lambda: os.kill(os.getpid(), signal.SIGKILL), {whole.operations * 2 // 3})
packing.pack_model(Path({str(source)!r}), Path({str(store)!r}), OPTIONS, disk=disk)
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=TIMEOUT, check=False)
    assert done.returncode == -signal.SIGKILL
    nothing_opens(store)
    packed = pack_model(source, store, OPTIONS)
    assert packed.resumed == packed.layers
    assert content_of(store) == whole.content


def test_an_unfinished_layer_is_done_again(source: Path, whole: Whole, tmp_path: Path) -> None:
    """Bytes of a finished layer that have changed meanwhile are found; those are redone, too."""
    store = tmp_path / "store"
    with pytest.raises(Killed):
        pack_model(source, store, OPTIONS, disk=FaultyDisk(kill, whole.operations * 2 // 3))
    (first, *_) = sorted((tmp_path / "store.partial" / "experts").iterdir())
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 4
    first.write_bytes(data)
    packed = pack_model(source, store, OPTIONS)
    assert packed.resumed == packed.layers - 1
    assert content_of(store) == whole.content


# -- replacing ----------------------------------------------------------------------------------


def test_a_killed_replacement_loses_neither_store(
    source: Path, whole: Whole, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    pack_model(source, old)
    before = content_of(old)
    operations = whole.operations + 1  # one renaming more
    late = range(operations - 8, operations)
    for at in [*points(whole.operations, seed=1)[:6], *late]:
        store = tmp_path / f"at{at}" / "store"
        shutil.copytree(old, store)
        with pytest.raises(Killed):
            pack_model(source, store, OPTIONS, force=True, disk=FaultyDisk(kill, at))
        if store.exists():
            assert content_of(store) in (before, whole.content)
        else:  # between two renamings: both are there
            assert content_of(store.with_name("store.replaced")) == before
            assert content_of(store.with_name("store.partial")) == whole.content
        pack_model(source, store, OPTIONS, force=True)
        assert content_of(store) == whole.content
        assert [path.name for path in store.parent.iterdir()] == ["store"]


def test_a_store_is_not_replaced_unless_asked(source: Path, whole: Whole, tmp_path: Path) -> None:
    store = tmp_path / "store"
    pack_model(source, store)
    before = content_of(store)
    with pytest.raises(TargetExists, match=r"exists; give another place, or --force"):
        pack_model(source, store, OPTIONS)
    assert content_of(store) == before
    pack_model(source, store, OPTIONS, force=True)
    assert content_of(store) == whole.content


def test_what_is_no_store_is_never_replaced(source: Path, tmp_path: Path) -> None:
    for name in ("store", "store.partial"):
        place = tmp_path / name / name
        place.mkdir(parents=True)
        (place / "precious").write_text("kept")
        with pytest.raises(TargetExists, match="is no"):
            pack_model(source, tmp_path / name / "store", force=True)
        assert content_of(place) == {"precious": b"kept"}
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(TargetExists, match="is no directory"):
        pack_model(source, file, force=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TargetExists, match="link"):
        pack_model(source, tmp_path / "link", force=True)


def test_an_empty_directory_is_filled(source: Path, whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    pack_model(source, tmp_path / "store", OPTIONS)
    assert content_of(tmp_path / "store") == whole.content


def test_other_options_do_not_go_on(source: Path, whole: Whole, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(Killed):
        pack_model(source, store, disk=FaultyDisk(kill, 40))
    with pytest.raises(TargetExists, match="other options or from another source"):
        pack_model(source, store, OPTIONS)
    other = zoo.make_checkpoint("qwen3_moe", tmp_path / "other", seed=1)
    with pytest.raises(TargetExists, match="other options or from another source"):
        pack_model(other, store)
    assert pack_model(source, store, OPTIONS, force=True).resumed == 0
    assert content_of(store) == whole.content


def test_two_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(Killed):
        pack_model(source, store, disk=FaultyDisk(kill, 40))
    journal = tmp_path / "store.partial" / pack_target.JOURNAL
    with Journal(Disk(), journal):
        for force in (False, True):
            with pytest.raises(PackError, match="another process is packing"):
                pack_model(source, store, OPTIONS if force else None, force=force)
    assert pack_model(source, store).resumed > 0


def test_the_source_is_not_the_target(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    pack_model(source, store)
    before = content_of(store)
    with pytest.raises(ValueError, match="is the source itself"):
        pack_model(store, store, force=True)
    assert content_of(store) == before


# -- full drives --------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(0, POINTS, 3))
def test_a_full_drive(nth: int, source: Path, whole: Whole, tmp_path: Path) -> None:
    at = points(whole.operations, seed=2)[nth]
    store = tmp_path / "store"
    with pytest.raises(NotEnoughSpace) as caught:
        pack_model(source, store, OPTIONS, disk=FaultyDisk(full, at))
    assert "the drive is full" in str(caught.value)
    assert "goes on where this one stopped" in str(caught.value)
    nothing_opens(store)
    pack_model(source, store, OPTIONS)
    assert content_of(store) == whole.content


def test_room_is_looked_for_beforehand(
    source: Path, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    total = whole.packed.expert_bytes + whole.packed.trunk_bytes
    free = total + packing.SPARE - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    disk = FaultyDisk()
    with pytest.raises(NotEnoughSpace) as caught:
        pack_model(source, tmp_path / "store", OPTIONS, disk=disk)
    assert (caught.value.needed, caught.value.free) == (free + 1, free)
    assert not list((tmp_path / "store.partial" / "experts").iterdir())
    nothing_opens(tmp_path / "store")
    free += 1
    pack_model(source, tmp_path / "store", OPTIONS)


def test_room_for_what_is_left_is_enough(
    source: Path, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        pack_model(
            source, tmp_path / "store", OPTIONS, disk=FaultyDisk(kill, whole.operations * 2 // 3)
        )
    usage = shutil.disk_usage(tmp_path)
    free = whole.packed.trunk_bytes + packing.SPARE
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    assert pack_model(source, tmp_path / "store", OPTIONS).resumed == whole.packed.layers


def test_other_errors_of_the_drive_are_told(source: Path, tmp_path: Path) -> None:
    def fault() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(PackError, match=os.strerror(errno.EIO)):
        pack_model(source, tmp_path / "store", disk=FaultyDisk(fault, 30))
    with pytest.raises(PackError, match="is no directory; make it first"):
        pack_model(source, tmp_path / "no" / "store")


def test_a_drive_that_takes_a_few_bytes_at_a_time(
    source: Path, whole: Whole, tmp_path: Path
) -> None:
    class Slow(Disk):
        def write(self, descriptor: int, data: memoryview) -> int:
            return super().write(descriptor, data[: max(len(data) // 3, 1)])

    pack_model(source, tmp_path / "store", OPTIONS, disk=Slow())
    assert content_of(tmp_path / "store") == whole.content


# -- progress, and what lies in a store -----------------------------------------------------------


def test_progress_counts_every_byte_once(source: Path, whole: Whole, tmp_path: Path) -> None:
    total = whole.packed.expert_bytes + whole.packed.trunk_bytes
    seen: list[tuple[int, int]] = []

    def progress(done: int, of: int) -> None:
        seen.append((done, of))

    with pytest.raises(Killed):
        pack_model(
            source,
            tmp_path / "store",
            OPTIONS,
            progress=progress,
            disk=FaultyDisk(kill, whole.operations // 2),
        )
    reached = seen[-1][0]
    assert 0 < reached < total
    seen.clear()
    pack_model(source, tmp_path / "store", OPTIONS, progress=progress)
    counts: Sequence[int] = [done for done, _ in seen]
    assert counts == sorted(counts)
    assert seen[-1] == (total, total)
    assert {of for _, of in seen} == {total}


def test_a_store_holds_what_belongs_to_the_model(demo: Path, tmp_path: Path) -> None:
    pack_model(demo, tmp_path / "store")
    names = set(content_of(tmp_path / "store"))
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "MODEL_CARD.md",
        "model.safetensors.index.json",
        "moestream.json",
        "experts/layer-000.bin",
    } <= names
    manifest: Any = parse_manifest(tmp_path / "store")
    named = {file.name for file in (*manifest.files, *manifest.trunk)}
    named |= {layer.file for layer in manifest.layers}
    assert names == named | {"moestream.json"}
    assert verify_store(tmp_path / "store").damages == ()
