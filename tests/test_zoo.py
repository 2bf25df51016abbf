"""The zoo itself: its checkpoints load, run and route, and it misses no architecture."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from . import zoo

LENGTHS = (1, 7, 65)


class Checkpoint(NamedTuple):
    name: str
    directory: Path
    model: Any


class Recorder:
    """Stands in for an expert module and keeps the indices it was called with."""

    def __init__(self, switch: Any) -> None:
        self.switch = switch
        self.calls: list[mx.array] = []

    def __call__(self, x: mx.array, indices: mx.array) -> Any:
        self.calls.append(indices)
        return self.switch(x, indices)


def record(model: Any) -> list[Recorder]:
    recorders = []
    for path, switch in zoo.switch_modules(model).items():
        *parents, name = path.split(".")
        owner = model
        for part in parents:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        recorders.append(Recorder(switch))
        setattr(owner, name, recorders[-1])
    return recorders


def prompt(length: int) -> mx.array:
    return mx.array(np.random.default_rng(length).integers(0, 256, (1, length)))


def stored(directory: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(directory / "model.safetensors")))  # type: ignore[arg-type]


def assert_unchanged(model: Any, directory: Path) -> None:
    parameters = dict(tree_flatten(model.parameters()))
    weights = stored(directory)
    assert parameters.keys() == weights.keys()
    for path, weight in weights.items():
        assert parameters[path].dtype == weight.dtype, path
        assert mx.array_equal(parameters[path], weight), path


@pytest.fixture(scope="module", params=zoo.ARCHITECTURES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checkpoint]:
    name: str = request.param
    directory = zoo.make_checkpoint(name, tmp_path_factory.mktemp("zoo") / name)
    yield Checkpoint(name, directory, zoo.reference(directory))
    shutil.rmtree(directory)


def test_loads_back_unchanged(checkpoint: Checkpoint) -> None:
    # Also holds mlx-lm's sanitize to leaving its own format alone.
    assert_unchanged(zoo.reference(checkpoint.directory, dtype=None), checkpoint.directory)


def test_forward_is_finite_and_routes_by_token(checkpoint: Checkpoint) -> None:
    if checkpoint.name in zoo.EXCEPTIONS and not mx.metal.is_available():
        with pytest.raises(RuntimeError, match="No Metal back-end"):
            mx.eval(checkpoint.model(prompt(7)))
        return
    recorders = record(checkpoint.model)
    assert len(recorders) >= 2
    for length in LENGTHS:
        cache = make_prompt_cache(checkpoint.model)
        logits = checkpoint.model(prompt(length), cache=cache)
        assert logits.shape == (1, length, 256)
        for step in range(3):
            assert mx.isfinite(logits).all()
            # Neither vanished nor exploded on the way through the layers.
            assert 0.1 < logits[:, -1].std().item() < 10
            if step < 2:
                logits = checkpoint.model(mx.argmax(logits[:, -1:], axis=-1), cache=cache)
    for recorder in recorders:
        assert len(recorder.calls) == 3 * len(LENGTHS)  # once a forward
        chosen = np.array(recorder.calls[-3]).reshape(LENGTHS[-1], -1)
        assert len(np.unique(np.sort(chosen, axis=-1), axis=0)) > 3
        first = recorder.switch.get("gate_proj", recorder.switch.get("fc1"))
        assert chosen.max() < first.num_experts


def test_no_architecture_is_missing() -> None:
    folder = Path(next(iter(mlx_lm.models.__path__)))
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    moe = {name for name, text in sources.items() if re.search(r"Switch(GLU|MLP)\(", text)}
    moe.remove("switch_layers")
    # Those that inherit from or wrap one of them, and so on.
    while more := {name for name, text in sources.items() if imports_any(text, moe)} - moe:
        moe |= more
    classes = [utils._get_classes(config)[0] for config in zoo.ARCHITECTURES.values()]
    modules = {base.__module__.rpartition(".")[2] for base in classes}
    # Re-exported or wrapped ones count under their own model types.
    names = modules | {config["model_type"] for config in zoo.ARCHITECTURES.values()}
    assert moe <= names
    assert modules <= moe
    assert zoo.EXCEPTIONS.keys() <= zoo.ARCHITECTURES.keys()


def imports_any(text: str, names: set[str]) -> bool:
    either = "|".join(sorted(names))
    return bool(re.search(rf"^from \.(({either}) import| import .*\b({either})\b)", text, re.M))


@pytest.mark.parametrize("name", ["bailing_hybrid", "gpt_oss", "kimi_linear", "qwen3_next"])
def test_parameters_follow_the_seed(name: str, tmp_path: Path) -> None:
    first = stored(zoo.make_checkpoint(name, tmp_path / "a", seed=1))
    mx.random.seed(123)
    again = stored(zoo.make_checkpoint(name, tmp_path / "b", seed=1))
    other = stored(zoo.make_checkpoint(name, tmp_path / "c", seed=2))
    assert first.keys() == again.keys() == other.keys()
    for path, weight in first.items():
        assert mx.array_equal(weight, again[path]), path
        assert not mx.array_equal(weight, other[path]), path


def test_selection_bias_decides_some_tokens(tmp_path: Path) -> None:
    model = zoo.reference(zoo.make_checkpoint("deepseek_v3", tmp_path))
    recorders = record(model)
    model(prompt(65))
    for layer in model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias *= 0
    model(prompt(65))
    for recorder in recorders:
        with_bias, without = (np.sort(np.array(call), axis=-1) for call in recorder.calls)
        assert 0.05 < (with_bias != without).any(axis=-1).mean() < 0.95


@pytest.mark.parametrize(
    "quantize",
    [{"bits": bits, "group_size": 32, "mode": "affine"} for bits in (2, 3, 4, 5, 6, 8)]
    + [{"bits": 4, "group_size": 64}, {"mode": "mxfp4"}, {"mode": "mxfp8"}, {"mode": "nvfp4"}],
    ids=lambda quantize: "-".join(map(str, quantize.values())),
)
@pytest.mark.parametrize("name", ["qwen3_moe", "nemotron_h"])
def test_quantized(name: str, quantize: dict[str, Any], tmp_path: Path) -> None:
    zoo.make_checkpoint(name, tmp_path, dtype="bfloat16", quantize=quantize)
    assert_unchanged(zoo.reference(tmp_path, dtype=None), tmp_path)
    model = zoo.reference(tmp_path)
    for switch in zoo.switch_modules(model).values():
        for projection in switch.children().values():
            if isinstance(projection, QuantizedSwitchLinear):
                assert projection.mode == quantize.get("mode", "affine")
                assert projection.bits == quantize.get("bits", projection.bits)
    assert mx.isfinite(model(prompt(7))).all()
    entry = json.loads((tmp_path / "config.json").read_text())["quantization"]
    assert quantize.items() <= entry.items()
    if name == "qwen3_moe":  # its own rule for routers
        assert entry["model.layers.1.mlp.gate"] == {"bits": 8, "group_size": 64}


def test_quantizing_a_prepacked_format_keeps_its_config(tmp_path: Path) -> None:
    name = "prism_hadamard_qwen35"
    zoo.make_checkpoint(name, tmp_path, quantize={"bits": 4, "group_size": 32})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization"] == zoo.ARCHITECTURES[name]["quantization"]
    model = zoo.reference(tmp_path)
    assert next(iter(zoo.switch_modules(model).values())).gate_proj.bits == 4
    assert mx.isfinite(model(prompt(7))).all()


def test_copies_a_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text("{}")
    directory = zoo.make_checkpoint("mixtral", tmp_path / "model", tokenizer_from=source)
    assert (directory / "tokenizer.json").read_text() == "{}"
    assert json.loads((directory / "config.json").read_text())["model_type"] == "mixtral"
    assert not (directory / "chat_template.jinja").exists()
