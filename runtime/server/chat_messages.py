"""Messages and tools in OpenAI's form, checked and made ready for chat templates."""

from __future__ import annotations

import json
from typing import Any

from ..arguments import show
from .errors import refused
from .fields import Fields

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME_LENGTH = 256


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages of a chat. Contents become plain texts, arguments of tool calls objects."""
    messages = [_message(part) for part in fields.parts("messages")]
    if not messages:
        raise refused("messages is missing or empty", "messages")
    return messages


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """The tools of a body, empty when there are none."""
    tools = []
    for part in fields.parts("tools"):
        kind = part.text("type")
        if kind != "function":
            raise refused(f"{part.path('type')} must be 'function', not {show(kind)}", "tools")
        function = part.part("function")
        name = _name(function)
        described: dict[str, Any] = {"name": name, "description": function.text("description")}
        described["parameters"] = function.table("parameters") or no_parameters()
        if described["description"] is None:
            described["description"] = ""
        tools.append({"type": "function", "function": described})
    return tools


def no_parameters() -> dict[str, Any]:
    """The schema of a tool that takes nothing."""
    return {"type": "object", "properties": {}}


def _message(part: Fields) -> dict[str, Any]:
    role = part.needed_text("role")
    if role not in _ROLES:
        raise refused(f"{part.path('role')} is {show(role)}; there are {', '.join(_ROLES)}")
    message: dict[str, Any] = {
        # Templates know the older name only.
        "role": "system" if role == "developer" else role,
        "content": read_content(part, "content"),
    }
    if (name := part.text("name")) is not None:
        message["name"] = name
    if role == "assistant":
        if (thought := part.text("reasoning_content")) is not None:
            message["reasoning_content"] = thought
        if calls := [_tool_call(call) for call in part.parts("tool_calls")]:
            message["tool_calls"] = calls
        elif part.raw("content") is None:
            raise refused(f"{part.path('content')} is missing", part.path("content"))
    elif role == "tool":
        message["tool_call_id"] = part.needed_text("tool_call_id")
    elif part.raw("content") is None:
        raise refused(f"{part.path('content')} is missing", part.path("content"))
    return message


def read_content(part: Fields, name: str) -> str:
    """A content that is a text, a list of text parts, or absent."""
    value = part.raw(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise part.wrong(name, "a text or a list of parts")
    texts = []
    for piece in part.parts(name):
        kind = piece.text("type")
        if kind not in ("text", "input_text", "output_text"):
            raise refused(
                f"{piece.path('type')} is {show(kind)}; this server takes text only",
                piece.path("type"),
                "unsupported",
            )
        texts.append(piece.needed_text("text"))
    return "".join(texts)


def _tool_call(call: Fields) -> dict[str, Any]:
    function = call.part("function")
    text = function.text("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        path = function.path("arguments")
        raise refused(f"{path} must be the JSON text of an object, not {show(text)}", path)
    return {
        "id": call.text("id") or "",
        "type": "function",
        "function": {"name": _name(function), "arguments": arguments},
    }


def _name(function: Fields) -> str:
    name = function.needed_text("name")
    if not 0 < len(name) <= _NAME_LENGTH:
        raise function.wrong("name", f"of 1 to {_NAME_LENGTH} characters")
    return name
