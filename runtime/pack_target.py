"""The directory that a store grows in, and how it becomes the store in one step."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..io.disk import Disk, write_file
from ..io.errors import CheckpointError
from ..io.journal import Journal, JournalBusy
from ..io.manifest import (
    FILE_BLOCK,
    MANIFEST,
    StoredFile,
    StoredLayer,
    block_checksums,
    parse_file,
    parse_layer,
    parse_manifest,
)
from ..io.verify import verify_file, verify_layer
from .errors import NotEnoughSpace, PackError, TargetExists

JOURNAL = "pack.journal"
CONFIG = "config.json"

T = TypeVar("T")


class Target:
    """A store being made beside its final place.

    It grows in ``DST.partial``, which has no config.json until everything else is on the drive, so
    nothing opens it. The journal in it lists the finished files; a later call with the same source
    and options takes those over whose bytes are still what was written.

    Attributes:
        directory: where it grows.
        complete: whether only the last renaming was missing when it was opened.
    """

    def __init__(self, disk: Disk, path: Path, made_from: str, *, force: bool) -> None:
        self._disk = disk
        self._path = path
        self._made_from = made_from
        self.directory = path.with_name(path.name + ".partial")
        self._replaced = path.with_name(path.name + ".replaced")
        check_target(path, force=force)
        self._prepare(force)
        self.complete = self._is_complete()
        self._journal: Journal | None = None

    def _prepare(self, force: bool) -> None:
        directory = self.directory
        if any(path.is_file() for path in directory.rglob("*")):
            if not ((directory / JOURNAL).exists() or (directory / MANIFEST).exists()):
                raise TargetExists(f"{directory} exists and is no unfinished store; move it away")
            if not self._continues():
                if not force:
                    raise TargetExists(
                        f"{directory} was begun with other options or from another source; give "
                        "--force to begin anew, or pack elsewhere"
                    )
                with self._lock():  # refuses while another process writes it
                    shutil.rmtree(directory)
        (directory / "experts").mkdir(parents=True, exist_ok=True)

    def _continues(self) -> bool:
        """Whether what is there was begun with the same source and options, or not at all."""
        try:
            lines = (self.directory / JOURNAL).read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return self._is_complete()
        if not lines or not lines[0].endswith(b"\n"):
            return True  # killed before the first line was written
        try:
            found = json.loads(lines[0])
        except ValueError:
            return False
        return isinstance(found, dict) and found.get("made_from") == self._made_from

    def _is_complete(self) -> bool:
        if (self.directory / JOURNAL).exists() or not (self.directory / CONFIG).exists():
            return False
        try:
            manifest = parse_manifest(self.directory)
        except CheckpointError:
            return False
        return manifest is not None and manifest.made_from == self._made_from

    def _lock(self) -> Journal:
        try:
            return Journal(self._disk, self.directory / JOURNAL)
        except JournalBusy as error:
            raise PackError(
                f"another process is packing into {self.directory}; wait until it has ended"
            ) from error

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the journal."""
        with self._lock() as journal:
            self._journal = journal
            if not journal.entries:
                journal.add({"made_from": self._made_from})
                self._disk.sync_directory(self.directory)
                self._disk.sync_directory(self.directory.parent)
            yield

    # -- what is finished -----------------------------------------------------------------------

    def finished_layers(self, advance: Callable[[int], None]) -> dict[str, StoredLayer]:
        """Path of the switch module -> its layer, where the file is still what was written.

        Args:
            advance: called with the bytes of each.
        """
        found = {}
        for path, layer in {x.path: x for x in self._entries("layer", parse_layer)}.items():
            if not verify_layer(self.directory, layer):
                found[path] = layer
                advance(layer.file_bytes)
        return found

    def finished_files(self) -> dict[str, StoredFile]:
        """Name -> trunk file, where it is still what was written."""
        files = {x.name: x for x in self._entries("trunk", parse_file)}
        return {name: x for name, x in files.items() if not verify_file(self.directory, x)}

    def _entries(self, key: str, parse: Callable[[Any], T]) -> list[T]:
        assert self._journal is not None
        found = []
        for entry in self._journal.entries:
            if key in entry:
                try:
                    found.append(parse(entry[key]))
                except (KeyError, TypeError, ValueError, AttributeError):
                    continue  # done again
        return found

    def keep_only(self, names: set[str]) -> None:
        """Delete what else lies in the directory: files that were never finished."""
        for path in self.directory.rglob("*"):
            name = path.relative_to(self.directory).as_posix()
            if path.is_file() and name not in names and name != JOURNAL:
                self._disk.remove(path)

    def add_layer(self, layer: StoredLayer) -> None:
        """A layer's file is written."""
        self._add({"layer": layer.to_json()}, self.directory / "experts")

    def add_trunk(self, file: StoredFile) -> None:
        """A trunk file is written."""
        self._add({"trunk": file.to_json()}, self.directory)

    def _add(self, entry: dict[str, Any], directory: Path) -> None:
        assert self._journal is not None
        self._disk.sync_directory(directory)
        self._journal.add(entry)

    def write(self, name: str, data: bytes) -> None:
        """Write one of the small files."""
        write_file(self._disk, self.directory / name, [data])

    # -- the end --------------------------------------------------------------------------------

    def publish(self) -> None:
        """Make the finished directory the store, in one step."""
        disk = self._disk
        if (self.directory / JOURNAL).exists():
            disk.sync_directory(self.directory)
            disk.remove(self.directory / JOURNAL)
        disk.sync_directory(self.directory)
        if self._path.exists() and any(self._path.iterdir()):
            if self._replaced.exists():
                shutil.rmtree(self._replaced)
            disk.rename(self._path, self._replaced)
        disk.rename(self.directory, self._path)
        disk.sync_directory(self._path.parent)
        if self._replaced.exists():
            shutil.rmtree(self._replaced)


def check_target(path: Path, *, force: bool) -> None:
    """Refuse a place where something else lies.

    Raises:
        TargetExists: something that is no packed store, or a store without ``force``.
        PackError: the directory for it is not there.
    """
    if not path.parent.is_dir():
        raise PackError(f"{path.parent} is no directory; make it first")
    if not path.exists():
        if path.is_symlink():
            raise TargetExists(f"{path} is a link to nowhere; remove it")
        return
    if not path.is_dir() or path.is_symlink():
        raise TargetExists(f"{path} exists and is no directory; give another place")
    if not any(path.iterdir()):
        return
    if not (path / MANIFEST).is_file():
        raise TargetExists(f"{path} exists and is no packed store; give another place")
    if not force:
        raise TargetExists(f"{path} exists; give another place, or --force to replace it")


@contextmanager
def drive_errors(target: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Turn what the system says about the drive into our errors.

    Args:
        target: the store.
        needed: bytes still to be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(target.parent).free
            raise NotEnoughSpace(target, needed(), free, begun=True) from error
        name = f" {error.filename}" if error.filename else ""
        raise PackError(
            f"cannot pack into {target}: {error.strerror or error}{name}; the same command again "
            "goes on where this one stopped"
        ) from error


def checked_file(name: str, data: bytes) -> StoredFile:
    """The manifest's entry of a small file."""
    return StoredFile(name, len(data), block_checksums(memoryview(data), FILE_BLOCK))
