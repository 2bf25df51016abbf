"""Tool calls and thoughts: parsed, streamed, and given back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from moestream.runtime import server
from moestream.runtime.api import Chunk, Generation
from moestream.runtime.server.answers import ChatReader, Text, Thought, ToolCall, find_stop

from .serving import QUESTION, STATS, TOOLS_TEMPLATE, ScriptedEngine, listening, tokenizer_with

CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Oslo"}}</tool_call>'
OTHER = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
]
ANTHROPIC_TOOLS: Any = [
    {
        "name": "weather",
        "description": "Tells the weather.",
        "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
    }
]


@pytest.fixture(scope="module")
def tokenizer(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tools")
    return tokenizer_with(directory, demo, TOOLS_TEMPLATE, "<think>", "</think>")


@asynccontextmanager
async def openai_client(engine: ScriptedEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening(server.app(engine.as_engine(), name="m")) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def anthropic_client(engine: ScriptedEngine) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        listening(server.app(engine.as_engine(), name="m")) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client,
    ):
        yield client


# -- OpenAI


async def test_openai_tool_call_and_its_result(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, f"Let me see.{CALL}", "It rains in Oslo.")
    messages: Any = list(QUESTION)
    async with openai_client(engine) as client:
        answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"town": "Oslo"}

        messages += [
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        last = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert last.choices[0].message.content == "It rains in Oslo."
        assert last.choices[0].finish_reason == "stop"
    first, second = (tokenizer.decode(prompt) for prompt in engine.prompts)
    assert '"name": "weather"' in first  # the template has shown the tools
    assert CALL in second  # the call, as the model had written it
    assert "<|im_start|>tool\nrain<|im_end|>" in second


async def test_openai_tool_calls_in_a_stream(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, f"Let me see.{CALL}\n{OTHER}")
    messages: Any = QUESTION
    text, calls, reason = "", {}, None
    async with openai_client(engine) as client:
        async for chunk in await client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, stream=True
        ):
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                calls[call.index] = (call.function.name, call.function.arguments)
            reason = choice.finish_reason or reason
    assert text.strip() == "Let me see."
    assert calls == {0: ("weather", '{"town": "Oslo"}'), 1: ("time", "{}")}
    assert reason == "tool_calls"


async def test_only_one_call_where_no_more_are_wanted(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, f"{CALL}{OTHER} and so on and on")
    messages: Any = QUESTION
    async with openai_client(engine) as client:
        answer = await client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, parallel_tool_calls=False
        )
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    assert engine.cancelled == 1  # the rest is not generated
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(tokenizer.encode(CALL, add_special_tokens=False))


@pytest.mark.parametrize(
    ("choice", "tools"), [("none", TOOLS), (None, None)], ids=["not wanted", "not offered"]
)
async def test_without_tools_a_call_is_text(tokenizer: Any, choice: Any, tools: Any) -> None:
    engine = ScriptedEngine(tokenizer, CALL)
    messages: Any = QUESTION
    given: Any = {} if tools is None else {"tools": tools, "tool_choice": choice}
    async with openai_client(engine) as client:
        answer = await client.chat.completions.create(model="m", messages=messages, **given)
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert "weather" not in tokenizer.decode(engine.prompts[0])


async def test_thoughts_are_told_apart(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, "<think>Hm, a greeting.</think>\n\nHello!")
    messages: Any = QUESTION
    async with openai_client(engine) as client:
        answer = await client.chat.completions.create(model="m", messages=messages)
        message: Any = answer.choices[0].message
        assert (message.content, message.reasoning_content) == ("Hello!", "Hm, a greeting.")
        text = thought = ""
        async for chunk in await client.chat.completions.create(
            model="m",
            messages=messages,
            stream=True,
            extra_body={"chat_template_kwargs": {"opened": False}},
        ):
            delta: Any = chunk.choices[0].delta
            text += delta.content or ""
            thought += getattr(delta, "reasoning_content", None) or ""
    assert (text, thought) == ("Hello!", "Hm, a greeting.")


async def test_a_template_may_open_the_thinking(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, "Hm.</think>Hello!")
    messages: Any = QUESTION
    async with openai_client(engine) as client:
        answer = await client.chat.completions.create(
            model="m", messages=messages, extra_body={"chat_template_kwargs": {"opened": True}}
        )
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello!", "Hm.")


async def test_a_template_of_the_clients_own_is_refused(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, "no")
    messages: Any = QUESTION
    async with openai_client(engine) as client:
        for name in ("chat_template", "tokenize", "tools", "messages"):
            with pytest.raises(openai.BadRequestError, match=name):
                await client.chat.completions.create(
                    model="m", messages=messages, extra_body={"chat_template_kwargs": {name: "x"}}
                )
    assert not engine.prompts


# -- Anthropic


async def test_anthropic_tool_use_and_its_result(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, f"<think>Hm.</think>Let me see.{CALL}", "It rains.")
    messages: Any = list(QUESTION)
    settings: Any = {"model": "m", "max_tokens": 100, "tools": ANTHROPIC_TOOLS}
    async with anthropic_client(engine) as client:
        first = await client.messages.create(messages=messages, **settings)
        assert first.stop_reason == "tool_use"
        thought, text, use = first.content
        assert thought.type == "thinking" and thought.thinking == "Hm."
        assert text.type == "text" and text.text == "Let me see."
        assert use.type == "tool_use" and (use.name, use.input) == ("weather", {"town": "Oslo"})

        result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
        said = {"type": "text", "text": "Well?"}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result, said]},
        ]
        last = await client.messages.create(messages=messages, **settings)
        assert last.content[0].type == "text" and last.content[0].text == "It rains."
    shown = tokenizer.decode(engine.prompts[1])
    assert f"<think>Hm.</think>Let me see.{CALL}<|im_end|>" in shown
    assert "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>user\nWell?<|im_end|>" in shown


async def test_anthropic_stream_of_blocks(tokenizer: Any) -> None:
    answer = f"<think>Hm.</think>Let me see.{CALL}{OTHER}Done."
    engine = ScriptedEngine(tokenizer, answer)
    messages: Any = QUESTION
    async with anthropic_client(engine) as client:
        async with client.messages.stream(
            model="m", max_tokens=100, tools=ANTHROPIC_TOOLS, messages=messages
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 5
    types = [block.type for block in final.content]
    assert types == ["thinking", "text", "tool_use", "tool_use", "text"]
    uses = [block for block in final.content if block.type == "tool_use"]
    assert [(use.name, use.input) for use in uses] == [("weather", {"town": "Oslo"}), ("time", {})]
    assert final.stop_reason == "tool_use"


# -- reading answers


def read(tokenizer: Any, text: str, pieces: list[str] | None = None, **more: Any) -> list[Any]:
    """All parts of an answer, fed in pieces."""
    reader = ChatReader(tokenizer, [], tools=TOOLS, **more)
    pieces = list(text) if pieces is None else pieces
    result = Generation(text, (1,) * len(pieces), "stop", 1, STATS)
    parts: list[Any] = []
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        chunk = Chunk(piece, 1, None, "stop" if last else None, result if last else None)
        parts += reader.feed(chunk).parts
    return parts


def joined(parts: list[Any], kind: type[Text] | type[Thought]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


@pytest.mark.parametrize(
    "text",
    [
        "plain <tool and < and <tool_cal",
        "<tool_call>not json</tool_call> after",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "x", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "x", "arguments": "words"}</tool_call>',
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": "cut off", "argu',
        "before <tool_call>",
    ],
)
def test_what_is_no_call_is_not_lost(tokenizer: Any, text: str) -> None:
    for pieces in (None, [text], [text[:13], text[13:]]):
        parts = read(tokenizer, text, pieces)
        assert joined(parts, Text) == text
        assert not [part for part in parts if isinstance(part, ToolCall)]


def test_a_call_without_its_closing_marker(tokenizer: Any) -> None:
    parts = read(tokenizer, CALL.removesuffix("</tool_call>"))
    (call,) = parts
    assert (call.name, json.loads(call.arguments)) == ("weather", {"town": "Oslo"})


def test_any_split_of_an_answer_gives_the_same(tokenizer: Any) -> None:
    text = f"<think>one\ntwo</think>\n\nHello{CALL}{OTHER}!\n"
    for width in range(1, len(text) + 1):
        pieces = [text[at : at + width] for at in range(0, len(text), width)]
        parts = read(tokenizer, text, pieces)
        assert joined(parts, Thought) == "one\ntwo"
        assert joined(parts, Text) == "Hello!\n"
        calls = [part.name for part in parts if isinstance(part, ToolCall)]
        assert calls == ["weather", "time"]


def test_the_stop_text_that_ended_an_answer(tokenizer: Any) -> None:
    tokens = tuple(tokenizer.encode("one two three", add_special_tokens=False))

    def found(text: str, *stops: str) -> str | None:
        return find_stop(tokenizer, Generation(text, tokens, "stop", 1, STATS), stops)

    assert found("one ", "never", "two") == "two"
    assert found("one ", "two three", "two") == "two"  # it was complete first
    assert found("one two three", "four") is None  # the end token
    assert found("one two three") is None
