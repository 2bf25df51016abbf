"""Measure llama.cpp (memory-mapped, on the CPU) on a GGUF file: prints JSON lines.

    python scripts/rivals/llamacpp_runner.py --checkout DIR --library DIR --gguf FILE --model DIR \\
        --budget-bytes N --prompt-file FILE [--tokens 32] [--repeats 3] [--cold | --warm]

Its cache of experts is the page cache, so the memory that it may use is what counts: a control
group as large as what it holds besides the file, the file's trunk, and the budget for experts;
``--memory-limit`` overrides this. Cold runs are preceded by a warm one without a limit: what takes
longer than there is given as ``stall_seconds``. scripts/rivals/README.md tells the rest.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.rivals import page_cache, protocol
from scripts.rivals.errors import CheckoutMissing, ModelUnsupported, RivalError
from scripts.rivals.memory_group import run_limited
from scripts.rivals.protocol import Line, Measured, Sample
from scripts.rivals.write_gguf import EXPERT_BYTES_KEY

LOAD_MMAP = 1
"""LLAMA_LOAD_MODE_MMAP."""


def import_binding(checkout: Path, library: Path) -> Any:
    """The ctypes binding of llama-cpp-python over a built library.

    Only its module of declarations is imported, without the package's dependencies.

    Raises:
        CheckoutMissing: either is not where it should be.
    """
    if not (checkout / "llama_cpp" / "llama_cpp.py").is_file():
        raise CheckoutMissing("--checkout", checkout, "llama_cpp/llama_cpp.py")
    if not any(library.glob("libllama.*")):
        raise CheckoutMissing("--library", library, "libllama")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(library.resolve())
    package = ModuleType("llama_cpp")
    package.__path__ = [str(checkout / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


def advise_random(file: Path, maps: Path = Path("/proc/self/maps")) -> int:
    """Tell the kernel that the mapping of a file is read at random; the number of parts told.

    A page fault then reads its page alone.
    """
    if not maps.exists():
        raise RivalError("--advice random needs /proc/self/maps, which this system has not")
    libc = ctypes.CDLL(None, use_errno=True)
    told = 0
    for line in maps.read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        if path != str(file.resolve()):
            continue
        begin, end = (int(place, 16) for place in span.split("-"))
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_RANDOM):
            raise RivalError(f"madvise: {os.strerror(ctypes.get_errno())}")
        told += 1
    return told


class LlamaCpp:
    """A loaded model.

    Args:
        options: of the command line.
        context: most tokens of prompt and answer.

    Attributes:
        vocabulary: its size.
    """

    def __init__(self, options: argparse.Namespace, context: int) -> None:
        api = self._api = import_binding(options.checkout, options.library)
        self._silence = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self._silence, ctypes.c_void_p(0))
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = LOAD_MMAP
        params.use_extra_bufts = False  # would copy all weights into memory, in another order
        self._model = api.llama_model_load_from_file(os.fsencode(options.gguf), params)
        if not self._model:
            raise ModelUnsupported("llama.cpp", options.gguf, "it cannot be loaded")
        if options.advice == "random":
            advise_random(options.gguf)
        wanted = api.llama_context_default_params()
        wanted.n_ctx = context
        wanted.n_batch = max(context, 32)
        wanted.n_threads = wanted.n_threads_batch = options.threads
        self._context = api.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise ModelUnsupported("llama.cpp", options.gguf, f"no context of {context} tokens")
        self.vocabulary = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))

    def metadata(self, key: str) -> int | None:
        """A number among the file's metadata; None when it is not there."""
        text = ctypes.create_string_buffer(64)
        size = self._api.llama_model_meta_val_str(self._model, key.encode(), text, len(text))
        return int(text.value) if size > 0 else None

    def forget(self) -> None:
        """Empty its caches."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def compute(self, tokens: Sequence[int]) -> int:
        """Append tokens; the most likely next one."""
        batch = (ctypes.c_int32 * len(tokens))(*tokens)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(batch, len(tokens))):
            raise RivalError("llama.cpp could not compute a batch")
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


def look() -> Sample:
    """Clock and counters; it counts no bytes itself, so the kernel's count has to do."""
    seen = page_cache.counters()
    nbytes = seen.device_bytes
    return Sample(time.perf_counter(), nbytes, None, nbytes, seen.major_faults)


def generate(
    system: LlamaCpp, prompt: Sequence[int], tokens: int
) -> tuple[list[Sample], list[int]]:
    """Looks before, at the first token and at the last one; all tokens."""
    system.forget()
    marks = [look()]
    output = [system.compute(prompt)]
    marks.append(look())
    for _ in range(tokens):
        output.append(system.compute(output[-1:]))
    return [*marks, look()], output


def measure(options: argparse.Namespace) -> Measured:
    """Load, warm up, repeat."""
    prompts = protocol.read_prompts(options.prompt_file)
    if options.cold:
        page_cache.drop([options.gguf])  # before it is mapped
    else:
        page_cache.read_in([options.gguf])
    longest = max(map(len, prompts))
    system = LlamaCpp(options, longest + max(options.tokens, options.warm_tokens) + 1)
    if max(map(max, prompts)) >= system.vocabulary:
        raise RivalError(f"the prompt has tokens beyond the vocabulary of {system.vocabulary}")
    generate(system, prompts[0], options.warm_tokens)
    result = Measured("llama.cpp", tokens=options.tokens)
    for turn in range(options.repeats):
        prompt = prompts[turn % len(prompts)]
        (begun, first, last), output = generate(system, prompt, options.tokens)
        result.prefill.append(protocol.between(begun, first))
        result.decode.append(protocol.between(first, last))
        result.prompt_tokens.append(len(prompt))
        result.outputs.append(output)
    result.extra = {
        "threads": options.threads,
        "memory_limit": options.memory_limit if options.inside else None,
        "anonymous_bytes": anonymous_bytes(),
        "readahead_bytes": page_cache.readahead_bytes(options.gguf),
        "advice": options.advice,
        "expert_bytes": system.metadata(EXPERT_BYTES_KEY),
        "experts": system.metadata("qwen3moe.expert_count"),
    }
    result.note = (
        f"{protocol.condition(options)}; weights are not repacked, since that would copy them "
        "into memory"
    )
    return result


def processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def anonymous_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Memory of this process that is not of files; None where the system does not say."""
    if not status.exists():
        return None
    match = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
    return int(match[1]) * 1024 if match else None


def limit_for(options: argparse.Namespace, warm: Line) -> int:
    """Bytes of the control group: what the warm run held, the file's trunk, the budget.

    Raises:
        RivalError: the file or the system does not say what is needed.
    """
    anonymous, experts = warm["anonymous_bytes"], warm["expert_bytes"]
    if anonymous is None or experts is None:
        raise RivalError("--memory-limit is needed: this file, or system, does not tell its sizes")
    budget = options.budget_bytes or experts * options.slots // warm["experts"]
    return int(anonymous + options.gguf.stat().st_size - experts + budget)


def run(arguments: Sequence[str]) -> list[Line]:
    """The whole program but for printing."""
    parser = protocol.make_parser(__doc__, reads=False)
    add = parser.add_argument
    add("--checkout", type=Path, required=True, metavar="DIR", help="of llama-cpp-python")
    add("--library", type=Path, required=True, metavar="DIR", help="where libllama was built")
    add("--gguf", type=Path, required=True, metavar="FILE", help="written by write_gguf.py")
    add("--threads", type=int, default=processors(), metavar="N")
    add(
        "--advice",
        choices=["none", "random"],
        default="none",
        help="random: page faults read one page, instead of the drive's read-ahead around it",
    )
    options = parser.parse_args(arguments)
    protocol.check_conditions(options)
    options.reads = "memory-mapped"
    if not options.gguf.is_file():
        raise RivalError(
            f"--gguf {options.gguf} is no file; scripts/rivals/write_gguf.py makes one"
        )
    if options.inside or options.warm:
        return protocol.launch(measure, options, __file__)
    words = [word for word in arguments if word != "--cold"]
    command = [sys.executable, __file__, *words, "--inside"]
    warm = [json.loads(line) for line in run_limited([*command, "--warm"], None).splitlines()]
    limit = options.memory_limit or limit_for(options, warm[0])
    output = run_limited([*command, "--cold", "--memory-limit", str(limit)], limit)
    lines = [json.loads(line) for line in output.splitlines()]
    for line, base in zip(lines, warm, strict=True):
        line["warm_seconds"] = base["seconds"]
        pairs = zip(line["seconds"], base["seconds"], strict=True)
        line["stall_seconds"] = [max(cold - unlimited, 0.0) for cold, unlimited in pairs]
        line["note"] += "; stall is the time above that of the same repetition, warm and unlimited"
    return lines


if __name__ == "__main__":
    protocol.run_main(run)
