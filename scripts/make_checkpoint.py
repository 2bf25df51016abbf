"""Write a synthetic Qwen3-MoE checkpoint of any size, in mlx-lm's format, in little memory.

The numbers are random but valid: 4-bit experts whose products neither explode nor vanish. With
``--aligned`` every expert's bytes begin at a page boundary of the file, so that direct I/O applies.

    python scripts/make_checkpoint.py DIRECTORY --layers 24 --experts 128 --hidden 1024 --inner 768
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

import numpy as np
from rich.console import Console
from rich.progress import Progress

GROUP = 64
BITS = 4
PAGE = 4096
BLOCK = 4 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int = 4
    experts: int = 64
    top_k: int = 8
    hidden: int = 512
    inner: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    vocabulary: int = 8192

    def config(self) -> dict[str, object]:
        """config.json for it."""
        return {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": self.layers,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inner,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocabulary,
            "rms_norm_eps": 1e-6,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rope_theta": 1e6,
            "max_position_embeddings": 8192,
            "eos_token_id": [0, 2],
            "quantization": {"group_size": GROUP, "bits": BITS, "mode": "affine"},
        }


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: ``fill(rng, count)`` gives that many items."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Callable[[np.random.Generator, int], np.ndarray]

    @property
    def items(self) -> int:
        """Number of items."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.items * {"U32": 4, "BF16": 2}[self.dtype]


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 cut to bfloat16 bits."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def normal(deviation: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Gaussian bfloat16 numbers."""
    return lambda rng, count: bf16(rng.standard_normal(count, np.float32) * np.float32(deviation))


def constant(value: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """The same bfloat16 number again and again."""
    return lambda rng, count: np.full(count, bf16(np.array([value]))[0], np.uint16)


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random 32-bit words: eight random 4-bit numbers each."""
    return rng.integers(0, 1 << 32, count, np.uint32)


def quantized(prefix: str, *lead: int, rows: int, columns: int) -> Iterator[Tensor]:
    """Weight, scales and biases of a 4-bit matrix whose products keep their size."""
    scale = 1.0 / (4.6 * columns**0.5)  # random 4-bit numbers around 7.5 deviate by 4.6
    groups = columns // GROUP
    yield Tensor(f"{prefix}.weight", "U32", (*lead, rows, columns * BITS // 32), words)
    yield Tensor(f"{prefix}.scales", "BF16", (*lead, rows, groups), constant(scale))
    yield Tensor(f"{prefix}.biases", "BF16", (*lead, rows, groups), constant(-7.5 * scale))


def layer_tensors(shape: Shape, number: int) -> Iterator[Tensor]:
    """All tensors of one layer, the experts first."""
    layer = f"model.layers.{number}"
    for name, rows, columns in (
        ("gate_proj", shape.inner, shape.hidden),
        ("up_proj", shape.inner, shape.hidden),
        ("down_proj", shape.hidden, shape.inner),
    ):
        prefix = f"{layer}.mlp.switch_mlp.{name}"
        yield from quantized(prefix, shape.experts, rows=rows, columns=columns)
    width = shape.hidden
    for name, rows, columns in (
        ("q_proj", shape.heads * shape.head_size, width),
        ("k_proj", shape.kv_heads * shape.head_size, width),
        ("v_proj", shape.kv_heads * shape.head_size, width),
        ("o_proj", width, shape.heads * shape.head_size),
    ):
        yield from quantized(f"{layer}.self_attn.{name}", rows=rows, columns=columns)
    gate = normal(2.0 / width**0.5)
    yield Tensor(f"{layer}.mlp.gate.weight", "BF16", (shape.experts, width), gate)
    for name, size in (
        ("input_layernorm", width),
        ("post_attention_layernorm", width),
        ("self_attn.q_norm", shape.head_size),
        ("self_attn.k_norm", shape.head_size),
    ):
        yield Tensor(f"{layer}.{name}.weight", "BF16", (size,), constant(1.0))


def outer_tensors(shape: Shape) -> Iterator[Tensor]:
    """Embedding, last norm and head."""
    size = (shape.vocabulary, shape.hidden)
    yield Tensor("model.embed_tokens.weight", "BF16", size, normal(1.0))
    yield Tensor("model.norm.weight", "BF16", (shape.hidden,), constant(1.0))
    yield Tensor("lm_head.weight", "BF16", size, normal(shape.hidden**-0.5))


def write_shard(
    path: Path, tensors: list[Tensor], *, seed: int, aligned: bool, advance: Callable[[int], None]
) -> None:
    """Write one safetensors file piece by piece."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    unit = PAGE if aligned else 8
    text += b" " * (-(len(text) + 8) % unit)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            write_tensor(file, tensor, rng, advance)


def write_tensor(
    file: BinaryIO, tensor: Tensor, rng: np.random.Generator, advance: Callable[[int], None]
) -> None:
    """Write the items of one tensor in blocks."""
    left = tensor.items
    while left:
        count = min(left, BLOCK)
        data = tensor.fill(rng, count)
        file.write(data.tobytes())
        advance(data.nbytes)
        left -= count


def make_checkpoint(
    directory: Path, shape: Shape, *, seed: int = 0, aligned: bool = False, quiet: bool = False
) -> Path:
    """Write the checkpoint, a shard per layer, with the demo model's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = [list(outer_tensors(shape))]
    shards += [list(layer_tensors(shape, number)) for number in range(shape.layers)]
    if aligned:
        for shard in shards:
            shard.sort(key=lambda tensor: tensor.nbytes % PAGE != 0)
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    index: dict[str, str] = {}
    hidden = quiet or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=hidden) as progress:
        task = progress.add_task(f"writing {total / 1e9:.1f} GB", total=total)
        for number, shard in enumerate(shards):
            name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
            write_shard(
                directory / name,
                shard,
                seed=seed + number,
                aligned=aligned,
                advance=lambda count: progress.update(task, advance=count),
            )
            index |= {tensor.name: name for tensor in shard}
    metadata = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(metadata))
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=2))
    demo = files("moestream") / "data" / "demo-moe-4bit"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(str(demo / name), directory / name)
    return directory


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--aligned", action="store_true", help="page-aligned experts")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in asdict(Shape())}
    make_checkpoint(
        arguments.directory, Shape(**sizes), seed=arguments.seed, aligned=arguments.aligned
    )


if __name__ == "__main__":
    main()
