"""Turns calls into token ids with the model's tokenizer and chat template.

Takes time for long prompts: runs on worker threads, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments import first_line
from .calls import Call
from .errors import ApiError, refused

NORMAL, REASONING = "normal", "reasoning"


def encode_call(tokenizer: Any, call: Call) -> tuple[tuple[int, ...], ...]:
    """Token ids of each prompt of a call.

    Args:
        tokenizer: mlx-lm's, or None when the checkpoint has none.
        call: a chat or text completions.

    Raises:
        ApiError: there is no tokenizer, or it or the template refuses the prompt.
    """
    if call.messages:
        return (_render(tokenizer, call),)
    return tuple(_encode(tokenizer, prompt) for prompt in call.prompts)


def initial_state(tokenizer: Any, call: Call, prompt: Sequence[int]) -> str:
    """The state in which an answer begins: a template may have opened the thinking."""
    if not call.messages or tokenizer is None:
        return NORMAL
    given: str | None = tokenizer.response_initial_state
    if given:
        return given
    if tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(
        prompt
    ):
        return REASONING
    return NORMAL


def _encode(tokenizer: Any, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return prompt
    if not prompt:
        raise refused("the prompt is empty", "prompt")
    if tokenizer is None:
        raise refused("the model has no tokenizer; give the prompt as token ids", "prompt")
    special = not tokenizer.bos_token or not prompt.startswith(tokenizer.bos_token)
    try:
        return tuple(tokenizer.encode(prompt, add_special_tokens=special))
    except Exception as error:  # of many kinds; all of them are about this text
        raise refused(f"the tokenizer refuses this text: {first_line(error)}", "prompt") from error


def _render(tokenizer: Any, call: Call) -> tuple[int, ...]:
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ApiError(400, "the model has no chat template; use /v1/completions", param="messages")
    if call.tools and not tokenizer.has_tool_calling:
        raise refused("this model knows no tools", "tools", "unsupported")
    arguments: dict[str, Any] = dict(call.template)
    if call.tools:
        arguments["tools"] = call.tools
    if call.continued:
        arguments["continue_final_message"] = True
    try:
        rendered = tokenizer.apply_chat_template(
            call.messages, add_generation_prompt=not call.continued, **arguments
        )
        return tuple(rendered)
    except Exception as error:  # templates raise errors of many kinds, meant for the user
        message = f"the chat template refuses these messages: {first_line(error)[:300]}"
        raise refused(message, "messages") from error
