"""Bodies of `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from ..arguments import show
from ..engine import SamplingArguments
from .calls import Call, check_model, limit_tokens, read_sampling
from .chat_messages import read_messages, read_tools
from .errors import refused
from .fields import Fields
from .settings import ServerSettings

MOST_ALTERNATIVES = 20
COMPLETION_TOKENS = 16
"""Most tokens of a text completion that does not say, as in OpenAI's API."""

_NO_SCHEMA = "this server cannot force a form on the answer; ask for it in a message"


def read_chat(body: dict[str, Any], settings: ServerSettings, name: str) -> Call:
    """Understand a body of `/v1/chat/completions`.

    Raises:
        ApiError: it is wrong, or asks for what is not offered.
    """
    fields = Fields(body)
    check_model(fields, name)
    messages = read_messages(fields)
    _refuse_in_chat(fields)
    sampling = read_sampling(fields, settings.sampling, stop="stop")
    limit_tokens(sampling, fields.whole("max_tokens", least=1))
    limit_tokens(sampling, fields.whole("max_completion_tokens", least=1))
    alternatives = fields.whole("top_logprobs", least=0, most=MOST_ALTERNATIVES)
    if fields.flag("logprobs"):
        sampling["logprobs"] = alternatives or 0
    elif alternatives is not None:
        raise refused("top_logprobs needs logprobs to be true", "top_logprobs")
    return Call(
        sampling=sampling,
        messages=messages,
        tools=_offered_tools(fields),
        template=_template(fields),
        one_tool=fields.flag("parallel_tool_calls") is False,
        **_delivery(fields, settings),
    )


def read_completion(body: dict[str, Any], settings: ServerSettings, name: str) -> Call:
    """Understand a body of `/v1/completions`.

    Raises:
        ApiError: it is wrong, or asks for what is not offered.
    """
    fields = Fields(body)
    check_model(fields, name)
    prompts = _prompts(fields)
    fields.refuse("suffix", "text cannot be filled in before a suffix", "")
    fields.refuse("response_format", _NO_SCHEMA, {"type": "text"})
    sampling: SamplingArguments = {"max_tokens": COMPLETION_TOKENS}
    sampling |= read_sampling(fields, settings.sampling, stop="stop")
    limit_tokens(sampling, fields.whole("max_tokens", least=1))
    alternatives = fields.whole("logprobs", least=0, most=MOST_ALTERNATIVES)
    if alternatives is not None:
        sampling["logprobs"] = alternatives
    delivery = _delivery(fields, settings)
    fields.refuse("best_of", "only the answers asked for by n are made", 1, delivery["choices"])
    echo = bool(fields.flag("echo"))
    if echo and alternatives is not None:
        raise refused("the prompt's own logprobs are not computed: leave out echo", "echo")
    return Call(sampling=sampling, prompts=prompts, echo=echo, **delivery)


def _delivery(fields: Fields, settings: ServerSettings) -> dict[str, Any]:
    stream = bool(fields.flag("stream"))
    options = fields.part("stream_options")
    if fields.raw("stream_options") is not None and not stream:
        raise refused("stream_options needs stream to be true", "stream_options")
    return {
        "choices": fields.whole("n", least=1, most=settings.most_choices) or 1,
        "stream": stream,
        "usage": bool(options.flag("include_usage")),
    }


def _refuse_in_chat(fields: Fields) -> None:
    fields.refuse("response_format", _NO_SCHEMA, {"type": "text"})
    fields.refuse("functions", "give tools instead")
    fields.refuse("function_call", "give tool_choice instead")
    fields.refuse("audio", "this server takes and gives text only")
    fields.refuse("modalities", "this server takes and gives text only", ["text"])
    fields.refuse("web_search_options", "there is no web search")


def _offered_tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools = read_tools(fields)
    choice = fields.raw("tool_choice")
    if choice not in (None, "none", "auto"):
        raise refused(
            f"tool_choice={show(choice)}: this server cannot force a call; give 'auto' or 'none'",
            "tool_choice",
            "unsupported",
        )
    return tools if tools and choice != "none" else None


def _template(fields: Fields) -> dict[str, Any]:
    given = dict(fields.table("chat_template_kwargs") or {})
    if reserved := sorted(_reserved() & given.keys()):
        raise refused(f"chat_template_kwargs may not set {reserved[0]}", "chat_template_kwargs")
    if (effort := fields.text("reasoning_effort")) is not None:
        given.setdefault("reasoning_effort", effort)
    return given


@cache
def _reserved() -> frozenset[str]:
    """Arguments of transformers' method, which are ours to set: a template of the client's own
    among them."""
    from transformers import PreTrainedTokenizerBase

    method = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
    return frozenset(method.parameters) | {"messages"}


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.raw("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", "a text, token ids, or a list of these")
    kinds = {*map(type, value)}
    if kinds == {int}:
        return (tuple(value),)
    if kinds == {str}:
        return tuple(value)
    if kinds == {list} and all({*map(type, ids)} == {int} for ids in value):
        return tuple(tuple(ids) for ids in value)
    raise fields.wrong("prompt", "a text, token ids, or a list of these")
