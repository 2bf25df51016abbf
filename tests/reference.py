"""What mlx-lm itself generates with everything resident: the bar for every identity test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

ALTERNATIVES = 5


@dataclass(frozen=True)
class Expected:
    """Greedy tokens, and for each the log-probabilities of itself and of the best few."""

    tokens: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]]]


def expect(model: Any, prompt: Sequence[int], steps: int) -> Expected:
    """Generate greedily: the prompt in one piece, then token by token."""
    cache = make_prompt_cache(model)
    tokens: list[int] = []
    logprobs = []
    step = mx.array([list(prompt)])
    for _ in range(steps):
        logits = model(step, cache=cache)[:, -1, :]
        scores = logits - mx.logsumexp(logits, keepdims=True)
        token: Any = mx.argmax(scores, axis=-1)
        best: Any = mx.argsort(-scores, axis=-1)[0, :ALTERNATIVES]
        values: Any = scores[0, best]
        own: Any = scores[0, token[0]]
        tokens.append(token.item())
        logprobs.append((own.item(), list(zip(best.tolist(), values.tolist(), strict=True))))
        step = token[None]
    return Expected(tokens, logprobs)


def make_prompt(length: int, vocabulary: int = 256) -> list[int]:
    """Random token ids, the same for each length."""
    source = random.Random(length)
    return [source.randrange(vocabulary) for _ in range(length)]
