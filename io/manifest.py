"""The manifest of a packed store, ``moestream.json``: what lies where, and its checksums."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import CheckpointError, CorruptCheckpoint, StoreMismatch
from .layout import Layout, StoredComponent
from .records import ITEM_BYTES, PAGE, Checksums

MANIFEST = "moestream.json"
FORMAT = 1
FILE_BLOCK = 16 << 20
"""Bytes of an ordinary file that one checksum covers."""

_SAMPLES = 64  # pages of each trunk file that its fingerprint looks at

Quantization = Mapping[str, int | str | bool]
"""The keys of mlx-lm's config: bits, group_size, mode, and global_scale where it is set."""


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The experts of one MoE layer in a packed store.

    Attributes:
        path: of mlx-lm's switch module in the model.
        layer: number of the transformer layer.
        experts: how many there are.
        file: with their records, relative to the store.
        layout: of a record.
        quantization: projection -> how it is quantized, None where it is not.
        place: of each expert among the records; None: in order.
        checksums: CRC-32 of the blocks of each expert's record, its padding left out.
    """

    path: str
    layer: int
    experts: int
    file: str
    layout: Layout
    quantization: Mapping[str, Quantization | None]
    place: tuple[int, ...] | None
    checksums: Checksums

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.experts * self.layout.stride

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": self.path,
            "layer": self.layer,
            "experts": self.experts,
            "file": self.file,
            "stride": self.layout.stride,
            "block": self.layout.block,
            "components": [
                {"name": c.name, "dtype": c.dtype, "shape": list(c.shape), "offset": c.offset}
                for c in self.layout.components
            ],
            "quantization": {
                name: None if value is None else dict(value)
                for name, value in self.quantization.items()
            },
            "place": None if self.place is None else list(self.place),
            "checksums": [encode_checksums(values) for values in self.checksums.values],
        }


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Any other file of the store: its name, size and the CRC-32 of its blocks."""

    name: str
    nbytes: int
    checksums: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        checksums = encode_checksums(self.checksums)
        return {"name": self.name, "nbytes": self.nbytes, "checksums": checksums}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a packed store consists of.

    Attributes:
        layers: in the order of the forward pass.
        trunk: the safetensors files with everything but the experts.
        files: config, tokenizer and so on.
        fingerprint: of the trunk, see ``fingerprint``.
        made_from: digest of the source and of the options that it was packed with.
    """

    layers: tuple[StoredLayer, ...]
    trunk: tuple[StoredFile, ...]
    files: tuple[StoredFile, ...]
    fingerprint: str
    made_from: str

    def to_bytes(self) -> bytes:
        """The content of the file."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "made_from": self.made_from,
            "layers": [layer.to_json() for layer in self.layers],
            "trunk": [file.to_json() for file in self.trunk],
            "files": [file.to_json() for file in self.files],
        }
        return json.dumps({**body, "checksum": _own_checksum(body)}, indent=1).encode()


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a packed store, checked against the files' sizes; None without one.

    Raises:
        CorruptCheckpoint: the manifest contradicts itself, or a file is missing or cut off.
        StoreMismatch: its version is unknown, or the trunk is not the one that was packed.
    """
    manifest = parse_manifest(directory)
    if manifest is None:
        return None
    sizes = {file.name: file.nbytes for file in manifest.trunk}
    sizes |= {layer.file: layer.file_bytes for layer in manifest.layers}
    for name, nbytes in sizes.items():
        problem = size_problem(directory / name, nbytes)
        if problem:
            raise CorruptCheckpoint(directory / name, problem, "pack the model again")
    present = sorted(path.name for path in directory.glob("model*.safetensors"))
    if present != sorted(file.name for file in manifest.trunk):
        raise StoreMismatch(directory, f"its trunk files are {present}, which it was not made with")
    if fingerprint([directory / file.name for file in manifest.trunk]) != manifest.fingerprint:
        raise StoreMismatch(directory, "its trunk is not the one that was packed with its experts")
    return manifest


def parse_manifest(directory: Path) -> Manifest | None:
    """As ``read_manifest``, without a look at the other files."""
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        body = json.loads(raw)
        version = body.get("format")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(path, f"is no JSON object ({error})", _AGAIN) from error
    if version != FORMAT:
        raise StoreMismatch(
            directory,
            f"its format is {version!r} and this moestream reads {FORMAT}",
            "use the moestream that packed it, or pack the model again",
        )
    if body.pop("checksum", None) != _own_checksum(body):
        raise CorruptCheckpoint(path, "has been changed since it was written", _AGAIN)
    try:
        return _parse(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(path, f"contradicts itself ({error!r})", _AGAIN) from error


_AGAIN = "pack the model again"


def fingerprint(files: Iterable[Path]) -> str:
    """Digest of safetensors files: sizes, headers and a sample of pages.

    It tells models of the same shape apart, since training changes nearly every page, and reads
    at most 256 KiB of a file besides its header. A flipped bit is the checksums' business.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(files):
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                prefix = file.read(8)
                header = file.read(min(int.from_bytes(prefix, "little"), size))
                digest.update(f"{path.name} {size} ".encode() + prefix + header)
                for number in range(_SAMPLES):
                    file.seek(size * number // _SAMPLES // PAGE * PAGE)
                    digest.update(file.read(PAGE))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()


def size_problem(path: Path, nbytes: int) -> str | None:
    """What is wrong with a file that should have so many bytes, in one clause."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return "is not there"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None if found == nbytes else f"has {found} bytes instead of {nbytes}"


def block_checksums(data: memoryview, block: int) -> tuple[int, ...]:
    """CRC-32 of each block: the fastest check of the standard library (6.6 GiB/s on the machine
    where blake2b reached 1.3 and SHA-256 1.9), and it finds every single flipped bit."""
    return tuple(zlib.crc32(data[at : at + block]) for at in range(0, len(data), block))


def encode_checksums(values: Sequence[int]) -> str:
    """Eight hexadecimal digits each."""
    return "".join(f"{value:08x}" for value in values)


def decode_checksums(text: str) -> tuple[int, ...]:
    """The inverse; ValueError for anything else."""
    if len(text) % 8:
        raise ValueError(text)
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))


def _own_checksum(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _parse(body: Mapping[str, Any]) -> Manifest:
    layers = tuple(parse_layer(entry) for entry in body["layers"])
    if len({layer.path for layer in layers}) != len(layers):
        raise ValueError("a layer occurs twice")
    return Manifest(
        layers=layers,
        trunk=tuple(parse_file(entry) for entry in body["trunk"]),
        files=tuple(parse_file(entry) for entry in body["files"]),
        fingerprint=str(body["fingerprint"]),
        made_from=str(body["made_from"]),
    )


def parse_file(entry: Mapping[str, Any]) -> StoredFile:
    """The inverse of ``StoredFile.to_json``; ValueError and the like for anything else."""
    nbytes, checksums = int(entry["nbytes"]), decode_checksums(entry["checksums"])
    if len(checksums) != -(-nbytes // FILE_BLOCK):
        raise ValueError(f"{len(checksums)} checksums for {nbytes} bytes")
    return StoredFile(_inside(entry["name"]), nbytes, checksums)


def parse_layer(entry: Mapping[str, Any]) -> StoredLayer:
    """The inverse of ``StoredLayer.to_json``; ValueError and the like for anything else."""
    layout = _parse_layout(entry)
    experts = int(entry["experts"])
    place = None if entry["place"] is None else tuple(entry["place"])
    if place is not None and sorted(place) != list(range(experts)):
        raise ValueError("the places of the experts are no permutation")
    values = tuple(decode_checksums(text) for text in entry["checksums"])
    blocks = -(-layout.nbytes // layout.block)
    if [len(each) for each in values] != [blocks] * experts:
        raise ValueError("wrong number of checksums")
    return StoredLayer(
        path=str(entry["path"]),
        layer=int(entry["layer"]),
        experts=experts,
        file=_inside(entry["file"]),
        layout=layout,
        quantization=dict(entry["quantization"]),
        place=place,
        checksums=Checksums(layout.block, values),
    )


def _parse_layout(entry: Mapping[str, Any]) -> Layout:
    at = 0
    components = []
    for given in entry["components"]:
        component = StoredComponent(
            str(given["name"]), str(given["dtype"]), tuple(given["shape"]), int(given["offset"])
        )
        if component.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {component.dtype!r}")
        if component.offset != at or component.nbytes < 0:
            raise ValueError(f"{component.name} lies at {component.offset} instead of {at}")
        at += component.nbytes
        components.append(component)
    layout = Layout(tuple(components), at, int(entry["stride"]), int(entry["block"]))
    if layout.stride % PAGE or layout.block % PAGE or layout.block <= 0 or at > layout.stride:
        raise ValueError(f"stride {layout.stride} or block {layout.block} does not fit")
    return layout


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} does not lie in the store")
    return name
