"""A packed store gives what mlx-lm gives, bit for bit, whatever the source looks like."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from moestream import Engine, ExpertsNotStacked, PrefetchConfig
from moestream.io.manifest import Manifest, read_manifest
from moestream.io.reader import RecordReader
from moestream.io.records import PAGE
from moestream.models import quantizing
from moestream.models.quantizing import Scheme, convert
from moestream.runtime.assembly import draw_blueprint, make_record
from moestream.runtime.pack_options import PackOptions
from moestream.runtime.packing import pack_model
from moestream.runtime.streams import leased_streams

from . import zoo
from .fakes import FakeDrive, aligned_rows
from .pack_sources import SOURCES
from .reference import ALTERNATIVES, Expected, expect, make_prompt
from .test_identity import assert_same

pytestmark = pytest.mark.one_loop

STEPS = 12
LENGTHS = (7, 65)
QUICK = (
    "qwen3_moe",
    "qwen3_next",
    "deepseek_v3",
    "gpt_oss",
    "nemotron_h",
    "glm4_moe",
    "mixtral",
    "gemma4_text",
)


def architectures() -> list[Any]:
    names = [name for name in zoo.ARCHITECTURES if name not in zoo.EXCEPTIONS]
    rest = [pytest.mark.slow, pytest.mark.exhaustive]
    return [name if name in QUICK else pytest.param(name, marks=rest) for name in names]


def manifest_of(store: Path) -> Manifest:
    manifest = read_manifest(store)
    assert manifest is not None
    return manifest


def expected_of(model: Any) -> dict[int, Expected]:
    return {length: expect(model, make_prompt(length), STEPS) for length in LENGTHS}


async def check_store(
    store: Path, expected: Mapping[int, Expected], slots: int | None = None, **options: Any
) -> None:
    """Compare with little room for experts, and with room for all."""
    layers = draw_blueprint(store).size.layers
    few = max(layer.top_k for layer in layers) if slots is None else slots
    for count in (few, max(layer.experts for layer in layers)):
        async with await Engine.open(store, slots=count, **options) as engine:
            for length, wanted in expected.items():
                result = await engine.generate(
                    make_prompt(length), max_tokens=STEPS, ignore_eos=True, logprobs=ALTERNATIVES
                )
                assert_same(result, wanted)
            engine.check_integrity(idle=True)


@pytest.mark.parametrize("name", architectures())
async def test_architecture(name: str, tmp_path: Path) -> None:
    source = zoo.make_checkpoint(name, tmp_path / "source")
    pack_model(source, tmp_path / "store")
    await check_store(tmp_path / "store", expected_of(zoo.reference(source)))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h", "phixtral"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
async def test_quantized_source_is_kept(name: str, mode: str, tmp_path: Path) -> None:
    quantize = {"mode": mode, "group_size": 32 if mode == "affine" else None}
    source = zoo.make_checkpoint(name, tmp_path / "source", quantize=quantize)
    packed = pack_model(source, tmp_path / "store")
    assert packed.warnings == ()
    await check_store(tmp_path / "store", expected_of(zoo.reference(source)))


@pytest.mark.parametrize("name", SOURCES)
async def test_source_that_is_not_stacked(name: str, tmp_path: Path) -> None:
    source = SOURCES[name](tmp_path / "source")
    with pytest.raises(ExpertsNotStacked):
        await Engine.open(source, slots=2)
    pack_model(source, tmp_path / "store")
    await check_store(tmp_path / "store", expected_of(zoo.reference(source)), checksum=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_16_bit_checkpoint_widened_and_not(dtype: str, tmp_path: Path) -> None:
    source = zoo.make_checkpoint("gpt_oss", tmp_path / "source", dtype=dtype)
    pack_model(source, tmp_path / "store")
    await check_store(tmp_path / "store", expected_of(zoo.reference(source)))


async def test_the_checkpoint_dtype_is_kept_when_asked(tmp_path: Path) -> None:
    quantize = {"bits": 4, "group_size": 32}
    source = zoo.make_checkpoint(
        "qwen3_moe", tmp_path / "source", dtype="bfloat16", quantize=quantize
    )
    pack_model(source, tmp_path / "store")
    native = {7: expect(zoo.reference(source, dtype=None), make_prompt(7), STEPS)}
    await check_store(tmp_path / "store", native, dtype="checkpoint", checksum=True)


# -- quantizing while packing -------------------------------------------------------------------


def quantized_reference(source: Path, choose: Callable[[str], Scheme | None]) -> Any:
    """mlx-lm's model with its expert projections quantized by mlx-lm's own code."""
    model: Any = zoo.reference(source, dtype=None)

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        scheme = choose(path) if isinstance(module, SwitchLinear) else None
        return False if scheme is None else dict(scheme.to_config())

    nn.quantize(model, class_predicate=predicate)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [
        *(("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)),
        ("affine", 4, 64),
        ("mxfp4", 4, None),
        ("mxfp8", 8, None),
        ("nvfp4", 4, None),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_moe", "nemotron_h"])
async def test_quantizing_gives_what_mlx_lm_gives(
    name: str, mode: str, bits: int, group_size: int | None, tmp_path: Path
) -> None:
    source = zoo.make_checkpoint(name, tmp_path / "source")
    options = PackOptions(bits=str(bits), mode=mode, group_size=group_size)
    packed = pack_model(source, tmp_path / "store", options)
    assert packed.warnings == ()
    size = group_size or {"nvfp4": 16}.get(mode, 32)
    model = quantized_reference(source, lambda path: Scheme(bits, size, mode))
    await check_store(tmp_path / "store", expected_of(model))


async def test_bits_of_projections_and_layers_differ(tmp_path: Path) -> None:
    source = zoo.make_checkpoint("qwen3_next", tmp_path / "source")
    numbers = [use.site.layer for use in draw_blueprint(source).uses]
    first, last = numbers[0], numbers[-1]
    options = PackOptions(
        bits="gate=3,up=5,down=4",
        group_size=32,
        layers=(f"{first}:6", f"{last}:gate=keep,down=8"),
    )
    pack_model(source, tmp_path / "store", options)

    def choose(path: str) -> Scheme | None:
        layer = next(int(part) for part in path.split(".") if part.isdecimal())
        projection = path.rpartition(".")[2]
        bits: int | None = {"gate_proj": 3, "up_proj": 5, "down_proj": 4}[projection]
        if layer == first:
            bits = 6
        elif layer == last:
            bits = {"gate_proj": None, "up_proj": 5, "down_proj": 8}[projection]
        return None if bits is None else Scheme(bits, 32, "affine")

    await check_store(tmp_path / "store", expected_of(quantized_reference(source, choose)))
    layers = {layer.layer: layer for layer in manifest_of(tmp_path / "store").layers}
    assert layers[last].quantization["gate_proj"] is None
    assert layers[first].quantization["gate_proj"] == Scheme(6, 32, "affine").to_config()
    assert len({layer.layout.stride for layer in layers.values()}) > 1


async def test_quantizing_again_begins_from_what_the_source_stands_for(tmp_path: Path) -> None:
    source = zoo.make_checkpoint(
        "qwen3_moe", tmp_path / "source", quantize={"bits": 8, "group_size": 32}
    )
    said: list[str] = []
    packed = pack_model(
        source, tmp_path / "store", PackOptions(bits="4", group_size=32), warn=said.append
    )
    assert packed.warnings == tuple(said)
    assert "quantized already (affine 8 bits in groups of 32)" in said[0]
    model = zoo.reference(source, dtype=None)
    for module in zoo.switch_modules(model).values():
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = module[name]
            weight = mx.dequantize(linear.weight, linear.scales, linear.biases, 32, 8)
            linear.weight, linear.scales, linear.biases = mx.quantize(weight, 32, 4)
            linear.bits = 4
    model.set_dtype(mx.float32)
    await check_store(tmp_path / "store", expected_of(model))


async def test_the_same_scheme_again_copies_the_bytes(tmp_path: Path) -> None:
    source = zoo.make_checkpoint(
        "qwen3_moe", tmp_path / "source", quantize={"bits": 4, "group_size": 32}
    )
    packed = pack_model(source, tmp_path / "store", PackOptions(bits="4", group_size=32))
    assert packed.warnings == ()
    assert_same_bytes(source, tmp_path / "store")


def test_a_global_scale_is_dequantized_with_its_expert() -> None:
    linear = SwitchLinear(64, 32, 4, bias=False)
    quantized = linear.to_quantized(16, 4, "nvfp4", global_scale=True)
    for expert in range(4):
        piece = convert(quantized, Scheme(8, 32, "affine"), expert, expert + 1)
        weight, scales, biases = (piece[name] for name in ("weight", "scales", "biases"))
        got = mx.dequantize(weight, scales, biases, 32, 8)[0]
        wanted = linear.weight[expert]
        assert float(mx.abs(got - wanted).max()) < 0.2 * float(mx.abs(wanted).max())
        assert "global_scale" not in piece


def test_quantizing_in_pieces_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = zoo.make_checkpoint("gpt_oss", tmp_path / "source")
    options = PackOptions(bits="gate=3,down=5", group_size=32)
    pack_model(source, tmp_path / "whole", options)
    for number, nbytes in enumerate((1, 3 * 4 * 64 * 128)):  # one expert, three experts
        monkeypatch.setattr(quantizing, "PIECE_BYTES", nbytes)
        pack_model(source, tmp_path / f"{number}", options)
        for file in (tmp_path / "whole" / "experts").iterdir():
            assert (
                tmp_path / f"{number}" / "experts" / file.name
            ).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("destination", ["slots", "staging", "pagecache"])
async def test_reading_ahead(destination: Any, demo: Path, tmp_path: Path) -> None:
    pack_model(demo, tmp_path / "store", PackOptions(layers=("3-5:3",)))
    prompt = make_prompt(20, 8192)
    prefetch = PrefetchConfig(destination=destination, admission="always")
    async with await Engine.open(tmp_path / "store", memory="all") as engine:
        plain = await engine.generate(prompt, max_tokens=STEPS, ignore_eos=True, logprobs=3)
    async with await Engine.open(
        tmp_path / "store", slots=16, prefetch=prefetch, checksum=True
    ) as engine:
        ahead = await engine.generate(prompt, max_tokens=STEPS, ignore_eos=True, logprobs=3)
        statistics = engine.statistics()
        assert statistics.prefetch.begun > 0
        assert statistics.read_errors == 0
        engine.check_integrity()
    assert ahead.tokens == plain.tokens
    assert ahead.logprobs == plain.logprobs


# -- the bytes ----------------------------------------------------------------------------------


def assert_same_bytes(source: Path, store: Path) -> None:
    """Every component of every expert is in the store what it is in the source."""
    with leased_streams():
        blueprints = [draw_blueprint(path, widen=False) for path in (source, store)]
        records = [
            [make_record(blueprint, use.site) for use in blueprint.uses] for blueprint in blueprints
        ]
    readers = [RecordReader(each) for each in records]
    for group, pair in enumerate(zip(*records, strict=True)):
        assert pair[0].experts == pair[1].experts
        for expert in range(pair[0].experts):
            contents = []
            for reader, record in zip(readers, pair, strict=True):
                rows = aligned_rows(record)
                reader.read(group, expert, rows)
                names = [component.name for component in record.components]
                contents.append(dict(zip(names, map(bytes, rows), strict=True)))
            assert contents[0] == contents[1]
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("quantize", [None, {"bits": 4, "group_size": 32}], ids=["plain", "4bit"])
def test_records_hold_the_bytes_of_the_source(
    name: str, quantize: dict[str, Any] | None, tmp_path: Path
) -> None:
    source = zoo.make_checkpoint(name, tmp_path / "source", quantize=quantize, dtype="bfloat16")
    pack_model(source, tmp_path / "store")
    assert_same_bytes(source, tmp_path / "store")


def test_an_expert_of_the_demo_model_is_one_direct_read(demo: Path, tmp_path: Path) -> None:
    pack_model(demo, tmp_path / "store")
    calls = {}
    for path in (demo, tmp_path / "store"):
        with leased_streams():
            blueprint = draw_blueprint(path)
            record = make_record(blueprint, blueprint.uses[0].site)
        drive = FakeDrive()
        reader = RecordReader([record], preadv=drive)
        reader.read(0, 5, aligned_rows(record))
        reader.close()
        calls[path] = drive.calls
    assert len(calls[demo]) == 9
    (call,) = calls[tmp_path / "store"]
    assert call.offset % PAGE == 0
    assert all(length % PAGE == 0 for length in call.lengths)


# -- memory -------------------------------------------------------------------------------------


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Of twelve layers of single experts, MLX never holds more than about two."""
    config = zoo.ARCHITECTURES["qwen3_moe"]
    before = dict(config)
    config.update(num_hidden_layers=12, mlp_only_layers=[])
    try:
        source = SOURCES["qwen3_moe per expert"](tmp_path / "source")
    finally:
        config.clear()
        config.update(before)
    with leased_streams():
        layers = draw_blueprint(source, widen=False).size.layers
    layer_bytes = layers[0].experts * layers[0].record_bytes
    assert len(layers) == 12
    mx.clear_cache()
    mx.reset_peak_memory()
    start = mx.get_active_memory()
    held: list[int] = []
    tracemalloc.start()
    try:
        before_python = tracemalloc.get_traced_memory()[0]
        pack_model(
            source,
            tmp_path / "store",
            progress=lambda done, total: held.append(mx.get_active_memory() - start),
        )
        python = tracemalloc.get_traced_memory()[1] - before_python
    finally:
        tracemalloc.stop()
    # A projection of the source is stacked from its experts: both exist for a moment.
    assert mx.get_peak_memory() - start < 2 * layer_bytes
    assert max(held) < layer_bytes
    # The layer's file, before it is written, and what a model's skeleton takes.
    assert layer_bytes < python < 3 * layer_bytes


# -- order on disk and other sources ------------------------------------------------------------


@pytest.mark.parametrize("by", ["frequency", "coactivation"])
async def test_experts_in_another_order_on_disk(by: Any, demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    prompt = make_prompt(20, 8192)
    async with await Engine.open(demo, slots=8, trace=trace) as engine:
        plain = await engine.generate(prompt, max_tokens=STEPS, ignore_eos=True, logprobs=3)
    pack_model(demo, tmp_path / "store", PackOptions(order=trace, order_by=by))
    places = [layer.place for layer in manifest_of(tmp_path / "store").layers]
    assert all(place is not None and sorted(place) == list(range(64)) for place in places)
    assert any(place != tuple(range(64)) for place in places)
    async with await Engine.open(tmp_path / "store", slots=8, checksum=True) as engine:
        moved = await engine.generate(prompt, max_tokens=STEPS, ignore_eos=True, logprobs=3)
    assert moved.tokens == plain.tokens
    assert moved.logprobs == plain.logprobs
    assert_same_bytes(demo, tmp_path / "store")


async def test_a_packed_store_can_be_packed_again(demo: Path, tmp_path: Path) -> None:
    pack_model(demo, tmp_path / "first")
    pack_model(tmp_path / "first", tmp_path / "second")
    assert_same_bytes(demo, tmp_path / "second")
    names = {path.name for path in (tmp_path / "first").glob("*")}
    assert names == {path.name for path in (tmp_path / "second").glob("*")}
    source = zoo.make_checkpoint("gpt_oss", tmp_path / "source")
    pack_model(source, tmp_path / "plain")
    pack_model(tmp_path / "plain", tmp_path / "small", PackOptions(bits="4", group_size=32))
    model = quantized_reference(source, lambda path: Scheme(4, 32, "affine"))
    await check_store(tmp_path / "small", expected_of(model))


def test_config_says_how_every_projection_is_quantized(demo: Path, tmp_path: Path) -> None:
    pack_model(demo, tmp_path / "store", PackOptions(bits="down=3"))
    config = json.loads((tmp_path / "store" / "config.json").read_text())
    module = "model.layers.0.mlp.switch_mlp"
    assert config["quantization"][f"{module}.down_proj"]["bits"] == 3
    assert config["quantization"][f"{module}.up_proj"]["bits"] == 4
    assert config["quantization_config"] == config["quantization"]
