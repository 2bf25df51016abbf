"""Bodies of `/v1/messages`, turned into messages and tools as chat templates take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..arguments import show
from .calls import Call, check_model, limit_tokens, read_sampling
from .chat_messages import no_parameters, read_content
from .errors import ApiError, refused
from .fields import Fields
from .settings import ServerSettings


def read_messages_call(
    body: dict[str, Any], settings: ServerSettings, name: str, *, counting: bool = False
) -> Call:
    """Understand a body of `/v1/messages`.

    Args:
        body: the decoded body.
        settings: of the server.
        name: of the model.
        counting: the prompt's tokens are only to be counted, so no limit has to be given.

    Raises:
        ApiError: it is wrong, or asks for what is not offered.
    """
    fields = Fields(body)
    check_model(fields, name)
    limit = fields.whole("max_tokens", least=1)
    if limit is None and not counting:
        raise refused("max_tokens is missing", "max_tokens")
    sampling = read_sampling(fields, settings.sampling, stop="stop_sequences")
    limit_tokens(sampling, limit)
    messages = [message for part in fields.parts("messages") for message in _messages(part)]
    if not messages:
        raise refused("messages is missing or empty", "messages")
    if (system := read_content(fields, "system")) != "":
        messages.insert(0, {"role": "system", "content": system})
    choice = fields.part("tool_choice")
    return Call(
        sampling=sampling,
        messages=messages,
        tools=_tools(fields, choice),
        template=_thinking(fields),
        # An answer that has begun is gone on with; one that ends in tool calls waits for results.
        continued=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        one_tool=bool(choice.flag("disable_parallel_tool_use")),
        stream=bool(fields.flag("stream")),
    )


def _messages(part: Fields) -> Iterator[dict[str, Any]]:
    """The messages that one message of a user or an assistant stands for."""
    role = part.needed_text("role")
    if role not in ("user", "assistant"):
        raise refused(f"{part.path('role')} is {show(role)}; there are user and assistant")
    content = part.raw("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise part.wrong("content", "a text or a list of blocks")
    if role == "assistant":
        yield _assistant(part)
        return
    texts: list[str] = []
    results = False
    for block in part.parts("content"):
        if block.text("type") == "tool_result":
            results = True
            yield {
                "role": "tool",
                "tool_call_id": block.needed_text("tool_use_id"),
                "content": read_content(block, "content"),
            }
        else:
            texts.append(_text_block(block))
    if texts or not results:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant(part: Fields) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in part.parts("content"):
        kind = block.text("type")
        if kind == "tool_use":
            function = {
                "name": block.needed_text("name"),
                "arguments": block.table("input") or {},
            }
            calls.append({"id": block.needed_text("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(block.needed_text("thinking"))
        elif kind != "redacted_thinking":
            texts.append(_text_block(block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text_block(block: Fields) -> str:
    kind = block.text("type")
    if kind != "text":
        raise _unsupported(block, kind)
    return block.needed_text("text")


def _unsupported(block: Fields, kind: str | None) -> ApiError:
    path = block.path("type")
    return refused(f"{path} is {show(kind)}; this server takes text and tools only", path)


def _tools(fields: Fields, choice: Fields) -> list[dict[str, Any]] | None:
    tools = []
    for part in fields.parts("tools"):
        if part.text("type") not in (None, "custom"):
            raise _unsupported(part, part.text("type"))
        function = {
            "name": part.needed_text("name"),
            "description": part.text("description") or "",
            "parameters": part.table("input_schema") or no_parameters(),
        }
        tools.append({"type": "function", "function": function})
    kind = choice.text("type")
    if kind not in (None, "auto", "none"):
        raise refused(
            f"tool_choice of type {show(kind)}: this server cannot force a call; "
            "give 'auto' or 'none'",
            "tool_choice",
        )
    return tools if tools and kind != "none" else None


def _thinking(fields: Fields) -> dict[str, Any]:
    kind = fields.part("thinking").text("type")
    if kind in (None, "adaptive"):
        return {}
    if kind not in ("enabled", "disabled"):
        raise refused(f"thinking.type is {show(kind)}; there are enabled and disabled")
    return {"enable_thinking": kind == "enabled"}
