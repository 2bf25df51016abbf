"""Runners for other systems, with stand-ins for them: what they are told, and what is printed."""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripts.make_checkpoint import Shape, make_checkpoint
from scripts.rivals import (
    compare,
    llamacpp_runner,
    memory_group,
    moestream_runner,
    page_cache,
    protocol,
    streamlx_patches,
    streamlx_runner,
    write_gguf,
)
from scripts.rivals.errors import CheckoutMissing, ModelUnsupported, NoControlGroup, RivalError

SMALL = Shape(
    layers=2, experts=8, top_k=2, hidden=128, inner=64, heads=2, kv_heads=1, vocabulary=96
)

# What the runner calls of streamlx, over an unchanged model: no expert is streamed.
FAKE_INTEGRATE = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import mlx.core as mx
from .reader import ExpertReader
from .stindex import SafetensorsIndex

calls = []
executor = ThreadPoolExecutor(1)

def _pf_ex():
    return executor

class Pool:
    def __init__(self, layer, slots):
        self.layer, self.n_slots, self.sweep_fetch_s = layer, slots, 0.25
        self.hits, self.misses = 0, 0
        self.pool = {"up_proj": {"weight": mx.zeros((2,), mx.uint32),
                                 "scales": mx.zeros((2,), mx.bfloat16)}}

class Switch:
    def __init__(self, inner, reader, pool):
        self.inner, self.reader, self.pool = inner, reader, pool
        self._pf_next = None
    def __call__(self, x, indices):
        self.reader.read_ranges([])
        self.pool.hits += 1
        if self._pf_next is not None:
            calls.append(("gate", self._pf_next[1](x).shape[-1]))
            _pf_ex().submit(len, ()).result()
        return self.inner(x, indices)

def load_streaming_model(directory, budget, k):
    from mlx_lm import load
    model, tokenizer = load(directory, lazy=True)
    calls.append(("load", budget, k, os.environ["STREAMLX_PREFETCH"]))
    reader = ExpertReader(SafetensorsIndex(directory))
    pools = {}
    for number, layer in enumerate(model.layers):
        pools[number] = Pool(number, budget // SafetensorsIndex(directory).total())
        layer.mlp.switch_mlp = Switch(layer.mlp.switch_mlp, reader, pools[number])
    if os.environ["STREAMLX_PREFETCH"] != "0":
        first, second = model.layers[0].mlp, model.layers[1].mlp
        first.switch_mlp._pf_next = (pools[1], second.gate, 1, 1)
    mx.eval(model.parameters())
    return model, tokenizer, pools, reader

def aggregate_stats(pools):
    return {"hits": len(pools)}
"""
FAKE_READER = """
import os
import numpy as np
import mlx.core as mx

class ExpertReader:
    def __init__(self, index):
        self.index, self.bytes_read = index, 0
    def read_ranges(self, requests):
        path = self.index.files[0]
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.bytes_read += len(os.pread(descriptor, 100, 50))
        finally:
            os.close(descriptor)
    def _to_mx(self, raw, loc):
        return mx.array(np.frombuffer(raw, np.uint16)).view(mx.bfloat16)
"""
FAKE_INDEX = """
import glob
from safetensors import safe_open

class SafetensorsIndex:
    def __init__(self, directory):
        self.files = sorted(glob.glob(directory + "/model-*.safetensors"))
        if not self.files:
            raise FileNotFoundError("no shards under " + directory)
        self.tensors = {}
        for file in self.files:
            with safe_open(file, "np") as opened:
                for name in opened.keys():
                    self.tensors[name] = opened.get_slice(name).get_shape()
    def layer_expert_bytes(self, layer):
        return 1000 + layer
    def total(self):
        return 2 * 1001
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small") / "model", SMALL, quiet=True)


@pytest.fixture
def streamlx(tmp_path: Path) -> Iterator[Path]:
    package = tmp_path / "checkout" / "streamlx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "integrate.py").write_text(FAKE_INTEGRATE)
    (package / "reader.py").write_text(FAKE_READER)
    (package / "stindex.py").write_text(FAKE_INDEX)
    before = os.environ.get("STREAMLX_PREFETCH")
    yield package.parent
    os.environ.pop("STREAMLX_PREFETCH", None)
    if before is not None:
        os.environ["STREAMLX_PREFETCH"] = before
    for name in [name for name in sys.modules if name.split(".")[0] == "streamlx"]:
        del sys.modules[name]


def prompt_file(folder: Path, value: object) -> Path:
    file = folder / "prompt.json"
    file.write_text(json.dumps(value))
    return file


def words(model: Path, folder: Path, *more: object, prompts: object = (5, 6, 7)) -> list[str]:
    """A command line of a runner."""
    common = ["--model", model, "--prompt-file", prompt_file(folder, prompts), "--tokens", 3]
    return [str(word) for word in [*common, "--repeats", 2, "--warm-tokens", 8, *more]]


# -- streamlx -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", ["direct", "buffered"])
def test_streamlx_prints_a_line_for_prompts_and_one_for_decoding(
    checkpoint: Path, streamlx: Path, tmp_path: Path, reads: str
) -> None:
    if reads == "direct" and not direct_possible(tmp_path):
        pytest.skip("no direct I/O here")
    arguments = words(checkpoint, tmp_path, "--checkout", streamlx, "--slots", 3, "--check")
    lines = streamlx_runner.run([*arguments, "--reads", reads])
    assert [(line["arm"], line["kind"], line["tokens"]) for line in lines] == [
        ("streamlx", "prefill", 3),
        ("streamlx", "decode", 3),
    ]
    for line, calls in zip(lines, (2 * 2, 3 * 2), strict=True):  # layers, and chunks or tokens
        assert line["bytes_read"] == [100 * calls] * 2
        assert (line["hits"], line["misses"]) == ([calls] * 2, [0, 0])
        assert len(line["seconds"]) == len(line["device_bytes"]) == 2
        assert all(0 < stall <= total for stall, total in both(line, "stall_seconds", "seconds"))
        assert line["identical"] is True
        assert line["slots"] == 3
        assert line["statistics"] == {"hits": 2}
        assert "float32" in line["note"]
        assert ("O_DIRECT" in line["note"]) == (reads == "direct" and sys.platform == "linux")
    assert [len(output) for output in lines[1]["outputs"]] == [4, 4]
    assert lines[1]["outputs"][0] == lines[1]["outputs"][1]


def both(line: dict[str, Any], first: str, second: str) -> list[tuple[float, float]]:
    return list(zip(line[first], line[second], strict=True))


def direct_possible(folder: Path) -> bool:
    if sys.platform != "linux":
        return True
    file = folder / "direct"
    file.write_bytes(b"0")
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_streamlx_gets_the_budget_that_makes_our_number_of_slots(
    checkpoint: Path, streamlx: Path, tmp_path: Path
) -> None:
    arguments = words(checkpoint, tmp_path, "--checkout", streamlx, "--reads", "buffered")
    by_slots = streamlx_runner.run([*arguments, "--slots", "4"])
    calls: Any = sys.modules["streamlx.integrate"]
    assert calls.calls[0] == ("load", 4 * 1001 * 2 + 2, SMALL.top_k, "1")
    by_bytes = streamlx_runner.run([*arguments, "--budget-bytes", str(2001 * 5 + 2000)])
    assert [by_slots[0]["slots"], by_bytes[0]["slots"]] == [4, 5]


def test_streamlx_without_its_lookahead(checkpoint: Path, streamlx: Path, tmp_path: Path) -> None:
    arguments = words(checkpoint, tmp_path, "--checkout", streamlx, "--reads", "buffered")
    lines = streamlx_runner.run([*arguments, "--slots", "4", "--no-lookahead"])
    assert lines[0]["arm"] == "streamlx, no lookahead"
    fake: Any = sys.modules["streamlx.integrate"]
    assert fake.calls == [("load", 4 * 1001 * 2 + 2, SMALL.top_k, "0")]


def double(gate: Any, *, seed: int, factor: int) -> Any:
    """A gate for the test below that is told from the model's by its width."""
    return lambda x: mx.tile(gate(x), (factor + seed,))


def test_a_wrapped_gate_is_asked_by_the_lookahead_and_not_by_routing(
    checkpoint: Path, streamlx: Path, tmp_path: Path
) -> None:
    arguments = words(checkpoint, tmp_path, "--checkout", streamlx, "--reads", "buffered")
    arguments += ["--slots", "4", "--check", "--lookahead-gate", f"{__name__}:double"]
    given = '{"seed": 10, "factor": 1}'
    lines = streamlx_runner.run([*arguments, "--lookahead-arguments", given])
    fake: Any = sys.modules["streamlx.integrate"]
    widths = {width for kind, width, *_ in fake.calls if kind == "gate"}
    assert widths == {SMALL.experts * (10 + 1 + 1)}  # the seed, the predicted layer, the factor
    assert lines[0]["identical"] is True
    assert streamlx_patches.CHANGES["gates"] in lines[0]["note"]


def test_a_lookahead_gate_that_is_not_there(
    checkpoint: Path, streamlx: Path, tmp_path: Path
) -> None:
    arguments = words(checkpoint, tmp_path, "--checkout", streamlx, "--reads", "buffered")
    with pytest.raises(RivalError, match="--lookahead-gate json:nothing"):
        streamlx_runner.run([*arguments, "--slots", "4", "--lookahead-gate", "json:nothing"])


def test_a_checkpoint_in_one_file_is_shown_as_a_shard(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "links"
    model.mkdir()
    folder.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"tensors")
    shown, changed = streamlx_patches.as_shards(model, folder)
    assert (shown, changed) == (folder, ["single"])
    assert sorted(file.name for file in shown.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
    ]
    assert (shown / "model-00001-of-00001.safetensors").read_bytes() == b"tensors"


def test_a_checkpoint_of_shards_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    assert streamlx_patches.as_shards(checkpoint, tmp_path) == (checkpoint, [])
    assert not list(tmp_path.iterdir())


def test_streamlx_is_not_there(checkpoint: Path, tmp_path: Path) -> None:
    arguments = words(checkpoint, tmp_path, "--checkout", tmp_path / "no", "--slots", 4)
    with pytest.raises(CheckoutMissing, match=r"no streamlx/integrate\.py; scripts/rivals/README"):
        streamlx_runner.run(arguments)


def test_streamlx_does_not_know_the_checkpoint(streamlx: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = words(empty, tmp_path, "--checkout", streamlx, "--slots", 4)
    with pytest.raises(ModelUnsupported, match=r"streamlx does not run .*no shards under"):
        streamlx_runner.run(arguments)


def test_fewer_slots_than_a_token_needs(checkpoint: Path, streamlx: Path, tmp_path: Path) -> None:
    arguments = words(checkpoint, tmp_path, "--checkout", streamlx, "--slots", 1)
    with pytest.raises(RivalError, match="1 slots per layer are fewer than the 2 experts"):
        streamlx_runner.run(arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="hints of Linux")
@pytest.mark.parametrize("direct", [False, True])
def test_reads_at_any_place_and_behind_the_end(tmp_path: Path, direct: bool) -> None:
    if direct and not direct_possible(tmp_path):
        pytest.skip("no direct I/O here")
    data = random.Random(0).randbytes(3 * 4096 + 100)
    file = tmp_path / "data"
    file.write_bytes(data)
    files: Any = streamlx_patches.LinuxFiles(direct)
    descriptor = files.open(str(file), files.O_RDONLY)
    try:
        for offset, size in [(0, 1), (1, 4096), (4096, 4096), (4095, 8194), (12288, 100), (9, 0)]:
            assert bytes(files.pread(descriptor, size, offset)) == data[offset : offset + size]
        assert bytes(files.pread(descriptor, 500, 12300)) == data[12300:]
        assert bytes(files.pread(descriptor, 10, 20000)) == b""
    finally:
        files.close(descriptor)


def test_only_the_computing_thread_is_on_the_clock() -> None:
    clock = streamlx_patches.WaitClock()
    calls: list[int] = []
    timed = clock.timed(calls.append)
    other = threading.Thread(target=timed, args=(1,))
    other.start()
    other.join()
    assert (calls, clock.seconds) == ([1], 0.0)
    timed(2)
    assert calls == [1, 2]
    assert clock.seconds > 0.0


def test_only_16_bit_floats_are_widened() -> None:
    kinds = [mx.bfloat16, mx.float16, mx.float32, mx.uint32]
    widened = [streamlx_patches.widened(mx.zeros((1,), kind)).dtype for kind in kinds]
    assert widened == [mx.float32, mx.float32, mx.float32, mx.uint32]


# -- llama.cpp ----------------------------------------------------------------------------------

# Generates the number of tokens that it holds, modulo its vocabulary.
FAKE_LLAMA = """
import ctypes
from types import SimpleNamespace

assert __import__("os").environ["LLAMA_CPP_LIB_PATH"]
log = []
held = []
logits = (ctypes.c_float * 50)()
llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
llama_log_set = lambda callback, data: None
llama_backend_init = lambda: None
llama_model_default_params = lambda: SimpleNamespace(n_gpu_layers=-1, use_extra_bufts=True)
llama_context_default_params = SimpleNamespace
llama_model_get_vocab = lambda model: model
llama_vocab_n_tokens = lambda vocab: 50
llama_get_memory = lambda context: held
llama_batch_get_one = lambda tokens, count: list(tokens[:count])

def llama_model_load_from_file(path, params):
    log.append((path, vars(params)))
    return "model" if b"bad" not in path else None

def llama_init_from_model(model, params):
    log.append(vars(params))
    return "context"

def llama_memory_clear(memory, data):
    memory.clear()

def llama_decode(context, batch):
    held.extend(batch)
    return 0

def llama_get_logits_ith(context, place):
    for token in range(50):
        logits[token] = float(token == len(held) % 50)
    return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))

def llama_model_meta_val_str(model, key, text, size):
    values = {b"moestream.expert_bytes": b"600", b"qwen3moe.expert_count": b"8"}
    text.value = values[key]
    return len(values[key])
"""


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Arguments that name the stand-in."""
    package, library = tmp_path / "binding" / "llama_cpp", tmp_path / "lib"
    package.mkdir(parents=True)
    library.mkdir()
    (package / "llama_cpp.py").write_text(FAKE_LLAMA)
    (library / "libllama.so").write_bytes(b"")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"0" * 1000)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "")
    paths = ["--checkout", package.parent, "--library", library, "--gguf", gguf]
    yield [*map(str, paths), "--slots", "4", "--threads", "2"]
    for name in ("llama_cpp", "llama_cpp.llama_cpp"):
        sys.modules.pop(name, None)


def test_llama_cpp_warm(checkpoint: Path, llama: list[str], tmp_path: Path) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    lines = llamacpp_runner.run(words(checkpoint, tmp_path, *llama, "--warm", prompts=prompts))
    prefill, decode = lines
    assert prefill["tokens"] == [3, 2]
    assert decode["tokens"] == 3
    assert decode["outputs"] == [[3, 4, 5, 6], [2, 3, 4, 5]]
    assert decode["stall_seconds"] == [None, None]
    assert (decode["expert_bytes"], decode["experts"]) == (600, 8)
    fake: Any = sys.modules["llama_cpp.llama_cpp"]
    (path, model), context = fake.log
    assert path == os.fsencode(tmp_path / "model.gguf")
    assert model == {"n_gpu_layers": 0, "use_extra_bufts": False, "load_mode": 1}
    assert context["n_ctx"] == 3 + 8 + 1
    assert context["n_threads"] == context["n_threads_batch"] == 2


def test_llama_cpp_cold_is_limited_and_compared_with_a_warm_run(
    checkpoint: Path, llama: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], int | None]] = []

    def run_limited(command: list[str], limit: int | None) -> str:
        started.append((command, limit))
        seconds = [[1.0, 1.5], [2.0, 2.5]] if limit is None else [[3.0, 1.0], [12.0, 13.0]]
        extra = {"anonymous_bytes": 5000, "expert_bytes": 600, "experts": 8, "note": "cold"}
        return "\n".join(json.dumps({"seconds": row, **extra}) for row in seconds)

    monkeypatch.setattr(llamacpp_runner, "run_limited", run_limited)
    lines = llamacpp_runner.run(words(checkpoint, tmp_path, *llama, "--cold"))
    # What it held, the file without its experts, and four slots of eight.
    limit = 5000 + (1000 - 600) + 300
    assert [(command[-1], given) for command, given in started] == [
        ("--warm", None),
        (str(limit), limit),
    ]
    assert all("--inside" in command for command, _ in started)
    assert [line["stall_seconds"] for line in lines] == [[2.0, 0.0], [10.0, 10.5]]
    assert [line["warm_seconds"] for line in lines] == [[1.0, 1.5], [2.0, 2.5]]


def test_a_memory_limit_of_the_caller_goes_first(
    checkpoint: Path, llama: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int | None] = []

    def run_limited(command: list[str], limit: int | None) -> str:
        limits.append(limit)
        return json.dumps({"seconds": [1.0], "note": ""})

    monkeypatch.setattr(llamacpp_runner, "run_limited", run_limited)
    llamacpp_runner.run(words(checkpoint, tmp_path, *llama, "--memory-limit", 12345))
    assert limits == [None, 12345]


@pytest.mark.parametrize(
    ("option", "lacks"),
    [("--checkout", r"llama_cpp/llama_cpp\.py"), ("--library", "libllama")],
)
def test_llama_cpp_is_not_there(
    checkpoint: Path, llama: list[str], tmp_path: Path, option: str, lacks: str
) -> None:
    llama[llama.index(option) + 1] = str(tmp_path / "no")
    with pytest.raises(CheckoutMissing, match=f"{option} .* has no {lacks}"):
        llamacpp_runner.run(words(checkpoint, tmp_path, *llama, "--warm"))


def test_llama_cpp_without_a_file(checkpoint: Path, llama: list[str], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(RivalError, match=r"is no file; scripts/rivals/write_gguf\.py makes one"):
        llamacpp_runner.run(words(checkpoint, tmp_path, *llama, "--warm"))


def test_llama_cpp_cannot_load_the_file(checkpoint: Path, llama: list[str], tmp_path: Path) -> None:
    bad = (tmp_path / "model.gguf").rename(tmp_path / "bad.gguf")
    llama[llama.index("--gguf") + 1] = str(bad)
    with pytest.raises(ModelUnsupported, match=r"llama\.cpp does not run .*cannot be loaded"):
        llamacpp_runner.run(words(checkpoint, tmp_path, *llama, "--warm"))


def test_llama_cpp_tokens_beyond_the_vocabulary(
    checkpoint: Path, llama: list[str], tmp_path: Path
) -> None:
    with pytest.raises(RivalError, match="beyond the vocabulary of 50"):
        llamacpp_runner.run(words(checkpoint, tmp_path, *llama, "--warm", prompts=[50]))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_only_the_mapping_of_the_file_is_advised(tmp_path: Path) -> None:
    file = tmp_path / "mapped"
    file.write_bytes(b"0" * 8192)
    assert llamacpp_runner.advise_random(file) == 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ):
        assert llamacpp_runner.advise_random(file) == 1
    with pytest.raises(RivalError, match="--advice random needs"):
        llamacpp_runner.advise_random(file, tmp_path / "none")


# -- GGUF ---------------------------------------------------------------------------------------


def unpack_q4_1(packed: np.ndarray[Any, Any]) -> list[float]:
    numbers = []
    for block in packed.reshape(-1, 20):
        scale, lowest = struct.unpack("<ee", block[:4].tobytes())
        codes = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
        numbers += [scale * code + lowest for code in codes]
    return numbers


def test_q4_1_holds_the_numbers_of_mlx() -> None:
    weights = mx.random.normal((3, 2, 128), key=mx.random.key(0))
    # Scales of few bits, so that 16-bit floats hold them.
    quantized = mx.quantize(weights.astype(mx.bfloat16), group_size=64, bits=4)
    words, scales, biases = quantized
    packed = write_gguf.pack_q4_1(
        write_gguf.codes_of(np.array(words)),
        np.array(scales.astype(mx.float32)),
        np.array(biases.astype(mx.float32)),
    )
    assert packed.shape == (3, 2, 128 // 32 * 20)
    expected = mx.dequantize(
        words, scales.astype(mx.float32), biases.astype(mx.float32), group_size=64, bits=4
    )
    assert unpack_q4_1(packed) == pytest.approx(expected.reshape(-1).tolist(), abs=1e-6)


def test_q4_0_is_given_the_numbers_of_mlx() -> None:
    words, scales, biases = mx.quantize(mx.random.normal((2, 64, 64)), group_size=64, bits=4)
    seen = []

    def quantize(rows: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
        seen.append(rows)
        return np.full((*rows.shape[:-1], 36), len(kind), np.uint8)

    gguf = SimpleNamespace(
        GGMLQuantizationType=SimpleNamespace(Q4_0="Q4_0"), quants=SimpleNamespace(quantize=quantize)
    )
    codes = write_gguf.codes_of(np.array(words))
    packed = write_gguf.pack_q4_0(gguf, codes, np.array(scales), np.array(biases))
    assert packed.shape == (2, 64, 36)
    expected = np.array(mx.dequantize(words, scales, biases, group_size=64, bits=4))
    np.testing.assert_allclose(np.stack(seen), expected, atol=1e-6)


class FakeWriter:
    """Notes what a GGUF file would hold."""

    def __init__(self, file: str, arch: str) -> None:
        assert arch == "qwen3moe"
        self.infos: dict[str, tuple[tuple[int, ...], int, str]] = {}
        self.values: dict[str, Any] = {}
        self.data: list[np.ndarray[Any, Any]] = []
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return lambda *value: self.values.__setitem__(name, value)

    def add_tensor_info(
        self, name: str, shape: tuple[int, ...], dtype: Any, nbytes: int, raw_dtype: str
    ) -> None:
        self.infos[name] = (shape, nbytes, raw_dtype)

    def write_tensor_data(self, data: np.ndarray[Any, Any]) -> None:
        self.data.append(data)

    def close(self) -> None:
        self.closed = True


def fake_gguf(writers: list[FakeWriter]) -> Any:
    def make(file: str, arch: str) -> FakeWriter:
        writers.append(FakeWriter(file, arch))
        return writers[-1]

    kinds = ("Q4_0", "Q4_1", "F16", "F32")
    return SimpleNamespace(
        GGUFWriter=make,
        GGMLQuantizationType={kind: kind for kind in kinds},
        GGML_QUANT_SIZES={"Q4_1": (32, 20), "F16": (1, 2), "F32": (1, 4)},
    )


def test_a_gguf_file_has_all_tensors_in_llama_cpps_order_of_names(
    checkpoint: Path, tmp_path: Path
) -> None:
    writers: list[FakeWriter] = []
    experts = write_gguf.write_gguf(checkpoint, tmp_path / "x", "q4_1", fake_gguf(writers))
    (writer,) = writers
    weights = SMALL.layers * SMALL.experts * 3 * SMALL.hidden * SMALL.inner
    assert experts == weights * 20 // 32
    assert writer.values["add_uint64"] == (write_gguf.EXPERT_BYTES_KEY, experts)
    assert writer.values["add_expert_count"] == (SMALL.experts,)
    assert writer.values["add_expert_used_count"] == (SMALL.top_k,)
    assert len(writer.infos) == 3 + SMALL.layers * len(write_gguf.NAMES)
    up = (SMALL.experts, SMALL.inner, SMALL.hidden)
    assert writer.infos["blk.1.ffn_up_exps.weight"][0] == up
    assert writer.infos["blk.0.attn_output.weight"][2] == "Q4_1"
    assert writer.infos["blk.0.ffn_gate_inp.weight"][2] == "F32"
    assert writer.infos["token_embd.weight"][2] == "Q4_1"
    assert writer.infos["output.weight"][2] == "F16"  # not quantized in the checkpoint
    sizes = [nbytes for _, nbytes, _ in writer.infos.values()]
    assert [data.nbytes for data in writer.data] == sizes
    assert writer.closed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mixtral"}, "model_type is mixtral"),
        ({"quantization": {"bits": 8}}, "not of 4 bits"),
        ({"quantization": {"bits": 4, "lm_head": {"bits": 8}}}, "in different ways"),
        ({"decoder_sparse_step": 2}, "layers are dense"),
        ({"rope_scaling": {"type": "yarn"}}, "scales positions"),
    ],
)
def test_checkpoints_that_no_gguf_file_is_made_of(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match=reason):
        write_gguf.write_gguf(tmp_path, tmp_path / "x", "q4_0", None)


def test_gguf_package_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        write_gguf.main(["model", "file", "--gguf-py", str(tmp_path)])
    assert ended.value.code == 2
    assert "has no gguf/__init__.py" in capsys.readouterr().err


# -- what all have in common --------------------------------------------------------------------


def test_ours_in_the_same_protocol(checkpoint: Path, tmp_path: Path) -> None:
    arguments = words(checkpoint, tmp_path, "--slots", 4, prompts=[[5, 6, 7], [8]])
    lines = moestream_runner.run(arguments)
    again = moestream_runner.run([*arguments, "--prefetch", "on", "--warm"])
    greedy = moestream_runner.run([*arguments, "--prefetch", '{"admission": "always"}'])
    assert greedy[1]["outputs"] == lines[1]["outputs"]
    assert greedy[1]["arm"] == 'moestream, prefetch {"admission": "always"}'
    assert [line["kind"] for line in lines] == ["prefill", "decode"]
    assert lines[0]["tokens"] == [3, 1]
    assert lines[1]["outputs"] == again[1]["outputs"]
    assert lines[1]["note"].startswith("cold, direct reads, page cache emptied before each")
    assert lines[1]["note"].endswith("; buffered in 2 of 2 files, which are not aligned")
    # The compute thread may be into the second token by the time that the first one has come.
    most = 3 * SMALL.layers * SMALL.top_k
    assert most / 3 < lines[1]["hits"][0] + lines[1]["misses"][0] <= most
    assert again[1]["note"] == "warm, buffered reads"
    assert all(stall <= total for stall, total in both(lines[1], "stall_seconds", "seconds"))


@pytest.mark.parametrize("value", [[], [1, "2"], {"a": 1}, [[1], []], [[1], 2], [True]])
def test_prompts_that_are_none(tmp_path: Path, value: object) -> None:
    with pytest.raises(RivalError, match="must hold token ids"):
        protocol.read_prompts(prompt_file(tmp_path, value))


def test_prompts_take_turns(tmp_path: Path) -> None:
    assert protocol.read_prompts(prompt_file(tmp_path, [1, 2])) == [[1, 2]]
    assert protocol.read_prompts(prompt_file(tmp_path, [[1], [2, 3]])) == [[1], [2, 3]]


def test_a_prompt_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RivalError, match=r"--prompt-file .*none\.json"):
        protocol.read_prompts(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--slots", "4", "--warm", "--reads", "direct"], "which --reads direct goes past"),
        (["--slots", "4", "--model", "nowhere"], "nowhere is no directory"),
        (["--slots", "4", "--prefetch", "of"], "--prefetch of: Expecting value"),
        (["--slots", "4", "--prefetch", '{"x": 1}'], "unexpected keyword argument 'x'"),
        (["--budget-bytes", "10"], "--budget-bytes 10: one expert per layer takes"),
    ],
)
def test_arguments_that_make_no_sense(
    checkpoint: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    with pytest.raises(RivalError, match=message):
        moestream_runner.run([*words(checkpoint, tmp_path), *more])


@pytest.mark.parametrize("more", [["--slots", "0"], [], ["--slots", "1", "--budget-bytes", "1"]])
def test_arguments_that_argparse_refuses(
    checkpoint: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        moestream_runner.run([*words(checkpoint, tmp_path), *more])
    assert ended.value.code == 2
    assert "--budget-bytes" in capsys.readouterr().err


def test_a_page_cache_that_cannot_be_emptied(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[Path] = []
    monkeypatch.setattr(page_cache, "drop", lambda files: dropped.extend(files))  # None: no way
    options = SimpleNamespace(cold=True, reads="direct")
    protocol.cool(options, [checkpoint])  # type: ignore[arg-type]
    options.cold = False
    protocol.cool(options, [checkpoint])  # type: ignore[arg-type]
    assert dropped == [checkpoint]
    options.cold, options.reads = True, "buffered"
    with pytest.raises(RivalError, match="use --reads direct"):
        protocol.cool(options, [checkpoint])  # type: ignore[arg-type]


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: object) -> list[protocol.Line]:
        raise RivalError("put this right")

    with pytest.raises(SystemExit) as ended:
        protocol.run_main(fail)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "put this right\n"


def test_a_memory_limit_starts_the_runner_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], int | None]] = []

    def run_limited(command: list[str], limit: int | None) -> str:
        started.append((command, limit))
        return '{"arm": "inside"}\n'

    monkeypatch.setattr(protocol, "run_limited", run_limited)
    monkeypatch.setattr(sys, "argv", ["runner", "--some", "words"])
    arguments = words(checkpoint, tmp_path, "--slots", 4, "--memory-limit", 5_000_000_000)
    assert moestream_runner.run(arguments) == [{"arm": "inside"}]
    ((command, limit),) = started
    assert command[1:] == [moestream_runner.__file__, "--some", "words", "--inside"]
    assert limit == 5_000_000_000


def test_a_program_in_a_group_of_its_own() -> None:
    show = [sys.executable, "-c", "print(open('/proc/self/cgroup').read())"]
    try:
        output = memory_group.run_limited(show, 1 << 30)
    except NoControlGroup as error:
        pytest.skip(str(error))
    assert f"moestream-rivals-{os.getpid()}" in output


def test_no_group_can_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(NoControlGroup, match="leave --memory-limit out"):
        memory_group.run_limited(["true"], 1 << 30, root=file)


def test_a_measured_process_that_fails() -> None:
    with pytest.raises(RivalError, match="ended with status 3"):
        memory_group.run_limited([sys.executable, "-c", "raise SystemExit(3)"], None)


def test_counters_of_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "io"
    file.write_text("rchar: 7\nread_bytes: 4096\n")
    assert page_cache.counters(file).device_bytes == 4096
    assert page_cache.counters(tmp_path / "none").device_bytes is None


def test_readahead_of_the_device(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    device = tmp_path / f"{os.major(number)}:{os.minor(number)}"
    assert page_cache.readahead_bytes(tmp_path, tmp_path) is None
    device.mkdir()
    (device / "read_ahead_kb").write_text("128\n")
    assert page_cache.readahead_bytes(tmp_path, tmp_path) == 128 * 1024


def canned(kind: str, seconds: list[float], outputs: object = 0) -> protocol.Line:
    zeros = [0.0] * len(seconds)
    return {
        "kind": kind,
        "tokens": 10,
        "seconds": seconds,
        "stall_seconds": [None] * len(seconds),
        "bytes_read": [2_000_000] * len(seconds),
        "device_bytes": zeros,
        "hits": [3] * len(seconds),
        "misses": [1] * len(seconds),
        "outputs": outputs,
    }


def test_ratios_are_of_runs_of_the_same_round() -> None:
    rounds = [
        {
            "ours": [canned("prefill", [1.0]), canned("decode", [1.0, 3.0, 2.0])],
            "theirs": [canned("prefill", [2.0]), canned("decode", [4.0], 1)],
        },
        {
            "ours": [canned("prefill", [4.0]), canned("decode", [10.0])],
            "theirs": [canned("prefill", [2.0]), canned("decode", [5.0])],
        },
    ]
    rows = {(row["kind"], row["arm"]): row for row in compare.summarize(rounds)}
    theirs = rows["decode", "theirs"]
    assert (theirs["time_ratio_low"], theirs["time_ratio_high"]) == (0.5, 2.0)
    assert theirs["time_ratio"] == 1.25
    assert theirs["ms_per_token"] == 450.0
    assert (theirs["read_mb"], theirs["stall_ms"], theirs["hit_rate"]) == (0.2, None, 0.75)
    assert rows["prefill", "theirs"]["time_ratio"] == 1.25
    assert rows["decode", "ours"]["time_ratio"] == 1.0
    assert compare.same_tokens(rounds) == {"ours": True, "theirs": False}


def test_arms_run_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def run_limited(command: list[str], limit: int | None) -> str:
        started.append(command)
        lines = [canned("prefill", [1.0]), canned("decode", [1.0])]
        return "\n".join(map(json.dumps, lines)) + "\n"

    monkeypatch.setattr(compare, "run_limited", run_limited)
    kept = tmp_path / "lines"
    arms = ["--arm", "a: moestream", "--arm", "b: streamlx --checkout 'my folder'"]
    compare.main([*arms, "--rounds", "2", "--jsonl", str(kept), "--slots", "4"])
    assert [Path(command[1]).name for command in started] == [
        "moestream_runner.py",
        "streamlx_runner.py",
        "streamlx_runner.py",
        "moestream_runner.py",
    ]
    assert started[1][2:] == ["--checkout", "my folder", "--slots", "4"]
    assert len(kept.read_text().splitlines()) == 8
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "same_tokens": {"a": True, "b": True}
    }


@pytest.mark.parametrize("arms", [[], ["--arm", "a: nobody"], ["--arm", "a"]])
def test_arms_that_are_none(arms: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(arms)
    assert ended.value.code == 2
    assert "--arm" in capsys.readouterr().err
