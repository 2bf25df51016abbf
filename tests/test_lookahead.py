"""Prediction of later layers' experts, checked against what every architecture's router does."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.utils import load_tokenizer

from moestream.models.experts import SiteUse, find_sites, probe_sites
from moestream.models.loading import load_lazily
from moestream.models.lookahead import Predictor, Tap, build_predictor

from . import zoo

# Longer lists than these are a regression; shorter ones are welcome.
OWN_CHOICE_ONLY: set[str] = set()
NOT_PREDICTABLE = {"muse_spark"}  # fuses its norm with the addition before it, in a Metal kernel
NO_EMBEDDING = {
    "longcat_flash_ngram",  # adds embeddings of n-grams
    "muse_spark",
    "prism_hadamard_qwen35",  # an embedding class of its own
}
SPARE_OUTPUTS = {"longcat_flash", "longcat_flash_ngram"}  # identity experts, run as expert 0

RULES = {
    "afmoe": "sigmoid+bias+groups-sum",
    "bailing_moe": "softmax+bias+groups-sum",
    "deepseek_v2": "logits+groups-max",
    "deepseek_v3": "sigmoid+bias+groups-sum",
    "deepseek_v41": "sqrtsoftplus+bias",
    "gemma4_text": "logits+own-norm",
    "gpt_oss": "logits",
    "laguna": "sigmoid+bias+softcap",
    "longcat_flash": "softmax+bias",
    "mistral4": "softmax+groups-sum",
    "nemotron_h": "sigmoid+bias+groups-sum",
    "phimoe": "logits",
    "qwen3_moe": "logits",
    "step3p5": "sigmoid+bias",
}


class Recorder:
    """Stands in for an expert module as the runtime's does, and keeps its last indices."""

    def __init__(self, switch: Any) -> None:
        self.switch = switch
        self.indices: Any = None
        self.dry = False  # leaves the experts out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.switch, name)

    def __call__(self, x: mx.array, indices: mx.array) -> Any:
        self.indices = indices
        if self.dry:
            return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)
        return self.switch(x, indices)


@dataclass
class Subject:
    """A model with its predictor; taps not yet in."""

    name: str
    model: Any
    uses: list[SiteUse]
    predictor: Predictor
    recorders: list[Recorder]

    def forward(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache or make_prompt_cache(self.model))
        mx.eval(logits)
        return logits


def prepare(directory: Path, name: str = "", dtype: mx.Dtype | None = mx.float32) -> Subject:
    model = load_lazily(directory).model
    if dtype is not None:
        model.set_dtype(dtype)
    return subject(model, name)


def subject(model: Any, name: str = "", cache: Any = None) -> Subject:
    def fresh() -> Any:
        return make_prompt_cache(model) if cache is None else cache

    uses, _ = probe_sites(model, find_sites(model), fresh())
    before = dict(tree_flatten(model.parameters()))
    predictor = build_predictor(model, uses, fresh())
    after = dict(tree_flatten(model.parameters()))
    assert {path: id(array) for path, array in before.items()} == {
        path: id(array) for path, array in after.items()
    }
    recorders = [Recorder(use.site.module) for use in uses]
    for use, recorder in zip(uses, recorders, strict=True):
        use.site.put(recorder)
    mx.eval(model.parameters(), [use.site.module.parameters() for use in uses])
    return Subject(name, model, uses, predictor, recorders)


def prompt(length: int, batch: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(length).integers(2, 256, (batch, length)))


def routed(recorder: Recorder) -> list[set[int]]:
    indices = recorder.indices
    return [set(row) for row in indices.reshape(-1, indices.shape[-1]).tolist()]


def ranks(predictor: Predictor, target: int, residual: mx.array, width: int) -> list[list[int]]:
    result = predictor.rank(target, residual, width)
    assert result.dtype == mx.uint32
    rows: Any = result.tolist()
    return list(rows)


def residuals(predictor: Predictor) -> list[mx.array]:
    found = [predictor.residual(group) for group in range(len(predictor.predictable))]
    assert all(array is not None and array.ndim == 3 for array in found)
    return [array for array in found if array is not None]


@pytest.fixture(
    scope="module", params=[name for name in zoo.ARCHITECTURES if name not in zoo.EXCEPTIONS]
)
def animal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """A subject of each architecture; its predictor is verified and its taps are out."""
    name: str = request.param
    directory = zoo.make_checkpoint(name, tmp_path_factory.mktemp("lookahead") / name)
    made = prepare(directory, name)
    made.predictor.verify()
    yield made
    shutil.rmtree(directory)


@pytest.fixture
def tapped(animal: Subject) -> Iterator[Subject]:
    animal.predictor.install()
    yield animal
    animal.predictor.remove()


# -- every architecture -----------------------------------------------------------------------


def test_router_is_understood(animal: Subject) -> None:
    predictor = animal.predictor
    groups = len(animal.uses)
    assert predictor.predictable == (animal.name not in NOT_PREDICTABLE,) * groups
    assert predictor.ranked == (animal.name not in OWN_CHOICE_ONLY,) * groups
    assert predictor.warnings == ()
    if animal.name in RULES:
        assert set(predictor.rules) == {RULES[animal.name]}


def test_logits_keep_their_bits(animal: Subject) -> None:
    def run() -> list[mx.array]:
        cache = make_prompt_cache(animal.model)
        return [animal.forward(prompt(length), cache) for length in (9, 1, 1)]

    plain = run()
    animal.predictor.install()
    try:
        tapped = run()
    finally:
        animal.predictor.remove()
    for one, other in zip(plain, tapped, strict=True):
        assert mx.array_equal(one, other)


def test_parameters_stay_reachable(animal: Subject) -> None:
    before = dict(tree_flatten(animal.model.parameters()))
    animal.predictor.install()
    during = {id(array) for _, array in tree_flatten(animal.model.parameters())}
    animal.predictor.remove()
    after = dict(tree_flatten(animal.model.parameters()))
    assert during == {id(array) for array in before.values()}
    assert before.keys() == after.keys()


@pytest.mark.parametrize("length", [1, 33])
def test_own_residual_gives_own_choice(tapped: Subject, length: int) -> None:
    tapped.forward(prompt(length))
    for group, residual in enumerate(residuals(tapped.predictor)):
        use, experts = tapped.uses[group], tapped.uses[group].site.experts
        chosen = routed(tapped.recorders[group])
        best = ranks(tapped.predictor, group, residual, use.top_k)
        every = ranks(tapped.predictor, group, residual, experts + 1)
        assert len(best) == len(every) == length
        for wanted, order, full in zip(chosen, best, every, strict=True):
            if tapped.name in SPARE_OUTPUTS:
                assert wanted - {0} <= set(order)
            else:
                assert wanted == set(order)
            assert full[: use.top_k] == order
            assert sorted(full) == list(range(experts))


def test_batches_are_flattened(tapped: Subject) -> None:
    tapped.forward(prompt(3))
    residual = residuals(tapped.predictor)[-1]
    group = len(tapped.uses) - 1
    single = ranks(tapped.predictor, group, residual, 3)
    double = ranks(tapped.predictor, group, mx.concatenate([residual, residual]), 3)
    assert double == single * 2


def test_entry_and_embedding(tapped: Subject) -> None:
    tokens = prompt(4)
    tapped.forward(tokens)
    start = tapped.predictor.embedding_residual(tokens)
    assert (start is None) == (tapped.name in NO_EMBEDDING)
    for group, use in enumerate(tapped.uses):
        entry = tapped.predictor.input_residual(group)
        assert entry is not None
        if use.site.layer == 0 and start is not None:
            assert mx.allclose(entry, start, atol=1e-4)
    tapped.predictor.clear()


def test_taps_let_go(tapped: Subject) -> None:
    predictor, groups = tapped.predictor, range(len(tapped.uses))
    tapped.forward(prompt(2))
    kept = [weakref.ref(array) for array in residuals(predictor)]
    assert all(predictor.residual(group) is None for group in groups)
    for group in groups:
        predictor.input_residual(group)
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    tapped.forward(prompt(2))
    predictor.clear()
    assert all(predictor.residual(group) is None for group in groups)
    assert all(predictor.input_residual(group) is None for group in groups)


@pytest.mark.parametrize("name", sorted(zoo.EXCEPTIONS))
def test_unpredictable_models_are_only_warned_about(name: str, tmp_path: Path) -> None:
    model = load_lazily(zoo.make_checkpoint(name, tmp_path)).model
    uses = [SiteUse(site, 2) for site in find_sites(model)]
    predictor = build_predictor(model, uses, make_prompt_cache(model))
    mx.eval(model.parameters())
    predictor.install()
    predictor.verify()
    assert not any(predictor.predictable) and not any(predictor.ranked)
    (warning,) = predictor.warnings
    assert "cannot be predicted" in warning and "\n" not in warning
    with pytest.raises(LookupError):
        predictor.rank(0, mx.zeros((1, 1, 64)), 2)


# -- precision and quantization ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "minimax", "gemma4_text", "bailing_moe_v3"]
)
def test_quantized_and_16_bit_routers(
    name: str, bits: int | None, dtype: str, tmp_path: Path
) -> None:
    quantize = {"bits": bits, "group_size": 32} if bits else None
    directory = zoo.make_checkpoint(name, tmp_path, dtype="bfloat16", quantize=quantize)
    made = prepare(directory, name, mx.float32 if dtype == "float32" else None)
    made.predictor.verify()
    assert all(made.predictor.ranked)
    made.predictor.install()
    for recorder in made.recorders:
        recorder.dry = dtype == "bfloat16"  # the CPU multiplies experts in float32 only
    made.forward(prompt(48))
    found = total = 0
    for group, residual in enumerate(residuals(made.predictor)):
        best = ranks(made.predictor, group, residual, made.uses[group].top_k)
        for wanted, order in zip(routed(made.recorders[group]), best, strict=True):
            found, total = found + len(wanted & set(order)), total + len(wanted)
    # In 16 bits experts tie, and a tie may go either way.
    assert found == total if dtype == "float32" else found >= 0.98 * total


def test_order_is_by_selection_score(tmp_path: Path) -> None:
    made = prepare(zoo.make_checkpoint("kimi_k2", tmp_path))
    made.predictor.verify()
    made.predictor.install()
    made.forward(prompt(5))
    for group, residual in enumerate(residuals(made.predictor)):
        layer = made.model.layers[made.uses[group].site.layer]
        gate = layer.mlp.gate
        x = layer.post_attention_layernorm(residual)
        scores = mx.sigmoid(x @ gate.weight.T) + gate.e_score_correction_bias
        expected: Any = mx.argsort(-scores, axis=-1)[0].tolist()
        assert ranks(made.predictor, group, residual, 64) == expected


# -- blocks of unknown kinds ------------------------------------------------------------------


class OddBlock(nn.Module):
    """Chooses by a rule that no adapter knows: the smallest magnitude of the logits."""

    def __init__(self, hidden: int = 32, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts)
        self.switch_mlp = SwitchGLU(hidden, 16, experts)
        self.top_k = 2

    def choose(self, x: mx.array) -> tuple[mx.array, mx.array]:
        scores = -mx.abs(self.gate(x))
        indices = mx.argpartition(-scores, kth=self.top_k - 1, axis=-1)[..., : self.top_k]
        return indices, mx.take_along_axis(scores, indices, axis=-1)

    def __call__(self, x: mx.array) -> mx.array:
        indices, weights = self.choose(x)
        output: mx.array = (self.switch_mlp(x, indices) * weights[..., None]).sum(axis=-2)
        return output


class OddRouter(nn.Module):
    """The same rule as a module that returns ids and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 8)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        scores = -mx.abs(self.proj(x))
        indices = mx.argpartition(-scores, kth=1, axis=-1)[..., :2]
        return indices, mx.take_along_axis(scores, indices, axis=-1)


class OddExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.switch_mlp = SwitchGLU(32, 16, 8)

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        output: mx.array = (self.switch_mlp(x, indices) * weights[..., None]).sum(axis=-2)
        return output


class PickyBlock(OddBlock):
    """Works inside its model only."""

    busy = False

    def __call__(self, x: mx.array) -> mx.array:
        if not self.busy:
            raise ValueError("called\nout of turn")
        return super().__call__(x)


class OddLayer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(32)
        self.norm.weight = 1 + 0.1 * mx.random.normal((32,), key=mx.random.key(1))
        if kind == "router":
            self.router = OddRouter()
            self.experts = OddExperts()
        else:
            self.mlp = PickyBlock() if kind == "picky" else OddBlock()

    def __call__(self, x: mx.array) -> mx.array:
        if self.kind == "bare":  # something between norm and block
            return x + self.mlp(self.norm(x) * 2)
        if self.kind == "router":
            indices, weights = self.router(x)
            return x + self.experts(self.norm(x), indices, weights)
        if self.kind == "picky":
            PickyBlock.busy = True
        output = x + self.mlp(self.norm(x))
        if self.kind == "picky":
            PickyBlock.busy = False
        return output


class OddModel(nn.Module):
    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = [OddLayer(kind) for kind in kinds]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x: mx.array = self.embed(tokens) * 3
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", ["block", "router"])
def test_unknown_rule_falls_back_to_the_block(kind: str) -> None:
    made = subject(OddModel(kind, kind), cache=[None])
    predictor = made.predictor
    predictor.verify()
    assert predictor.predictable == (True, True)
    assert predictor.ranked == (False, False)
    assert predictor.rules == ("own choice", "own choice")
    assert predictor.warnings == ()
    predictor.install()
    made.model(prompt(6) % 64)
    for group, residual in enumerate(residuals(predictor)):
        # However many are asked for, only the choice is known.
        best = ranks(predictor, group, residual, 5)
        assert [set(row) for row in best] == routed(made.recorders[group])
        assert made.uses[group].site.parent.switch_mlp is made.recorders[group]
        if kind == "router":  # which tells the weights: best first
            logits = mx.abs(made.model.layers[group].router.proj(residual))[0]
            first: Any = mx.argmin(logits, axis=-1).tolist()
            assert [row[0] for row in best] == first


def test_reasons_are_told_once_for_all_their_layers() -> None:
    made = subject(OddModel("bare", "bare", "block", "bare", "picky"), cache=[None])
    made.predictor.verify()
    assert made.predictor.predictable == (False, False, True, False, False)
    assert made.predictor.warnings == (
        "the experts of layers 0-1, 3 cannot be predicted: its router's input is no norm's output",
        "the experts of layer 4 cannot be predicted: "
        "its block fails when called by itself (called)",
    )
    made.predictor.install()
    assert made.predictor.residual(0) is None


def test_a_failing_forward_pass_is_a_warning() -> None:
    model = OddModel("block")
    uses, _ = probe_sites(model, find_sites(model), [None])
    before = [type(module) for _, module in model.named_modules()]
    model.layers[0].norm.weight = mx.ones((31,))
    predictor = build_predictor(model, uses, [None])
    assert predictor.predictable == (False,)
    assert "cannot be probed" in predictor.warnings[0]
    assert before == [type(module) for _, module in model.named_modules()]


def test_embedding_scale_is_measured() -> None:
    made = subject(OddModel("block"), cache=[None])
    made.predictor.verify()
    tokens = prompt(3) % 64
    start = made.predictor.embedding_residual(tokens)
    assert start is not None
    assert mx.allclose(start, made.model.embed(tokens) * 3)


# -- taps -------------------------------------------------------------------------------------


def test_tap_is_transparent() -> None:
    norm = nn.RMSNorm(4, eps=1e-3)
    tap = Tap(norm)
    assert tap.eps == 1e-3 and tap.weight is norm.weight
    assert [path for path, _ in tree_flatten(tap.parameters())] == ["inner.weight"]
    with pytest.raises(AttributeError):
        _ = tap.nothing
    x = mx.arange(4.0)
    assert mx.array_equal(tap(x), norm(x))
    assert tap.take() is x
    assert tap.take() is None


def test_inputs_are_told_before_the_layer_is_built() -> None:
    made = subject(OddModel("block", "block"), cache=[None])
    made.predictor.verify()
    events: list[tuple[str, int]] = []
    for group, recorder in enumerate(made.recorders):
        switch = recorder.switch

        def call(x: mx.array, ids: mx.array, group: int = group, switch: Any = switch) -> Any:
            events.append(("experts", group))
            return switch(x, ids)

        recorder.switch = call
    made.predictor.install(lambda group, x: events.append(("input", group)))
    made.model(prompt(1) % 64)
    assert events == [("input", 0), ("experts", 0), ("input", 1), ("experts", 1)]


# -- a trained model --------------------------------------------------------------------------

# Half of the held-out texts came from templates, which are harder to predict than free prose;
# "Improvise." asks for the latter.
PROMPTS = (
    "Write a short story about a fox who finds a lantern.",
    "Why do leaves fall in autumn?",
    "Improvise. Write a story about a girl and her grandfather at the sea.",
    "Improvise. Tell me about a storm in the mountains.",
)

RECALL = {0: (0.795, 0.932), 1: (0.724, 0.895), 2: (0.615, 0.808), 3: (0.548, 0.740)}
"""Distance -> recall at top_k and twice top_k on held-out texts of the model's training."""


@pytest.mark.slow
def test_recall_on_generated_text(demo: Path) -> None:
    made = prepare(demo)
    predictor = made.predictor
    predictor.verify()
    assert all(predictor.ranked)
    predictor.install()
    hits = {distance: np.zeros(3) for distance in RECALL}
    for text in PROMPTS:
        tokens = _generate(made, demo, text, 50)
        made.forward(mx.array([tokens]))
        sources = residuals(predictor)
        chosen = [routed(recorder) for recorder in made.recorders]
        for target, use in enumerate(made.uses):
            for distance in RECALL:
                if distance > target:
                    continue
                source = sources[target - distance]
                if distance == 0:
                    entry = predictor.input_residual(target)
                    assert entry is not None
                    source = entry
                order = ranks(predictor, target, source, 2 * use.top_k)
                for wanted, row in zip(chosen[target], order, strict=True):
                    near, far = set(row[: use.top_k]), set(row)
                    hits[distance] += (len(wanted & near), len(wanted & far), len(wanted))
    for distance, expected in RECALL.items():
        recall = hits[distance][:2] / hits[distance][2]
        assert np.abs(recall - expected).max() < 0.06, (distance, recall)


def _generate(made: Subject, directory: Path, text: str, count: int) -> list[int]:
    tokenizer = load_tokenizer(directory)
    message = [{"role": "user", "content": text}]
    tokens: list[int] = list(tokenizer.apply_chat_template(message, add_generation_prompt=True))
    cache = make_prompt_cache(made.model)
    logits = made.forward(mx.array([tokens]), cache)
    for _ in range(count):
        token: Any = mx.argmax(logits[0, -1]).item()
        tokens.append(token)
        logits = made.forward(mx.array([[token]]), cache)
    return tokens
