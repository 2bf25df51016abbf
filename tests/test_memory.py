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


@pytest.mark.parametrize("prompt", [5, 200])
def test_four_times_larger_than_the_limit(checkpoint: Path, prompt: int) -> None:
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert size > 4 * BUDGET
    with limited_group(BUDGET) as group:
        # The shell joins the group before it becomes Python.
        join = f"echo $$ > {group}/cgroup.procs && " if group else ""
        command = f'{join}exec "$@"'
        arguments = [sys.executable, "-c", RUN, str(checkpoint), str(BUDGET), str(prompt)]
        run = subprocess.run(
            ["/bin/sh", "-c", command, "sh", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout)
    assert len(report["tokens"]) == 6
    assert min(report["slots"]) >= SHAPE.top_k
    assert report["peak"] <= BUDGET * 1.03
    assert report["read"] > BUDGET / 8
