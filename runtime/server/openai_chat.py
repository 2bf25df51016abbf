"""Replies of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..api import TokenLogprob
from .answers import Ended, Piece, Text, Thought, ToolCall
from .errors import ApiError
from .replies import Collected, Head, finite, frame, token_text

DONE = b"data: [DONE]\n\n"
"""The frame that ends a stream."""


class ChatStream:
    """Frames of a streamed chat completion."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._calls = [0] * head.answers
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(head.answers)]
        self._ended: dict[int, Ended] = {}

    def begin(self) -> bytes:
        """The role of each answer."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, role) for index in range(self._head.answers))

    def piece(self, index: int, piece: Piece) -> bytes:
        """The deltas of a token."""
        if piece.logprob is not None:
            self._logprobs[index].append(piece.logprob)
        frames = [self._chunk(index, self._delta(index, part)) for part in piece.parts]
        if piece.ended is not None:
            self._ended[index] = piece.ended
            frames.append(self._chunk(index, {}, piece.ended.reason))
        return b"".join(frames)

    def end(self) -> bytes:
        """Usage, when asked for, and the end mark."""
        usage = b""
        if self._head.usage:
            counts = usage_of(self._head, [self._ended[index] for index in sorted(self._ended)])
            usage = frame(self._envelope([]) | {"usage": counts})
        return usage + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error in place of a chunk, and the end mark for those who wait for it."""
        return frame(error.body("openai")) + DONE

    def _delta(self, index: int, part: Text | Thought | ToolCall) -> dict[str, Any]:
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Thought):
            return {"reasoning_content": part.text}
        number = self._calls[index]
        self._calls[index] += 1
        return {"tool_calls": [{"index": number, **call_json(part)}]}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> bytes:
        logprobs = None
        if self._logprobs[index]:  # of tokens that showed nothing they come with the next delta
            logprobs = logprobs_json(self._head.tokenizer, self._logprobs[index])
            self._logprobs[index] = []
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        envelope = self._envelope([choice])
        if self._head.usage:
            envelope["usage"] = None
        return frame(envelope)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return envelope(self._head, "chat.completion.chunk", choices)


class ChatWhole:
    """The body of a chat completion."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._answers = [Collected() for _ in range(head.answers)]

    def piece(self, index: int, piece: Piece) -> None:
        """The next piece of one of the answers."""
        self._answers[index].add(piece)

    def body(self) -> dict[str, Any]:
        """The completion."""
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": logprobs_json(self._head.tokenizer, answer.logprobs)
                if answer.logprobs
                else None,
                "finish_reason": answer.ended.reason,
            }
            for index, answer in enumerate(self._answers)
        ]
        usage = usage_of(self._head, [answer.ended for answer in self._answers])
        return envelope(self._head, "chat.completion", choices) | {"usage": usage}


def _message(answer: Collected) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.thoughts:
        message["reasoning_content"] = answer.thoughts
    if answer.calls:
        message["tool_calls"] = [call_json(call) for call in answer.calls]
    else:
        message["content"] = answer.text
    return message


def envelope(head: Head, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What every object of a reply begins with."""
    return {
        "id": head.key,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
    }


def usage_of(head: Head, ended: Sequence[Ended]) -> dict[str, Any]:
    """The counts of tokens; a prompt counts once however many answers it gets.

    Args:
        head: of the reply.
        ended: how each answer has ended, in their order.
    """
    prompt, tokens = sum(head.prompts), sum(one.tokens for one in ended)
    cached = [one.cached for one in ended]
    # What the first of its answers to come had to compute was computed.
    reused = (min(cached[i : i + head.choices]) for i in range(0, len(cached), head.choices))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(reused)},
    }


def call_json(call: ToolCall) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.key, "type": "function", "function": function}


def logprobs_json(tokenizer: Any, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    """The log-probabilities of some tokens."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        # Of a part of a character the bytes are not known.
        raw = None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    content = [
        entry(item.token, item.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in item.top]}
        for item in logprobs
    ]
    return {"content": content, "refusal": None}
