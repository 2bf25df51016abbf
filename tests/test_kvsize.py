"""Sizes of caches from headers against those of mlx-lm's caches in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from moestream.runtime.assembly import draw_blueprint
from moestream.runtime.kvsize import measure_caches, nbytes
from moestream.runtime.sizes import CacheSize, Window

from . import zoo

CHUNK, CHUNKS, STEPS = 60, 5, 6
CONTEXT = CHUNK * CHUNKS + STEPS

QUICK = (
    "qwen3_moe",  # keys and values of all tokens
    "deepseek_v3",  # latents (MLA)
    "deepseek_v32",  # lists of caches
    "deepseek_v41",  # a class of its own
    "gpt_oss",  # sliding windows
    "llama4",  # chunked attention
    "qwen3_next",  # linear attention
    "nemotron_h",  # state-space layers
)


def _architectures() -> list[Any]:
    names = [name for name in zoo.ARCHITECTURES if name not in zoo.EXCEPTIONS]
    slow = [pytest.mark.slow, pytest.mark.exhaustive]
    return [name if name in QUICK else pytest.param(name, marks=slow) for name in names]


@pytest.mark.parametrize("name", _architectures())
def test_caches_take_what_was_planned(name: str, tmp_path: Path) -> None:
    directory = zoo.make_checkpoint(name, tmp_path / name)
    size = draw_blueprint(directory).size.cache
    model = zoo.reference(directory)
    cache = make_prompt_cache(model)
    highest = 0
    for done in range(0, CHUNK * CHUNKS, CHUNK):
        model(mx.arange(done, done + CHUNK)[None] % 250, cache=cache)
        highest = max(highest, nbytes(cache))
    assert highest <= size.held(CONTEXT) + size.passing(CONTEXT, CHUNK)
    for _ in range(STEPS):
        model(mx.array([[7]]), cache=cache)
    held = nbytes(cache)
    assert held <= size.held(CONTEXT)
    # No more than the blocks of rows that caches grow by are planned in vain, and the pages of a
    # chunked cache, which are of its own.
    spare = size.step * size.token + sum(256 * window.row_bytes for window in size.windows)
    assert held >= 0.9 * size.held(CONTEXT) - spare


def test_rows_are_counted_by_what_keeps_them() -> None:
    size = CacheSize(fixed=1000, token=10, step=256, largest=4, windows=(Window(100, 3),))
    assert size.held(50) == 1000 + 10 * (50 + 255) + 3 * 50
    assert size.held(500) == 1000 + 10 * (500 + 255) + 3 * 100
    assert size.passing(50, 20) == 4 * 50
    assert size.passing(500, 20) == 3 * 20 + 4 * 500


def test_a_cache_of_an_unknown_class_is_measured_with_longer_prompts() -> None:
    class Odd:
        def __init__(self, tokens: int) -> None:
            self.all = mx.zeros((1, (tokens + 1) // 4, 8))
            self.last = mx.zeros((1, min(tokens, 100), 2))

    built: list[int] = []

    def build(tokens: int) -> list[Odd]:
        built.append(tokens)
        return [Odd(tokens)]

    size = measure_caches([Odd(1)], build)
    assert size == CacheSize(fixed=100 * 2 * 4 + 8, token=8, largest=8)
    assert built == [1023, 2047]
