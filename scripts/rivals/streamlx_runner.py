"""Measure streamlx on a checkpoint: prints JSON lines, one for prompts and one for decoding.

    python scripts/rivals/streamlx_runner.py --checkout DIR --model DIR --budget-bytes N \\
        --prompt-file FILE [--tokens 32] [--repeats 3] [--cold | --warm] [--no-lookahead]

scripts/rivals/README.md says how to get streamlx, what is changed in it at run time, and what the
figures say.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mlx.core as mx
from mlx.utils import tree_flatten

from scripts.rivals import page_cache, protocol
from scripts.rivals import streamlx_patches as patches
from scripts.rivals.errors import ModelUnsupported, RivalError
from scripts.rivals.protocol import Line, Measured, Sample

PREFILL_CHUNK = 2048
"""Prompt tokens at once: the default of its server."""


class Streamlx:
    """A loaded model with its counters.

    Args:
        options: of the command line.
        folder: for links, as long as the model is used.

    Attributes:
        model: the mlx-lm model with streamlx installed.
        slots: experts held per layer.
        changed: names of the changes made (``streamlx_patches.CHANGES``).
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        os.environ["STREAMLX_PREFETCH"] = "1" if options.lookahead else "0"
        integrate: Any = patches.import_streamlx(options.checkout)
        directory, self.changed = patches.as_shards(options.model, folder)
        self.changed += patches.use_linux_files(options.reads == "direct")
        try:
            budget, top_k = plan_budget(directory, options.budget_bytes, options.slots)
            with patches.loading_widened(options.dtype == "float32") as widening:
                self.model, _, self._pools, self._reader = integrate.load_streaming_model(
                    str(directory), budget, k=top_k
                )
        except (KeyError, ValueError, AttributeError, FileNotFoundError) as error:
            raise ModelUnsupported("streamlx", options.model, error) from error
        if widening:
            patches.widen_pools(self._pools)
        self.changed += widening
        self._clock = patches.WaitClock()
        self.changed += patches.count_waits(integrate, self._reader, self._clock)
        if options.lookahead_gate:
            self.changed += patches.wrap_gates(
                self.model, gate_wrapper(options.lookahead_gate, options.lookahead_arguments)
            )
        if options.dtype == "checkpoint":
            self.changed += patches.widen_scores(self.model)
        self._integrate = integrate
        self.slots = min(pool.n_slots for pool in self._pools.values())

    def bytes_read(self) -> int:
        """Read so far from expert files, gaps in merged spans included."""
        return int(self._reader.bytes_read)

    def stall(self) -> float:
        """Seconds that the computing thread has waited for reads so far."""
        sweeps = sum(pool.sweep_fetch_s for pool in self._pools.values())
        return self._clock.seconds + float(sweeps)

    def count(self, name: str) -> int:
        """One of its counters, of all layers."""
        return sum(getattr(pool, name) for pool in self._pools.values())

    def statistics(self) -> dict[str, Any]:
        """Its own counters since the start."""
        return dict(self._integrate.aggregate_stats(self._pools))


def plan_budget(directory: Path, budget: int | None, slots: int | None) -> tuple[int, int]:
    """Budget that makes streamlx take our number of slots, and the model's top_k."""
    index_class: Any = importlib.import_module("streamlx.stindex").SafetensorsIndex
    index = index_class(str(directory))
    marker = ".mlp.switch_mlp.gate_proj.weight"
    layers = sorted(
        int(name.removesuffix(marker).rsplit(".", 1)[1])
        for name in index.tensors
        if name.endswith(marker)
    )
    if not layers:
        raise KeyError("no tensors named ...mlp.switch_mlp.*")
    sizes = [index.layer_expert_bytes(layer) for layer in layers]
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    top_k = int(text.get("num_experts_per_tok", 8))
    count = slots or protocol.slots_for(budget or 0, sizes)
    if count < top_k:
        raise RivalError(f"{count} slots per layer are fewer than the {top_k} experts of a token")
    # It divides the budget by layers first; layers of one size then get exactly this many.
    return count * max(sizes) * len(sizes) + len(sizes), top_k


def gate_wrapper(name: str, arguments: str) -> Callable[[int, Any], Any]:
    """``module:function`` as a wrapper for ``streamlx_patches.wrap_gates``.

    The function gets the gate and the given arguments; a seed among them is told apart by layer.
    """
    module, _, function = name.partition(":")
    try:
        wrap: Callable[..., Any] = getattr(importlib.import_module(module), function)
        given: dict[str, Any] = json.loads(arguments)
    except (ImportError, AttributeError, ValueError) as error:
        raise RivalError(f"--lookahead-gate {name}, --lookahead-arguments: {error}") from error

    def wrapped(layer: int, gate: Any) -> Any:
        seeded = {"seed": given["seed"] + layer} if "seed" in given else {}
        return wrap(gate, **given | seeded)

    return wrapped


def generate(model: Any, prompt: Sequence[int], tokens: int, mark: Callable[[], None]) -> list[int]:
    """Greedy tokens; ``mark`` is called when the first one and when the last one is there.

    The prompt is computed as mlx-lm's generation does: chunks, then its last token by itself.
    """
    cache_module: Any = importlib.import_module("mlx_lm.models.cache")
    cache = cache_module.make_prompt_cache(model)
    left = list(prompt)
    while len(left) > 1:
        size = min(PREFILL_CHUNK, len(left) - 1)
        model(mx.array([left[:size]]), cache=cache)
        mx.eval([array for _, array in tree_flatten([entry.state for entry in cache])])
        left = left[size:]
    output: list[int] = []
    step = mx.array([left])
    for _ in range(tokens + 1):
        token: Any = mx.argmax(model(step, cache=cache)[:, -1, :], axis=-1)
        output.append(token.item())
        if len(output) == 1:
            mark()
        step = token[None]
    mark()
    return output


def measure(options: argparse.Namespace) -> Measured:
    """Load, warm up, repeat."""
    prompts = protocol.read_prompts(options.prompt_file)
    files = sorted(options.model.glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        system = Streamlx(options, Path(folder))
        if options.warm:
            page_cache.read_in(files)
        generate(system.model, prompts[0], options.warm_tokens, lambda: None)
        arm = "streamlx" if options.lookahead else "streamlx, no lookahead"
        result = Measured(arm, tokens=options.tokens)
        for turn in range(options.repeats):
            protocol.cool(options, files)
            prompt = prompts[turn % len(prompts)]
            marks = [_look(system)]
            mark = partial(_append, marks, system)
            output = generate(system.model, prompt, options.tokens, mark)
            for samples, begun, ended in zip(
                (result.prefill, result.decode), marks, marks[1:], strict=False
            ):
                samples.append(protocol.between(begun, ended))
            result.prompt_tokens.append(len(prompt))
            result.outputs.append(output)
        result.extra = {
            "slots": system.slots,
            "dtype": options.dtype,
            "statistics": system.statistics(),
        }
        if options.check:
            result.extra["identical"] = identical(options, prompts, result.outputs)
    changes = "; ".join(patches.CHANGES[name] for name in system.changed)
    result.note = f"{protocol.condition(options)}; changed: {changes}"
    return result


def _append(marks: list[Sample], system: Streamlx) -> None:
    marks.append(_look(system))


def _look(system: Streamlx) -> Sample:
    seen = page_cache.counters()
    return Sample(
        time.perf_counter(),
        system.bytes_read(),
        system.stall(),
        seen.device_bytes,
        seen.major_faults,
        system.count("hits"),
        system.count("misses"),
    )


def identical(
    options: argparse.Namespace, prompts: list[list[int]], outputs: list[list[int]]
) -> bool:
    """Whether mlx-lm, everything resident, generates the same tokens."""
    utils: Any = importlib.import_module("mlx_lm.utils")
    model, _ = utils.load_model(options.model, lazy=True)
    if options.dtype == "float32":
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    expected = [generate(model, prompt, options.tokens, lambda: None) for prompt in prompts]
    return all(output == expected[turn % len(expected)] for turn, output in enumerate(outputs))


def run(arguments: Sequence[str]) -> list[Line]:
    """The whole program but for printing."""
    parser = protocol.make_parser(__doc__)
    add = parser.add_argument
    add("--checkout", type=Path, required=True, metavar="DIR", help="of streamlx")
    add(
        "--no-lookahead",
        dest="lookahead",
        action="store_false",
        help="switch its prediction off; on, its own defaults hold",
    )
    add(
        "--dtype",
        choices=["float32", "checkpoint"],
        default="float32" if mx.default_device() == mx.cpu else "checkpoint",
        help="computes in; default: what moestream takes here",
    )
    add(
        "--lookahead-gate",
        metavar="MODULE:FUNCTION",
        help="applied to each gate that the lookahead asks, never to routing",
    )
    add("--lookahead-arguments", default="{}", metavar="JSON", help="further arguments of it")
    add("--check", action="store_true", help="compare tokens with mlx-lm, everything resident")
    options = parser.parse_args(arguments)
    protocol.check_conditions(options)
    return protocol.launch(measure, options, __file__)


if __name__ == "__main__":
    protocol.run_main(run)
