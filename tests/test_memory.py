"""A checkpoint several times larger than the memory runs, and stays within its budget.

Each run is a process of its own: the high-water mark of the resident set never falls. Where control
groups may be made, one limits the process as well, page cache included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripts.make_checkpoint import Shape, make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPE = Shape(layers=16, experts=128, top_k=4, hidden=1024, inner=768)  # 2.6 GB of experts
BUDGET = 640_000_000

RUN = """
import asyncio, json, re, sys
from moestream import Engine

def peak():
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

async def main():
    directory, budget, prompt = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    async with await Engine.open(directory, memory=budget, context=1024) as engine:
        tokens = [5 + n % 500 for n in range(prompt)]
        result = await engine.generate(tokens, max_tokens=6, ignore_eos=True)
        engine.check_integrity(idle=True)
        print(json.dumps({
            "peak": peak(), "tokens": result.tokens, "slots": engine.plan.slots,
            "read": engine.statistics().bytes_read,
        }))

asyncio.run(main())
"""

LONG = Shape(layers=4, experts=160, top_k=4, hidden=512, inner=256)
LONG_BUDGET = 300_000_000

LONG_RUN = """
import asyncio, json, sys
import psutil
from moestream import Engine
from moestream.runtime import limits

limits.CACHE_BYTES = 1 << 20  # buffers that MLX keeps would hide what grows

async def main():
    directory, budget, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    async with await Engine.open(directory, memory=budget, context=tokens + 8) as engine:
        sizes = []
        async for _ in engine.stream([5, 6, 7], max_tokens=tokens, ignore_eos=True):
            sizes.append(psutil.Process().memory_info().rss)
        engine.check_integrity(idle=True)
        print(json.dumps({
            "sizes": sizes, "kv": engine.plan.kv_bytes, "slots": engine.plan.slots,
            "read": engine.statistics().bytes_read, "resizes": engine.statistics().resizes,
        }))

asyncio.run(main())
"""

GROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def limited_group(limit: int) -> Iterator[Path | None]:
    """A control group with a memory limit, or None where none can be made."""
    group = GROUPS / f"moestream-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large") / "model"
    return make_checkpoint(directory, SHAPE, aligned=True, quiet=True)


def run_limited(program: str, limit: int, *arguments: object) -> Any:
    """What a program prints, run in a group of its own."""
    with limited_group(limit) as group:
        # The shell joins the group before it becomes Python.
        join = f"echo $$ > {group}/cgroup.procs && " if group else ""
        words = [sys.executable, "-c", program, *map(str, arguments)]
        run = subprocess.run(
            ["/bin/sh", "-c", f'{join}exec "$@"', "sh", *words],
            capture_output=True,
            text=True,
            check=False,
        )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("prompt", [5, 200])
def test_four_times_larger_than_the_limit(checkpoint: Path, prompt: int) -> None:
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert size > 4 * BUDGET
    report = run_limited(RUN, BUDGET, checkpoint, BUDGET, prompt)
    assert len(report["tokens"]) == 6
    assert min(report["slots"]) >= SHAPE.top_k
    assert report["peak"] <= BUDGET * 1.03
    assert report["read"] > BUDGET / 8


def test_nothing_grows_but_the_caches(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", LONG, aligned=True, quiet=True)
    report = run_limited(LONG_RUN, LONG_BUDGET, directory, LONG_BUDGET, 2000)
    sizes = report["sizes"]
    assert len(sizes) == 2000
    assert max(report["slots"]) < LONG.experts // 2, "the model is streamed"
    assert report["read"] > LONG_BUDGET
    # After a quarter the caches have a quarter of their rows, too. They grow by copying, every 256
    # tokens, and what a copy leaves behind is not always of use for the next one.
    assert max(sizes[500:]) - sizes[500] <= 1.25 * report["kv"] + 0.01 * LONG_BUDGET
    # Between these steps nothing grows at all.
    assert max(sizes[1800:]) - sizes[1800] <= 0.002 * LONG_BUDGET
    assert max(sizes) <= LONG_BUDGET * 1.03
