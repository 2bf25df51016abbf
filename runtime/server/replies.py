"""What the answers of all APIs have in common."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..api import TokenLogprob
from .answers import Ended, Piece, Text, Thought, ToolCall
from .errors import ApiError, encode

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a reply before its first token.

    Attributes:
        key: the reply's id.
        model: name of the model.
        prompts: tokens of each prompt.
        choices: answers to each prompt.
        tokenizer: mlx-lm's, or None.
        usage: whether a stream ends with the counts of tokens.
        echo: texts that completions begin with, one for each prompt; empty for none.
        created: seconds since 1970.
    """

    key: str
    model: str
    prompts: tuple[int, ...]
    choices: int
    tokenizer: Any
    usage: bool = False
    echo: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def answers(self) -> int:
        """Answers in all."""
        return self.choices * len(self.prompts)


class Streamed(Protocol):
    """Turns pieces into the frames of a stream of server-sent events."""

    keep_alive: bytes
    """A frame that means nothing."""

    def begin(self) -> bytes:
        """What comes before the first token."""

    def piece(self, index: int, piece: Piece) -> bytes:
        """What a token brings to one of the answers; may be empty."""

    def end(self) -> bytes:
        """What comes behind the last token."""

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream early."""


class Whole(Protocol):
    """Collects pieces into one body."""

    def piece(self, index: int, piece: Piece) -> None:
        """The next piece of one of the answers."""

    def body(self) -> dict[str, Any]:
        """Everything, once all answers have ended."""


class Collected:
    """One answer, collected."""

    def __init__(self) -> None:
        self.parts: list[Text | Thought | ToolCall] = []
        self.logprobs: list[TokenLogprob] = []
        self.ended = Ended("length", None, 0)

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self.parts += piece.parts
        if piece.logprob is not None:
            self.logprobs.append(piece.logprob)
        if piece.ended is not None:
            self.ended = piece.ended

    @property
    def text(self) -> str:
        """The answer itself."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def thoughts(self) -> str:
        """What the model thought."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> list[ToolCall]:
        """Tools to be called."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


def new_key(prefix: str) -> str:
    """An id for a reply."""
    return f"{prefix}{uuid.uuid4().hex}"


def frame(value: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n".encode() if event is not None else b""
    return name + b"data: " + encode(value) + b"\n\n"


def token_text(tokenizer: Any, token: int) -> str:
    """A token as text; part of a character shows as U+FFFD."""
    return str(tokenizer.decode([token])) if tokenizer is not None else f"token_id:{token}"


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB
