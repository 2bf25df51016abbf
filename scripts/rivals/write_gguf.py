"""Write a GGUF file from an mlx-lm checkpoint of type qwen3_moe with 4-bit experts.

    python scripts/rivals/write_gguf.py MODEL FILE [--type q4_0 | q4_1] [--gguf-py DIR]

``q4_0`` takes as many bytes as mlx-lm's 4 bits in groups of 64 (4.5 bits a weight) and rounds the
weights anew; ``q4_1`` holds them as they are, its scales rounded to 16-bit floats, in 5 bits a
weight: with it llama.cpp generates nearly what mlx-lm does. One tensor is in memory at a time.

Needs the package ``gguf``: installed, or ``--gguf-py`` names its folder in a llama.cpp checkout.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.rivals.errors import CheckoutMissing, ModelUnsupported, RivalError

Kind = Literal["q4_0", "q4_1"]
Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 32
EXPERT_BYTES_KEY = "moestream.expert_bytes"
DTYPES = {"U32": "<u4", "BF16": "<u2", "F16": "<f2", "F32": "<f4"}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, on disk."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> Array:
        """Its numbers; bfloat16 as float32."""
        stored = np.fromfile(
            self.file, DTYPES[self.dtype], count=int(np.prod(self.shape)), offset=self.offset
        )
        if self.dtype == "BF16":
            stored = (stored.astype("<u4") << 16).view("<f4")
        return stored.reshape(self.shape)


def read_headers(model: Path) -> dict[str, Source]:
    """All tensors of a checkpoint."""
    sources = {}
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise ModelUnsupported("write_gguf", model, f"{name} is {entry['dtype']}")
            begin = 8 + size + entry["data_offsets"][0]
            sources[name] = Source(file, begin, entry["dtype"], tuple(entry["shape"]))
    return sources


def codes_of(words: Array) -> Array:
    """4-bit numbers of mlx's 32-bit words, ``[..., columns]`` uint8, in order."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & 15
    codes[..., 1::2] = packed >> 4
    return codes


def pack_q4_1(codes: Array, scales: Array, biases: Array) -> Array:
    """Blocks of Q4_1: scale and minimum as 16-bit floats, then 32 numbers, the later half above.

    Args:
        codes: ``[..., columns]`` uint8 below 16.
        scales: of groups, ``[..., groups]`` floats.
        biases: of groups.

    Returns:
        Bytes ``[..., columns // 32 * 20]``.
    """
    lead, columns = codes.shape[:-1], codes.shape[-1]
    blocks = codes.reshape(*lead, columns // BLOCK, BLOCK)
    repeat = blocks.shape[-2] // scales.shape[-1]
    packed = np.empty((*blocks.shape[:-1], 4 + BLOCK // 2), np.uint8)
    for place, numbers in ((0, scales), (2, biases)):
        halves = np.repeat(numbers.astype("<f2"), repeat, axis=-1)
        packed[..., place : place + 2] = halves[..., None].view(np.uint8)
    packed[..., 4:] = blocks[..., : BLOCK // 2] | blocks[..., BLOCK // 2 :] << 4
    return packed.reshape(*lead, -1)


def pack_q4_0(gguf: Any, codes: Array, scales: Array, biases: Array) -> Array:
    """Blocks of Q4_0 of the nearest numbers, row by row of the first axis."""
    rows = []
    for row, scale, bias in zip(codes, scales, biases, strict=True):
        group = row.shape[-1] // scale.shape[-1]
        wide = np.repeat(scale, group, axis=-1) * row + np.repeat(bias, group, axis=-1)
        kind = gguf.GGMLQuantizationType.Q4_0
        rows.append(gguf.quants.quantize(wide.astype(np.float32), kind))
    return np.stack(rows)


@dataclass(frozen=True)
class Target:
    """A tensor of the GGUF file.

    Attributes:
        name: there.
        source: its prefix in the checkpoint.
        kind: name of its type in ggml.
        shape: of its numbers.
    """

    name: str
    source: str
    kind: str
    shape: tuple[int, ...]


def targets_of(model: Path, sources: dict[str, Source], kind: Kind) -> list[Target]:
    """What to write, in order."""
    targets = []
    for name, source in sources.items():
        prefix, _, part = name.rpartition(".")
        if part != "weight":
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", prefix)
        stem = NAMES.get(match[2]) if match else OUTER.get(prefix)
        if stem is None:
            raise ModelUnsupported("write_gguf", model, f"no place for {name}")
        target = f"blk.{match[1]}.{stem}.weight" if match else f"{stem}.weight"
        shape = source.shape
        if f"{prefix}.scales" in sources:
            shape = (*shape[:-1], shape[-1] * 8)
            groups = sources[f"{prefix}.scales"].shape[-1]
            if shape[-1] % (groups * BLOCK):
                raise ModelUnsupported(
                    "write_gguf", model, f"{prefix} is not of 4 bits in groups of 32 or more"
                )
            targets.append(Target(target, prefix, kind, shape))
        else:
            plain = "f32" if len(shape) == 1 or stem == "ffn_gate_inp" else "f16"
            targets.append(Target(target, prefix, plain, shape))
    return targets


def contents(gguf: Any, target: Target, sources: dict[str, Source]) -> Array:
    """The bytes or numbers of a tensor as GGUF holds them."""
    weight = sources[f"{target.source}.weight"].read()
    if target.kind in ("f32", "f16"):
        return weight.astype({"f32": np.float32, "f16": np.float16}[target.kind])
    scales = sources[f"{target.source}.scales"].read().astype(np.float32)
    biases = sources[f"{target.source}.biases"].read().astype(np.float32)
    codes = codes_of(weight)
    if target.kind == "q4_1":
        return pack_q4_1(codes, scales, biases)
    return pack_q4_0(gguf, codes, scales, biases)


def describe(writer: Any, config: dict[str, Any], context: int) -> None:
    """Hyperparameters of the file. It has no vocabulary: tokens are ids."""
    writer.add_name("moestream comparison")
    writer.add_context_length(context)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def check_config(model: Path) -> dict[str, Any]:
    """config.json of a model that qwen3moe stands for.

    Raises:
        ModelUnsupported: it is another one.
    """
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise RivalError(f"{model} is no checkpoint: {error}") from error
    quantization = config.get("quantization", {})
    reason = None
    if config.get("model_type") != "qwen3_moe":
        reason = f"model_type is {config.get('model_type')}, not qwen3_moe"
    elif quantization.get("bits") != 4 or quantization.get("mode", "affine") != "affine":
        reason = "its experts are not of 4 bits (affine)"
    elif any(isinstance(entry, dict) for entry in quantization.values()):
        reason = "its tensors are quantized in different ways"
    elif config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        reason = "some of its layers are dense"
    elif config.get("rope_scaling") or not config.get("norm_topk_prob", True):
        reason = "it scales positions, or does not norm the weights of experts"
    if reason:
        raise ModelUnsupported("write_gguf", model, reason)
    return config


def write_gguf(model: Path, file: Path, kind: Kind, gguf: Any) -> int:
    """Write the file; the number of bytes of its experts."""
    config = check_config(model)
    sources = read_headers(model)
    targets = targets_of(model, sources, kind)
    writer = gguf.GGUFWriter(str(file), "qwen3moe")
    describe(writer, config, int(config.get("max_position_embeddings", 4096)))
    experts = 0
    for target in targets:
        raw = gguf.GGMLQuantizationType[target.kind.upper()]
        block, size = gguf.GGML_QUANT_SIZES[raw]
        nbytes = int(np.prod(target.shape)) // block * size
        experts += nbytes if "_exps" in target.name else 0
        writer.add_tensor_info(
            target.name, target.shape, np.dtype(np.float32), nbytes, raw_dtype=raw
        )
    writer.add_uint64(EXPERT_BYTES_KEY, experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, target in enumerate(targets):
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(targets)} tensors", end="", file=sys.stderr)
        writer.write_tensor_data(contents(gguf, target, sources))
    writer.close()
    return experts


def import_gguf(folder: Path | None) -> Any:
    """The package ``gguf``.

    Raises:
        CheckoutMissing: it is not where it should be.
        RivalError: it is not installed.
    """
    if folder is not None:
        if not (folder / "gguf" / "__init__.py").is_file():
            raise CheckoutMissing("--gguf-py", folder, "gguf/__init__.py")
        sys.path.insert(0, str(folder))
    try:
        gguf: Any = importlib.import_module("gguf")
        importlib.import_module("gguf.quants")
    except ImportError as error:
        raise RivalError(
            f"{error}: install the package gguf, or name a llama.cpp checkout's gguf-py folder "
            "with --gguf-py"
        ) from error
    return gguf


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=["q4_0", "q4_1"], default="q4_0")
    parser.add_argument("--gguf-py", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        experts = write_gguf(
            options.model, options.file, options.type, import_gguf(options.gguf_py)
        )
    except RivalError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"{options.file}: {options.file.stat().st_size} bytes, {experts} of them experts")


if __name__ == "__main__":
    main()
