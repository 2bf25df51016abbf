"""A notebook in the percent format: write a trace, open it, see where the time went.

Editors show the cells (`# %%`) one by one; as a script it runs them all:

    python scripts/examples/trace_notebook.py [MODEL] [TRACE]
"""

# %% A short generation with a trace. In Jupyter `await generate()` does instead of asyncio.run.
import asyncio
import sys
from importlib.resources import files
from pathlib import Path

import moestream
from moestream.runtime.report import make_report
from moestream.runtime.tracefile import read_trace

model = sys.argv[1] if len(sys.argv) > 1 else str(files("moestream") / "data" / "demo-moe-4bit")
path = Path(sys.argv[2] if len(sys.argv) > 2 else "run.trace")


async def generate() -> moestream.Generation:
    async with await moestream.Engine.open(model, slots=16, trace=path) as engine:
        return await engine.generate("Once upon a time", max_tokens=24, ignore_eos=True)


result = asyncio.run(generate())
print(result.text)

# %% Open the trace. `moestream trace report` makes a file for https://ui.perfetto.dev of it.
trace = read_trace(path)
report = make_report(trace)
print(report.summary)

# %% Hits and misses of each layer.
for layer in report.layers[:4]:
    print(f"layer {layer.layer}: {layer.hits} of {layer.routed} experts were resident")

# %% What other rules of eviction would have done with the same routing and as many slots.
for name, rate in report.hit_rates.items():
    print(f"{name}: {rate:.1%}")
