"""Bit-identity with mlx-lm: same tokens, same log-probabilities, for every cache size.

Prompts of 65 and 300 tokens route to more experts than the small pools hold, so they run in waves.
On the CPU backend each row of a gathered product is computed by itself, and waves change no bit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import convert

from moestream import Engine, Generation
from moestream.runtime.assembly import draw_blueprint

from . import zoo
from .reference import ALTERNATIVES, Expected, expect, make_prompt

STEPS = 24
LENGTHS = (1, 7, 65, 300)

pytestmark = pytest.mark.one_loop
QUICK = ("qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "nemotron_h", "gemma4_text")
MODES = [{"bits": bits, "group_size": 32, "mode": "affine"} for bits in (2, 3, 4, 5, 6, 8)] + [
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    {"bits": 4, "group_size": 16, "mode": "nvfp4"},
]


def _architectures() -> list[Any]:
    names = [name for name in zoo.ARCHITECTURES if name not in zoo.EXCEPTIONS]
    slow = pytest.mark.slow
    return [name if name in QUICK else pytest.param(name, marks=slow) for name in names]


def assert_same(result: Generation, expected: Expected) -> None:
    """Same tokens, and log-probabilities equal to the last bit."""
    assert list(result.tokens) == expected.tokens
    assert result.logprobs is not None
    assert [(own.logprob, list(own.top)) for own in result.logprobs] == expected.logprobs


def slot_counts(directory: Path) -> list[int]:
    """Slots to test with: top_k, a quarter, all but one, all."""
    layers = draw_blueprint(directory).size.layers
    experts = max(layer.experts for layer in layers)
    top_k = max(layer.top_k for layer in layers)
    return sorted({top_k, max(experts // 4, 1), experts - 1, experts})


async def check_identity(directory: Path, lengths: tuple[int, ...], **options: Any) -> None:
    """Compare the engine with mlx-lm for all slot counts and prompt lengths."""
    model = zoo.reference(directory)
    prompts = {length: make_prompt(length) for length in lengths}
    expected = {length: expect(model, prompt, STEPS) for length, prompt in prompts.items()}
    for slots in slot_counts(directory):
        async with await Engine.open(directory, slots=slots, **options) as engine:
            for length, prompt in prompts.items():
                result = await engine.generate(
                    prompt, max_tokens=STEPS, ignore_eos=True, logprobs=ALTERNATIVES
                )
                assert_same(result, expected[length])
            engine.check_integrity(idle=True)


@pytest.mark.parametrize("name", _architectures())
async def test_architecture(name: str, tmp_path: Path) -> None:
    await check_identity(zoo.make_checkpoint(name, tmp_path / name), LENGTHS)


@pytest.mark.parametrize("quantize", MODES, ids=lambda mode: f"{mode['mode']}{mode['bits']}")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "phixtral"])
async def test_quantization(name: str, quantize: dict[str, Any], tmp_path: Path) -> None:
    directory = zoo.make_checkpoint(name, tmp_path / name, quantize=quantize)
    await check_identity(directory, (7, 65))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("quantize", [None, MODES[2]], ids=["plain", "affine4"])
async def test_widening_16_bit_checkpoints(
    dtype: str, quantize: dict[str, Any] | None, tmp_path: Path
) -> None:
    directory = zoo.make_checkpoint("gpt_oss", tmp_path / "m", dtype=dtype, quantize=quantize)
    await check_identity(directory, (7, 65))


async def test_checkpoint_dtype_is_kept_when_asked(tmp_path: Path) -> None:
    directory = zoo.make_checkpoint(
        "qwen3_moe", tmp_path / "m", dtype="bfloat16", quantize=MODES[2]
    )
    model = zoo.reference(directory, dtype=None)
    prompt = make_prompt(7)
    expected = expect(model, prompt, 4)
    async with await Engine.open(directory, slots=4, dtype="checkpoint") as engine:
        result = await engine.generate(prompt, max_tokens=4, ignore_eos=True, logprobs=ALTERNATIVES)
    assert_same(result, expected)


@pytest.mark.parametrize(
    "recipe", [{"q_bits": 4, "q_group_size": 32}, {"quant_predicate": "mixed_3_6"}], ids=str
)
async def test_mlx_lm_conversion_opens_in_place(
    recipe: dict[str, Any], tmp_path: Path, demo: Path
) -> None:
    source = hugging_face_layout(zoo.make_checkpoint("qwen3_moe", tmp_path / "m"), demo)
    target = tmp_path / "converted"
    convert(str(source), str(target), quantize=True, dtype="float32", **recipe)
    await check_identity(target, (7, 65))


def hugging_face_layout(directory: Path, tokenizer: Path) -> Path:
    """Rewrite a qwen3_moe checkpoint the way its authors publish it: a tensor per expert."""
    tensors: Any = mx.load(str(directory / "model.safetensors"))
    split: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if "switch_mlp" not in name:
            split[name] = tensor
            continue
        for expert in range(tensor.shape[0]):
            split[name.replace("switch_mlp", f"experts.{expert}")] = tensor[expert]
    mx.save_safetensors(str(directory / "model.safetensors"), split, {"format": "pt"})
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, directory / file)
    config = json.loads((directory / "config.json").read_text())
    config["hidden_act"] = "silu"
    (directory / "config.json").write_text(json.dumps(config))
    return directory


async def test_resident_decode_of_the_demo_model(demo: Path) -> None:
    model = zoo.reference(demo)
    prompt = make_prompt(20, 8192)
    expected = expect(model, prompt, STEPS)
    for memory in ({"memory": "all"}, {"slots": 16}, {"slots": 3}):
        async with await Engine.open(demo, **memory) as engine:
            result = await engine.generate(
                prompt, max_tokens=STEPS, ignore_eos=True, logprobs=ALTERNATIVES
            )
            assert_same(result, expected)


@pytest.mark.parametrize("policy", ["lfu-decay", "lru"])  # the default is everywhere else
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
async def test_every_policy(name: str, policy: str, tmp_path: Path) -> None:
    directory = zoo.make_checkpoint(name, tmp_path / name)
    await check_identity(directory, (2, 65), policy=policy)
