"""Makes a body into a job: understood, tokenized, checked by the engine; nothing is generated yet.

Takes time for long prompts: runs on worker threads, never on the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import Chunk
from .answers import ChatReader, PlainReader
from .body import parse_body
from .calls import Call
from .errors import ApiError, from_engine
from .prompts import encode_call, initial_state
from .replies import Head, new_key
from .service import Service
from .settings import ServerSettings

ReadCall = Callable[[dict[str, Any], ServerSettings, str], Call]
"""Understands a body: called with it, the server's settings and the name of the model."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to be made.

    Attributes:
        index: among the request's answers.
        chunks: of the engine; the generation begins with the first that is asked for.
        reader: takes the chunks apart.
    """

    index: int
    chunks: AsyncGenerator[Chunk, None]
    reader: PlainReader


@dataclass(frozen=True, slots=True)
class Job:
    """A request, ready to be generated."""

    call: Call
    head: Head
    answers: tuple[Answer, ...]


def prepare(service: Service, read: ReadCall, prefix: str, body: bytes) -> Job:
    """Understand and tokenize a body.

    Args:
        service: what all endpoints share.
        read: of the API.
        prefix: of the reply's id.
        body: as it came.

    Raises:
        ApiError: it is wrong, or the engine has stopped.
    """
    engine = service.engine
    tokenizer = engine.tokenizer
    if not engine.alive:
        raise ApiError(503, "the engine has stopped; restart the server", code="engine_dead")
    call = read(parse_body(body), service.settings, service.name)
    prompts = encode_call(tokenizer, call)
    head = Head(
        key=new_key(prefix),
        model=service.name,
        prompts=tuple(map(len, prompts)),
        choices=call.choices,
        tokenizer=tokenizer,
        usage=call.usage,
        echo=_echo(tokenizer, call),
    )
    try:
        answers = tuple(
            _answer(service, call, prompt, number * call.choices + choice, choice)
            for number, prompt in enumerate(prompts)
            for choice in range(call.choices)
        )
    except Exception as error:
        raise from_engine(error) from error
    return Job(call, head, answers)


def _answer(
    service: Service, call: Call, prompt: tuple[int, ...], index: int, choice: int
) -> Answer:
    engine = service.engine
    sampling = call.sampling.copy()
    limit = sampling.get("max_tokens", engine.plan.context)
    sampling["max_tokens"] = min(limit, engine.plan.context)
    if (seed := sampling.get("seed")) is not None:
        sampling["seed"] = (seed + choice) % 2**64  # or all answers would be the same
    given = sampling.get("stop") or ()
    stops = [given] if isinstance(given, str) else list(given)
    reader = PlainReader(engine.tokenizer, stops)
    if call.messages:
        reader = ChatReader(
            engine.tokenizer,
            stops,
            state=initial_state(engine.tokenizer, call, prompt),
            tools=call.tools,
            one_tool=call.one_tool,
        )
    return Answer(index, engine.stream(prompt, **sampling), reader)


def _echo(tokenizer: Any, call: Call) -> tuple[str, ...]:
    if not call.echo:
        return ()
    return tuple(
        prompt if isinstance(prompt, str) else _decoded(tokenizer, prompt)
        for prompt in call.prompts
    )


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    try:
        return str(tokenizer.decode(list(tokens))) if tokenizer is not None else ""
    except Exception as error:  # ids beyond the vocabulary, in many guises
        raise ApiError(400, "the prompt has token ids that mean nothing", param="prompt") from error
