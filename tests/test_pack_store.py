"""Packed stores that are damaged or put together wrongly: found, named, refused."""

from __future__ import annotations

import json
import os
import random
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from moestream import (
    CheckpointNotFound,
    ChecksumMismatch,
    CorruptCheckpoint,
    Engine,
    InvalidRequest,
    PrefetchConfig,
    ReadFailed,
    StoreMismatch,
    UnsupportedModel,
)
from moestream.io.disk import Disk, FileWriter
from moestream.io.journal import Journal
from moestream.io.layout import StoredComponent, lay_out
from moestream.io.manifest import (
    FILE_BLOCK,
    MANIFEST,
    Manifest,
    _own_checksum,
    block_checksums,
    decode_checksums,
    encode_checksums,
    parse_manifest,
)
from moestream.io.reader import RecordReader
from moestream.io.records import PAGE
from moestream.io.verify import verify_store
from moestream.runtime import core
from moestream.runtime.assembly import draw_blueprint
from moestream.runtime.hub import resolve_model
from moestream.runtime.pack_options import PackOptions
from moestream.runtime.packed import check_manifest
from moestream.runtime.packing import pack_model

from . import zoo
from .reference import make_prompt

pytestmark = pytest.mark.one_loop


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a small quantized model; tests work on copies."""
    folder = tmp_path_factory.mktemp("packed")
    source = zoo.make_checkpoint("qwen3_moe", folder / "source")
    pack_model(source, folder / "store", PackOptions(bits="4", group_size=32))
    return folder / "store"


@pytest.fixture
def store(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "store"))


def manifest_of(store: Path) -> Manifest:
    manifest = parse_manifest(store)
    assert manifest is not None
    return manifest


def edit(store: Path, change: Any) -> None:
    """Change the manifest as somebody would who knows about its checksum."""
    body = json.loads((store / MANIFEST).read_bytes())
    del body["checksum"]
    change(body)
    body["checksum"] = _own_checksum(body)
    (store / MANIFEST).write_text(json.dumps(body))


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# -- verify -------------------------------------------------------------------------------------


def test_a_sound_store_is_found_sound(store: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify_store(store, lambda done, total: seen.append((done, total)))
    manifest = manifest_of(store)
    assert report.damages == ()
    assert report.records == sum(layer.experts for layer in manifest.layers)
    names = [path for path in store.rglob("*") if path.is_file() and path.name != MANIFEST]
    assert report.nbytes == sum(path.stat().st_size for path in names)
    assert seen[-1] == (report.nbytes, report.nbytes)


def test_every_flipped_bit_is_found_and_named(store: Path) -> None:
    source = random.Random(0)
    layers = {layer.file: layer for layer in manifest_of(store).layers}
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.name != MANIFEST)
    for path in files * 4:
        name = path.relative_to(store).as_posix()
        before = path.read_bytes()
        at = source.randrange(len(before))
        flip(path, at, source.randrange(8))
        (damage,) = verify_store(store).damages
        path.write_bytes(before)
        assert damage.file == name
        assert damage.offset is not None
        if name in layers:
            layer = layers[name]
            assert (damage.layer, damage.expert) == (layer.layer, at // layer.layout.stride)
            assert damage.offset <= at < damage.offset + layer.layout.stride
            assert str(damage).startswith(
                f"layer {layer.layer}, expert {damage.expert}: {name} at offset {damage.offset}: "
            )
        else:
            assert (damage.layer, damage.expert) == (None, None)
            assert damage.offset == at // FILE_BLOCK * FILE_BLOCK
    assert verify_store(store).damages == ()


def test_padding_counts_for_verify(demo: Path, tmp_path: Path) -> None:
    pack_model(demo, tmp_path / "store")
    layer = manifest_of(tmp_path / "store").layers[3]
    assert layer.layout.nbytes < layer.layout.stride
    flip(tmp_path / "store" / layer.file, 2 * layer.layout.stride - 1)
    (damage,) = verify_store(tmp_path / "store").damages
    assert (damage.layer, damage.expert) == (3, 1)
    assert damage.offset == layer.layout.stride + layer.layout.nbytes
    assert "padding" in damage.problem


def test_experts_in_another_order_are_named_rightly(demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "routing.csv"
    rows = [
        f"{step},{layer},{rank},{expert}"
        for step in range(3)
        for layer in range(12)
        for rank, expert in enumerate((5, 9))
    ]
    trace.write_text("\n".join(["step,layer,slot,expert", *rows]))
    pack_model(demo, tmp_path / "store", PackOptions(order=trace))
    layer = manifest_of(tmp_path / "store").layers[2]
    assert layer.place is not None
    assert (layer.place[5], layer.place[9], layer.place[0]) == (0, 1, 2)
    flip(tmp_path / "store" / layer.file, layer.layout.stride + 7)
    (damage,) = verify_store(tmp_path / "store").damages
    assert (damage.layer, damage.expert, damage.offset) == (2, 9, layer.layout.stride)


def test_files_that_are_gone_or_cut_off_are_named(store: Path) -> None:
    layer = manifest_of(store).layers[1]
    (store / layer.file).unlink()
    trunk = store / "model.safetensors"
    trunk.write_bytes(trunk.read_bytes()[:-1])
    damages = verify_store(store).damages
    assert [(d.file, d.layer, d.offset) for d in damages] == [
        (layer.file, layer.layer, None),
        ("model.safetensors", None, None),
    ]
    assert damages[0].problem == "is not there"
    assert "instead of" in damages[1].problem


def test_verify_wants_a_store(demo: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="moestream pack"):
        verify_store(demo)


# -- reading with checksums ---------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
async def test_a_flipped_bit_fails_the_read(store: Path, direct: bool) -> None:
    layer = manifest_of(store).layers[-1]
    path = store / layer.file
    sound = path.read_bytes()
    for expert in range(layer.experts):
        flip(path, expert * layer.layout.stride + 100)
    options: Any = {"slots": 4, "direct": direct}
    async with await Engine.open(store, checksum=True, **options) as engine:
        with pytest.raises(ChecksumMismatch) as caught:
            await engine.generate(make_prompt(3), max_tokens=2, ignore_eos=True)
        error = caught.value
        assert isinstance(error, ReadFailed)
        assert (error.layer, error.path) == (layer.layer, path)
        assert error.offset == error.expert * layer.layout.stride
        assert f"expert {error.expert} of layer {layer.layer}" in str(error)
        assert str(error).endswith("are not those that were packed; pack the model again")
        engine.check_integrity(idle=True)
        path.write_bytes(sound)  # the engine goes on
        result = await engine.generate(make_prompt(3), max_tokens=2, ignore_eos=True)
        assert engine.statistics().read_errors > 0
    async with await Engine.open(store, slots=4) as engine:
        again = await engine.generate(make_prompt(3), max_tokens=2, ignore_eos=True)
    assert again.tokens == result.tokens


async def test_a_flipped_bit_goes_unnoticed_without_checksums(store: Path) -> None:
    """What `checksum` is for: the other half of the test above."""
    layer = manifest_of(store).layers[-1]
    for expert in range(layer.experts):
        flip(store / layer.file, expert * layer.layout.stride + 100)
    async with await Engine.open(store, slots=4) as engine:
        await engine.generate(make_prompt(3), max_tokens=2, ignore_eos=True)
        assert engine.statistics().read_errors == 0


async def test_layers_held_whole_are_checked_when_opened(store: Path) -> None:
    layer = manifest_of(store).layers[0]
    flip(store / layer.file, 3 * layer.layout.stride)
    with pytest.raises(ChecksumMismatch) as caught:
        await Engine.open(store, memory="all", checksum=True)
    assert (caught.value.layer, caught.value.expert) == (layer.layer, 3)


@pytest.mark.parametrize("options", [{"memory": "all"}, {"slots": 4}], ids=str)
async def test_loading_a_store_is_told_step_by_step(store: Path, options: Any) -> None:
    seen: list[tuple[int, int]] = []
    async with await Engine.open(
        store, progress=lambda done, total: seen.append((done, total)), **options
    ) as engine:
        trunk_bytes = engine.statistics().trunk_bytes
    done = [count for count, _ in seen]
    assert done == sorted(set(done))
    assert seen[-1] == (trunk_bytes, trunk_bytes)
    assert len(seen) == (1 if "slots" in options else 1 + len(manifest_of(store).layers))


async def test_checksums_need_a_store(demo: Path) -> None:
    with pytest.raises(InvalidRequest, match="needs a packed store"):
        await Engine.open(demo, slots=4, checksum=True)


async def test_a_file_that_ends_early_is_told(store: Path) -> None:
    """Cut off while the engine is open: at opening it would have been refused."""
    layer = manifest_of(store).layers[-1]
    async with await Engine.open(store, slots=4) as engine:
        os.truncate(store / layer.file, 0)
        with pytest.raises(ReadFailed, match=r"ends .* bytes early"):
            await engine.generate(make_prompt(3), max_tokens=2, ignore_eos=True)


# -- what does not fit is refused ---------------------------------------------------------------


def refuse(store: Path, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        draw_blueprint(store)


def test_the_trunk_of_another_model_is_refused(store: Path, tmp_path: Path) -> None:
    other = zoo.make_checkpoint("qwen3_moe", tmp_path / "other", seed=1)
    pack_model(other, tmp_path / "second", PackOptions(bits="4", group_size=32))
    shutil.copy(tmp_path / "second" / "model.safetensors", store / "model.safetensors")
    refuse(store, StoreMismatch, "trunk is not the one that was packed with its experts")


def test_a_manifest_of_another_model_is_refused(store: Path, tmp_path: Path) -> None:
    other = zoo.make_checkpoint("qwen3_moe", tmp_path / "other", seed=1)
    pack_model(other, tmp_path / "second", PackOptions(bits="4", group_size=32))
    shutil.copy(tmp_path / "second" / MANIFEST, store / MANIFEST)
    refuse(store, StoreMismatch, "trunk is not the one")


def test_one_more_trunk_file_is_refused(store: Path) -> None:
    shutil.copy(store / "model.safetensors", store / "model-2.safetensors")
    (store / "model.safetensors.index.json").unlink()
    refuse(store, CorruptCheckpoint, "holds tensor")
    (store / "model-2.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    refuse(store, StoreMismatch, "its trunk files are")


def test_a_changed_manifest_is_refused(store: Path) -> None:
    text = (store / MANIFEST).read_text()
    (store / MANIFEST).write_text(text.replace('"layer": 1,', '"layer": 7,', 1))
    refuse(store, CorruptCheckpoint, "has been changed since it was written")
    (store / MANIFEST).write_text(text[:-10])
    refuse(store, CorruptCheckpoint, "is no JSON object")
    (store / MANIFEST).write_text("[]")
    refuse(store, CorruptCheckpoint, "is no JSON object")


def test_a_later_format_is_refused(store: Path) -> None:
    edit(store, lambda body: body.update(format=2))
    refuse(store, StoreMismatch, "its format is 2 and this moestream reads 1")


@pytest.mark.parametrize("damage", ["gone", "short", "long"])
def test_files_of_the_wrong_size_are_refused(store: Path, damage: str) -> None:
    path = store / manifest_of(store).layers[0].file
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:-1] if damage == "short" else data + b"x")
    refuse(store, CorruptCheckpoint, "is not there" if damage == "gone" else "instead of")


def change_layer(**values: Any) -> Any:
    return lambda body: body["layers"][0].update(values)


def change_component(**values: Any) -> Any:
    return lambda body: body["layers"][0]["components"][1].update(values)


@pytest.mark.parametrize(
    "change",
    [
        change_layer(file="../elsewhere.bin"),
        change_layer(file="/etc/passwd"),
        change_layer(stride=PAGE + 1),
        change_layer(block=100),
        change_layer(block=0),
        change_layer(place=[0, 0]),
        change_layer(checksums=[]),
        change_layer(experts="many"),
        change_layer(components=None),
        change_component(offset=1),
        change_component(dtype="F8"),
        change_component(shape=[1 << 20]),
        lambda body: body["layers"].append(body["layers"][0]),
        lambda body: body["trunk"][0].update(checksums="xyz"),
        lambda body: body["trunk"][0].update(nbytes=1 << 40),
        lambda body: body.pop("trunk"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(store: Path, change: Any) -> None:
    edit(store, change)
    refuse(store, CorruptCheckpoint, "contradicts itself")


def test_a_config_that_quantizes_otherwise_is_refused(store: Path) -> None:
    path = store / "config.json"
    config = json.loads(path.read_text())
    entry = config["quantization"]["model.layers.1.mlp.switch_mlp.up_proj"]
    assert entry == {"bits": 4, "group_size": 32, "mode": "affine"}
    entry["bits"] = 8
    path.write_text(json.dumps(config))
    refuse(store, StoreMismatch, "mlx-lm makes no model of its config and manifest")


def test_a_manifest_that_quantizes_otherwise_is_refused(store: Path) -> None:
    edit(store, lambda body: body["layers"][0]["quantization"]["up_proj"].update(mode="mxfp4"))
    refuse(store, StoreMismatch, "up_proj was packed as .*mxfp4.* and its config says .*affine")


@pytest.mark.parametrize(
    "change", [{"num_experts": 6}, {"num_hidden_layers": 2}, {"moe_intermediate_size": 64}], ids=str
)
def test_a_config_of_another_model_is_refused(store: Path, change: dict[str, int]) -> None:
    path = store / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    refuse(store, StoreMismatch, "mlx-lm makes no model of its config and manifest")


def test_a_config_without_entries_will_do(store: Path) -> None:
    """mlx-lm finds the same from the shapes of the tensors."""
    path = store / "config.json"
    config = json.loads(path.read_text())
    plain = {"group_size": 32, "bits": 4, "mode": "affine"}
    path.write_text(json.dumps({**config, "quantization": plain, "quantization_config": plain}))
    assert draw_blueprint(store).manifest == manifest_of(store)


def test_a_module_that_holds_no_experts_is_refused(store: Path) -> None:
    manifest = manifest_of(store)
    with pytest.raises(StoreMismatch, match="is no expert module of its model"):
        check_manifest(store, manifest, [])


def test_an_unknown_model_type_is_told_as_such(store: Path) -> None:
    path = store / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "nonsense"}))
    refuse(store, UnsupportedModel, "nonsense")


# -- the pieces ---------------------------------------------------------------------------------


def test_layout_puts_whole_pages_first_and_large_items_next() -> None:
    given = [
        StoredComponent("bytes", "U8", (PAGE + 3,)),
        StoredComponent("scales", "BF16", (PAGE // 2,)),
        StoredComponent("halves", "F16", (5,)),
        StoredComponent("weight", "U32", (PAGE // 4, 3)),
        StoredComponent("words", "U32", (7,)),
    ]
    layout = lay_out(given)
    assert [c.name for c in layout.components] == ["weight", "scales", "words", "halves", "bytes"]
    assert [c.offset for c in layout.components] == [
        0,
        3 * PAGE,
        4 * PAGE,
        4 * PAGE + 28,
        4 * PAGE + 38,
    ]
    assert layout.nbytes == 5 * PAGE + 41
    assert layout.stride == 6 * PAGE
    assert layout.block == 6 * PAGE


def test_large_records_have_equal_blocks() -> None:
    layout = lay_out([StoredComponent("weight", "U8", (2_700_000,))])
    assert layout.block % PAGE == 0
    blocks = -(-layout.nbytes // layout.block)
    assert blocks == 3
    assert layout.nbytes - (blocks - 1) * layout.block > layout.block - blocks * PAGE


def test_checksums_are_told_in_hexadecimal() -> None:
    values = block_checksums(memoryview(b"123456789" * 3), 9)
    assert encode_checksums(values) == "cbf43926" * 3
    assert decode_checksums("cbf43926" * 3) == values
    with pytest.raises(ValueError):
        decode_checksums("cbf4392")


def test_a_file_writer_counts_its_blocks(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1000)
    with FileWriter(Disk(), tmp_path / "f", block=256) as file:
        for begin in range(0, 1000, 37):
            file.add(data[begin : begin + 37])
    assert (tmp_path / "f").read_bytes() == data
    assert file.nbytes == 1000
    assert tuple(file.checksums) == block_checksums(memoryview(data), 256)


@pytest.mark.parametrize("torn", [b'{"b": ', b'{"b": 2}', b"\0\0\0\n", b"[1]\n"])
def test_a_torn_line_of_the_journal_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal"
    with Journal(Disk(), path) as journal:
        journal.add({"a": 1})
    path.write_bytes(path.read_bytes() + torn)
    with Journal(Disk(), path) as journal:
        assert journal.entries == [{"a": 1}]
        journal.add({"c": 3})
    with Journal(Disk(), path) as journal:
        assert journal.entries == [{"a": 1}, {"c": 3}]


# -- around the store ---------------------------------------------------------------------------


@pytest.mark.parametrize(("destination", "direct"), [("slots", True), ("pagecache", False)])
async def test_guesses_in_the_page_cache_are_not_passed_by(
    store: Path, destination: Any, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def reader(records: Any, *, direct: bool) -> Any:
        asked.append(direct)
        return RecordReader(records, direct=direct)

    monkeypatch.setattr(core, "RecordReader", reader)
    async with await Engine.open(
        store, slots=4, prefetch=PrefetchConfig(destination=destination)
    ) as engine:
        await engine.generate(make_prompt(3), max_tokens=2, ignore_eos=True)
    assert asked == [direct]


def test_a_store_on_the_hub_is_downloaded_whole(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options)
        return str(packed)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("somebody/store") == packed
    names = [path.relative_to(packed).as_posix() for path in packed.rglob("*") if path.is_file()]
    patterns = asked["allow_patterns"]
    assert [n for n in names if not any(fnmatch(n, pattern) for pattern in patterns)] == []
