"""A FastAPI app with routes of its own and, under /llm, the whole server of moestream.

    pip install "moestream[server]" fastapi
    python scripts/examples/embed_fastapi.py path/to/model --memory 8GB

Then http://127.0.0.1:8000/describe/owl answers, http://127.0.0.1:8000/llm/ is the page with the
figures, and clients of OpenAI use http://127.0.0.1:8000/llm/v1 as their base URL. All of them share
one engine.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

import moestream
from moestream.runtime import server


def make_app(model: str, **options: Any) -> FastAPI:
    """The app; the engine is open while it runs.

    Args:
        model: directory of a model, or its id on the Hub.
        **options: of ``Engine.open``.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with await moestream.Engine.open(model, **options) as engine:
            app.state.engine = engine
            app.mount("/llm", server.app(engine))
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/describe/{thing}")
    async def describe(thing: str) -> dict[str, Any]:
        engine: moestream.Engine = app.state.engine
        question = [{"role": "user", "content": f"Tell me about {thing}."}]
        result = await engine.generate(question, max_tokens=60)
        return {"text": result.text, "hit_rate": result.stats.hit_rate}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--memory")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(make_app(arguments.model, memory=arguments.memory), port=arguments.port)


if __name__ == "__main__":
    main()
