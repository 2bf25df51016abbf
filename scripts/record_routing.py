"""Record which experts a model is routed to, token by token, into a compact file.

The demo model answers the prompts below, sampled with fixed seeds; only the tokens that it
generates count, each computed by itself in float32. With ``--texts`` it reads given answers.

    python -m scripts.record_routing scripts/synthetic/demo-routing.npz
    python -m scripts.record_routing routing.npz --texts heldout.jsonl.gz --steps 32768

The file of texts holds a JSON object per line with "prompt" and "text"; it may be gzipped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from .synthetic.routing import Routing

STEPS = 2048
LONGEST = 384
"""Tokens of one answer at most; the model was trained on windows of 512."""

PROMPTS = (
    "Tell me a story about a cat.",
    "Why do birds sing?",
    "Tell me a short story about a brave little mouse.",
    "Describe a garden in spring.",
    "Give me three tips for a rainy day.",
    "Write a short letter to a friend.",
    "Tell me a story about a girl who finds a key.",
    "What is a river?",
    "Write a dialogue between a fox and a bear.",
    "Tell me a story about two brothers and a boat.",
    "Why is sleep important?",
    "Describe a busy market.",
    "Tell me a story about a lost dog.",
    "Make a list of things to take to the beach.",
    "Tell me a story about an old clock.",
    "How do plants grow?",
    "Tell me a short story about a kind baker.",
    "Describe the sea at night.",
    "Tell me a story about a boy who was afraid of the dark.",
    "Give me some tips for learning to swim.",
)


class Tap(nn.Module):
    """Keeps what a gate has said of the tokens of the last call."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.logits = mx.zeros((0,))

    def __call__(self, x: mx.array) -> mx.array:
        self.logits = self.gate(x)
        return self.logits


class Recorder:
    """A model whose routing is looked at; softmax routers of blocks named "mlp.gate".

    Args:
        directory: of an mlx-lm checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self.model, self.tokenizer, config = load(str(directory), return_config=True)
        widen = lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a  # noqa: E731
        self.model.update(tree_map(widen, self.model.parameters()))
        self.top_k = int(config["num_experts_per_tok"])
        self.taps: list[Tap] = []
        for layer in self.model.layers:
            layer.mlp.gate = Tap(layer.mlp.gate)
            self.taps.append(layer.mlp.gate)

    def forward(self, tokens: list[int], cache: Any) -> tuple[mx.array, np.ndarray]:
        """Logits of the tokens, and what the routers said: ``[tokens, layers, experts]``."""
        logits = self.model(mx.array([tokens]), cache=cache)[0]
        gates = mx.softmax(mx.stack([tap.logits[0] for tap in self.taps], axis=1), axis=-1)
        mx.eval(logits, gates)
        return logits, np.array(gates)

    def prompt(self, text: str) -> list[int]:
        """Token ids of a question in the model's template."""
        messages = [{"role": "user", "content": text}]
        tokens: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return tokens

    def answer(self, prompt: str, seed: int) -> Iterator[np.ndarray]:
        """Gates of each token that the model answers with, at temperature 0.8."""
        mx.random.seed(seed)
        cache = make_prompt_cache(self.model)
        logits, _ = self.forward(self.prompt(prompt), cache)
        for _ in range(LONGEST):
            token: Any = mx.random.categorical(logits[-1] / 0.8).item()
            if token in self.tokenizer.eos_token_ids:
                return
            logits, gates = self.forward([token], cache)
            yield gates

    def read(self, prompt: str, text: str) -> np.ndarray:
        """Gates of the tokens of a given answer."""
        begin = self.prompt(prompt)
        tokens = begin + self.tokenizer.encode(text, add_special_tokens=False)[:LONGEST]
        _, gates = self.forward(tokens, make_prompt_cache(self.model))
        return gates[len(begin) :]


def record(recorder: Recorder, texts: Path | None, steps: int) -> Routing:
    """The routing of the first ``steps`` tokens of all answers."""
    pieces: list[np.ndarray] = []
    for piece in _given(recorder, texts) if texts else _answered(recorder):
        pieces.append(piece)
        if sum(map(len, pieces)) >= steps:
            break
    gates = np.concatenate(pieces)[:steps]
    chosen = np.argsort(-gates, axis=-1, kind="stable")[..., : recorder.top_k]
    weights = np.take_along_axis(gates, chosen, axis=-1)
    what = "given texts" if texts else "own answers"
    source = f"demo-moe-4bit on {what}, {len(gates)} tokens"
    return Routing(chosen.astype(np.uint16), weights, gates.shape[-1], source)


def _answered(recorder: Recorder) -> Iterator[np.ndarray]:
    seed = 0
    while True:
        for prompt in PROMPTS:
            yield from recorder.answer(prompt, seed)
        seed += 1


def _given(recorder: Recorder, texts: Path) -> Iterator[np.ndarray]:
    opened = gzip.open if texts.suffix == ".gz" else open
    with opened(texts, "rt", encoding="utf-8") as file:
        for line in file:
            pair = json.loads(line)
            yield recorder.read(pair["prompt"], pair["text"])


def main() -> int:
    """Parse the command line and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    demo = Path(str(files("moestream") / "data" / "demo-moe-4bit"))
    routing = record(Recorder(demo), arguments.texts, arguments.steps)
    routing.save(arguments.output)
    size = arguments.output.stat().st_size
    print(f"{arguments.output}: {routing.source}, {size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
