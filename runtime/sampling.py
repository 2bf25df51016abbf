"""Checks a request's arguments and turns them into mlx-lm samplers and stop matchers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from numbers import Integral
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import TextStateMachine
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from .arguments import real, show, whole
from .errors import InvalidRequest, PromptTooLong

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

MOST_ALTERNATIVES = 1024
MOST_STOPS = 1024
SMALLEST = 1e-6
"""Of temperature and top_p, other than 0: its inverse has to make sense in float32."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The arguments of one request, checked and copied. Names and meaning are mlx-lm's.

    Whole and real numbers may be numpy's. What is given for ``stop`` and ``logit_bias`` is read
    here and never again.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: 0 takes the most likely token; otherwise at least 1e-6.
        top_p, min_p, top_k: cut the distribution; 0 switches each off (top_p also at 1, and it is
            otherwise at least 1e-6).
        seed: of the request's random numbers; None takes a fresh one.
        repetition_penalty: divides the logits of recent tokens; None or 1 for none.
        presence_penalty, frequency_penalty: taken off the logits of the last 20 tokens, once or as
            often as they occur; from -2 to 2, None or 0 for none.
        logit_bias: token id -> added to its logit.
        stop: texts that end the generation and are cut off; may be given as a single text, any
            iterable of texts, or None.
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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._set("max_tokens", whole("max_tokens", self.max_tokens, least=1))
        self._set("temperature", _no_tiny("temperature", self.temperature, 100.0))
        self._set("top_p", _no_tiny("top_p", self.top_p, 1.0))
        self._set("min_p", real("min_p", self.min_p, 0.0, 1.0))
        self._set("top_k", whole("top_k", self.top_k, least=0))
        if self.seed is not None:
            self._set("seed", whole("seed", self.seed, least=0, most=2**64 - 1))
        if self.repetition_penalty is not None:
            penalty = real("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
            self._set("repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                self._set(name, real(name, getattr(self, name), -2.0, 2.0))
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias))
        self._set("stop", _stops(self.stop))
        if not isinstance(self.ignore_eos, bool | np.bool_):
            raise InvalidRequest(f"ignore_eos={show(self.ignore_eos)} must be True or False")
        self._set("ignore_eos", bool(self.ignore_eos))
        if self.logprobs is not None:
            count = whole("logprobs", self.logprobs, least=0, most=MOST_ALTERNATIVES)
            self._set("logprobs", count)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def check_vocabulary(self, size: int) -> None:
        """Raise InvalidRequest when a token id or count exceeds the vocabulary."""
        if self.top_k >= size:
            raise InvalidRequest(f"top_k={show(self.top_k)} must be below the vocabulary's {size}")
        if self.logprobs is not None and self.logprobs > size:
            raise InvalidRequest(f"logprobs={self.logprobs} exceeds the vocabulary's {size}")
        for token in self.logit_bias or {}:
            if token >= size:
                raise InvalidRequest(
                    f"logit_bias names token {show(token)}; the vocabulary has {size}"
                )

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
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
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


def make_sampling(arguments: Mapping[str, Any], *, function: str = "generate") -> Sampling:
    """The checked keyword arguments of a call.

    Raises:
        TypeError: there is no such argument; worded as Python does for the function.
        InvalidRequest: a value makes no sense.
    """
    known = {entry.name for entry in fields(Sampling)}
    for name in arguments:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return Sampling(**arguments)


def freeze_prompt(prompt: object, *, context: int | None = None) -> Prompt:
    """A checked copy of a prompt: a text, a tuple of ints, or a tuple of dicts.

    Token ids may come as any sequence of whole numbers or as a 1-D numpy array. The text parts of
    a chat message's content are joined.

    Args:
        prompt: as the caller gave it.
        context: the most token ids that make sense; more are refused before they are copied.

    Raises:
        InvalidRequest: it is empty or of no known kind.
        PromptTooLong: more token ids than the context holds.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        return _text(prompt, "the prompt")
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise InvalidRequest(
                f"the prompt is a numpy array of shape {prompt.shape} and type {prompt.dtype}; "
                "token ids are a 1-D array of whole numbers"
            )
    elif isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence):
        raise InvalidRequest(
            "the prompt must be a text, a list of token ids or of chat messages, not "
            f"{type(prompt).__name__}"
        )
    try:
        size = len(prompt)
    except OverflowError:
        raise InvalidRequest(f"the prompt {show(prompt)} is too long") from None
    if context is not None and size >= context and not isinstance(prompt[0], Mapping):
        raise PromptTooLong(size, context)
    parts = tuple(prompt.tolist() if isinstance(prompt, np.ndarray) else prompt)
    if not parts:
        raise InvalidRequest("the prompt is empty")
    if {*map(type, parts)} == {int}:  # at the speed of C: prompts are long
        return parts
    for index, part in enumerate(parts):
        if isinstance(part, bool) or not isinstance(part, Integral | Mapping):
            hint = "; a text is a prompt without a list around it" if isinstance(part, str) else ""
            raise InvalidRequest(
                f"prompt[{index}] is {show(part)}, but each element must be a token id (a whole "
                f"number) or a chat message (a dict with 'role' and 'content'){hint}"
            )
    messages = [part for part in parts if isinstance(part, Mapping)]
    if not messages:
        return tuple(int(part) for part in parts)
    if len(messages) < len(parts):
        raise InvalidRequest("the prompt mixes kinds: give token ids or chat messages, not both")
    try:
        return tuple(_message(part, f"prompt[{index}]") for index, part in enumerate(messages))
    except RecursionError:
        raise InvalidRequest("the prompt's chat messages contain themselves") from None


def check_prompt(prompt: object) -> None:
    """Raise InvalidRequest when a prompt is empty or of no known kind."""
    freeze_prompt(prompt)


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise InvalidRequest when a token id is not in the vocabulary."""
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise InvalidRequest(f"token {show(wrong)} is not in the vocabulary of {vocabulary}")


def early_check(sampling: Sampling, prompt: Prompt, *, vocabulary: int, context: int) -> None:
    """Refuse what is known to fail before the request gets its turn.

    Args:
        sampling: of the request.
        prompt: from ``freeze_prompt``; only token ids are looked at.
        vocabulary: number of logits.
        context: most tokens of prompt and answer together.

    Raises:
        InvalidRequest: an argument or a token id is beyond the vocabulary.
        PromptTooLong: the token ids leave no room for an answer.
    """
    sampling.check_vocabulary(vocabulary)
    if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
        return
    tokens: Sequence[int] = prompt  # type: ignore[assignment]
    if len(tokens) >= context:
        raise PromptTooLong(len(tokens), context)
    check_tokens(tokens, vocabulary)


def _no_tiny(name: str, value: object, most: float) -> float:
    number = real(name, value, 0.0, most)
    if 0.0 < number < SMALLEST:
        raise InvalidRequest(f"{name}={number!r} must be 0 or at least {SMALLEST:g}")
    return number


def _biases(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise InvalidRequest(f"logit_bias={show(biases)} must be a dict of token ids and numbers")
    return {
        whole("logit_bias key", token, least=0): real("logit_bias value", bias, -1e9, 1e9)
        for token, bias in tuple(biases.items())
    }


def _stops(stops: object) -> tuple[str, ...]:
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = (stops,)
    if not isinstance(stops, Iterable):
        raise InvalidRequest(f"stop={show(stops)} must be a text or a list of texts")
    texts = tuple(islice(stops, MOST_STOPS + 1))
    if len(texts) > MOST_STOPS:
        raise InvalidRequest(f"stop must be at most {MOST_STOPS} texts")
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest("stop must be a text or a list of texts, none of them empty")
    return tuple(_text(text, "stop") for text in texts)


def _text(text: str, name: str) -> str:
    """A plain str of what may be a subclass."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} is not valid Unicode: a lone surrogate ({show(text[error.start])}) at "
            f"position {error.start}; decode the text anew or replace it"
        ) from None
    return str.__str__(text)


def _message(message: Mapping[Any, Any], name: str) -> dict[str, Any]:
    copy: dict[str, Any] = _plain(message, name)
    if "role" not in copy or "content" not in copy:
        raise InvalidRequest(f"each chat message needs 'role' and 'content'; {name} does not")
    if not isinstance(copy["role"], str):
        raise InvalidRequest(f"{name}: role={show(copy['role'])} must be a text")
    content = copy["content"]
    if isinstance(content, list):
        copy["content"] = "".join(_part(part, name) for part in content)
    elif content is not None and not isinstance(content, str):  # None: only calls of tools
        raise InvalidRequest(f"{name}: content={show(content)} must be a text")
    return copy


def _part(part: object, name: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise InvalidRequest(
        f"{name}: the content has a part {show(part)}, but only text parts "
        "({'type': 'text', 'text': ...}) can be used"
    )


def _plain(value: Any, name: str) -> Any:
    """A deep copy of what JSON could say; anything else stays the same object."""
    if isinstance(value, str):
        return _text(value, name)
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(item, name) for key, item in tuple(value.items())}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    return value
