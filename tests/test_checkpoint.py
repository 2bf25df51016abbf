"""Opening checkpoints: good ones are described exactly, each kind of bad one gets its own error."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from moestream.io import checkpoint as checkpoint_module
from moestream.io.checkpoint import Checkpoint, TensorRef, open_checkpoint, read_header
from moestream.io.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    MoestreamError,
)

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def entry(begin: Any, end: Any, *, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def shard_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_shard(path: Path, header: object, data: bytes = b"") -> Path:
    path.write_bytes(shard_bytes(header, data))
    return path


def write_index(directory: Path, weight_map: object) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def write_model(directory: Path, config: str = '{"model_type": "toy"}') -> Path:
    """A complete checkpoint of one shard with the tensors `a` (2 x 3 BF16) and `b` (4 U8)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config)
    header = {"a": entry(0, 12, dtype="BF16", shape=[2, 3]), "b": entry(12, 16)}
    write_shard(directory / "model.safetensors", header, bytes(range(16)))
    return directory


def write_two_shards(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    write_shard(directory / "model-00001-of-00002.safetensors", {"a": entry(0, 2)}, b"xy")
    write_shard(directory / "model-00002-of-00002.safetensors", {"b": entry(0, 1)}, b"z")
    return directory


def stored_bytes(tensor: TensorRef) -> bytes:
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


def make_link(path: Path, target: str | Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


# Good checkpoints


def test_describes_every_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_model(tmp_path)))
    path = tmp_path / "model.safetensors"
    start = path.stat().st_size - 16
    assert checkpoint.directory == tmp_path
    assert checkpoint.config == {"model_type": "toy"}
    assert checkpoint.files == (path,)
    assert dict(checkpoint.tensors) == {
        "a": TensorRef("a", path, start, 12, "BF16", (2, 3)),
        "b": TensorRef("b", path, start + 12, 4, "U8", (4,)),
    }
    assert checkpoint.total_bytes == 16


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "matrix": np.arange(12, dtype=np.uint32).reshape(3, 4),
        "bytes": np.arange(7, dtype=np.uint8),
    }
    write_model(tmp_path)
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    tensors = open_checkpoint(tmp_path).tensors
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert stored_bytes(tensors[name]) == array.tobytes()


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items())
def test_sizes_of_dtypes_agree_with_the_safetensors_library(
    tmp_path: Path, dtype: str, bits: int
) -> None:
    header = {"a": entry(0, bits, dtype=dtype, shape=[2, 4])}
    path = write_shard(tmp_path / "model.safetensors", header, bytes(bits))
    safetensors.deserialize(path.read_bytes())  # raises if it disagrees
    assert read_header(path)["a"].nbytes == bits


def test_takes_the_files_that_mlx_lm_takes(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_shard(tmp_path / "model-extra.safetensors", {"c": entry(0, 1)}, b"c")
    for name in ("consolidated.safetensors", "._model.safetensors", "model.safetensors.part"):
        (tmp_path / name).write_bytes(b"not read")
    checkpoint = open_checkpoint(tmp_path)
    assert [file.name for file in checkpoint.files] == [
        "model-extra.safetensors",
        "model.safetensors",
    ]
    assert list(checkpoint.tensors) == ["c", "a", "b"]


def test_what_is_found_cannot_be_changed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path))
    with pytest.raises(TypeError):
        checkpoint.tensors["c"] = checkpoint.tensors["a"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        checkpoint.files = ()  # type: ignore[misc]


def test_a_relative_path_outlives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("model")
    monkeypatch.chdir("/")
    assert stored_bytes(checkpoint.tensors["b"]) == bytes(range(12, 16))


@pytest.mark.parametrize(
    "header",
    [
        pytest.param({}, id="no tensors"),
        pytest.param(b'{"a": {"dtype":"U8","shape":[],"data_offsets":[0,1]}}   ', id="padded"),
        pytest.param({"a": entry(0, 1), "b": entry(3, 4)}, id="gap"),
        pytest.param({"a": entry(0, 1)}, id="bytes after the last tensor"),
        pytest.param({"a": entry(0, 4), "b": entry(2, 2)}, id="empty tensor inside another"),
        pytest.param({"b": entry(2, 4), "a": entry(0, 2)}, id="not in order"),
        pytest.param({"__metadata__": {"format": "mlx"}, "a": entry(0, 4)}, id="metadata"),
        pytest.param({"__metadata__": None, "a": entry(0, 4)}, id="metadata null"),
        pytest.param({"a": entry(0, 3, dtype="F6_E2M3", shape=[4])}, id="sub-byte dtype"),
        pytest.param({"a": entry(0, 0, shape=[0, 2**62])}, id="zero-size"),
        pytest.param({"å": entry(0, 1)}, id="name not ASCII"),
    ],
)
def test_accepts(tmp_path: Path, header: object) -> None:
    path = write_shard(tmp_path / "model.safetensors", header, b"data")
    for tensor in read_header(path).values():
        assert tensor.offset + tensor.nbytes <= path.stat().st_size


# Directories


@pytest.mark.parametrize("name", ["absent", "file/below", "nul\0byte"])
def test_no_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotFound, match="give"):
        open_checkpoint(tmp_path / name)


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(CheckpointNotFound, match="is not a directory"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_name_too_long(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="too long"):
        open_checkpoint(tmp_path / ("x" * 5000))


def test_no_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointNotFound, match=r"no config\.json"):
        open_checkpoint(tmp_path)


def test_no_shards(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    with pytest.raises(CheckpointNotFound, match=r"no files model\*\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON in UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[]", "not a JSON object"),
    ],
)
def test_a_bad_config(tmp_path: Path, content: bytes, problem: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=problem) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.path == tmp_path / "config.json"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_dangling_link(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    make_link(tmp_path / name, "../blobs/gone")
    with pytest.raises(CorruptCheckpoint, match="is a link to a file that is not there"):
        open_checkpoint(tmp_path)


def test_a_link_to_itself(tmp_path: Path) -> None:
    write_model(tmp_path)
    make_link(tmp_path / "model.safetensors", "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_shard_that_is_no_regular_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    write_model(tmp_path)
    make(tmp_path / "model-2.safetensors")
    with pytest.raises(CorruptCheckpoint, match="is not a regular file"):
        open_checkpoint(tmp_path)


def refuse(*_: object) -> Any:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("module", "function"), [(checkpoint_module, "open"), (os, "listdir"), (Path, "stat")]
)
def test_permission_denied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str
) -> None:
    write_model(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, function, refuse, raising=False)
        with pytest.raises(CheckpointError, match=r"Permission denied.*check") as caught:
            open_checkpoint(tmp_path)
    assert isinstance(caught.value.__cause__, PermissionError)
    assert str(tmp_path) in str(caught.value)


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", refuse)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint("model")


# The Hugging Face cache


def write_repository(directory: Path, *revisions: str, main: bytes | None = None) -> Path:
    """A repository folder of the hub cache: snapshots are folders of links into blobs/."""
    repository = directory / "models--org--name"
    blobs = write_model(repository / "blobs")
    for revision in revisions:
        snapshot = repository / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for blob in blobs.iterdir():
            (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    if main is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_bytes(main)
    return repository


def test_a_snapshot_of_links(tmp_path: Path) -> None:
    snapshot = write_repository(tmp_path, "abc") / "snapshots" / "abc"
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.files == (snapshot / "model.safetensors",)
    assert stored_bytes(checkpoint.tensors["b"]) == bytes(range(12, 16))


@pytest.mark.parametrize(
    ("revisions", "main", "chosen"),
    [
        (("abc", "def"), b"def", "def"),
        (("abc", "def"), b"abc\n", "abc"),
        (("abc",), None, "abc"),
        (("abc",), b"def", "abc"),
        (("abc",), b"\xff\x00", "abc"),
        (("abc",), b"../../blobs", "abc"),
    ],
)
def test_a_repository_of_the_hub_cache(
    tmp_path: Path, revisions: tuple[str, ...], main: bytes | None, chosen: str
) -> None:
    repository = write_repository(tmp_path, *revisions, main=main)
    (repository / "snapshots" / ".DS_Store").touch()
    assert open_checkpoint(repository).directory == repository / "snapshots" / chosen


def test_a_repository_with_a_choice_of_snapshots(tmp_path: Path) -> None:
    repository = write_repository(tmp_path, "abc", "def")
    with pytest.raises(CheckpointError, match="give one of them: abc, def"):
        open_checkpoint(repository)


def test_a_repository_without_snapshots(tmp_path: Path) -> None:
    repository = write_repository(tmp_path)
    (repository / "snapshots").mkdir()
    with pytest.raises(CheckpointNotFound, match="no snapshot"):
        open_checkpoint(repository)


def test_a_snapshot_without_config(tmp_path: Path) -> None:
    repository = write_repository(tmp_path, "abc")
    (repository / "snapshots" / "abc" / "config.json").unlink()
    with pytest.raises(CheckpointNotFound, match=r"abc: there is no config\.json"):
        open_checkpoint(repository)


# The index


def test_an_index_that_agrees(tmp_path: Path) -> None:
    write_two_shards(tmp_path)
    write_index(
        tmp_path,
        {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
            # mlx-lm neither downloads nor loads these:
            "draft": "mtp.safetensors",
            "part": "model/part.safetensors",
        },
    )
    assert open_checkpoint(tmp_path).tensors.keys() == {"a", "b"}


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    write_two_shards(tmp_path)
    names = {"a": "model-00001-of-00002.safetensors", "c": "model-00003-of-00003.safetensors"}
    index = write_index(tmp_path, names)
    with pytest.raises(CorruptCheckpoint, match=r"names shards .*model-00003") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.path == index


@pytest.mark.parametrize("name", ["absent", "b"])
def test_an_index_that_names_a_tensor_its_shard_lacks(tmp_path: Path, name: str) -> None:
    write_two_shards(tmp_path)
    write_index(tmp_path, {name: "model-00001-of-00002.safetensors"})
    with pytest.raises(CorruptCheckpoint, match=f"places tensor '{name}' in .*00001.*lacks"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": []}', "no weight_map"),
        (b'{"weight_map": {"a": 1}}', "not all file names"),
    ],
)
def test_a_bad_index(tmp_path: Path, content: bytes, problem: str) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=problem):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write_two_shards(tmp_path)
    write_shard(tmp_path / "model-copy.safetensors", {"a": entry(0, 1)}, b"x")
    with pytest.raises(CorruptCheckpoint, match=r"'a', which model-00001\S* holds too; move"):
        open_checkpoint(tmp_path)


# Malformed shards


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"{}" + b"}" * depth


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(b"", "has 0 bytes and no header", id="empty"),
        pytest.param(b"\x02\0\0\0", "has 4 bytes and no header", id="shorter than 8 bytes"),
        pytest.param(
            struct.pack("<Q", 100) + b"{}", "has 10 bytes .* end at byte 108", id="beyond the file"
        ),
        pytest.param(
            struct.pack("<Q", 3) + b"{}", "has 10 bytes .* end at byte 11", id="one byte beyond"
        ),
        pytest.param(
            struct.pack("<Q", 100_000_001) + b"{}", "would take 100000001 bytes", id="over 100 MB"
        ),
        pytest.param(b"\xff" * 64, "not a safetensors file", id="absurd length"),
        pytest.param(b"version https://git-lfs", "Git LFS pointer", id="Git LFS pointer"),
        pytest.param(shard_bytes(b""), "not valid JSON", id="empty header"),
        pytest.param(shard_bytes(b'{"a'), "not valid JSON", id="cut JSON"),
        pytest.param(shard_bytes(b'{"\xff":{}}'), "not valid JSON in UTF-8", id="not UTF-8"),
        pytest.param(shard_bytes(nested(100_000)), "not valid JSON", id="too deep"),
        pytest.param(shard_bytes(b"9" * 5000), "not valid JSON", id="too many digits"),
        pytest.param(shard_bytes([]), "not a JSON object", id="list"),
        pytest.param(shard_bytes(b"null"), "not a JSON object", id="null"),
        pytest.param(shard_bytes(b'{"a":{},"a":{}}'), "'a' occurs twice", id="duplicate tensor"),
        pytest.param(
            shard_bytes(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "'dtype' occurs twice", id="field"
        ),
        pytest.param(shard_bytes({"__metadata__": []}), "__metadata__", id="metadata list"),
        pytest.param(shard_bytes({"__metadata__": {"a": 1}}), "__metadata__", id="metadata value"),
    ],
)
def test_a_malformed_file(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=problem) as caught:
        read_header(path)
    assert caught.value.path == path
    assert str(path) in str(caught.value)


NOT_WHOLE_NUMBERS = "not a list of whole numbers"


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        pytest.param([], "JSON object", id="list"),
        pytest.param({}, "unknown dtype None", id="no fields"),
        pytest.param(entry(0, 4, dtype="F5"), "unknown dtype 'F5'", id="unknown dtype"),
        pytest.param(entry(0, 4, dtype=["U8"]), "unknown dtype", id="dtype list"),
        pytest.param({"dtype": "U8", "shape": [4]}, NOT_WHOLE_NUMBERS, id="no offsets"),
        pytest.param(entry(0, 4, shape=4), NOT_WHOLE_NUMBERS, id="shape number"),
        pytest.param(entry(0, 4, shape=[-1, -4]), NOT_WHOLE_NUMBERS, id="negative shape"),
        pytest.param(entry(0, 4, shape=[4.0]), NOT_WHOLE_NUMBERS, id="float shape"),
        pytest.param(entry(0, 1, shape=[True]), NOT_WHOLE_NUMBERS, id="bool shape"),
        pytest.param(entry(0, 4, shape=["4"]), NOT_WHOLE_NUMBERS, id="string shape"),
        pytest.param(entry(0, 4, shape=[2**63]), NOT_WHOLE_NUMBERS, id="large shape"),
        pytest.param(entry(0, 4, shape=[2**40] * 1000), "impossible shape", id="overflow"),
        pytest.param(entry(-4, 0, shape=[4]), NOT_WHOLE_NUMBERS, id="negative offset"),
        pytest.param(entry(0, 4.0, shape=[4]), NOT_WHOLE_NUMBERS, id="float offset"),
        pytest.param(entry(0, float("nan"), shape=[4]), NOT_WHOLE_NUMBERS, id="NaN offset"),
        pytest.param(entry(0, None, shape=[4]), NOT_WHOLE_NUMBERS, id="null offset"),
        pytest.param(
            {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}, "3 data_offsets", id="three"
        ),
        pytest.param(entry(4, 0, shape=[4]), "after its end", id="begin after end"),
        pytest.param(entry(0, 3, shape=[4]), "needs 4 bytes and has 3", id="size"),
        pytest.param(entry(0, 0, shape=[]), "needs 1 bytes and has 0", id="scalar size"),
        pytest.param(entry(0, 2, dtype="F4", shape=[3]), "whole bytes", id="half a byte"),
    ],
)
def test_a_malformed_tensor(tmp_path: Path, described: object, problem: str) -> None:
    path = write_shard(tmp_path / "model.safetensors", {"weight": described}, b"data")
    with pytest.raises(CorruptCheckpoint, match=f"tensor 'weight' .*{problem}"):
        read_header(path)


def test_a_name_that_cannot_be_printed(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "model.safetensors", {"\ud800": entry(0, 1)}, b"x")
    with pytest.raises(CorruptCheckpoint, match="not valid Unicode") as caught:
        read_header(path)
    str(caught.value).encode()


def test_long_values_do_not_make_long_messages(tmp_path: Path) -> None:
    header = {"n" * 10_000: entry(0, 4, dtype="D" * 10_000)}
    path = write_shard(tmp_path / "model.safetensors", header, b"data")
    with pytest.raises(CorruptCheckpoint) as caught:
        read_header(path)
    assert len(caught.value.problem) < 600


def test_a_cut_shard_says_how_much_is_missing(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 3)
    with pytest.raises(CorruptCheckpoint, match=f"has {size - 3} bytes .* describes {size}"):
        open_checkpoint(tmp_path)


def test_an_empty_tensor_beyond_the_end(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "model.safetensors", {"a": entry(5, 5)}, b"data")
    with pytest.raises(CorruptCheckpoint, match="cut off"):
        read_header(path)


@pytest.mark.parametrize(
    "other",
    [entry(0, 4), entry(1, 3), entry(3, 4), entry(0, 1)],
    ids=["same", "in", "end", "begin"],
)
def test_overlapping_tensors(tmp_path: Path, other: dict[str, Any]) -> None:
    header = {"a": entry(0, 4), "empty": entry(2, 2), "b": other}
    path = write_shard(tmp_path / "model.safetensors", header, b"data")
    with pytest.raises(CorruptCheckpoint, match=r"'[ab]' and '[ab]' overlap"):
        read_header(path)


def test_a_shard_that_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    full = os.stat(path)
    os.truncate(path, 20)
    monkeypatch.setattr(os, "fstat", lambda _: full)
    with pytest.raises(CorruptCheckpoint, match="ends after 12 of the"):
        read_header(path)


def test_a_shard_that_goes_away(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="is not there"):
        read_header(tmp_path / "model.safetensors")


# Anything at all

VALID = shard_bytes(
    {
        "__metadata__": {"format": "mlx"},
        "a": entry(0, 12, dtype="BF16", shape=[2, 3]),
        "b": entry(12, 16),
        "c": entry(16, 17, dtype="F4", shape=[2]),
    },
    bytes(17),
)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(DTYPE_BITS)) | json_values,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 9), min_size=2, max_size=2) | json_values,
    }
)


def check_outcome(content: bytes) -> None:
    """Opening must succeed with tensors that lie in the file, or fail with an error of ours."""
    with tempfile.TemporaryDirectory() as name:
        directory = write_model(Path(name))
        (directory / "model.safetensors").write_bytes(content)
        try:
            checkpoint = open_checkpoint(directory)
        except MoestreamError as error:
            assert name in str(error)
            str(error).encode()
        else:
            check_extents(checkpoint, len(content))


def check_extents(checkpoint: Checkpoint, size: int) -> None:
    end = 8
    for tensor in sorted(checkpoint.tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        assert tensor.offset + tensor.nbytes <= size
        assert tensor.offset >= end or tensor.nbytes == 0
        end = max(end, tensor.offset + tensor.nbytes)


@settings(deadline=None, max_examples=300)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.sampled_from(b'\0\xff"{}[],:-.019eU\\ ')),
        max_size=3,
    ),
    length=st.just(len(VALID)) | st.integers(0, len(VALID)),
)
def test_any_change_of_bytes_gives_success_or_our_error(
    changes: list[tuple[int, int]], length: int
) -> None:
    content = bytearray(VALID)
    for place, value in changes:
        content[place] = value
    check_outcome(bytes(content[:length]))


@settings(deadline=None, max_examples=200)
@given(header=json_values | st.dictionaries(st.text(max_size=4), entries | json_values))
def test_any_header_gives_success_or_our_error(header: object) -> None:
    check_outcome(shard_bytes(header, bytes(8)))
