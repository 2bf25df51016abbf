"""Takes an answer apart: text, thoughts and tool calls, token by token. No input or output."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from ..api import Chunk, Generation, TokenLogprob
from .prompts import NORMAL, REASONING

Ending = Literal["stop", "length", "tool_calls"]

_TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model asks for a call of a tool.

    Attributes:
        key: names the call when its result is given back.
        name: of the tool.
        arguments: JSON text of an object.
    """

    key: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer.

    Attributes:
        reason: why it ended.
        stop: the stop text that ended it, if one did.
        tokens: generated.
        cached: tokens of its prompt that were not computed again.
    """

    reason: Ending
    stop: str | None
    tokens: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token brought.

    Attributes:
        parts: in their order; often none or one.
        logprob: when asked for.
        ended: on the last piece only.
    """

    parts: tuple[Text | Thought | ToolCall, ...] = ()
    logprob: TokenLogprob | None = None
    ended: Ended | None = None


class PlainReader:
    """Reads an answer that is nothing but text.

    Args:
        tokenizer: mlx-lm's, or None.
        stops: stop texts that the engine looks for.
    """

    done = False
    """Never: the answer ends when the engine ends it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops

    def feed(self, chunk: Chunk) -> Piece:
        """The next chunk of ``Engine.stream``."""
        parts = (Text(chunk.text),) if chunk.text else ()
        return Piece(parts, chunk.logprob, self._ended(chunk))

    def _ended(self, chunk: Chunk) -> Ended | None:
        if chunk.result is None:
            return None
        stop = None
        if chunk.finish_reason == "stop":
            stop = find_stop(self._tokenizer, chunk.result, self._stops)
        reason: Ending = "stop" if chunk.finish_reason == "stop" else "length"
        return Ended(reason, stop, len(chunk.result.tokens), chunk.result.cached_tokens)


class ChatReader(PlainReader):
    """Reads an answer in a chat: mlx-lm's markers tell text, thoughts and tool calls apart.

    Args:
        tokenizer: mlx-lm's.
        stops: stop texts that the engine looks for.
        state: in which the answer begins.
        tools: that were offered; without any, what looks like a call is text.
        one_tool: nothing is wanted behind the first call.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        *,
        state: str = NORMAL,
        tools: list[dict[str, Any]] | None = None,
        one_tool: bool = False,
    ) -> None:
        super().__init__(tokenizer, stops)
        self._machine = make_text_state_machine(tokenizer).make_state(state)
        self._was = state
        self._tools = tools
        self._one_tool = one_tool
        self._call = ""
        self._called = False
        self._count = 0
        self._bare = state == REASONING  # nothing but thoughts so far
        self.done = False

    def feed(self, chunk: Chunk) -> Piece:
        """The next chunk of ``Engine.stream``; ``done`` tells that no more are wanted."""
        self._count += 1
        self._machine, segments = TextStateMachine.split(self._machine, chunk.text)
        if chunk.result is not None:
            self._machine, held, state = TextStateMachine.flush(self._machine)
            segments = [*segments, (state, held)]
        parts = list(_joined(self._sort(segments)))
        ended = self._ended(chunk)
        if ended is not None and self._was == _TOOL:  # some models end without a closing marker
            parts += self._close_call(closed=False)
        if self._one_tool and self._called and ended is None:
            parts = parts[: 1 + next(i for i, p in enumerate(parts) if isinstance(p, ToolCall))]
            ended, self.done = Ended("tool_calls", None, self._count), True
        elif ended is not None and ended.reason == "stop" and self._called:
            ended = replace(ended, reason="tool_calls")
        return Piece(tuple(parts), chunk.logprob, ended)

    def _sort(self, segments: Iterable[tuple[str, str]]) -> Iterator[Text | Thought | ToolCall]:
        for state, text in segments:
            if self._was == _TOOL and state != _TOOL:
                yield from self._close_call(closed=True)
            if state == _TOOL:
                self._call += text
            elif state == REASONING:
                self._bare = True
                if text:
                    yield Thought(text)
            elif state == NORMAL:
                # Empty lines part thoughts from the answer and belong to neither.
                shown = text.lstrip("\n") if self._bare else text
                if shown:
                    self._bare = False
                    yield Text(shown)
            self._was = state

    def _close_call(self, *, closed: bool) -> list[Text | Thought | ToolCall]:
        text, self._call, self._was = self._call, "", NORMAL
        calls = parse_calls(self._tokenizer, text, self._tools) if self._tools else []
        if calls:
            self._called = True
            return list(calls)
        # Not a call after all: nothing that the model said gets lost.
        end = (self._tokenizer.tool_call_end or "") if closed else ""
        return [Text(f"{self._tokenizer.tool_call_start}{text}{end}")]


def parse_calls(tokenizer: Any, text: str, tools: list[dict[str, Any]]) -> list[ToolCall]:
    """The calls in what stands between a model's markers; empty when it makes no sense."""
    try:
        parsed = tokenizer.tool_parser(text, tools)
    except Exception:  # parsers fail in many ways on what a model makes up or is cut off in
        return []
    calls = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            return []
        try:
            given = call.get("arguments") or {}
            arguments = json.loads(given) if isinstance(given, str) else given
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return []
        if not isinstance(arguments, dict):
            return []
        key = call.get("id")
        if not isinstance(key, str) or not key:
            key = f"call_{uuid.uuid4().hex[:24]}"
        calls.append(ToolCall(key, name, written))
    return calls


def find_stop(tokenizer: Any, result: Generation, stops: Sequence[str]) -> str | None:
    """Which stop text ended a generation; None for an end token."""
    if tokenizer is None or not stops:
        return None
    detokenizer = tokenizer.detokenizer
    for token in result.tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    behind = detokenizer.text[len(result.text) :]
    # Of two that begin alike the shorter one was complete first.
    return min((stop for stop in stops if behind.startswith(stop)), key=len, default=None)


def _joined(parts: Iterable[Text | Thought | ToolCall]) -> Iterator[Text | Thought | ToolCall]:
    """Neighbours of one kind as one."""
    last: Text | Thought | None = None
    for part in parts:
        if isinstance(part, ToolCall):
            if last is not None:
                yield last
            last = None
            yield part
        elif last is not None and type(last) is type(part):
            last = type(part)(last.text + part.text)
        else:
            if last is not None:
                yield last
            last = part
    if last is not None:
        yield last
