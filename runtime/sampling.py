"""Checks a request's arguments and turns them into mlx-lm samplers and stop matchers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import mlx.core as mx
from mlx_lm.generate import TextStateMachine
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from .errors import InvalidRequest

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

MOST_ALTERNATIVES = 1024


@dataclass(frozen=True, slots=True)
class Sampling:
    """The arguments of one request, checked. Names and meaning are mlx-lm's.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: 0 takes the most likely token.
        top_p, min_p, top_k: cut the distribution; 0 switches each off (top_p also at 1).
        seed: of the request's random numbers; None takes a fresh one.
        repetition_penalty: divides the logits of recent tokens; None or 1 for none.
        logit_bias: token id -> added to its logit.
        stop: texts that end the generation and are cut off.
        ignore_eos: go on behind the end token.
        logprobs: how many alternatives to report for each token; None for no log-probabilities.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: Sequence[str] = field(default_factory=tuple)
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, least=1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _whole("top_k", self.top_k, least=0)
        if self.seed is not None:
            _whole("seed", self.seed, least=0, most=2**64 - 1)
        if self.repetition_penalty is not None:
            _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, least=0, most=MOST_ALTERNATIVES)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequest("stop must be a text or a list of texts, none of them empty")
        for token, bias in (self.logit_bias or {}).items():
            _whole("logit_bias key", token, least=0)
            _number("logit_bias value", bias, -1e9, 1e9)

    def check_vocabulary(self, size: int) -> None:
        """Raise InvalidRequest when a token id or count exceeds the vocabulary."""
        if self.top_k >= size:
            raise InvalidRequest(f"top_k={self.top_k} must be below the vocabulary's {size}")
        if self.logprobs is not None and self.logprobs > size:
            raise InvalidRequest(f"logprobs={self.logprobs} exceeds the vocabulary's {size}")
        for token in self.logit_bias or {}:
            if token >= size:
                raise InvalidRequest(f"logit_bias names token {token}; the vocabulary has {size}")

    def sampler(self) -> Callable[[mx.array], mx.array]:
        """mlx-lm's sampler: log-probabilities ``[1, vocabulary]`` to token ids ``[1]``."""
        sampler: Callable[[mx.array], mx.array] = make_sampler(
            temp=self.temperature, top_p=self.top_p, min_p=self.min_p, top_k=self.top_k
        )
        return sampler

    def processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        """mlx-lm's logits processors, called with all tokens so far and the logits."""
        processors: list[Callable[[mx.array, mx.array], mx.array]] = make_logits_processors(
            logit_bias=dict(self.logit_bias) if self.logit_bias else None,
            repetition_penalty=self.repetition_penalty,
        )
        return processors


class StopText:
    """Holds back text that may be the beginning of a stop text; cuts the stop text off."""

    def __init__(self, stops: Sequence[str]) -> None:
        machine = TextStateMachine({"normal": [(text, None) for text in stops]})
        self._state = machine.make_state("normal")
        self.stopped = False

    def feed(self, text: str) -> str:
        """The part of all text so far that can be shown now."""
        if self.stopped:
            return ""
        self._state, shown, state = TextStateMachine.step(self._state, text)
        self.stopped = state is None
        return str(shown)

    def finish(self) -> str:
        """What was held back, when no stop text has come."""
        if self.stopped:
            return ""
        self._state, shown, _ = TextStateMachine.flush(self._state)
        return str(shown)


def check_prompt(prompt: Prompt) -> None:
    """Raise InvalidRequest when a prompt is empty or of no known kind."""
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence):
        raise InvalidRequest("the prompt must be a text, a list of token ids or of chat messages")
    if not len(prompt):
        raise InvalidRequest("the prompt is empty")
    if isinstance(prompt, str):
        return
    if all(isinstance(part, Mapping) for part in prompt):
        for part in prompt:
            if not isinstance(part, Mapping) or "role" not in part or "content" not in part:
                raise InvalidRequest("each chat message needs 'role' and 'content'")
    elif not all(isinstance(part, Integral) and not isinstance(part, bool) for part in prompt):
        raise InvalidRequest("the prompt mixes kinds: give token ids or chat messages, not both")


def _whole(name: str, value: object, *, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name}={value!r} must be a whole number")
    if value < least or (most is not None and value > most):
        bound = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidRequest(f"{name}={value} must be {bound}")


def _number(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name}={value!r} must be a finite number")
    if not least <= value <= most:
        raise InvalidRequest(f"{name}={value} must be from {least:g} to {most:g}")
