"""Synthetic checkpoints: valid, of real sizes, and routed as recorded, token by token."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load, load_model
from scripts.make_checkpoint import SHAPES, Shape, main, make_checkpoint, read_routing, route
from scripts.record_routing import Recorder, record
from scripts.synthetic import gates, writer
from scripts.synthetic.routing import DEMO, Routing, compose, load_routing
from scripts.synthetic.tensors import FIRST_TOKEN, TINY, Tensors, bf16

from moestream import Engine, InvalidRequest, MoestreamError
from moestream.io.checkpoint import read_header
from moestream.runtime.tracefile import read_trace

TINY_SHAPES = {
    # More layers, more experts, and more ranks than the recording has.
    "qwen3_moe": Shape(layers=14, top_k=6, hidden=128, inner=64, heads=2, kv_heads=1, head_size=64),
    "qwen3_next": Shape(
        kind="qwen3_next",
        layers=4,
        experts=128,
        top_k=10,
        hidden=192,
        inner=64,
        heads=2,
        kv_heads=1,
        head_size=64,
        key_heads=1,
        value_heads=2,
        linear_head_size=64,
    ),
    "gpt_oss": Shape(
        kind="gpt_oss",
        layers=2,
        top_k=4,
        hidden=192,
        inner=64,
        heads=2,
        kv_heads=1,
        head_size=64,
        window=8,
        context=131072,
    ),
}
CSV = Path(__file__).parent / "data" / "demo.route.csv.gz"


@pytest.fixture(scope="module", params=TINY_SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape, routed = route(TINY_SHAPES[request.param], DEMO)
    directory = tmp_path_factory.mktemp("synthetic") / str(request.param)
    return make_checkpoint(directory, shape, routed=routed, quiet=True)


# -- routing in mlx-lm --------------------------------------------------------------------------


class GateTap(nn.Module):
    """Keeps the logits of a gate."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.logits = mx.zeros((0,))

    def __call__(self, x: mx.array) -> mx.array:
        self.logits = self.inner(x)
        return self.logits


class SwitchTap(nn.Module):
    """Keeps the experts that a block asks for, and the size of what they answer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.indices = self.output = mx.zeros((0,))

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.indices = indices
        self.output = self.inner(x, indices)
        return self.output


class Watched:
    """A model of mlx-lm whose routing is looked at."""

    def __init__(self, directory: Path, dtype: mx.Dtype) -> None:
        self.model, _ = load_model(directory)

        def cast(array: mx.array) -> mx.array:
            return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array

        self.model.update(tree_map(cast, self.model.parameters()))
        self.cache = make_prompt_cache(self.model)
        self.gates: list[GateTap] = []
        self.switches: list[SwitchTap] = []
        for layer in self.model.layers:
            block = layer.mlp
            gate = "router" if "router" in block else "gate"
            switch = "experts" if "experts" in block else "switch_mlp"
            setattr(block, gate, GateTap(getattr(block, gate)))
            setattr(block, switch, SwitchTap(getattr(block, switch)))
            self.gates.append(getattr(block, gate))
            self.switches.append(getattr(block, switch))

    def __call__(self, tokens: list[int]) -> tuple[list[int], np.ndarray]:
        """The likeliest next token of each; the routed experts ``[tokens, layers, top_k]``."""
        logits = self.model(mx.array([tokens]), cache=self.cache)
        best: Any = mx.argmax(logits[0], axis=-1).tolist()
        layers = []
        for gate, switch in zip(self.gates, self.switches, strict=True):
            top_k = switch.indices.shape[-1]
            ranked = np.argsort(-np.array(gate.logits[0].astype(mx.float32)), axis=-1)[:, :top_k]
            chosen = np.sort(np.array(switch.indices[0]), axis=-1)
            assert np.array_equal(chosen, np.sort(ranked, axis=-1))
            layers.append(ranked)
        return best, np.stack(layers, axis=1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_mlx_lm_routes_as_recorded(checkpoint: Path, dtype: mx.Dtype) -> None:
    first, chosen = read_routing(checkpoint)
    steps = len(chosen)
    watched = Watched(checkpoint, dtype)
    # A prompt of all steps in any order, then tokens by themselves, past the end of the recording.
    order = np.random.default_rng(0).permutation(steps)
    if dtype == mx.bfloat16:  # slow on the CPU backend
        order = order[:40]
    best, routed = watched((order + first).tolist())
    assert np.array_equal(routed, chosen[order])
    assert best == ((order + 1) % steps + first).tolist()
    token = first + steps - 3
    for step in (-3, -2, -1, 0, 1):
        best, routed = watched([token])
        assert np.array_equal(routed[0], chosen[step])
        token = best[0]
    assert token == first + 2
    sizes: list[Any] = [mx.abs(switch.output).max().item() for switch in watched.switches]
    assert 0 < max(sizes) < 50 * TINY, "the experts answer, and change nothing"


def test_any_token_has_recorded_routing(checkpoint: Path) -> None:
    first, chosen = read_routing(checkpoint)
    _, routed = Watched(checkpoint, mx.float32)([0, 1, 300, 8191])
    at = [(token - first) % len(chosen) for token in (0, 1, 300, 8191)]
    assert np.array_equal(routed, chosen[at])


async def test_the_engine_routes_as_recorded(checkpoint: Path, tmp_path: Path) -> None:
    first, chosen = read_routing(checkpoint)
    _, layers, top_k = chosen.shape
    trace = tmp_path / "trace.json"
    async with await Engine.open(checkpoint, slots=2 * top_k, trace=trace) as engine:
        result = await engine.generate([first + 5], max_tokens=12, ignore_eos=True)
        text = await engine.generate("Once upon a time", max_tokens=2)
    assert result.tokens == tuple(range(first + 6, first + 18))
    assert text.tokens[1] == text.tokens[0] + 1, "no end token, and on to the next step"
    routes = [route for route in read_trace(trace).routes if route.tokens == 1]
    assert len(routes) >= 12 * layers
    for place, seen in enumerate(routes[: 12 * layers]):
        step, layer = divmod(place, layers)
        assert seen.layer == layer
        assert set(seen.experts) == set(chosen[5 + step, layer].tolist())


def test_a_checkpoint_opens_with_its_tokenizer(checkpoint: Path) -> None:
    tokenizer = load(str(checkpoint))[1]
    assert (
        tokenizer.vocab_size <= json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    )
    assert len(tokenizer.encode("a brave little mouse")) > 2
    assert not tokenizer.eos_token_ids & set(range(FIRST_TOKEN, FIRST_TOKEN + 128))


# -- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers", "experts", "record", "total"),
    [
        ("qwen3-30b-a3b", 48, 128, 2_654_208, 16.9e9),
        ("qwen3-next-80b-a3b", 48, 512, 1_769_472, 44.5e9),
        ("gpt-oss-120b", 36, 128, 13_236_480, 61.9e9),
    ],
)
def test_sizes_of_the_real_models(
    name: str, layers: int, experts: int, record: int, total: float
) -> None:
    shape = SHAPES[name]
    assert (shape.layers, shape.experts) == (layers, experts)
    shards = list(Tensors(shape, None).shards())
    switch = [t for t in shards[-1] if ".switch_mlp." in t.name or ".experts." in t.name]
    assert sum(tensor.nbytes for tensor in switch) == record * experts
    assert sum(t.nbytes for shard in shards for t in shard) == pytest.approx(total, rel=0.01)


def test_random_routing_opens_too(tmp_path: Path) -> None:
    for kind, shape in TINY_SHAPES.items():
        directory = make_checkpoint(tmp_path / kind, shape, quiet=True)
        assert not (directory / "routing.json").exists()
        logits = load_model(directory)[0](mx.array([[5, 6, 7]]))
        spread: Any = mx.std(logits.astype(mx.float32)).item()
        assert 0.1 < spread < 10, kind
        assert not bool(mx.any(mx.isnan(logits)).item())


def test_aligned_experts_begin_at_pages(tmp_path: Path) -> None:
    shape = Shape(layers=1, experts=4, top_k=2, hidden=512, inner=256)
    directory = make_checkpoint(tmp_path / "model", shape, aligned=True, quiet=True)
    header = read_header(directory / "model-00002-of-00002.safetensors")
    experts = [t for name, t in header.items() if "switch_mlp" in name and "_proj.weight" in name]
    assert len(experts) == 3
    assert all(tensor.offset % 4096 == 0 for tensor in experts)


def test_experts_differ(tmp_path: Path) -> None:
    shape = Shape(layers=1, experts=16, top_k=2, hidden=256, inner=64)
    model, _ = load_model(make_checkpoint(tmp_path / "model", shape, quiet=True))
    weight = np.array(model.layers[0].mlp.switch_mlp.gate_proj.weight)
    assert len(np.unique(weight.reshape(16, -1), axis=0)) == 16


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kind": "qwen3_next", "layers": 3}, "at least 4 layers"),
        ({"kind": "gpt_oss", "layers": 1}, "at least 2 layers"),
        ({"top_k": 65}, "top_k=65"),
        ({"hidden": 100}, "multiple of 64"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Shape(**sizes)


# -- gates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [64, 128, 192, 320, 2048])
def test_embeddings_are_orthogonal_signs(hidden: int) -> None:
    assert gates.most_steps(hidden) == hidden
    rows = gates.sign_rows(hidden, hidden)
    assert set(np.unique(rows)) == {-1, 1}
    products = rows.astype(np.float32) @ rows.T.astype(np.float32)
    assert np.array_equal(products, hidden * np.eye(hidden))


def test_the_width_of_gpt_oss_has_such_a_matrix() -> None:
    assert gates.most_steps(2880) == 2880
    rows = gates.sign_rows(2880, 500).astype(np.float32)
    assert np.array_equal(rows @ rows.T, 2880 * np.eye(500))


def test_widths_without_such_a_matrix_have_zeros_behind() -> None:
    assert gates.most_steps(2368) == 2048
    rows = gates.sign_rows(2368, 2048)[::5].astype(np.float32)
    assert not rows[:, 2048:].any()
    assert np.array_equal(rows @ rows.T, 2048 * np.eye(len(rows)))
    with pytest.raises(ValueError, match="2048 such rows"):
        gates.sign_rows(2368, 2049)


def test_logits_keep_the_order_and_the_distances() -> None:
    weights = np.array([[0.5, 0.3, 0.2], [0.34, 0.33, 0.33], [0.9999, 5e-5, 5e-5]], np.float32)
    logits = gates.rank_logits(weights)
    assert np.allclose(logits[0] - gates.FLOOR, np.log([2.5, 1.5, 1.0]), atol=1e-6)
    assert np.allclose(logits[1] - gates.FLOOR, [0.5, 0.25, 0.0])
    assert np.allclose(logits[2] - gates.FLOOR, [gates.SPAN, gates.GAP, 0.0])


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_gates_survive_rounding(bits: int) -> None:
    """As many steps as columns, which is the worst case; 4 bits may change ranks, not the set."""
    made = compose(load_routing(DEMO), layers=1, experts=128, top_k=8, steps=1024).routing
    rows = gates.sign_rows(1024, 1024)
    gate = gates.make_gate(made.chosen[:, 0], made.weights[:, 0], rows, 128)
    if bits == 16:
        rounded = (bf16(gate).astype(np.uint32) << 16).view(np.float32)
    else:
        quantized = mx.quantize(mx.array(gate), 64, bits)
        rounded = np.array(mx.dequantize(*quantized, 64, bits))
    ranked = np.argsort(-(rows.astype(np.float32) @ rounded.T), axis=1)[:, :8]
    if bits == 4:
        ranked, wanted = np.sort(ranked, axis=1), np.sort(made.chosen[:, 0], axis=1)
    else:
        wanted = made.chosen[:, 0]
    assert np.array_equal(ranked, wanted)


# -- recordings ---------------------------------------------------------------------------------


def recording(steps: int, layers: int, experts: int, ranks: int) -> Routing:
    rng = np.random.default_rng(3)
    chosen = rng.random((steps, layers, experts)).argsort(axis=-1)[..., :ranks]
    weights = np.sort(rng.random((steps, layers, ranks)), axis=-1)[..., ::-1]
    return Routing(chosen.astype(np.uint16), weights.astype(np.float32), experts, "a test")


def test_what_was_recorded_is_used_as_it_is() -> None:
    recorded = recording(40, 3, 8, 2)
    made = compose(recorded, layers=2, experts=8, top_k=2, steps=30)
    assert np.array_equal(made.routing.chosen, recorded.chosen[:30, :2])
    assert made.segments == 1
    assert not made.overlap
    assert made.words.endswith("as recorded")


@pytest.mark.parametrize("steps", [10, 40])
def test_layers_and_groups_follow_the_recording_at_their_times(steps: int) -> None:
    """Ids are shuffled within a group, so what is compared is which steps share an expert."""
    recorded = recording(40, 3, 8, 3)
    made = compose(recorded, layers=5, experts=16, top_k=6, steps=steps)
    assert made.segments == 4
    assert made.overlap == (steps == 40)
    assert made.routing.chosen.shape == (steps, 5, 6)
    for layer in range(5):
        for group in range(2):
            start = 10 * (layer // 3 * 2 + group)
            at = (start + np.arange(steps)) % 40
            ours = made.routing.chosen[:, layer]
            mine = [set(row[row // 8 == group].tolist()) for row in ours]
            theirs = [set(row.tolist()) for row in recorded.chosen[at, layer % 3]]
            assert [[len(a & b) for a in mine] for b in mine] == [
                [len(a & b) for a in theirs] for b in theirs
            ]


def test_groups_share_the_ranks_by_weight() -> None:
    recorded = recording(40, 1, 8, 3)
    made = compose(recorded, layers=1, experts=16, top_k=3, steps=20).routing
    shares = recorded.weights / recorded.weights.sum(axis=-1, keepdims=True)
    both = np.concatenate([shares[:20, 0], shares[20:, 0]], axis=1)
    assert np.allclose(made.weights[:, 0], -np.sort(-both, axis=1)[:, :3])
    counts = (made.chosen[:, 0] < 8).sum(axis=1)
    assert counts.min() < counts.max()
    assert all(len(set(row)) == 3 for row in made.chosen[:, 0].tolist())


def test_a_recording_that_does_not_fit_is_refused() -> None:
    recorded = recording(40, 3, 8, 2)
    for experts in (4, 12):
        with pytest.raises(InvalidRequest, match="multiple of the 8"):
            compose(recorded, layers=1, experts=experts, top_k=2, steps=8)
    with pytest.raises(InvalidRequest, match="give --top-k no more than that"):
        compose(recorded, layers=1, experts=16, top_k=5, steps=8)


def test_csv_with_weights(tmp_path: Path) -> None:
    path = tmp_path / "routes.csv"
    lines = ["# model=m n_expert=8", "turn,phase,step,layer,slot,expert,weight"]
    lines += [f"0,0,{s},{n},{r},{r},0.5" for n in (0, 1) for s in (0, 1) for r in (0, 1)]
    lines += [f"0,1,{s},{n},0,{s + 3},0.75" for s in (0, 1) for n in (0, 1)]
    lines[-2:-2] = []
    rows = [f"0,1,{s},{n},1,{n},0.25" for s in (0, 1) for n in (0, 1)]
    for row in rows:  # behind the first rank of its call
        at = next(i for i, line in enumerate(lines) if line.startswith(row[:8] + "0,"))
        lines.insert(at + 1, row)
    path.write_text("\n".join(lines))
    routing = load_routing(path)
    assert routing.chosen.tolist() == [[[3, 0], [3, 1]], [[4, 0], [4, 1]]]
    assert routing.weights.tolist() == [[[0.75, 0.25]] * 2] * 2
    assert (routing.experts, routing.source) == (8, "m, 2 tokens")


def test_recordings_without_weights_get_falling_ones() -> None:
    routing = load_routing(CSV)
    assert routing.chosen.shape[1:] == (3, 6)
    assert routing.steps > 10
    assert np.all(routing.weights > 0)
    assert np.all(np.diff(routing.weights, axis=-1) <= 0)


async def test_a_trace_of_an_engine_is_a_recording(demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    async with await Engine.open(demo, slots=16, trace=trace) as engine:
        await engine.generate("Once upon a time", max_tokens=6, ignore_eos=True)
    routing = load_routing(trace)
    assert routing.chosen.shape == (5, 12, 6)
    assert routing.experts == 64


def test_a_file_without_decoded_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "routes.csv"
    path.write_text("phase,step,layer,slot,expert\n0,0,0,0,3\n0,1,0,0,4\n")
    with pytest.raises(InvalidRequest, match="no token that was recorded by itself"):
        load_routing(path)


def test_the_demo_recording_can_be_made_again(demo: Path, tmp_path: Path) -> None:
    """The first of its tokens; and the routing of given texts."""
    recorder = Recorder(demo)
    again, kept = record(recorder, None, 12), load_routing(DEMO)
    assert kept.chosen.shape == (2048, 12, 6)
    # Not all: another machine's rounding may turn two experts round that are nearly as good.
    assert (again.chosen == kept.chosen[:12]).mean() > 0.95
    again.save(tmp_path / "again.npz")
    saved = load_routing(tmp_path / "again.npz")
    assert np.array_equal(saved.chosen, again.chosen)
    shares = again.weights / again.weights[..., :1]
    assert np.allclose(saved.weights / 255, shares, atol=1 / 255)
    assert saved.source == again.source
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"prompt": "Why?", "text": "Because the sun was warm."}))
    given = record(recorder, texts, 4)
    assert given.chosen.shape == (4, 12, 6)
    assert "given texts" in given.source


# -- writing ------------------------------------------------------------------------------------

RUN = """
import resource, sys
from pathlib import Path
from scripts.make_checkpoint import SHAPES, make_checkpoint, route
from scripts.synthetic.routing import DEMO
from dataclasses import replace
def peak():
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
before = peak()
shape, routed = route(replace(SHAPES["qwen3-30b-a3b"], layers=1), DEMO)
make_checkpoint(Path(sys.argv[1]), shape, routed=routed)
print(peak() - before)
"""

KILLED = """
import os, signal, sys
from pathlib import Path
from scripts.make_checkpoint import Shape, make_checkpoint
from scripts.synthetic import writer
shards = 0
write = writer._write_shard
def dying(*arguments):
    global shards
    write(*arguments)
    shards += 1
    if shards == 3:
        os.kill(os.getpid(), signal.SIGKILL)
writer._write_shard = dying
make_checkpoint(Path(sys.argv[1]), Shape(layers=4, experts=8, top_k=2, hidden=64, inner=64))
"""


def run_script(program: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    run = run_script(RUN, tmp_path / "model")
    assert run.returncode == 0, run.stderr[-2000:]
    size = sum(file.stat().st_size for file in (tmp_path / "model").iterdir())
    assert size > 350e6
    assert int(run.stdout) < 200 << 20
    shutil.rmtree(tmp_path / "model")


def test_a_kill_leaves_nothing_that_opens(tmp_path: Path) -> None:
    run = run_script(KILLED, tmp_path / "model")
    assert run.returncode == -signal.SIGKILL, run.stderr[-2000:]
    (left,) = tmp_path.iterdir()
    assert len(list(left.glob("model-*.safetensors"))) == 3
    with pytest.raises(FileNotFoundError):
        load_model(left)
    shape = Shape(layers=4, experts=8, top_k=2, hidden=64, inner=64)
    make_checkpoint(tmp_path / "model", shape, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "the next run cleans up"
    load_model(tmp_path / "model")


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write_shard", fail)
    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "model", Shape(layers=1), quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_full_drive_is_noticed_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=writer.SPARE + 10**6))
    with pytest.raises(writer.DriveFull, match=r"takes 0\.0 GB and 0\.3 GB are free"):
        make_checkpoint(tmp_path / "model", Shape(layers=1), quiet=True)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("mine")
    with pytest.raises(writer.DirectoryTaken):
        make_checkpoint(tmp_path / "model", Shape(layers=1), quiet=True)
    assert (tmp_path / "model" / "config.json").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    shape = Shape(layers=1, experts=8, top_k=2, hidden=64, inner=64)
    assert (make_checkpoint(tmp_path / "empty", shape, quiet=True) / "config.json").exists()


# -- command line -------------------------------------------------------------------------------

SMALL = ["--hidden", "64", "--inner", "64", "--heads", "1", "--kv-heads", "1"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "a"), "--shape", "qwen3-30b-a3b", "--layers", "2", *SMALL]
    assert main([*words, "--steps", "50"]) == 0
    printed = capsys.readouterr()
    assert "top 8 of 128 experts; 50 steps of demo-moe-4bit on own answers" in printed.out
    assert not printed.err, "no bar where nobody sees it"
    assert read_routing(tmp_path / "a")[1].shape == (50, 2, 8)
    assert main(words) == 1
    assert "is there already" in capsys.readouterr().err
    words[0] = str(tmp_path / "b")
    assert main([*words, "--routing", str(CSV), "--experts", "64"]) == 0
    assert "top 6 of 64 experts" in capsys.readouterr().out, "as many ranks as were recorded"
    words[0] = str(tmp_path / "c")
    assert main([*words, "--experts", "64", "--top-k", "8"]) == 1
    assert "top_k=8" in capsys.readouterr().err
    assert main([*words, "--routing", "random"]) == 0
    assert "random routing" in capsys.readouterr().out


def test_steps_are_bounded_by_width_and_vocabulary() -> None:
    shape = replace(TINY_SHAPES["qwen3_moe"], vocabulary=FIRST_TOKEN + 100)
    assert route(shape, DEMO)[1].routing.steps == 100
    assert route(replace(shape, vocabulary=8192), DEMO)[1].routing.steps == 128
    with pytest.raises(MoestreamError):
        route(replace(shape, vocabulary=FIRST_TOKEN), DEMO)
