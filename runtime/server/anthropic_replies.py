"""Replies of `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

from .answers import Ended, Piece, Text, Thought, ToolCall
from .errors import ApiError
from .replies import Collected, Head, frame


class MessageStream:
    """Events of a streamed message: blocks of text, thoughts and tool calls, one after another."""

    keep_alive = frame({"type": "ping"}, "ping")

    def __init__(self, head: Head) -> None:
        self._head = head
        self._open: type[Text] | type[Thought] | None = None
        self._index = 0
        self._ended = Ended("length", None, 0)

    def begin(self) -> bytes:
        """The message without content."""
        message = _message(self._head, [], None)
        return _event("message_start", message=message) + self.keep_alive

    def piece(self, index: int, piece: Piece) -> bytes:
        """The blocks and deltas of a token. There is only one answer."""
        frames = [self._part(part) for part in piece.parts]
        if piece.ended is not None:
            self._ended = piece.ended
        return b"".join(frames)

    def end(self) -> bytes:
        """Why it ended, and the count of tokens."""
        delta = _ending(self._ended)
        usage = _usage(self._head, self._ended)  # what was cached is known only now
        return (
            self._close()
            + _event("message_delta", delta=delta, usage=usage)
            + _event("message_stop")
        )

    def failure(self, error: ApiError) -> bytes:
        """The error as an event."""
        return frame(error.body("anthropic"), "error")

    def _part(self, part: Text | Thought | ToolCall) -> bytes:
        if isinstance(part, ToolCall):
            begin = self._close() + self._start(_tool_block(part, {}))
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            frames = begin + self._delta(delta) + _event("content_block_stop", index=self._index)
            self._index += 1
            return frames
        frames = b""
        if self._open is not type(part):
            frames = self._close()
            empty = Text("") if isinstance(part, Text) else Thought("")
            frames += self._start(_text_block(empty))
            self._open = type(part)
        if isinstance(part, Text):
            return frames + self._delta({"type": "text_delta", "text": part.text})
        return frames + self._delta({"type": "thinking_delta", "thinking": part.text})

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._index += 1
        return _event("content_block_stop", index=self._index - 1)


class MessageWhole:
    """The body of a message."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._answer = Collected()

    def piece(self, index: int, piece: Piece) -> None:
        """The next piece. There is only one answer."""
        self._answer.add(piece)

    def body(self) -> dict[str, Any]:
        """The message."""
        blocks: list[dict[str, Any]] = []
        for part in self._answer.parts:
            if isinstance(part, ToolCall):
                blocks.append(_tool_block(part, json.loads(part.arguments)))
                continue
            key = "text" if isinstance(part, Text) else "thinking"
            if blocks and blocks[-1]["type"] == key:
                blocks[-1][key] += part.text
            else:
                blocks.append(_text_block(part))
        return _message(self._head, blocks, self._answer.ended)


def _message(head: Head, content: list[dict[str, Any]], ended: Ended | None) -> dict[str, Any]:
    return {
        "id": head.key,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **_ending(ended),
        "usage": _usage(head, ended),
    }


def _usage(head: Head, ended: Ended | None) -> dict[str, int]:
    """The counts of tokens; those that were read from the prompt cache are no input tokens."""
    prompt = sum(head.prompts)
    if ended is None:
        return {"input_tokens": prompt, "output_tokens": 0}
    return {
        "input_tokens": prompt - ended.cached,
        "cache_read_input_tokens": ended.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": ended.tokens,
    }


def _ending(ended: Ended | None) -> dict[str, Any]:
    if ended is None:
        return {"stop_reason": None, "stop_sequence": None}
    if ended.reason == "tool_calls":
        reason = "tool_use"
    elif ended.reason == "length":
        reason = "max_tokens"
    else:
        reason = "end_turn" if ended.stop is None else "stop_sequence"
    stop = ended.stop if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stop}


def _text_block(part: Text | Thought) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "thinking", "thinking": part.text, "signature": ""}


def _tool_block(call: ToolCall, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.key, "name": call.name, "input": arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return frame({"type": kind, **fields}, kind)
