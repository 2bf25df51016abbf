"""Prompts as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .arguments import first_line
from .errors import InvalidRequest
from .sampling import Prompt, check_tokens


class Vocabulary(Protocol):
    """What prompts are encoded with.

    Attributes:
        tokenizer: mlx-lm's TokenizerWrapper, or None when the checkpoint has none.
        vocabulary: number of logits.
    """

    tokenizer: Any
    vocabulary: int


def encode(loaded: Vocabulary, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: text, token ids or chat messages.

    Raises:
        InvalidRequest: there is no tokenizer or chat template for it, or a token id is unknown.
    """
    tokenizer = loaded.tokenizer
    tokens: list[int]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("the checkpoint has no tokenizer; give the prompt as token ids")
        # A text that begins with the special token already (a rendered chat template) keeps one.
        special = not tokenizer.bos_token or not prompt.startswith(tokenizer.bos_token)
        try:
            tokens = list(tokenizer.encode(prompt, add_special_tokens=special))
        except Exception as error:  # of many kinds; all of them are about this text
            raise InvalidRequest(f"the tokenizer refuses this text: {first_line(error)}") from error
    elif not isinstance(prompt[0], Mapping):
        tokens = [int(token) for token in prompt]  # type: ignore[arg-type]
    else:
        if tokenizer is None or not tokenizer.has_chat_template:
            raise InvalidRequest("the checkpoint has no chat template; give the prompt as text")
        tokens = _render(tokenizer, prompt)
    if not tokens:
        raise InvalidRequest("the prompt is empty")
    check_tokens(tokens, loaded.vocabulary)
    return tokens


def _render(tokenizer: Any, messages: Prompt) -> list[int]:
    try:
        tokens: list[int] = tokenizer.apply_chat_template(
            [dict(message) for message in messages],  # type: ignore[arg-type]
            add_generation_prompt=True,
        )
    except Exception as error:  # templates raise errors of many kinds, meant for the user
        raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
    return tokens
