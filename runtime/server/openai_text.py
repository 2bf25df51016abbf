"""Replies of `/v1/completions`."""

from __future__ import annotations

from typing import Any

from ..api import TokenLogprob
from .answers import Ended, Piece, Text
from .errors import ApiError
from .openai_chat import DONE, envelope, usage_of
from .replies import Collected, Head, finite, frame, token_text


class TextStream:
    """Frames of a streamed text completion."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._offsets = [0] * head.answers
        self._ended: dict[int, Ended] = {}

    def begin(self) -> bytes:
        """The prompts, when they are to be echoed."""
        frames = []
        for index in range(self._head.answers):
            if text := echoed(self._head, index):
                self._offsets[index] = len(text)
                frames.append(self._chunk(_choice(index, text, None, None)))
        return b"".join(frames)

    def piece(self, index: int, piece: Piece) -> bytes:
        """The text of a token."""
        text = "".join(part.text for part in piece.parts if isinstance(part, Text))
        if piece.ended is not None:
            self._ended[index] = piece.ended
        elif not text and piece.logprob is None:
            return b""
        logprobs = None
        if piece.logprob is not None:
            logprobs = logprobs_json(self._head.tokenizer, [piece.logprob], self._offsets[index])
        self._offsets[index] += len(text)
        reason = None if piece.ended is None else piece.ended.reason
        return self._chunk(_choice(index, text, logprobs, reason))

    def end(self) -> bytes:
        """Usage, when asked for, and the end mark."""
        usage = b""
        if self._head.usage:
            counts = usage_of(self._head, [self._ended[index] for index in sorted(self._ended)])
            usage = frame(envelope(self._head, "text_completion", []) | {"usage": counts})
        return usage + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error in place of a chunk, and the end mark for those who wait for it."""
        return frame(error.body("openai")) + DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = envelope(self._head, "text_completion", [choice])
        if self._head.usage:
            chunk["usage"] = None
        return frame(chunk)


class TextWhole:
    """The body of a text completion."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._answers = [Collected() for _ in range(head.answers)]

    def piece(self, index: int, piece: Piece) -> None:
        """The next piece of one of the answers."""
        self._answers[index].add(piece)

    def body(self) -> dict[str, Any]:
        """The completion."""
        choices = []
        for index, answer in enumerate(self._answers):
            logprobs = None
            if answer.logprobs:
                logprobs = logprobs_json(self._head.tokenizer, answer.logprobs, 0)
            text = echoed(self._head, index) + answer.text
            choices.append(_choice(index, text, logprobs, answer.ended.reason))
        usage = usage_of(self._head, [answer.ended for answer in self._answers])
        return envelope(self._head, "text_completion", choices) | {"usage": usage}


def echoed(head: Head, index: int) -> str:
    """What an answer begins with."""
    return head.echo[index // head.choices] if head.echo else ""


def logprobs_json(tokenizer: Any, logprobs: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """The log-probabilities of some tokens, the first of which stands at an offset of the text."""
    tokens, offsets = [], []
    for item in logprobs:
        tokens.append(token_text(tokenizer, item.token))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [finite(item.logprob) for item in logprobs],
        "top_logprobs": [
            {token_text(tokenizer, token): finite(logprob) for token, logprob in item.top}
            for item in logprobs
        ],
        "text_offset": offsets,
    }


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
