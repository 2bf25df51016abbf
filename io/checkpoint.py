"""Where every tensor of a checkpoint lies on disk, read from the safetensors headers alone.

A safetensors file is an 8-byte little-endian header length, a JSON header, then the data. Only the
first two are read here. Everything that a later read relies on is checked once, at opening: a
`TensorRef` always lies inside its file and has the size that its dtype and shape ask for.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from .errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint

__all__ = ["Checkpoint", "TensorRef", "open_checkpoint", "read_header"]

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000  # bytes; set by the format
_LARGEST = 2**63 - 1  # file offsets are signed 64-bit
_LFS_POINTER = b"version "  # how a Git LFS pointer begins, where the header length should be

# Every dtype that safetensors 0.8 knows. The 4- and 6-bit ones are packed without padding.
_DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "F4": 4,
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        **dict.fromkeys(("BOOL", "U8", "I8"), 8),
        **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
        **dict.fromkeys(("I32", "U32", "F32"), 32),
        **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    }
)

# Values from a broken file can be of any size; an error message should not be.
_repr = reprlib.Repr()
_repr.maxstring = 200
_repr.maxlist = 8
_quote = _repr.repr


class _Malformed(Exception):
    """What is wrong with one tensor's entry, as the end of a sentence about the tensor."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor on disk.

    Attributes:
        name: its key in the checkpoint.
        path: the file that holds it.
        offset: first byte, counted from the start of the file (not of the data section).
        nbytes: length in bytes; 0 when a dimension is 0.
        dtype: safetensors code, such as "BF16", "U32" or "F4".
        shape: dimensions in elements; empty for a scalar.
    """

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked model directory: what it is and where its bytes are.

    Attributes:
        directory: absolute path of the folder that holds the files.
        config: the parsed config.json.
        tensors: every tensor by name, in file order and then in header order.
        files: the shards, sorted by name; the set that mlx-lm loads.
    """

    directory: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorRef]
    files: tuple[Path, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together, headers and gaps not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Read and check the headers of a checkpoint; no tensor data is read.

    The shards are the files `model*.safetensors`, as in mlx-lm. Entries of the index for files of
    other names are not checked, since mlx-lm neither downloads nor loads such files.

    Args:
        directory: a model folder, or a repository folder of the Hugging Face cache
            (`models--org--name`), of which the snapshot named by `refs/main` is taken, or else
            the only one.

    Raises:
        CheckpointNotFound: no directory, or no config.json or no shards in it.
        CorruptCheckpoint: a file is cut off, contradicts itself, the index or another shard.
        CheckpointError: a file cannot be read, or the choice of a snapshot is open.
    """
    root = _locate(directory)
    config = _read_object(root / _CONFIG)
    files = _find_shards(root)
    tensors = _read_headers(files)
    _check_index(root / _INDEX, files, tensors)
    return Checkpoint(root, config, MappingProxyType(tensors), files)


def read_header(path: Path) -> dict[str, TensorRef]:
    """Read and check the header of one safetensors file.

    Gaps between tensors and bytes after the last one are accepted, as MLX accepts them.

    Returns:
        Its tensors by name, in header order.

    Raises:
        CorruptCheckpoint: the file is cut off or its header contradicts itself.
        CheckpointError: the file cannot be read.
    """
    size, raw = _read_raw_header(path)
    header = _parse_object(path, raw, "its header", _without_duplicates)
    _check_metadata(path, header.pop(_METADATA, None))
    start = _LENGTH_BYTES + len(raw)
    tensors = {name: _parse_tensor(path, name, entry, start) for name, entry in header.items()}
    _check_extents(path, tensors.values(), size)
    return tensors


# Finding the files


def _locate(directory: str | Path) -> Path:
    if "\0" in str(directory):
        raise CheckpointNotFound(f"{str(directory)!r} is not a path; give a model directory")
    root = _absolute(Path(directory))
    status = _stat(root)
    if status is None:
        raise CheckpointNotFound(f"{root}: no such directory; give the folder with {_CONFIG}")
    if not stat.S_ISDIR(status.st_mode):
        raise CheckpointNotFound(f"{root}: is not a directory; give the folder that holds it")
    if not _exists(root / _CONFIG) and _is_directory(root / "snapshots"):
        root = _choose_snapshot(root)
    if not _exists(root / _CONFIG):
        raise CheckpointNotFound(
            f"{root}: there is no {_CONFIG}; give the folder that holds it, "
            "or download the checkpoint again"
        )
    return root


def _choose_snapshot(repository: Path) -> Path:
    snapshots = repository / "snapshots"
    names = [name for name in _list(snapshots) if _is_directory(snapshots / name)]
    # The revision is only compared with names that exist: what the file says is no path.
    revision = _read_revision(repository / "refs" / "main")
    if revision in names:
        return snapshots / revision
    if not names:
        raise CheckpointNotFound(f"{snapshots}: holds no snapshot; download the model first")
    if len(names) > 1:
        raise CheckpointError(
            f"{snapshots}: refs/main names none of the {len(names)} snapshots; "
            f"give one of them: {', '.join(names)}"
        )
    return snapshots / names[0]


def _read_revision(path: Path) -> str:
    return _read(path).decode("utf-8", "replace").strip() if _exists(path) else ""


def _find_shards(directory: Path) -> tuple[Path, ...]:
    files = tuple(directory / name for name in _list(directory) if _is_shard_name(name))
    if not files:
        raise CheckpointNotFound(
            f"{directory}: there are no files model*.safetensors; "
            "download or convert the checkpoint to safetensors"
        )
    return files


def _is_shard_name(name: str) -> bool:
    return name.startswith("model") and name.endswith(".safetensors") and "/" not in name


# Reading one header


def _read_raw_header(path: Path) -> tuple[int, bytes]:
    """Size of the file in bytes, and the header's JSON text."""
    _require_file(path)
    with _readable(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = _read_header_length(path, file, size)
        raw = file.read(length)
    if len(raw) < length:
        raise CorruptCheckpoint(path, f"ends after {len(raw)} of the {length} bytes of its header")
    return size, raw


def _read_header_length(path: Path, file: BinaryIO, size: int) -> int:
    prefix = file.read(_LENGTH_BYTES)
    if len(prefix) < _LENGTH_BYTES:
        raise CorruptCheckpoint(path, f"is cut off: it has {len(prefix)} bytes and no header")
    if prefix == _LFS_POINTER:
        raise CorruptCheckpoint(path, "is a Git LFS pointer, not the file", "run `git lfs pull`")
    length = int.from_bytes(prefix, "little")
    if length > _HEADER_LIMIT:
        raise CorruptCheckpoint(
            path,
            f"is not a safetensors file: its header would take {length} bytes, "
            f"the format allows {_HEADER_LIMIT}",
        )
    if length > size - _LENGTH_BYTES:
        raise CorruptCheckpoint(
            path,
            f"is cut off: it has {size} bytes and its header alone "
            f"should end at byte {_LENGTH_BYTES + length}",
        )
    return length


def _parse_object(
    path: Path,
    raw: bytes,
    what: str,
    hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=hook)
    # ValueError: bad UTF-8, bad JSON, a duplicate key, or an integer of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(path, f"{what} is not valid JSON in UTF-8 ({error})") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(path, f"{what} is not a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {_quote(key)} occurs twice")
            seen.add(key)
    return result


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptCheckpoint(path, f"its {_METADATA} is not an object of strings")


def _parse_tensor(path: Path, name: str, entry: object, start: int) -> TensorRef:
    try:
        _check_name(name)
        dtype, shape, begin, end = _parse_entry(entry)
        _check_size(dtype, shape, begin, end)
    except _Malformed as error:
        raise CorruptCheckpoint(path, f"tensor {_quote(name)} {error}") from None
    return TensorRef(name, path, start + begin, end - begin, dtype, shape)


def _check_name(name: str) -> None:
    # A lone surrogate passes through JSON but can be neither printed nor stored.
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise _Malformed("has a name that is not valid Unicode")


def _parse_entry(entry: object) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise _Malformed("is not described by a JSON object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise _Malformed(f"has the unknown dtype {_quote(dtype)}")
    shape = _whole_numbers("shape", entry.get("shape"))
    offsets = _whole_numbers("data_offsets", entry.get("data_offsets"))
    if len(offsets) != 2:
        raise _Malformed(f"has {len(offsets)} data_offsets instead of 2")
    return dtype, shape, offsets[0], offsets[1]


def _whole_numbers(field: str, value: object) -> tuple[int, ...]:
    # `type(n) is int` and not isinstance: true and false are no numbers in JSON.
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n <= _LARGEST for n in value):
        raise _Malformed(f"has the {field} {_quote(value)}, not a list of whole numbers below 2^63")
    return tuple(value)


def _check_size(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> None:
    if begin > end:
        raise _Malformed(f"begins at {begin}, after its end at {end}")
    bits = _count_elements(shape) * _DTYPE_BITS[dtype]
    if bits % 8:
        raise _Malformed(f"({dtype} {_quote(list(shape))}) does not fill whole bytes")
    if bits // 8 != end - begin:
        raise _Malformed(
            f"({dtype} {_quote(list(shape))}) needs {bits // 8} bytes and has {end - begin}"
        )


def _count_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
        # Stops early: the product of a long list of large numbers would take hours.
        if count > _LARGEST:
            raise _Malformed(f"has the impossible shape {_quote(list(shape))}")
    return count


def _check_extents(path: Path, tensors: Iterable[TensorRef], size: int) -> None:
    """Check that all tensors lie in the file and that no two share a byte."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes))
    needed = max((tensor.offset + tensor.nbytes for tensor in ordered), default=0)
    if needed > size:
        raise CorruptCheckpoint(
            path, f"is cut off: it has {size} bytes and its header describes {needed}"
        )
    # An empty tensor shares no byte with anything, wherever it is said to lie.
    filled = [tensor for tensor in ordered if tensor.nbytes]
    for left, right in pairwise(filled):
        if left.offset + left.nbytes > right.offset:
            raise CorruptCheckpoint(
                path, f"tensors {_quote(left.name)} and {_quote(right.name)} overlap"
            )


# Putting the shards together


def _read_headers(files: tuple[Path, ...]) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    for path in files:
        header = read_header(path)
        for name in header.keys() & tensors.keys():
            raise CorruptCheckpoint(
                path,
                f"holds tensor {_quote(name)}, which {tensors[name].path.name} holds too",
                "move one of the two files away",
            )
        tensors.update(header)
    return tensors


def _check_index(path: Path, files: tuple[Path, ...], tensors: Mapping[str, TensorRef]) -> None:
    if not _exists(path):
        return
    expected = _read_weight_map(path)
    missing = sorted(set(expected.values()) - {file.name for file in files})
    if missing:
        raise CorruptCheckpoint(
            path,
            f"names shards that are not there: {_quote(missing)}",
            "download them, or delete the index if the checkpoint is complete without them",
        )
    for name, shard in expected.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.path.name != shard:
            raise CorruptCheckpoint(
                path, f"places tensor {_quote(name)} in {_quote(shard)}, which lacks it"
            )


def _read_weight_map(path: Path) -> dict[str, str]:
    """File name by tensor name, for the files that count as shards."""
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptCheckpoint(path, "has no weight_map")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CorruptCheckpoint(path, "has a weight_map whose values are not all file names")
    return {name: shard for name, shard in weight_map.items() if _is_shard_name(shard)}


# The file system, with its errors turned into ours


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(
            f"{path}: cannot be read ({reason}); check the path, its permissions and the drive"
        ) from error


def _absolute(path: Path) -> Path:
    with _readable(path):
        return path.absolute()


def _stat(path: Path) -> os.stat_result | None:
    """Status of what the path leads to, links followed; None when nothing is there."""
    with _readable(path):
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _exists(path: Path) -> bool:
    """Whether there is such a name; a dangling link is one, so that reading it reports it."""
    return _stat(path) is not None or path.is_symlink()


def _is_directory(path: Path) -> bool:
    status = _stat(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _list(directory: Path) -> list[str]:
    with _readable(directory):
        return sorted(os.listdir(directory))


def _require_file(path: Path) -> None:
    # Before opening: to open a named pipe would wait for a writer for ever.
    status = _stat(path)
    if status is None:
        what = "is a link to a file that is not there" if path.is_symlink() else "is not there"
        raise CorruptCheckpoint(path, what)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpoint(path, "is not a regular file")


def _read(path: Path) -> bytes:
    _require_file(path)
    with _readable(path), open(path, "rb") as file:
        return file.read()


def _read_object(path: Path) -> dict[str, Any]:
    return _parse_object(path, _read(path), "its content")
