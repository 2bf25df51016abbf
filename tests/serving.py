"""A server on a real socket for tests, and an engine whose answers are written beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn
from mlx_lm.utils import load_tokenizer
from starlette.types import ASGIApp

from moestream.runtime.api import (
    Chunk,
    FinishReason,
    Generation,
    GenerationStats,
    PrefetchStatistics,
    Statistics,
)
from moestream.runtime.engine import Engine
from moestream.runtime.plan import Plan

QUESTION = [{"role": "user", "content": "Hello! How are you?"}]
ANSWER = "I am fine, thank you. How are you?"
"""What the demo model says to it."""

TOOLS_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for tool_call in message.tool_calls %}"
    "{% set tool_call = tool_call.function %}"
    '<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if opened %}<think>{% endif %}"
    "{% endif %}"
)
"""A chat template with tools, which mlx-lm recognizes as one for its parser ``json_tools``."""


class UvicornServer(uvicorn.Server):
    """Tells when it has started, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an app on a free port of this machine; gives the address."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    server = UvicornServer(config)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        await server.ready.wait()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def calling(app: ASGIApp, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls an app without any socket."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers=headers
    ) as client:
        yield client


def tokenizer_with(directory: Path, source: Path, template: str, *tokens: str) -> Any:
    """The demo model's tokenizer with another chat template and further special tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    (directory / "chat_template.jinja").write_text(template)
    if tokens:
        from transformers import AutoTokenizer

        grown = AutoTokenizer.from_pretrained(directory)
        grown.add_tokens(list(tokens), special_tokens=True)
        grown.save_pretrained(directory)
    return load_tokenizer(directory)


_IDLE: dict[str, Any] = {
    **{entry.name: 0 for entry in fields(Statistics)},
    "slots": (),
    "experts": (),
    "trace_error": None,
    "prefetch": PrefetchStatistics(),
}
STATS = GenerationStats(0.0, 0.1, 10.0, 3, 1, 1000, 0.0, 0.0, 0.0, 1, 0)


class ScriptedEngine:
    """Answers with given texts, in the order of the requests; the last one stands for the rest.

    Attributes:
        prompts: that were given.
        samplings: arguments that were given.
        open: generations that have begun and not ended.
        cancelled: generations that were given up.
        hold: generations wait for it before their first token, when it is there.
        fail: raised instead of the token of this number.
    """

    def __init__(self, tokenizer: Any, *answers: str) -> None:
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.prompts: list[Sequence[int]] = []
        self.samplings: list[dict[str, Any]] = []
        self.open = self.cancelled = self.finished = 0
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.hold: asyncio.Event | None = None
        self.fail: tuple[int, Exception] | None = None
        self.alive = True
        self.plan = cast(Plan, _PlanOf(2048))
        self.trace_error: str | None = None

    def statistics(self) -> Statistics:
        """Like ``Engine.statistics``."""
        return Statistics(
            **{**_IDLE, "requests_running": min(self.open, 1), "trace_error": self.trace_error}
        )

    def stream(self, prompt: Sequence[int], **sampling: Any) -> AsyncGenerator[Chunk, None]:
        """Like ``Engine.stream``."""
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return self._stream(prompt, text, sampling)

    async def _stream(
        self, prompt: Sequence[int], text: str, sampling: dict[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        self.open += 1
        self.begun.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            tokens = tokens[: sampling["max_tokens"]]
            detokenizer = self.tokenizer.detokenizer
            whole = ""
            for number, token in enumerate(tokens):
                if self.fail is not None and number == self.fail[0]:
                    raise self.fail[1]
                detokenizer.add_token(token)
                last = number == len(tokens) - 1
                if last:
                    detokenizer.finalize()
                piece = detokenizer.last_segment
                whole += piece
                cut = last and len(tokens) == sampling["max_tokens"]
                finish: FinishReason | None = ("length" if cut else "stop") if last else None
                result = None
                if finish is not None:
                    result = Generation(whole, tuple(tokens), finish, len(prompt), STATS)
                yield Chunk(piece, token, None, finish, result)
            self.finished += 1
        except GeneratorExit:
            self.cancelled += 1
            raise
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1
            self.ended.set()

    def as_engine(self) -> Engine:
        """As the type that servers take."""
        return cast(Engine, self)


class _PlanOf:
    def __init__(self, context: int) -> None:
        self.context = context
