"""Tiny random checkpoints of every MoE architecture of mlx-lm, saved in mlx-lm's own format."""

import contextlib
import copy
import io
import math
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear, SwitchMLP

from .zoo_configs import ARCHITECTURES, EXCEPTIONS

__all__ = ["ARCHITECTURES", "EXCEPTIONS", "make_checkpoint", "reference", "switch_modules"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# Wide enough to change which experts win, narrow enough that the token still decides.
_SELECTION_BIAS = re.compile(r"(expert_bias|e_score_correction_bias|router_bias)$")


def make_checkpoint(
    name: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    quantize: dict[str, Any] | None = None,
    tokenizer_from: Path | None = None,
) -> Path:
    """Write the architecture's checkpoint into the directory and return it.

    The parameters depend on the seed and on their own paths only. `quantize` takes the keys
    bits, group_size and mode of mlx-lm's conversion; the model's own rules (8-bit routers, layers
    left as they are) apply on top of it.
    """
    config = copy.deepcopy(ARCHITECTURES[name])
    model_class, args_class = utils._get_classes(config)
    # Some ModelArgs write into the dict they get.
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    _initialise(model, seed, getattr(mx, dtype))
    if quantize is not None:
        config = _quantize(model, config, **quantize)
    model.eval()
    directory.mkdir(parents=True, exist_ok=True)
    utils.save_model(directory, model)
    utils.save_config(config, directory / "config.json")
    if tokenizer_from is not None:
        for file in _TOKENIZER_FILES:
            if (tokenizer_from / file).exists():
                shutil.copyfile(tokenizer_from / file, directory / file)
    return directory


def reference(directory: Path, *, dtype: str | None = "float32") -> Any:
    """mlx-lm's own model with everything resident; None keeps the checkpoint's types."""
    model: Any = utils.load_model(directory)[0]
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


def switch_modules(model: Any) -> dict[str, Any]:
    """Path -> expert module, in the order of the layers."""
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, (SwitchGLU, SwitchMLP))
    ]
    return dict(sorted(found, key=lambda item: [int(part) for part in re.findall(r"\d+", item[0])]))


def _quantize(
    model: Any,
    config: dict[str, Any],
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
) -> dict[str, Any]:
    plain = {key: value for key, value in config.items() if key != "quantization"}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
        quantized: dict[str, Any] = utils.quantize_model(
            model, plain, group_size=group_size, bits=bits, mode=mode
        )[1]
    # A pre-packed format fixes its own entry, and the loader infers the rest from the shapes.
    return config if "quantization" in config else quantized


def _initialise(model: Any, seed: int, dtype: Any) -> None:
    keep: Callable[[str], bool] = getattr(model, "cast_predicate", lambda path: True)
    gains = _gains(model)
    weights: list[tuple[str, mx.array]] = []
    for prefix, module in model.named_modules():
        for key, value in module.items():
            if key.startswith("_") or not isinstance(value, mx.array):
                continue
            path = f"{prefix}.{key}" if prefix else key
            rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
            new = _parameter(rng, module, path, value) * gains.get(path, 1.0)
            target = value.dtype
            if target == mx.float32 and keep(path):
                target = dtype
            weights.append((path, mx.array(new).astype(target)))
    # A parameter missed here would be random by mlx-lm's own initialiser.
    missed = dict(tree_flatten(model.parameters())).keys() - dict(weights).keys()
    assert not missed, sorted(missed)
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())


def _parameter(rng: np.random.Generator, module: Any, path: str, value: mx.array) -> Any:
    """Values that keep activations near unit size and let every branch do something."""
    shape = tuple(value.shape)
    key = path.rpartition(".")[2]
    noise = rng.standard_normal(shape, dtype=np.float32)
    if value.dtype == mx.uint32:  # packed codes
        return rng.integers(0, 2**32, size=shape, dtype=np.uint32)
    if key == "signs":
        return np.where(noise < 0, -1.0, 1.0).astype(np.float32)
    if key in ("scales", "biases"):  # of 2-bit codes, centred, with the spread of a linear layer
        scale = (1 + 0.1 * noise) / math.sqrt(1.25 * module.weight.shape[-1] * 16)
        return scale if key == "scales" else -1.5 * scale
    if _SELECTION_BIAS.search(path):
        return 0.05 * noise
    if key == "A_log":
        return np.log(1 + 7 * rng.random(shape, dtype=np.float32))
    if path.endswith("router.scale"):  # Gemma 4 divides its router's input by this
        return math.sqrt(shape[0]) * (1 + 0.1 * noise)
    if isinstance(module, nn.Embedding):
        return noise
    if isinstance(module, nn.Conv1d) and key == "weight":
        return noise / math.sqrt(shape[1] * shape[2])
    matrix = isinstance(module, (nn.Linear, SwitchLinear, MultiLinear)) or len(shape) == 2
    if matrix and key in ("weight", "fn"):
        return noise / math.sqrt(shape[-1])
    if key == "bias":  # mlx starts some of them at random
        return 0.1 * noise
    # Norms, sinks, gates: around the constant that the architecture starts from.
    return np.array(value.astype(mx.float32)) + 0.1 * noise


def _gains(model: Any) -> dict[str, float]:
    gains: dict[str, float] = {}
    # Let a clamped activation clamp: widen its inputs, and narrow what follows by as much.
    for path, module in switch_modules(model).items():
        activation = module.activation
        limit = getattr(activation, "_limit", None) or getattr(activation, "limit", None) or 0.0
        gain = max(1.0, limit / 2)
        gains |= {f"{path}.gate_proj.weight": gain, f"{path}.up_proj.weight": gain}
        gains[f"{path}.down_proj.weight"] = gain**-2
    # A tied head would only repeat the last token if the layers could not outweigh its embedding.
    modules = dict(model.named_modules())
    if not any(path.endswith("lm_head") for path in modules):
        for path, module in modules.items():
            multiplier = getattr(module, "embed_scale", getattr(module, "embedding_multiplier", 1))
            for name in ("embed_tokens", "word_embeddings"):
                if name in module:
                    gains[f"{path}.{name}.weight"] = 0.15 / multiplier
    return gains
