"""Several agents that share one engine: one plans, some write at the same time, one sums up.

    python scripts/examples/agents.py path/to/model "a trip to the sea" --memory 8GB

Tasks are anyio's. When one agent fails, or all of it is cancelled, the generations of the others
stop within one layer: nothing has to be cleaned up by hand.
"""

from __future__ import annotations

import argparse
from contextlib import aclosing

import anyio

import moestream

VOICES = ("a sailor", "a child", "a poet")


async def ask(engine: moestream.Engine, text: str, max_tokens: int = 60) -> str:
    """One answer, whole."""
    question = [{"role": "user", "content": text}]
    return (await engine.generate(question, max_tokens=max_tokens)).text.strip()


async def write(engine: moestream.Engine, voice: str, topic: str, drafts: dict[str, str]) -> None:
    """One agent's draft, token by token; it stops by itself at the end of its second sentence."""
    question = [{"role": "user", "content": f"Tell me about {topic}, as {voice} would."}]
    draft = ""
    async with aclosing(engine.stream(question, max_tokens=80)) as chunks:
        async for chunk in chunks:
            draft += chunk.text
            if draft.count(".") == 2:
                break  # aclosing stops the generation
    drafts[voice] = draft.strip()
    print(f"- {voice} is done")


async def run(engine: moestream.Engine, topic: str) -> str:
    """All agents together; gives the last one's answer."""
    print("plan:", await ask(engine, f"Give me three ideas for {topic}."))
    drafts: dict[str, str] = {}
    async with anyio.create_task_group() as group:
        for voice in VOICES:
            group.start_soon(write, engine, voice, topic, drafts)
    everything = " ".join(drafts[voice] for voice in VOICES)
    return await ask(engine, f"Make this shorter: {everything}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("topic")
    parser.add_argument("--memory")
    arguments = parser.parse_args()
    async with await moestream.Engine.open(arguments.model, memory=arguments.memory) as engine:
        print("in short:", await run(engine, arguments.topic))
        statistics = engine.statistics()
        print(f"{statistics.tokens} tokens, {statistics.hit_rate:.0%} of the experts were resident")


if __name__ == "__main__":
    anyio.run(main)
