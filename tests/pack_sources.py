"""Checkpoints in the layouts of their authors, which mlx-lm turns into its own while loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import zoo

Tensors = dict[str, mx.array]


def per_expert(directory: Path, stacked: str, names: dict[str, str], experts: str) -> Path:
    """Rewrite a stacked checkpoint with a tensor for each expert.

    Args:
        directory: of the checkpoint.
        stacked: name of the stacked module, such as "switch_mlp".
        names: projection there -> projection of a single expert.
        experts: name of the list of experts.
    """

    def split(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, tensor in tensors.items():
            head, found, tail = name.partition(f".{stacked}.")
            if not found:
                result[name] = tensor
                continue
            projection, _, parameter = tail.partition(".")
            for expert in range(tensor.shape[0]):
                key = f"{head}.{experts}.{expert}.{names[projection]}.{parameter}"
                result[key] = tensor[expert]
        return result

    return rewrite(directory, split)


def fused(directory: Path) -> Path:
    """Rewrite a qwen3_5_moe checkpoint with gate and up in one tensor."""

    def join(tensors: Tensors) -> Tensors:
        result = {name: t for name, t in tensors.items() if ".switch_mlp." not in name}
        for name, tensor in tensors.items():
            if name.endswith("switch_mlp.gate_proj.weight"):
                up = tensors[name.replace("gate_proj", "up_proj")]
                key = name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
                result[key] = mx.concatenate([tensor, up], axis=-2)
            elif name.endswith("switch_mlp.down_proj.weight"):
                result[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = tensor
        return result

    return rewrite(directory, join)


def mxfp4_blocks(directory: Path) -> Path:
    """Rewrite a gpt_oss checkpoint with its experts as interleaved mxfp4 blocks."""

    def pack(tensors: Tensors) -> Tensors:
        result = {name: t for name, t in tensors.items() if ".experts." not in name}
        for name, tensor in tensors.items():
            if name.endswith("experts.gate_proj.weight"):
                up = tensors[name.replace("gate_proj", "up_proj")]
                key = name.replace("gate_proj.weight", "gate_up_proj")
                add_blocks(result, key, interleaved(tensor, up))
            elif name.endswith("experts.gate_proj.bias"):
                up = tensors[name.replace("gate_proj", "up_proj")]
                pair = interleaved(tensor[..., None], up[..., None])[..., 0]
                result[name.replace("gate_proj.bias", "gate_up_proj_bias")] = pair
            elif name.endswith("experts.down_proj.weight"):
                add_blocks(result, name.removesuffix(".weight"), tensor)
            elif name.endswith("experts.down_proj.bias"):
                result[name.replace("down_proj.bias", "down_proj_bias")] = tensor
        return result

    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return rewrite(directory, pack)


def interleaved(gate: mx.array, up: mx.array) -> mx.array:
    """Rows of gate and up by turns."""
    experts, rows, columns = gate.shape
    return mx.stack([gate, up], axis=2).reshape(experts, 2 * rows, columns)


def add_blocks(result: Tensors, key: str, weight: mx.array) -> None:
    pair: Any = mx.quantize(weight, 32, 4, mode="mxfp4")
    words, scales = pair
    blocks = mx.view(words, mx.uint8)
    result[f"{key}_blocks"] = blocks.reshape(*scales.shape, 16)
    result[f"{key}_scales"] = scales


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    tensors: Any = mx.load(str(directory / "model.safetensors"))
    changed = change(tensors)
    mx.eval(changed)
    mx.save_safetensors(str(directory / "model.safetensors"), changed, {"format": "pt"})
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    return directory


GLU = {name: name for name in ("gate_proj", "up_proj", "down_proj")}

SOURCES: dict[str, Callable[[Path], Path]] = {
    "qwen3_moe per expert": lambda at: per_expert(
        zoo.make_checkpoint("qwen3_moe", at), "switch_mlp", GLU, "experts"
    ),
    "deepseek_v3 per expert": lambda at: per_expert(
        zoo.make_checkpoint("deepseek_v3", at), "switch_mlp", GLU, "experts"
    ),
    "mixtral w1 w2 w3": lambda at: per_expert(
        zoo.make_checkpoint("mixtral", at),
        "switch_mlp",
        {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
        "experts",
    ),
    "nemotron_h per expert": lambda at: per_expert(
        zoo.make_checkpoint("nemotron_h", at),
        "switch_mlp",
        {"fc1": "up_proj", "fc2": "down_proj"},
        "experts",
    ),
    "qwen3_5_moe fused": lambda at: fused(zoo.make_checkpoint("qwen3_5_moe", at)),
    "gpt_oss mxfp4 blocks": lambda at: mxfp4_blocks(zoo.make_checkpoint("gpt_oss", at)),
    "bfloat16 per expert": lambda at: per_expert(
        zoo.make_checkpoint("qwen3_moe", at, dtype="bfloat16"), "switch_mlp", GLU, "experts"
    ),
}
"""Name -> writes the checkpoint into a directory; none of them can be read in place."""
